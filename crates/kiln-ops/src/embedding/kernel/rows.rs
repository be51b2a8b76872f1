//! Rows of numbers: adding some up, and writing what they are.

use super::sums::{Onto, Plan};
use cubecl::prelude::*;

/// Rows that are under way together.
pub(super) const BATCH: usize = 4;

/// Positions whose rows of dy are added up.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Range {
    pub(super) from: usize,
    pub(super) to: usize,
}

/// The first [`BATCH`] of every `step`th row of `range`, one after the other; what is past the end is the first again. If
/// `ordered`, of the rows in the order that `order` names.
#[cube]
pub(super) fn load_rows<E: Float, N: Size>(
    values: &[Vector<E, N>],
    order: &[u32],
    range: Range,
    step: usize,
    stride: usize,
    first: usize,
    width: usize,
    #[comptime] ordered: bool,
    #[comptime] plan: Plan,
) -> Array<Vector<E, N>> {
    let count = comptime!(plan.vectors);
    let mut held = Array::<Vector<E, N>>::new(comptime!(BATCH * count));
    #[unroll]
    for k in 0..BATCH {
        let at = select(range.from + k * step < range.to, range.from + k * step, range.from);
        let mut row = at;
        if comptime!(ordered) {
            row = order[at] as usize;
        }
        #[unroll]
        for c in 0..count {
            let column = min(first + comptime!(c * plan.lanes as usize), width - 1);
            held[comptime!(k * count + c)] = values[row * stride + column];
        }
    }
    held
}

/// Adds the `k`th of the rows that are held to `sum`.
#[cube]
pub(super) fn add_row<E: Float, N: Size>(
    sum: &mut Array<Vector<f32, N>>,
    held: &Array<Vector<E, N>>,
    #[comptime] k: usize,
    #[comptime] plan: Plan,
) {
    let count = comptime!(plan.vectors);
    #[unroll]
    for c in 0..count {
        sum[c] += Vector::<f32, N>::cast_from(held[comptime!(k * count + c)]);
    }
}

/// Adds every `step`th row of `range` to `sum`, as [`load_rows`] has them.
#[cube]
pub(super) fn add_rows<E: Float, N: Size>(
    sum: &mut Array<Vector<f32, N>>,
    values: &[Vector<E, N>],
    order: &[u32],
    range: Range,
    step: usize,
    stride: usize,
    first: usize,
    width: usize,
    #[comptime] ordered: bool,
    #[comptime] plan: Plan,
) {
    for i in range_stepped(range.from, range.to, step * BATCH) {
        let own = Range { from: i, to: range.to };
        let held = load_rows::<E, N>(values, order, own, step, stride, first, width, ordered, plan);
        #[unroll]
        for k in 0..BATCH {
            if i + k * step < range.to {
                add_row::<E, N>(sum, &held, k, plan);
            }
        }
    }
}

#[cube]
pub(super) fn zeros<N: Size>(#[comptime] count: usize) -> Array<Vector<f32, N>> {
    let mut zeros = Array::<Vector<f32, N>>::new(count);
    #[unroll]
    for c in 0..count {
        zeros[c] = Vector::new(0.0f32);
    }
    zeros
}

/// The sums of a cube's groups, in their order, one vector of a unit after the other; the first group has them.
#[cube]
pub(super) fn add_groups<N: Size>(
    sum: &mut Array<Vector<f32, N>>,
    shared: &mut Shared<[Vector<f32, N>]>,
    #[comptime] plan: Plan,
) {
    let unit = UNIT_POS_X as usize;
    let lanes = comptime!(plan.lanes as usize);
    #[unroll]
    for c in 0..comptime!(plan.vectors) {
        sync_cube();
        shared[UNIT_POS_Y as usize * lanes + unit] = sum[c];
        sync_cube();
        if UNIT_POS_Y == 0 {
            let mut all = sum[c];
            #[unroll]
            for group in 1..comptime!(plan.groups as usize) {
                all += shared[group * lanes + unit];
            }
            sum[c] = all;
        }
    }
}

/// Of a piece of a row.
#[cube]
pub(super) fn write_row<N: Size>(
    to: &mut [Vector<f32, N>],
    row: usize,
    sum: &Array<Vector<f32, N>>,
    first: usize,
    width: usize,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for c in 0..comptime!(plan.vectors) {
        let column = first + comptime!(c * plan.lanes as usize);
        if column < width {
            to[row * width + column] = sum[c];
        }
    }
}

/// The same of a whole row.
#[cube]
pub(super) fn finish_row<F: Float, N: Size>(
    to: &mut [Vector<F, N>],
    onto: &[Vector<F, N>],
    row: usize,
    sum: &Array<Vector<f32, N>>,
    first: usize,
    width: usize,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for c in 0..comptime!(plan.vectors) {
        let column = first + comptime!(c * plan.lanes as usize);
        if column < width {
            let at = row * width + column;
            let mut value = sum[c];
            if comptime!(plan.onto != Onto::Zeros) {
                value += Vector::<f32, N>::cast_from(onto[at]);
            }
            to[at] = Vector::cast_from(value);
        }
    }
}
