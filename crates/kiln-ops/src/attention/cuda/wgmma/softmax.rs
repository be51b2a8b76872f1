//! The online softmax of a warpgroup's scores, in registers.
//!
//! A unit has scores of two rows, as [`fragment`](crate::tile::cuda::fragment) says. Of each row it keeps the largest
//! score so far as an exponent of 2, the shift, and the sum of its own weights 2^(score − shift).

use super::places::{Places, limits};
use super::plan::Forward;
use crate::exponential::{exp2, reciprocal};
use crate::tile::cuda::fragment::{offset, row_max};
use crate::tile::cuda::ptx::log2;
use cubecl::prelude::*;

/// Less than any score, and finite, so that the difference of two shifts is a number.
pub(super) const LEAST: f32 = -1.0e30;

/// Two numbers, one for each row of a unit.
pub(super) type RowPair = Vector<f32, Const<2>>;

/// Shifts and sums before the first block.
#[cube]
pub(super) fn begin(rows: &mut Array<RowPair>) {
    rows[0] = Vector::new(f32::new(LEAST));
    rows[1] = Vector::new(0.0f32);
}

/// The keys that the rows of a unit see, counted from its first column of the first block.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Sight {
    low_0: i32,
    low_1: i32,
    high_0: i32,
    high_1: i32,
}

/// That of a unit whose first element is of query `row`, and in column `col` of the scores.
#[cube]
pub(super) fn sight(
    row: u32,
    col: u32,
    documents: &[u32],
    places: &Places,
    #[comptime] forward: Forward,
) -> Sight {
    let (low_0, high_0) = limits(row, documents, places, forward.limited);
    let (low_1, high_1) = limits(row + 8, documents, places, forward.limited);
    let col = i32::cast_from(col);
    Sight {
        low_0: i32::cast_from(low_0) - col,
        low_1: i32::cast_from(low_1) - col,
        high_0: i32::cast_from(high_0) - col,
        high_1: i32::cast_from(high_1) - col,
    }
}

/// Scores of a block with a soft-cap, in exponents of 2: c·tanh(s/c) = c − 2c / (1 + e^(2s/c)).
#[cube]
fn capped<N: Size>(
    scores: Vector<f32, N>,
    places: &Places,
    #[comptime] count: usize,
) -> Vector<f32, N> {
    let mut capped = scores;
    #[unroll]
    for i in 0..count {
        let part = reciprocal(1.0f32 + exp2(scores.extract(i) * places.scale));
        capped.insert(i, fma(part, places.cap * -2.0f32, places.cap));
    }
    capped
}

/// Scores of block `block` with those out of sight made −∞.
#[cube]
fn masked<N: Size>(
    scores: Vector<f32, N>,
    block: u32,
    sight: &Sight,
    #[comptime] forward: Forward,
) -> Vector<f32, N> {
    let first = i32::cast_from(block * forward.keys());
    let (high_0, high_1) = (sight.high_0 - first, sight.high_1 - first);
    let (low_0, low_1) = (sight.low_0 - first, sight.low_1 - first);
    let nothing = f32::new(f32::NEG_INFINITY);
    let mut masked = scores;
    #[unroll]
    for i in 0..forward.tile.keys / 2 {
        let column = comptime!(offset(i).1 as i32);
        let (low, high) = if comptime!(i % 4 < 2) { (low_0, high_0) } else { (low_1, high_1) };
        let score = select(high > column, scores.extract(i), nothing);
        if comptime!(forward.limited.below()) {
            masked.insert(i, select(low > column, nothing, score));
        } else {
            masked.insert(i, score);
        }
    }
    masked
}

/// Makes weights of the scores of a block, masked or seen whole, and brings the sums to the new shifts. Returns
/// the factors for what has been added up with the old ones.
#[cube]
pub(super) fn soften<N: Size>(
    scores: &mut Array<Vector<f32, N>>,
    rows: &mut Array<RowPair>,
    block: u32,
    sight: &Sight,
    places: &Places,
    #[comptime] mask: bool,
    #[comptime] forward: Forward,
) -> RowPair {
    let count = comptime!(forward.tile.keys / 2);
    let scale = if comptime!(forward.softcap) { f32::new(1.0) } else { places.scale };
    if comptime!(forward.softcap) {
        scores[0] = capped::<N>(scores[0], places, count);
    }
    if comptime!(mask) {
        scores[0] = masked::<N>(scores[0], block, sight, forward);
    }
    let largest = row_max::<N>(scores[0], count);
    let mut shifts = RowPair::empty();
    let mut factors = RowPair::empty();
    let mut sums = RowPair::empty();
    #[unroll]
    for r in 0..2usize {
        shifts.insert(r, max(rows[0].extract(r), largest.extract(r) * scale));
        let factor = exp2(rows[0].extract(r) - shifts.extract(r));
        factors.insert(r, factor);
        sums.insert(r, rows[1].extract(r) * factor);
    }
    let mut weights = scores[0];
    #[unroll]
    for i in 0..count {
        let r = comptime!(i % 4 / 2);
        let weight = exp2(fma(scores[0].extract(i), scale, -shifts.extract(r)));
        weights.insert(i, weight);
        sums.insert(r, sums.extract(r) + weight);
    }
    scores[0] = weights;
    rows[0] = shifts;
    rows[1] = sums;
    factors
}

/// Keeps what makes these sums before the waits that follow, under the products that are waited for: ptxas would move
/// it behind them. It does not know that sums are not negative, and moves no store behind a wait.
#[cube]
pub(super) fn settle(sums: RowPair) {
    gpu_asm!(
        "{{ .reg .pred p; .reg .b32 zero; mov.b32 zero, 0;",
        "setp.lt.f32 p, {a}, 0f00000000; setp.lt.or.f32 p, {b}, 0f00000000, p;",
        "@p st.shared.b32 [zero], zero; }}",
        a = in(_) sums.extract(0usize), b = in(_) sums.extract(1usize)
    );
}

/// What rows are divided by, as factors; 0 for one that saw nothing.
#[cube]
pub(super) fn inverses(totals: RowPair) -> RowPair {
    let mut inverses = RowPair::empty();
    #[unroll]
    for r in 0..2usize {
        let total = totals.extract(r);
        inverses.insert(r, select(total == 0.0f32, 0.0f32, reciprocal(total)));
    }
    inverses
}

/// The log-sum-exp of row `r` to base 2; +∞ for one that saw nothing.
#[cube]
pub(super) fn log_sum_exp(shifts: RowPair, totals: RowPair, #[comptime] r: usize) -> f32 {
    let total = totals.extract(r);
    select(total == 0.0f32, f32::new(f32::INFINITY), shifts.extract(r) + log2(total))
}
