//! How a row of the last dimension is spread over the units of a cube.

use super::RowUnits;
use crate::launch;
use cubecl::prelude::*;

/// How a row is spread over units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowPlan {
    /// The units of a row and the rows of a cube.
    pub(crate) row: RowUnits,
    /// Vectors of a row for each unit, rounded up.
    pub(crate) chunks: usize,
    /// Whether they are held in registers.
    pub(crate) resident: bool,
    /// Whether the units divide the row evenly.
    pub(crate) even: bool,
}

impl RowPlan {
    /// For rows of `vectors` vectors: as few units as leave each at most `chunks` of them, so that
    /// a narrow row stays inside a plane and needs no barrier. If the units of a cube run out, a
    /// unit holds up to `most` in registers; beyond, rows are read twice.
    pub(crate) fn new(client: &Client, vectors: usize, chunks: usize, most: usize) -> Self {
        let widest = client.properties().hardware.max_units_per_cube.min(1024);
        let plane = launch::plane_size(client);
        let wanted = vectors.div_ceil(chunks).next_power_of_two() as u32;
        // Rows of up to four vectors a unit of one plane, and no fewer units than reach every lane
        // of a memory transaction.
        let units = if plane > 1 && vectors <= 4 * plane as usize {
            (vectors.next_power_of_two() as u32).min(plane).max(8.min(plane))
        } else {
            wanted
        };
        let units = units.min(widest);
        // Cubes of at least 128 units: four planes hide each other's latency.
        let rows = (128 / units).max(1);
        let chunks = vectors.div_ceil(units as usize);
        Self {
            row: RowUnits { units, rows, plane },
            chunks,
            resident: chunks <= most,
            even: vectors.is_multiple_of(units as usize),
        }
    }

    /// The cube.
    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.row.units, self.row.rows)
    }
}
