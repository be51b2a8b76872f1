//! The limit on |G|.

use super::complex::{Complex, over, scaled, size, unit_of};
use cubecl::prelude::*;

/// min(1, cap / |g|).
#[cube]
pub(super) fn cap_factor(g: Complex, cap: f32, #[comptime] ptx: bool) -> f32 {
    // Scaled, because squares leave f32 first.
    let scale = unit_of(size(g));
    let scaled = scaled(g, scale);
    let length = f32::sqrt(scaled.re * scaled.re + scaled.im * scaled.im);
    let limit = cap * scale;
    select(length > limit, limit * over(length, ptx), 1.0f32)
}

/// The cotangent of G before its cap: (m/|G|)·(w − Re(w·G)·conj(G)/|G|²).
#[cube]
pub(super) fn uncapped(w: Complex, g: Complex, cap: f32, #[comptime] ptx: bool) -> Complex {
    let factor = cap_factor(g, cap, ptx);
    let unit = unit_of(size(g));
    let direction = scaled(g, unit);
    let square = direction.re * direction.re + direction.im * direction.im;
    let along = (w.re * direction.re - w.im * direction.im) * over(square, ptx);
    let re = (w.re - along * direction.re) * factor;
    let im = (w.im + along * direction.im) * factor;
    let capped = factor < 1.0f32;
    Complex { re: select(capped, re, w.re), im: select(capped, im, w.im) }
}
