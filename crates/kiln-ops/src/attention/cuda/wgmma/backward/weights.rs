//! Weights of scores and their gradients, in registers.
//!
//! Rows are keys, columns are queries: a unit has two rows of keys, and of every eight columns two.

use super::plan::Gradient;
use crate::attention::cuda::wgmma::places::Places;
use crate::exponential::{exp2, reciprocal};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// What a unit has of 64 keys and 64 queries, and the same rounded in pairs.
pub(super) type Sums = Vector<f32, Const<32>>;
pub(super) type Pairs = Vector<u32, Const<16>>;

/// Makes weights 2^(score − log-sum-exp) of a unit's scores of 64 queries, one half or the other, and returns them
/// rounded in pairs, as the left operand of a product over the queries. What remains in the place of the scores is
/// the factor of their gradients: the weights, with a soft-cap times its slope. `key` is the unit's first key, at
/// `numbers` are those of its first column.
#[cube]
pub(super) fn weigh<X: Size>(
    scores: &mut Array<Vector<f32, X>>,
    #[comptime] half: usize,
    numbers: u32,
    key: u32,
    places: &Places,
    #[comptime] masked: bool,
    #[comptime] gradient: Gradient,
) -> Pairs {
    let mut factors = scores[0];
    let mut weights = Pairs::empty();
    #[unroll]
    for c in 0..8u32 {
        let column = numbers + comptime!(c * 32);
        let lse = load_pair(column);
        let mut pairs = Vector::<f32, Const<4>>::empty();
        #[unroll]
        for e in 0..4usize {
            let i = comptime!(32 * half + 4 * c as usize + e);
            let shift = lse.extract(comptime!(e % 2));
            if comptime!(gradient.softcap) {
                let part = reciprocal(1.0f32 + exp2(factors.extract(i) * places.scale));
                let capped = fma(part, places.cap * -2.0f32, places.cap);
                pairs.insert(e, exp2(capped - shift));
                // 1 − tanh²
                factors.insert(i, 4.0f32 * part * (1.0f32 - part));
            } else {
                pairs.insert(e, exp2(fma(factors.extract(i), places.scale, -shift)));
            }
        }
        if comptime!(masked) {
            pairs = seen(pairs, column, key, gradient);
        }
        #[unroll]
        for e in 0..4usize {
            let i = comptime!(32 * half + 4 * c as usize + e);
            if comptime!(gradient.softcap) {
                factors.insert(i, factors.extract(i) * pairs.extract(e));
            } else {
                factors.insert(i, pairs.extract(e));
            }
        }
        #[unroll]
        for r in 0..2usize {
            let pair = round_pair(
                pairs.extract(comptime!(2 * r)),
                pairs.extract(comptime!(2 * r + 1)),
                gradient.float,
            );
            weights.insert(comptime!(2 * c as usize + r), pair);
        }
    }
    scores[0] = factors;
    weights
}

/// The weights of four neighbours, of two keys and two queries, with zeros where a query does not see a key.
#[cube]
fn seen(
    weights: Vector<f32, Const<4>>,
    at: u32,
    key: u32,
    #[comptime] gradient: Gradient,
) -> Vector<f32, Const<4>> {
    let mut seen = weights;
    let high = load_words(at + comptime!(3 * gradient.row_bytes()));
    #[unroll]
    for e in 0..4usize {
        let key = key + comptime!(e as u32 / 2 * 8);
        let below = key < high.extract(comptime!(e % 2));
        seen.insert(e, select(below, seen.extract(e), 0.0f32));
    }
    if comptime!(gradient.limited.below()) {
        let low = load_words(at + comptime!(2 * gradient.row_bytes()));
        #[unroll]
        for e in 0..4usize {
            let key = key + comptime!(e as u32 / 2 * 8);
            let above = key >= low.extract(comptime!(e % 2));
            seen.insert(e, select(above, seen.extract(e), 0.0f32));
        }
    }
    seen
}

/// The gradients of a unit's scores, rounded in pairs: factor · (gradient of the weight − delta).
#[cube]
pub(super) fn slopes<X: Size>(
    factors: Vector<f32, X>,
    #[comptime] half: usize,
    of_weights: Sums,
    numbers: u32,
    #[comptime] gradient: Gradient,
) -> Pairs {
    let mut rounded = Pairs::empty();
    #[unroll]
    for c in 0..8u32 {
        let delta = load_pair(numbers + comptime!(gradient.row_bytes() + c * 32));
        #[unroll]
        for r in 0..2usize {
            let i = comptime!(4 * c as usize + 2 * r);
            let j = comptime!(i + 1);
            let first = of_weights.extract(i) - delta.extract(0usize);
            let second = of_weights.extract(j) - delta.extract(1usize);
            let first = factors.extract(comptime!(32 * half + i)) * first;
            let second = factors.extract(comptime!(32 * half + j)) * second;
            let pair = round_pair(first, second, gradient.float);
            rounded.insert(comptime!(2 * c as usize + r), pair);
        }
    }
    rounded
}
