//! Numbers that are no average ones.

use crate::host::HostTensor;
use kiln_ops::oracle::Format;
use rand::{Rng, RngExt};
use serde::{Deserialize, Serialize};

/// What is far from 0 beside normal numbers, and not so far that sigmoids of it are no numbers of f32.
const FAR: f64 = 30.0;

/// What holds special numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holder {
    /// The input of this name.
    Input(&'static str),
    /// The cotangent of the output of this name.
    Cotangent(&'static str),
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Input(name) => write!(f, "`{name}`"),
            Self::Cotangent(name) => write!(f, "the cotangent of `{name}`"),
        }
    }
}

/// Why no case has some of these numbers in an input or a cotangent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// The language of the device does not define what becomes of them.
    Device,
    /// Nor does the operator, or they cannot be.
    Operator,
    /// The element type does not hold what is made of them.
    Type,
    /// Results are defined, but the oracle's bounds are of roundings that are not alike, and there they are.
    Bound,
    /// Other inputs, or cotangents, have them, in turns.
    OtherInputs,
    /// No case that is small has such an input.
    NoCase,
}

/// [`Why::Operator`], if that is so.
pub(crate) fn undefined(so: bool) -> Option<Why> {
    so.then_some(Why::Operator)
}

/// What an input or a cotangent of a case holds instead of, or among, normal numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// A few infinities of both signs.
    Infinities,
    /// A few NaN.
    NotNumbers,
    /// A third is −∞, as what is masked.
    Masked,
    /// A third is below the smallest normal number of the element type.
    Subnormals,
    /// A third is 0, or −0.
    Zeros,
    /// One of three numbers each, so that several elements are the largest.
    Ties,
    /// All far from 0, on one side.
    Offset,
    /// Each two neighbours are large, and their sum is not.
    Cancelling,
}

impl Special {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Infinities,
        Self::NotNumbers,
        Self::Masked,
        Self::Subnormals,
        Self::Zeros,
        Self::Ties,
        Self::Offset,
        Self::Cancelling,
    ];

    /// Whether they are all numbers.
    pub fn finite(self) -> bool {
        !matches!(self, Self::Infinities | Self::NotNumbers | Self::Masked)
    }

    /// Whether they are far from 0, beside normal numbers.
    pub fn far(self) -> bool {
        matches!(self, Self::Offset | Self::Cancelling)
    }

    /// As a failure names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Infinities => "infinities",
            Self::NotNumbers => "NaN",
            Self::Masked => "-inf",
            Self::Subnormals => "subnormals",
            Self::Zeros => "zeros",
            Self::Ties => "ties",
            Self::Offset => "offset",
            Self::Cancelling => "cancelling",
        }
    }

    /// Puts them in the place of normal numbers.
    pub fn put(self, tensor: &mut HostTensor, format: Format, rng: &mut impl Rng) {
        let n = tensor.values.len();
        let smallest = f64::from(format.least_exponent()).exp2();
        let few = n.div_ceil(100).clamp(2, 5);
        let mut at_few = |numbers: &[f64]| {
            for i in 0..few {
                tensor.values[rng.random_range(0..n)] = numbers[i % numbers.len()];
            }
        };
        match self {
            Self::Infinities if n > 0 => at_few(&[f64::INFINITY, f64::NEG_INFINITY]),
            Self::NotNumbers if n > 0 => at_few(&[f64::NAN]),
            _ => {}
        }
        for i in 0..n {
            // One number alone is one of them.
            let third = if n == 1 { 0 } else { rng.random_range(0..3usize) };
            let value = tensor.values[i];
            tensor.values[i] = match self {
                Self::Masked if third == 0 => f64::NEG_INFINITY,
                Self::Subnormals if third == 0 => value * smallest / 8.0,
                Self::Zeros if third == 0 => 0.0f64.copysign(value),
                Self::Ties => [-0.75, 0.5, 1.25][third],
                Self::Offset => value + FAR,
                Self::Cancelling if i % 2 == 0 => value * FAR,
                Self::Cancelling => value - tensor.values[i - 1],
                _ => value,
            };
        }
    }
}
