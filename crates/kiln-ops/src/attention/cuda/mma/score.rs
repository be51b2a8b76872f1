//! What becomes of a score before it is an exponent of 2.

use crate::attention::problem::Problem;
use crate::exponential::{exp2, reciprocal};
use cubecl::prelude::*;
use std::f32::consts::LOG2_E;

/// How.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Score {
    /// A positive factor, multiplied in with the exponent: the largest score stays the largest.
    Positive,
    /// Any factor.
    Any,
    /// c·tanh(s/c) of the scaled score s.
    Capped,
}

impl Score {
    pub(super) fn of(problem: &Problem) -> Self {
        match problem.softcap {
            Some(_) => Self::Capped,
            None if problem.scale > 0.0 => Self::Positive,
            None => Self::Any,
        }
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Numbers {
    /// Of a score, where it becomes an exponent of 2, or twice that of the tangent.
    factor: f32,
    /// The softcap, in the base 2.
    cap: f32,
    /// Of the gradients of q and k.
    pub(super) scale: f32,
}

impl NumbersLaunch {
    pub(super) fn of(problem: &Problem) -> Self {
        let Problem { scale, softcap, .. } = *problem;
        let factor = softcap.map_or(scale, |cap| 2.0 * (scale / cap)) * LOG2_E;
        Self::new(factor, softcap.unwrap_or(0.0) * LOG2_E, scale)
    }
}

/// 1 / (1 + 2^y), of which the tangent is made: tanh(x) = 1 − 2 / (1 + e^2x).
#[cube]
fn slack(score: f32, numbers: &Numbers) -> f32 {
    reciprocal(1.0f32 + exp2(score * numbers.factor))
}

/// The score but for [`exponent_factor`].
#[cube]
pub(super) fn shaped(score: f32, numbers: &Numbers, #[comptime] kind: Score) -> f32 {
    if comptime!(kind == Score::Positive) {
        score
    } else if comptime!(kind == Score::Any) {
        score * numbers.factor
    } else {
        fma(slack(score, numbers), -2.0f32 * numbers.cap, numbers.cap)
    }
}

/// The factor that makes [`shaped`] scores exponents of 2.
#[cube]
pub(super) fn exponent_factor(numbers: &Numbers, #[comptime] kind: Score) -> f32 {
    if comptime!(kind == Score::Positive) { numbers.factor } else { f32::new(1.0) }
}

/// The probability of a score by the log-sum-exp of its row, and its derivative by the scaled score but for the
/// sum over the row.
#[cube]
pub(super) fn weigh(
    score: f32,
    lse: f32,
    numbers: &Numbers,
    #[comptime] kind: Score,
) -> (f32, f32) {
    if comptime!(kind == Score::Capped) {
        let slack = slack(score, numbers);
        let weight = exp2(fma(slack, -2.0f32 * numbers.cap, numbers.cap) - lse);
        // 1 − tanh² = 4·slack·(1 − slack).
        (weight, weight * (4.0f32 * slack * (1.0f32 - slack)))
    } else {
        let weight = exp2(fma(score, numbers.factor, -lse));
        (weight, weight)
    }
}
