//! Sums in a fixed order: over the units that share a row, and over rows.

mod columns;
mod rows;

pub(crate) use columns::column_sum;
pub(crate) use rows::RowPlan;

use cubecl::prelude::*;

/// How the units of a row add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowUnits {
    /// Units of one row: a power of two.
    pub(crate) units: u32,
    /// Rows of one cube.
    pub(crate) rows: u32,
    /// Units of a plane that can shuffle; 1 stands for none.
    pub(crate) plane: u32,
}

impl RowUnits {
    /// f32 of shared memory that one sum needs.
    pub(crate) fn shared(&self) -> usize {
        let partials = if self.plane > 1 { self.units.div_ceil(self.plane) } else { self.units };
        (partials * self.rows) as usize
    }

    /// Whether a row lies inside one plane, so that its sum needs no shared memory.
    pub(crate) fn in_plane(&self) -> bool {
        self.plane > 1 && self.units <= self.plane
    }
}

/// The sum of `value` over the units of each row, known to all of them.
///
/// The cube is `units` × `rows`, all of it calls this. `shared` holds [`RowUnits::shared`] values
/// that nobody else uses before the next `sync_cube`; a caller that sums again without one in
/// between passes another part.
#[cube]
pub(crate) fn row_sum(value: f32, shared: &mut [f32], #[comptime] row: RowUnits) -> f32 {
    let mut sum = value;
    if comptime!(row.plane > 1) {
        let lanes = comptime!(row.units.min(row.plane));
        #[unroll]
        for level in 0..comptime!(lanes.ilog2()) {
            sum += plane_shuffle_xor(sum, comptime!(1u32 << level));
        }
        if comptime!(!row.in_plane()) {
            let planes = comptime!((row.units / row.plane) as usize);
            let first = UNIT_POS_Y as usize * planes;
            if UNIT_POS_X % comptime!(row.plane) == 0 {
                shared[first + (UNIT_POS_X / comptime!(row.plane)) as usize] = sum;
            }
            sync_cube();
            sum = shared[first];
            #[unroll]
            for i in 1..planes {
                sum += shared[first + i];
            }
        }
    } else {
        let first = (UNIT_POS_Y * comptime!(row.units)) as usize;
        let unit = UNIT_POS_X as usize;
        shared[first + unit] = sum;
        sync_cube();
        #[unroll]
        for level in 0..comptime!(row.units.ilog2()) {
            let step = comptime!((row.units >> (level + 1)) as usize);
            if unit < step {
                let other = shared[first + unit + step];
                shared[first + unit] += other;
            }
            sync_cube();
        }
        sum = shared[first];
    }
    sum
}

/// Adds up the elements of a vector, first to last.
#[cube]
pub(crate) fn vector_sum<N: Size>(value: Vector<f32, N>) -> f32 {
    let mut sum = value.extract(0usize);
    #[unroll]
    for i in 1..N::value() {
        sum += value.extract(i);
    }
    sum
}
