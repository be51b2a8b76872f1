//! What the portable kernels are made of: products of blocks, and which keys a query sees.

use super::tile::Tile;
use crate::exponential::factor;
use crate::tile::Keep;
use crate::tile::simt::{fragment, load_block, place};
use cubecl::prelude::*;

/// What a kernel is specialised on beside its tile; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::attention) struct Rules {
    pub(in crate::attention) causal: bool,
    pub(in crate::attention) window: bool,
    pub(in crate::attention) documents: bool,
    pub(in crate::attention) softcap: bool,
    /// Exponentials are in units of log 2.
    pub(in crate::attention) ptx: bool,
}

/// Heads of a tensor, and where they are, in vectors.
#[derive(CubeType, CubeLaunch)]
pub(in crate::attention) struct Heads<E: Float, N: Size> {
    pub(in crate::attention) elements: Box<[Vector<E, N>]>,
    pub(in crate::attention) start: usize,
    pub(in crate::attention) batch_stride: usize,
    pub(in crate::attention) head_stride: usize,
    pub(in crate::attention) row_stride: usize,
}

#[cube]
impl<E: Float, N: Size> Heads<E, N> {
    /// Where a head begins.
    pub(in crate::attention) fn head(&self, batch: usize, head: usize) -> usize {
        self.start + batch * self.batch_stride + head * self.head_stride
    }
}

/// Sizes, and numbers of scores.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::attention) struct Numbers {
    pub(in crate::attention) batches: usize,
    pub(in crate::attention) heads: usize,
    pub(in crate::attention) kv_heads: usize,
    pub(in crate::attention) queries: usize,
    pub(in crate::attention) keys: usize,
    pub(in crate::attention) width: usize,
    pub(in crate::attention) window: usize,
    /// On sums q·k, for scores in units of shifts; under a soft-cap for the argument of the tangent.
    pub(in crate::attention) factor: f32,
    /// The soft-cap in units of shifts.
    pub(in crate::attention) cap: f32,
    /// The scale.
    pub(in crate::attention) scale: f32,
    /// +∞.
    pub(in crate::attention) infinity: f32,
}

/// Keys from `start` up to `end`.
#[derive(CubeType, Clone, Copy)]
pub(in crate::attention) struct Span {
    pub(in crate::attention) start: usize,
    pub(in crate::attention) end: usize,
}

/// The keys that a query sees; of one past the last those of the last.
#[cube]
pub(in crate::attention) fn seen(
    query: usize,
    of: &Numbers,
    documents: &[u32],
    #[comptime] rules: Rules,
) -> Span {
    let query = min(query, of.queries - 1);
    let mut start = 0usize.runtime();
    let mut end = of.keys;
    if comptime!(rules.causal) {
        let reach = query + of.keys + 1;
        end = reach - min(of.queries, reach);
    }
    if comptime!(rules.window) {
        start = end - min(of.window, end);
    }
    if comptime!(rules.documents) {
        start = max(start, documents[query] as usize);
        end = min(end, documents[of.queries + query] as usize);
    }
    Span { start, end }
}

/// The queries that see some of the keys from `start` up to `end`.
#[cube]
pub(super) fn seeing(
    start: usize,
    end: usize,
    of: &Numbers,
    documents: &[u32],
    #[comptime] rules: Rules,
) -> Span {
    let mut first = 0usize.runtime();
    let mut last = of.queries;
    if comptime!(rules.causal) {
        let reach = start + of.queries;
        first = reach - min(of.keys, reach);
    }
    if comptime!(rules.window) {
        let reach = end + of.queries + of.window - 1;
        last = min(last, reach - min(of.keys, reach));
    }
    if comptime!(rules.documents) {
        first = max(first, documents[start] as usize);
        last = min(last, documents[of.queries + end - 1] as usize);
    }
    Span { start: first, end: last }
}

/// tanh, near 0 too: that of drivers beside CUDA's has an absolute error, which a large soft-cap multiplies.
#[cube]
fn tanh(x: f32, #[comptime] rules: Rules) -> f32 {
    if comptime!(rules.ptx) {
        f32::tanh(x)
    } else {
        // Up to x¹¹; the next term is below 2⁻²⁶ of the sum.
        let square = x * x;
        let series = fma(square, -1382.0f32 / 155925.0f32, 62.0f32 / 2835.0f32);
        let series = fma(square, series, -17.0f32 / 315.0f32);
        let series = fma(square, series, 2.0f32 / 15.0f32);
        let series = fma(square, series, -1.0f32 / 3.0f32);
        let series = x * fma(square, series, 1.0f32);
        select(square < 0.0625f32, series, f32::tanh(x))
    }
}

/// A score in units of shifts, from its sum q·k.
#[cube]
pub(in crate::attention) fn score(sum: f32, of: &Numbers, #[comptime] rules: Rules) -> f32 {
    let mut x = sum * of.factor;
    if comptime!(rules.softcap) {
        x = tanh(x, rules) * of.cap;
    }
    x
}

/// The gradient of a sum q·k but for the scale, from the probability's `p` and `dp`.
#[cube]
pub(super) fn gradient(
    sum: f32,
    p: f32,
    dp: f32,
    delta: f32,
    of: &Numbers,
    #[comptime] rules: Rules,
) -> f32 {
    let mut ds = p * (dp - delta);
    if comptime!(rules.softcap) {
        let tanh = tanh(sum * of.factor, rules);
        ds *= 1.0f32 - tanh * tanh;
    }
    ds
}

