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
    /// For rows of `vectors` vectors, with at most `chunks` of them for each unit. If the units of a
    /// cube run out, a unit holds up to `most` in registers; beyond, rows are read twice. Rows share
    /// a cube of `cube(units of a row)` units.
    pub(crate) fn new(
        client: &Client,
        vectors: usize,
        chunks: usize,
        most: usize,
        cube: impl Fn(u32) -> u32,
    ) -> Self {
        let plane = launch::plane_size(client);
        // Without planes each level of a tree is a barrier, which software drivers pay for.
        let most_units = if plane > 1 { 1024 } else { 128 };
        let widest = client.properties().hardware.max_units_per_cube.min(most_units);
        let wanted = vectors.div_ceil(chunks) as u32;
        let units = match plane {
            // No planes: a tree in shared memory.
            1 => wanted.next_power_of_two(),
            // Inside a plane, but no fewer units than fill a memory transaction.
            _ if wanted <= plane => wanted.next_power_of_two().max(8.min(plane)),
            _ => wanted.next_multiple_of(plane),
        };
        let units = units.min(widest);
        let rows = (cube(units).min(widest) / units).max(1);
        let chunks = vectors.div_ceil(units as usize);
        Self {
            row: RowUnits::new(client, units, rows),
            chunks,
            resident: chunks <= most,
            even: vectors.is_multiple_of(units as usize),
        }
    }

    /// Vectors that a unit holds in registers; never none, which no array can have.
    pub(crate) fn held(&self) -> usize {
        if self.resident { self.chunks } else { 1 }
    }

    /// The cube.
    pub(crate) fn cube_dim(&self) -> CubeDim {
        self.row.cube_dim()
    }
}
