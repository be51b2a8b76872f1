//! What the oracles of all operators are made of (`rms_norm::oracle` and the like: the formulas with plain loops in
//! float64, knowing nothing of the kernels but where results are rounded), and how a result is compared with them.
//!
//! Tensors are row-major slices of [`Number`]s: of `f64`, or of [`Bounded`] ones, which
//! [`Rounding::numbers`] makes of inputs and which carry how far an implementation may be off. A backward
//! takes the inputs and the cotangents and returns the gradients in the order of the inputs.

mod bounded;
mod compare;
mod format;
mod functions;
mod number;
mod rounding;
mod sums;
#[cfg(test)]
mod tests;
mod through;

pub use bounded::{Bounded, Errors, LAMBDA};
pub use compare::{Comparison, Place, Worst, compare};
pub use format::Format;
pub use number::Number;
pub use rounding::{Path, Products, Rounding};
pub use sums::block_errors;
pub use through::Step;

use burn::tensor::DType;

/// How far a result is from its oracle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distance {
    /// ‖out − ref‖ / ‖ref‖.
    pub relative: f64,
    /// Largest |out − ref| over the largest |ref|.
    pub largest: f64,
    /// Number of results that are NaN or infinite where the oracle is finite.
    pub not_finite: usize,
}

/// Measures the distance of `out` from `reference`; of unlike lengths it is infinite.
pub fn distance(out: &[f64], reference: &[f64]) -> Distance {
    if out.len() != reference.len() {
        return Distance { relative: f64::INFINITY, largest: f64::INFINITY, not_finite: 0 };
    }
    let (mut squares, mut norm, mut largest, mut scale, mut not_finite) =
        (0.0, 0.0, 0.0f64, 0.0f64, 0);
    for (out, reference) in out.iter().zip(reference) {
        if !out.is_finite() {
            not_finite += usize::from(reference.is_finite());
            continue;
        }
        let error = out - reference;
        squares += error * error;
        norm += reference * reference;
        largest = largest.max(error.abs());
        scale = scale.max(reference.abs());
    }
    // Where the oracle is zero, only zero is right.
    let ratio = |a: f64, b: f64| if a == 0.0 { 0.0 } else { a / b };
    Distance {
        relative: ratio(squares.sqrt(), norm.sqrt()),
        largest: ratio(largest, scale),
        not_finite,
    }
}

/// Half the distance from 1 to the next number: the largest relative error of one rounding.
pub fn unit_roundoff(dtype: DType) -> f64 {
    Format::from(dtype).unit()
}

impl Distance {
    /// Whether a result that was rounded `roundings` times to `dtype` and computed in f32 in
    /// between may be this far away.
    ///
    /// The norm of the error is allowed one unit of roundoff for each rounding, a single element
    /// twice that, and both the noise of f32 arithmetic.
    pub fn within(&self, dtype: DType, roundings: u32) -> bool {
        let unit = f64::from(roundings) * unit_roundoff(dtype) + F32_NOISE;
        self.not_finite == 0 && self.relative <= unit && self.largest <= 2.0 * unit
    }
}

/// Relative error of sums of some thousand f32 terms; a wrong formula or a TF32 product is far above.
const F32_NOISE: f64 = 4e-6;

/// C = op(A) · op(B) for row-major A and B; `[m, k] · [k, n]` after the transposes.
pub(crate) fn product<N: Number>(
    a: &[N],
    b: &[N],
    m: usize,
    k: usize,
    n: usize,
    ta: bool,
    tb: bool,
) -> Vec<N> {
    N::product(a, b, [m, k, n], [ta, tb])
}

impl From<DType> for Format {
    /// That of the element type; anything wider is compared as f32.
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16,
            DType::F16 => Self::F16,
            _ => Self::F32,
        }
    }
}

#[cfg(test)]
mod distance_tests {
    use super::*;

    #[test]
    fn distance_sees_each_kind_of_error() {
        let reference = [1.0, -2.0, 0.5];
        assert!(distance(&reference, &reference).within(DType::F32, 1));
        assert!(!distance(&[1.0, -2.0, f64::NAN], &reference).within(DType::BF16, 1));
        assert!(!distance(&[1.0, -2.0], &reference).within(DType::BF16, 1));
        assert!(!distance(&[1.0, -2.0, 0.53], &reference).within(DType::BF16, 1));
        assert!(distance(&[1.0, -2.0, 0.501], &reference).within(DType::BF16, 1));
        assert!(!distance(&[1.0, -2.0, 0.501], &reference).within(DType::F32, 1));
        assert!(!distance(&[1e-3], &[0.0]).within(DType::BF16, 1));
    }
}
