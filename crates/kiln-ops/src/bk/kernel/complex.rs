//! Complex numbers.

use super::SMALLEST;
use crate::exponential::reciprocal;
use cubecl::prelude::*;

/// A complex number.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Complex {
    pub(super) re: f32,
    pub(super) im: f32,
}

#[cube]
pub(super) fn times(a: Complex, b: Complex) -> Complex {
    Complex { re: a.re * b.re - a.im * b.im, im: a.re * b.im + a.im * b.re }
}

/// sum + a·b, as fused multiply-adds.
#[cube]
pub(super) fn plus_times(sum: Complex, a: Complex, b: Complex) -> Complex {
    let re = sum.re + a.re * b.re;
    let im = sum.im + a.re * b.im;
    Complex { re: re - a.im * b.im, im: im + a.im * b.re }
}

/// a·b − less.
#[cube]
pub(super) fn times_less(a: Complex, b: Complex, less: Complex) -> Complex {
    let re = a.re * b.re - less.re;
    let im = a.re * b.im - less.im;
    Complex { re: re - a.im * b.im, im: im + a.im * b.re }
}

#[cube]
pub(super) fn plus(a: Complex, b: Complex) -> Complex {
    Complex { re: a.re + b.re, im: a.im + b.im }
}

#[cube]
pub(super) fn minus(a: Complex, b: Complex) -> Complex {
    Complex { re: a.re - b.re, im: a.im - b.im }
}

#[cube]
pub(super) fn scaled(a: Complex, by: f32) -> Complex {
    Complex { re: a.re * by, im: a.im * by }
}

#[cube]
pub(super) fn chosen(condition: bool, then: Complex, or_else: Complex) -> Complex {
    Complex {
        re: select(condition, then.re, or_else.re),
        im: select(condition, then.im, or_else.im),
    }
}

/// The larger of |re| and |im|.
#[cube]
pub(super) fn size(a: Complex) -> f32 {
    max(f32::abs(a.re), f32::abs(a.im))
}

/// Within ±`limit`; NaN stays.
#[cube]
pub(super) fn limited(x: f32, #[comptime] limit: f32) -> f32 {
    let most = f32::new(limit);
    let low = select(x < -most, -most, x);
    select(x > most, most, low)
}

#[cube]
pub(super) fn both_limited(a: Complex, #[comptime] limit: f32) -> Complex {
    Complex { re: limited(a.re, limit), im: limited(a.im, limit) }
}

/// The power of two that brings a number of this size into [½, 1), as far as f32 has one.
#[cube]
pub(super) fn unit_of(size: f32) -> f32 {
    let exponent = min(u32::reinterpret(size) & 0x7F80_0000u32, 0x7E00_0000u32);
    f32::reinterpret(0x7E80_0000u32 - exponent)
}

/// 1/x.
#[cube]
pub(super) fn over(x: f32, #[comptime] ptx: bool) -> f32 {
    if comptime!(ptx) { reciprocal(x) } else { 1.0f32 / x }
}

/// 1/a, for an a of at most about 1 that is taken for no smaller than [`SMALLEST`].
#[cube]
pub(super) fn inverse(a: Complex, #[comptime] ptx: bool) -> Complex {
    let least = f32::new(SMALLEST);
    let small = size(a) < least;
    // Its direction is noise.
    let re = select(small, least, a.re);
    let im = select(small, 0.0f32, a.im);
    let factor = over(re * re + im * im, ptx);
    Complex { re: re * factor, im: -im * factor }
}

/// Number `e` of an array that holds two f32 for each.
#[cube]
pub(super) fn complex_of(values: &Array<f32>, e: usize) -> Complex {
    Complex { re: values[2 * e], im: values[2 * e + 1] }
}

#[cube]
pub(super) fn set(values: &mut Array<f32>, e: usize, value: Complex) {
    values[2 * e] = value.re;
    values[2 * e + 1] = value.im;
}
