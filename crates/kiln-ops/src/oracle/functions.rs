//! Functions of bounded numbers, with the errors that devices make.
//!
//! Each is off by the most that any device may be, in units of f32 roundoff u = 2⁻²⁴; a unit in the last
//! place (ULP) is at most 2u of a number. Sources: the accuracy tables of the WebGPU Shading Language
//! (section 14.6.2.1), and of CUDA, which asks for less: `ex2.approx` and `rsqrt.approx` 2 ULP,
//! `rcp.approx` 1 (PTX ISA 9.7.3).

use super::bounded::{Bounded, Errors, UNIT};
use super::number::Number;

/// Division: 2.5 ULP.
pub(super) const DIVISION: f64 = 5.0;
/// 1/√x in one step 2 ULP; √x, as 1 / x^-½, 4.5, and its reciprocal 2.5.
const RSQRT: f64 = 14.0;

/// 1 / (1 − δ), by which an error grows that is taken along a slope that falls as 1/x; infinite where the
/// error reaches zero.
pub(super) fn beyond(relative: f64) -> f64 {
    if relative < 1.0 { 1.0 / (1.0 - relative) } else { f64::INFINITY }
}

/// (e^δ − 1) / δ, by which an error δ grows in an exponential.
fn growing(error: f64) -> f64 {
    if error > 0.0 { error.exp_m1() / error } else { 1.0 }
}

/// Units that e^x is off: 3 + 2·|x| ULP.
fn exp_units(x: f64) -> f64 {
    6.0 + 4.0 * x.abs()
}

/// What the logarithm y of x is off: 2⁻²¹ from ½ to 2, 3 ULP elsewhere.
fn ln_error(x: f64, y: f64) -> f64 {
    let near = if (0.49..2.01).contains(&x) { 8.0 } else { 0.0 };
    UNIT * (6.0 * y.abs()).max(near)
}

/// `value` = f(x), where |f′| ≤ `slope` as far as x may be off, and the device's f is `own` off.
fn applied(x: Bounded, value: f64, slope: f64, own: f64) -> Bounded {
    // An exact x has no error for an infinite slope to grow.
    let errors = if x.bound() > 0.0 { x.errors().scaled(slope) } else { Errors::default() };
    Bounded::rounded(value, errors.biased(own), x.rounding())
}

/// e^x.
pub(super) fn exp(x: Bounded) -> Bounded {
    let value = x.value().exp();
    if value == 0.0 {
        return Bounded::new(0.0, Errors::default(), x.rounding());
    }
    applied(x, value, value * growing(x.bound()), exp_units(x.value()) * UNIT * value)
}

/// ln x.
pub(super) fn ln(x: Bounded) -> Bounded {
    let (at, value) = (x.value(), x.value().ln());
    applied(x, value, beyond(x.bound() / at) / at, ln_error(at, value))
}

/// x^-½.
pub(super) fn rsqrt(x: Bounded) -> Bounded {
    let at = x.value();
    let value = 1.0 / at.sqrt();
    let slope = 0.5 * value / at * beyond(x.bound() / at).powf(1.5);
    applied(x, value, slope, RSQRT * UNIT * value)
}

/// 1 / (1 + e^-x), computed like this or, as Burn has it, as e^(−ln(1 + e^-x)).
pub(super) fn sigmoid(x: Bounded) -> Bounded {
    let at = x.value();
    let value = 1.0 / (1.0 + (-at).exp());
    // The same without cancellation.
    let other = 1.0 / (1.0 + at.exp());
    let log = -value.ln();
    let sum = other * exp_units(at) + 2.0;
    let logarithm = ln_error(1.0 + (-at).exp(), log) / UNIT + log;
    let own = (sum + logarithm + exp_units(log)) * UNIT * value;
    let slope = value * other * growing(x.bound());
    applied(x, value, slope, if own.is_finite() { own } else { 0.0 })
}

/// tanh x, computed from e^(2x) or from e^x and e^-x: off by what these are, and by a division and two sums,
/// relative to 1.
pub(super) fn tanh(x: Bounded) -> Bounded {
    let at = x.value();
    let value = at.tanh();
    let slope = 1.0 - value * value;
    let own = (0.5 * slope * exp_units(2.0 * at) + 2.0 * DIVISION + 4.0) * UNIT;
    // sech² grows by at most e^(2δ).
    let growing = growing(2.0 * x.bound());
    applied(x, value, slope * growing, if own.is_finite() { own } else { 0.0 })
}
