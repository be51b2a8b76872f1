//! A float64 value with a bound on what a right implementation may be off.
//!
//! Running error analysis: every operation takes the errors of its operands along, to first order with
//! what the second order may add, and adds its own rounding (N. Higham, Accuracy and Stability of
//! Numerical Algorithms, 2002, chapters 2 and 3.3).
//!
//! Roundings to nearest point either way, independently of each other. Few of them are simply added. Of
//! many the sum is bounded by what chance allows: if errors have mean 0, whatever the earlier ones were,
//! and sizes up to cᵢ, then |Σ| > λ·√(Σcᵢ²) with a probability of at most 2·e^(−λ²/2) (Azuma and
//! Hoeffding; N. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019;
//! M. Connolly, N. Higham and T. Mary, Stochastic Rounding and Its Probabilistic Backward Error
//! Analysis, 2021). What may point one way in all elements, as approximations and truncation do, is kept
//! apart and always added.

use super::format::Format;
use super::functions;
use super::number::Number;
use super::rounding::{Path, Rounding};
use super::sums;
use super::through::{self, Step};
use std::ops::{Add, Div, Mul, Neg, Sub};

/// λ: 5·10⁻¹⁸ for one element, under 10⁻⁹ for 10⁸ of them.
pub const LAMBDA: f64 = 9.0;

/// Unit roundoff of f32, in which all arithmetic is.
pub(super) const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

/// Unit roundoff of a sum of two bf16: each has eight bits, and the second one a sign.
const TWO_BF16: f64 = 1.0 / (1u64 << 17) as f64;

/// What a device that takes subnormal f32 for zero is off.
pub(super) const TINY: f64 = f32::MIN_POSITIVE as f64;

/// The errors that a value may have.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Errors {
    /// Largest size of those that may all point the same way.
    pub bias: f64,
    /// Largest size of the sum of a few roundings.
    pub hard: f64,
    /// Root of the sum of the squares of many roundings, each at its largest.
    pub noise: f64,
    /// The same, of roundings that the elements of a row have in common; part of `hard` and `noise`.
    pub row: f64,
    /// Those that the elements of a column have in common.
    pub column: f64,
}

impl Errors {
    /// The largest error.
    pub fn bound(self) -> f64 {
        self.bias + self.hard + LAMBDA * self.noise
    }

    /// Root of the sum of the squares of all roundings, each at its largest.
    pub fn deviation(self) -> f64 {
        (self.hard * self.hard + self.noise * self.noise).sqrt()
    }

    /// Those of a value times `factor`.
    pub(super) fn scaled(self, factor: f64) -> Self {
        let factor = factor.abs();
        Self {
            bias: self.bias * factor,
            hard: self.hard * factor,
            noise: self.noise * factor,
            row: self.row * factor,
            column: self.column * factor,
        }
    }

    /// Those of a sum: of errors that may have the same origin, so nothing averages out.
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            bias: self.bias + other.bias,
            hard: self.hard + other.hard,
            noise: self.noise + other.noise,
            row: self.row + other.row,
            column: self.column + other.column,
        }
    }

    /// With more in one direction.
    pub(super) fn biased(self, by: f64) -> Self {
        Self { bias: self.bias + by, ..self }
    }
}

/// A value and its errors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounded {
    value: f64,
    errors: Errors,
    /// None: a constant.
    rounding: Option<Rounding>,
}

impl Bounded {
    pub(super) fn input(value: f64, rounding: Rounding) -> Self {
        Self { value, errors: Errors::default(), rounding: Some(rounding) }
    }

    /// As it is; without errors where it is infinite or not a number, which a result has to be then too.
    pub(super) fn new(value: f64, errors: Errors, rounding: Option<Rounding>) -> Self {
        let errors = if value.is_finite() { errors } else { Errors::default() };
        Self { value, errors, rounding }
    }

    /// The result of an operation of f32, which rounds it.
    pub(super) fn rounded(value: f64, errors: Errors, rounding: Option<Rounding>) -> Self {
        let reach = value.abs() + errors.bound();
        let hard = errors.hard + if reach > 0.0 { UNIT * reach + TINY } else { 0.0 };
        Self::new(value, Errors { hard, ..errors }, rounding)
    }

    /// The errors.
    pub fn errors(&self) -> Errors {
        self.errors
    }

    /// A right result is no further from the value.
    pub fn bound(&self) -> f64 {
        self.errors.bound()
    }

    /// The same in a matrix that has been transposed: what a row shared a column shares.
    pub fn transposed(self) -> Self {
        let Errors { row, column, .. } = self.errors;
        Self { errors: Errors { row: column, column: row, ..self.errors }, ..self }
    }

    pub(super) fn rounding(&self) -> Option<Rounding> {
        self.rounding
    }

    fn is_zero(&self) -> bool {
        self.value == 0.0 && self.errors == Errors::default()
    }

    /// A constant of an implementation, which holds it in f32.
    fn constant(value: f64) -> Self {
        let held = f64::from(value as f32) == value;
        let hard = if held { 0.0 } else { Format::F32.half_gap(value) };
        Self::new(value, Errors { hard, ..Errors::default() }, None)
    }
}

impl Neg for Bounded {
    type Output = Self;

    fn neg(self) -> Self {
        Self { value: -self.value, ..self }
    }
}

impl Add for Bounded {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let rounding = self.rounding.or(other.rounding);
        // Adding nothing rounds nothing.
        if self.is_zero() {
            return Self { rounding, ..other };
        }
        if other.is_zero() {
            return Self { rounding, ..self };
        }
        Self::rounded(self.value + other.value, self.errors.plus(other.errors), rounding)
    }
}