/// e^x of a score relative to the log-sum-exp of its query, where that sees the key.
#[cube]
pub(super) fn probability(x: f32, lse: f32, visible: bool, #[comptime] rules: Rules) -> f32 {
    select(visible, factor(x - lse, rules.ptx), f32::new(0.0))
}

/// `sums` = left · rightᵀ: rows of heads from `left_row` and `right_row` on, zero from the ends on.
#[cube]
pub(super) fn scores<E: Float, N: Size>(
    left: &Heads<E, N>,
    left_head: usize,
    left_row: usize,
    left_end: usize,
    right: &Heads<E, N>,
    right_head: usize,
    right_row: usize,
    right_end: usize,
    width: usize,
    left_block: &mut [f32],
    right_block: &mut [f32],
    sums: &mut Array<f32>,
    #[comptime] tile: Tile,
) {
    let (across, down, units) = comptime!((tile.across(), tile.down(), tile.units()));
    let (ty, tx) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    #[unroll]
    for i in 0..comptime!(tile.unit_own * tile.unit_other) {
        sums[i] = 0.0f32;
    }
    for at in range_stepped(0usize, width, tile.depth) {
        // Nobody reads what was there.
        sync_cube();
        load_block::<E, N>(
            &left.elements,
            left_block,
            left_head,
            left.row_stride,
            left_row,
            at,
            left_end,
            width,
            tile.own,
            tile.depth,
            units,
            true,
            comptime!(Keep::All),
        );
        load_block::<E, N>(
            &right.elements,
            right_block,
            right_head,
            right.row_stride,
            right_row,
            at,
            right_end,
            width,
            tile.other,
            tile.depth,
            units,
            true,
            comptime!(Keep::All),
        );
        sync_cube();
        #[unroll(tile.unrolled)]
        for k in 0..tile.depth {
            let mut a = Array::<f32>::new(tile.unit_own);
            let mut b = Array::<f32>::new(tile.unit_other);
            fragment(&*left_block, &mut a, k * tile.own, ty, down, tile.unit_own, tile.unrolled);
            fragment(
                &*right_block,
                &mut b,
                k * tile.other,
                tx,
                across,
                tile.unit_other,
                tile.unrolled,
            );
            #[unroll]
            for i in 0..tile.unit_own {
                #[unroll]
                for j in 0..tile.unit_other {
                    let at = comptime!(i * tile.unit_other + j);
                    sums[at] = fma(a[i], b[j], sums[at]);
                }
            }
        }
    }
}

/// Adds scores · rows of heads from `row` on to `sums`; the scores stand as [other][own].
#[cube]
pub(super) fn accumulate<E: Float, N: Size>(
    scores: &[f32],
    rows: &Heads<E, N>,
    head: usize,
    row: usize,
    end: usize,
    width: usize,
    block: &mut [f32],
    sums: &mut Array<f32>,
    #[comptime] tile: Tile,
) {
    let (across, down, units) = comptime!((tile.across(), tile.down(), tile.units()));
    let (ty, tx) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    let columns = comptime!(tile.columns());
    for at in range_stepped(0usize, tile.other, tile.stream) {
        // The scores are written, and nobody reads what was in the block.
        sync_cube();
        load_block::<E, N>(
            &rows.elements,
            block,
            head,
            rows.row_stride,
            0usize,
            row + at,
            width,
            end,
            tile.width,
            tile.stream,
            units,
            false,
            comptime!(Keep::All),
        );
        sync_cube();
        #[unroll(tile.unrolled)]
        for k in 0..tile.stream {
            let mut a = Array::<f32>::new(tile.unit_own);
            let mut b = Array::<f32>::new(columns);
            fragment(scores, &mut a, (at + k) * tile.own, ty, down, tile.unit_own, tile.unrolled);
            fragment(&*block, &mut b, k * tile.width, tx, across, columns, tile.unrolled);
            #[unroll]
            for i in 0..tile.unit_own {
                #[unroll]
                for j in 0..columns {
                    let at = comptime!(i * columns + j);
                    sums[at] = fma(a[i], b[j], sums[at]);
                }
            }
        }
    }
}

/// Stores a unit's sums of the width, each times its row's factor, in rows before `end`.
#[cube]
pub(super) fn store<E: Float, N: Size>(
    sums: &Array<f32>,
    factors: &Array<f32>,
    to: &mut Heads<E, N>,
    head: usize,
    row: usize,
    end: usize,
    width: usize,
    #[comptime] tile: Tile,
) {
    let (across, down) = comptime!((tile.across(), tile.down()));
    let (ty, tx) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    let columns = comptime!(tile.columns());
    let size = N::value();
    #[unroll]
    for i in 0..tile.unit_own {
        let row = row + place(ty, i, down);
        #[unroll]
        for group in 0..comptime!(columns / size) {
            let column = place(tx, comptime!(group * size), across);
            if row < end && column < width {
                let mut value = Vector::<E, N>::new(E::new(0.0));
                #[unroll]
                for v in 0..size {
                    let sum = sums[comptime!(i * columns + group * size + v)];
                    value.insert(v, E::cast_from(sum * factors[i]));
                }
                to.elements[head + row * to.row_stride + column / size] = value;
            }
        }
    }
}
