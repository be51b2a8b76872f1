//! MLPs on plain units: exact f32 arithmetic, any device.
//!
//! A cube takes some rows of its chunk at a time through shared memory, and a unit makes 4×4 of what comes next; weights
//! are read where they are, since a cube's are few.

mod backward;
mod forward;

pub(super) use backward::backward;
pub(super) use forward::forward;

use super::CubeTensor;
use crate::kasmina::kernel::MlpSeed;
use cubecl::prelude::*;

/// Bytes of shared memory of a cube at most.
const SHARED: usize = 32 << 10;

/// How a cube works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    units: u32,
    /// Rows at a time, a multiple of 4.
    rows: usize,
    /// Features of a chunk at most, a multiple of 4.
    width: usize,
}

impl Plan {
    /// For chunks of up to `widest` features, with `tiles` numbers in shared memory for each row and feature.
    fn new(client: &Client, widest: usize, tiles: usize) -> Self {
        let hardware = &client.properties().hardware;
        let width = widest.next_multiple_of(4);
        let units = (if width <= 32 { 128 } else { 256 }).min(hardware.max_units_per_cube);
        let shared = SHARED.min(hardware.max_shared_memory_size) / size_of::<f32>();
        let rows = (shared.saturating_sub(units as usize) / (tiles * width)).min(32) / 4 * 4;
        Self { units: 1 << units.ilog2(), rows: rows.max(4), width }
    }

    /// 4×4 of a gradient of weights that a unit has.
    fn tiles(&self) -> usize {
        (self.width * self.width / 8).div_ceil(self.units as usize)
    }
}

/// 4×4 sums of rows of `left` from `row` on, `pitch` apart, times columns of weights from `column` on, of `columns`.
#[cube]
fn product<E: Float>(
    left: &[f32],
    row: usize,
    #[comptime] pitch: usize,
    depth: usize,
    weights: &[E],
    base: usize,
    column: usize,
    columns: usize,
    // From one column of the weights to the next, and down one.
    across: usize,
    down: usize,
) -> Array<f32> {
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        sums[i] = 0.0f32;
    }
    for k in 0..depth {
        let mut right = Array::<f32>::new(4usize);
        #[unroll]
        for j in 0..4usize {
            let at = base + min(column + j, columns - 1) * across + k * down;
            right[j] = f32::cast_from(weights[at]);
        }
        #[unroll]
        for i in 0..4usize {
            let value = left[(row + i) * pitch + k];
            #[unroll]
            for j in 0..4usize {
                sums[comptime!(i * 4 + j)] = fma(value, right[j], sums[comptime!(i * 4 + j)]);
            }
        }
    }
    sums
}

/// Reads rows of a chunk into shared memory; zero past the last one.
#[cube]
fn load<E: Float>(
    from: &[E],
    to: &mut [f32],
    stride: usize,
    row: usize,
    end: usize,
    of: &MlpSeed,
    #[comptime] plan: Plan,
) {
    let count = of.size * comptime!(plan.rows);
    for at in range_stepped(UNIT_POS as usize, count, comptime!(plan.units as usize)) {
        let r = at / of.size;
        let c = at - r * of.size;
        let mut value = f32::new(0.0);
        if row + r < end {
            value = f32::cast_from(from[(row + r) * stride + of.begin + c]);
        }
        to[r * comptime!(plan.width) + c] = value;
    }
}
