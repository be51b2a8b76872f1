//! Sums in a fixed order, over the units that share a row and over rows; maxima of a row.

mod columns;
mod rows;

pub(crate) use columns::column_sum;
pub(crate) use rows::RowPlan;

use cubecl::prelude::*;

/// How the units of a row add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RowUnits {
    /// Units of one row: a power of two up to the size of a plane, then whole planes; without planes
    /// always a power of two.
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

/// Replaces each of `values` by its sum over the units of the row; all units get it.
///
/// The cube is `units` × `rows`, all of it calls this. `shared` holds `count` times
/// [`RowUnits::shared`] values that nobody else uses before the next `sync_cube`; a caller that
/// sums again without one in between passes another part.
#[cube]
pub(crate) fn row_sums(
    values: &mut Array<f32>,
    shared: &mut [f32],
    #[comptime] count: usize,
    #[comptime] row: RowUnits,
) {
    if comptime!(row.plane > 1) {
        let lanes = comptime!(row.units.min(row.plane));
        #[unroll]
        for level in 0..comptime!(lanes.ilog2()) {
            #[unroll]
            for k in 0..count {
                values[k] += plane_shuffle_xor(values[k], comptime!(1u32 << level));
            }
        }
        if comptime!(!row.in_plane()) {
            let planes = comptime!((row.units / row.plane) as usize);
            let first = UNIT_POS_Y as usize * planes;
            let part = comptime!(row.shared());
            if UNIT_POS_PLANE == 0 {
                let plane = (UNIT_POS_X / comptime!(row.plane)) as usize;
                #[unroll]
                for k in 0..count {
                    shared[k * part + first + plane] = values[k];
                }
            }
            sync_cube();
            #[unroll]
            for k in 0..count {
                let mut sum = shared[k * part + first];
                #[unroll]
                for i in 1..planes {
                    sum += shared[k * part + first + i];
                }
                values[k] = sum;
            }
        }
    } else {
        let first = (UNIT_POS_Y * comptime!(row.units)) as usize;
        let part = comptime!(row.shared());
        let unit = UNIT_POS_X as usize;
        #[unroll]
        for k in 0..count {
            shared[k * part + first + unit] = values[k];
        }
        sync_cube();
        #[unroll]
        for level in 0..comptime!(row.units.ilog2()) {
            let step = comptime!((row.units >> (level + 1)) as usize);
            if unit < step {
                #[unroll]
                for k in 0..count {
                    let other = shared[k * part + first + unit + step];
                    shared[k * part + first + unit] += other;
                }
            }
            sync_cube();
        }
        #[unroll]
        for k in 0..count {
            values[k] = shared[k * part + first];
        }
    }
}

/// The largest `value` of the units of the row; all units get it. As [`row_sums`] otherwise, with
/// [`RowUnits::shared`] values of `shared`.
#[cube]
pub(crate) fn row_max(value: f32, shared: &mut [f32], #[comptime] row: RowUnits) -> f32 {
    let mut largest = value;
    if comptime!(row.plane > 1) {
        let lanes = comptime!(row.units.min(row.plane));
        #[unroll]
        for level in 0..comptime!(lanes.ilog2()) {
            largest = max(largest, plane_shuffle_xor(largest, comptime!(1u32 << level)));
        }
        if comptime!(!row.in_plane()) {
            let planes = comptime!((row.units / row.plane) as usize);
            let first = UNIT_POS_Y as usize * planes;
            if UNIT_POS_PLANE == 0 {
                shared[first + (UNIT_POS_X / comptime!(row.plane)) as usize] = largest;
            }
            sync_cube();
            #[unroll]
            for i in 0..planes {
                largest = max(largest, shared[first + i]);
            }
        }
    } else {
        let first = (UNIT_POS_Y * comptime!(row.units)) as usize;
        let unit = UNIT_POS_X as usize;
        shared[first + unit] = largest;
        sync_cube();
        #[unroll]
        for level in 0..comptime!(row.units.ilog2()) {
            let step = comptime!((row.units >> (level + 1)) as usize);
            if unit < step {
                shared[first + unit] = max(shared[first + unit], shared[first + unit + step]);
            }
            sync_cube();
        }
        largest = shared[first];
    }
    largest
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

/// The largest element of a vector.
#[cube]
pub(crate) fn vector_max<N: Size>(value: Vector<f32, N>) -> f32 {
    let mut largest = value.extract(0usize);
    #[unroll]
    for i in 1..N::value() {
        largest = max(largest, value.extract(i));
    }
    largest
}
