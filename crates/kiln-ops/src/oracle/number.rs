//! What oracles compute with: plain float64, or a value with its [bound](super::Bounded).
//!
//! An oracle is the formula, with a word where implementations round ([`stored`](Number::stored)) and
//! where numbers share an error ([`of_row`](Number::of_row)). Of float64 these words change nothing.

use super::rounding::Path;
use super::through::Step;
use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A number of an oracle.
///
/// An operation with a plain `f64` is one with a constant that implementations hold in f32.
pub trait Number:
    Copy
    + Debug
    + Neg<Output = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Add<f64, Output = Self>
    + Sub<f64, Output = Self>
    + Mul<f64, Output = Self>
    + Div<f64, Output = Self>
{
    /// A number without an error.
    fn exact(value: f64) -> Self;

    /// The float64 result.
    fn value(self) -> f64;

    /// Whose roundings are meant.
    fn path(self) -> Path;

    /// e^x.
    fn exp(self) -> Self;

    /// The natural logarithm.
    fn ln(self) -> Self;

    /// x^-½.
    fn rsqrt(self) -> Self;

    /// 1 / (1 + e^-x).
    fn sigmoid(self) -> Self;

    /// The hyperbolic tangent.
    fn tanh(self) -> Self;

    /// A number of an oracle that computes bounds of its own, and how far from it a right result may be; `self` is an
    /// input.
    fn known(self, value: f64, bound: f64) -> Self;

    /// Whether a right result may be on either side of zero, or there: what decides by its sign may go both ways.
    fn may_be_zero(self) -> bool;

    /// Rounded to the element type of the operation.
    fn stored(self) -> Self;

    /// [`stored`](Self::stored) by that implementation only.
    fn stored_by(self, path: Path) -> Self {
        if self.path() == path { self.stored() } else { self }
    }

    /// Nothing, plus or minus what one [`stored`](Self::stored) of the number is off: to be added to a sum
    /// whose terms are rounded, but have a common factor outside of it.
    fn storing(self) -> Self;

    /// The error is common to a row: of its norm, of its log-sum-exp. It does not average out along the row.
    fn of_row(self) -> Self;

    /// The error is common to a column: of its factor, or of numbers of few bits that are all changed alike and so
    /// rounded alike.
    fn of_column(self) -> Self;

    /// Off by so many roundings of f32 beside, all in one direction.
    fn off_by(self, roundings: f64) -> Self;

    /// An f32 that kernels multiply numbers of 16 bits with: beside bf16 as the sum of two of these, 17 bits.
    fn beside_halves(self) -> Self;

    /// Σ terms, in f32 and in any order.
    ///
    /// The errors of more than three terms have to be independent: what they share is multiplied in afterwards.
    fn sum(terms: impl IntoIterator<Item = Self>) -> Self;

    /// Σ left · right, as [`sum`](Self::sum), by whatever multiplies matrices.
    fn dot(terms: impl IntoIterator<Item = (Self, Self)>) -> Self;

    /// f of a few numbers: an iteration along which running bounds would grow and errors do not. `f` passes every number
    /// on the way that f32 rounds through the second argument, with the units that it may be off in one direction beside,
    /// and must round the terms of sums that may cancel, not the sums.
    fn through(inputs: &[Self], f: impl Fn(&[f64], Step<'_>) -> Vec<f64>) -> Vec<Self>;

    /// op(A) · op(B) of row-major A and B, `[m, k]` · `[k, n]` after the transposes that `transposed` asks for.
    fn product(a: &[Self], b: &[Self], sizes: [usize; 3], transposed: [bool; 2]) -> Vec<Self>;
}

impl Number for f64 {
    fn exact(value: f64) -> Self {
        value
    }

    fn value(self) -> f64 {
        self
    }

    fn path(self) -> Path {
        Path::Fused
    }

    fn exp(self) -> Self {
        self.exp()
    }

    fn ln(self) -> Self {
        self.ln()
    }

    fn rsqrt(self) -> Self {
        1.0 / self.sqrt()
    }

    fn sigmoid(self) -> Self {
        1.0 / (1.0 + (-self).exp())
    }

    fn tanh(self) -> Self {
        self.tanh()
    }

    fn known(self, value: f64, _bound: f64) -> Self {
        value
    }

    fn may_be_zero(self) -> bool {
        self == 0.0
    }

    fn stored(self) -> Self {
        self
    }

    fn storing(self) -> Self {
        0.0
    }

    fn of_row(self) -> Self {
        self
    }

    fn of_column(self) -> Self {
        self
    }

    fn off_by(self, _roundings: f64) -> Self {
        self
    }

    fn beside_halves(self) -> Self {
        self
    }

    fn sum(terms: impl IntoIterator<Item = Self>) -> Self {
        terms.into_iter().sum()
    }

    fn dot(terms: impl IntoIterator<Item = (Self, Self)>) -> Self {
        terms.into_iter().map(|(a, b)| a * b).sum()
    }

    fn through(inputs: &[Self], f: impl Fn(&[f64], Step<'_>) -> Vec<f64>) -> Vec<Self> {
        f(inputs, &mut |x, _| x)
    }

    fn product(
        a: &[Self],
        b: &[Self],
        [m, k, n]: [usize; 3],
        [transposed_a, transposed_b]: [bool; 2],
    ) -> Vec<Self> {
        let transposed = transposed_b
            .then(|| -> Vec<f64> { (0..k * n).map(|i| b[i % n * k + i / n]).collect() });
        let b = transposed.as_deref().unwrap_or(b);
        let mut c = vec![0.0; m * n];
        for (i, row) in c.chunks_exact_mut(n.max(1)).enumerate() {
            for (x, right) in b.chunks_exact(n.max(1)).enumerate() {
                let left = if transposed_a { a[x * m + i] } else { a[i * k + x] };
                for (c, right) in row.iter_mut().zip(right) {
                    *c += left * right;
                }
            }
        }
        c
    }
}