impl Sub for Bounded {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self + -other
    }
}

impl Mul for Bounded {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        let rounding = self.rounding.or(other.rounding);
        let errors = product_errors(&self, &other);
        Self::rounded(self.value * other.value, errors, rounding)
    }
}

/// What a rounding to nearest is off. Of numbers of a few steps, far below the smallest normal one, many are
/// rounded alike, as all are that become 0.
fn rounding_errors(format: Format, reach: f64, half_gap: f64) -> Errors {
    match reach < 32.0 * format.half_gap(0.0) {
        true => Errors { bias: half_gap.min(reach), ..Errors::default() },
        false => Errors { hard: half_gap, ..Errors::default() },
    }
}

/// |b|·(errors of a) + |a|·(errors of b), and the product of both.
pub(super) fn product_errors(a: &Bounded, b: &Bounded) -> Errors {
    let both = a.errors.scaled(b.value).plus(b.errors.scaled(a.value));
    both.biased(a.bound() * b.bound())
}

impl Div for Bounded {
    type Output = Self;

    fn div(self, other: Self) -> Self {
        let rounding = self.rounding.or(other.rounding);
        let value = self.value / other.value;
        let errors = self.errors.plus(other.errors.scaled(value)).scaled(1.0 / other.value);
        // 1 / (1 − δ): what the divisor is off, relative to it.
        let second = functions::beyond(other.bound() / other.value.abs());
        Self::rounded(
            value,
            errors.scaled(second).biased(functions::DIVISION * UNIT * value.abs()),
            rounding,
        )
    }
}

macro_rules! with_constants {
    ($($operator:ident $name:ident),*) => {$(
        impl $operator<f64> for Bounded {
            type Output = Self;

            fn $name(self, constant: f64) -> Self {
                $operator::$name(self, Self::constant(constant))
            }
        }
    )*};
}

with_constants!(Add add, Sub sub, Mul mul, Div div);

impl Number for Bounded {
    fn exact(value: f64) -> Self {
        Self::new(value, Errors::default(), None)
    }

    #[inline]
    fn value(self) -> f64 {
        self.value
    }

    fn path(self) -> Path {
        self.rounding.map_or(Path::Fused, |rounding| rounding.path)
    }

    fn exp(self) -> Self {
        functions::exp(self)
    }

    fn ln(self) -> Self {
        functions::ln(self)
    }

    fn rsqrt(self) -> Self {
        functions::rsqrt(self)
    }

    fn sigmoid(self) -> Self {
        functions::sigmoid(self)
    }

    fn tanh(self) -> Self {
        functions::tanh(self)
    }

    fn known(self, value: f64, bound: f64) -> Self {
        let errors = Errors { bias: bound + TINY, ..Errors::default() };
        Self::new(value, errors, self.rounding)
    }

    fn may_be_zero(self) -> bool {
        self.value.abs() <= self.bound()
    }

    fn stored(self) -> Self {
        let Some(Rounding { format, .. }) = self.rounding else { return self };
        if format == Format::F32 || self.is_zero() || !self.value.is_finite() {
            return self;
        }
        let (size, bound) = (self.value.abs(), self.bound());
        if size - bound >= format.overflow() {
            let infinite = f64::INFINITY.copysign(self.value);
            return Self::new(infinite, Errors::default(), self.rounding);
        }
        if size + bound >= format.overflow() {
            // Perhaps infinite, perhaps not.
            return Self { errors: self.errors.biased(f64::INFINITY), ..self };
        }
        let errors =
            self.errors.plus(rounding_errors(format, size + bound, format.half_gap(size + bound)));
        Self { errors, ..self }
    }

    fn storing(self) -> Self {
        let Some(Rounding { format, .. }) = self.rounding else { return Self::exact(0.0) };
        let reach = self.value.abs() + self.bound();
        let errors = match format {
            Format::F32 => Errors::default(),
            _ if reach == 0.0 => Errors::default(),
            // The number may be stored without a factor that is not a power of two.
            _ => rounding_errors(format, reach, (format.unit() * reach).max(format.half_gap(0.0))),
        };
        Self::new(0.0, errors, self.rounding)
    }

    fn of_row(self) -> Self {
        let row = self.errors.row.max(self.errors.deviation());
        Self { errors: Errors { row, ..self.errors }, ..self }
    }

    fn of_column(self) -> Self {
        let column = self.errors.column.max(self.errors.deviation());
        Self { errors: Errors { column, ..self.errors }, ..self }
    }

    fn off_by(self, roundings: f64) -> Self {
        let errors = self.errors.biased(roundings * UNIT * self.value.abs());
        Self::new(self.value, errors, self.rounding)
    }

    fn beside_halves(self) -> Self {
        match self.rounding {
            Some(Rounding { format: Format::Bf16, path: Path::Fused, .. }) => {
                let off = TWO_BF16 * (self.value.abs() + self.bound());
                let hard = self.errors.hard + off;
                Self::new(self.value, Errors { hard, ..self.errors }, self.rounding)
            }
            _ => self,
        }
    }

    fn sum(terms: impl IntoIterator<Item = Self>) -> Self {
        sums::sum(terms)
    }

    fn dot(terms: impl IntoIterator<Item = (Self, Self)>) -> Self {
        sums::dot(terms)
    }

    fn through(inputs: &[Self], f: impl Fn(&[f64], Step<'_>) -> Vec<f64>) -> Vec<Self> {
        through::through(inputs, f)
    }

    fn product(a: &[Self], b: &[Self], sizes: [usize; 3], transposed: [bool; 2]) -> Vec<Self> {
        sums::product(a, b, sizes, transposed)
    }
}
