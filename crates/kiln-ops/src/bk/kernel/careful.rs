//! The [recurrences](super::recurrences) of units whose numbers leave f32 or, on CUDA, that have nearly singular sites, and
//! of those with a limit on |G| its gradient.
//!
//! The vectors of both recurrences are scaled at every site, by powers of two s_j. With v_j the vector from the left and x_j
//! its first part
//!
//! * from the left Y_j = w_j x_j² + γ_{j−1} Y_{j−1}, γ_j = β_j s_j²: Σ_i≤j w_i G_ij G_ji = s_j² g_j² Y_j,
//! * from the right Z_j = s_j² w_j g_j² + γ_j Z_{j+1}: Σ_i≥j w_i G_ij G_ji = x_j² Z_j,
//!
//! and all sums are limited. All that is rare, so it is in loops, on copies in memory.

use super::cap::uncapped;
use super::complex::{Complex, both_limited, complex_of, limited, over, plus, scaled, set, times};
use super::recurrences::{CARRIED, Found, Held, squared};
use super::sites::{copy, in_memory};
use super::steps::{Recorded, STEPS, first, step, steps};
use super::vectors::{rights, scaled_g, site};
use super::{LARGEST, SITES, SMALLEST};
use crate::scan::{Sides, Span};
use cubecl::prelude::*;

/// s²·a, for an s² that may leave f32.
#[cube]
fn twice(a: Complex, s: f32) -> Complex {
    both_limited(scaled(scaled(a, s), s), LARGEST)
}

/// a·g.
#[cube]
fn along(a: Complex, g: Complex) -> Complex {
    both_limited(times(a, g), CARRIED)
}

/// The cotangents of G before its cap.
#[cube]
pub(super) fn uncap(held: &mut Held, cap: f32) {
    let options = comptime!(held.options);
    let sites = in_memory(&held.sites);
    let rights = rights(&sites, held.right, comptime!(options.causal));
    let mut w = copy(&held.w, comptime!(2 * SITES));
    let mut at = held.left;
    for e in 0..sites.number {
        let site = site(&sites, &rights, at, e, comptime!(options.ptx));
        let before = uncapped(complex_of(&w, e), scaled_g(&site), cap, comptime!(options.ptx));
        set(&mut w, e, before);
        at = site.next;
    }
    held.w = w;
}

/// What the recurrences make of a unit's sites.
#[derive(CubeType)]
pub(super) struct Sums {
    pub(super) total: Array<f32>,
    w: Array<f32>,
    steps: Array<f32>,
    /// s_j² w_j g_j², and γ.
    z: Array<f32>,
    gamma: Array<f32>,
    /// |v|² before the first site, and one over that behind the last.
    before: f32,
    after: f32,
}

#[cube]
pub(super) fn sums(of: &Recorded, span: &Span, held: &Held) -> Sums {
    let options = comptime!(held.options);
    let number = held.sites.number;
    let beta = copy(&held.sites.beta, SITES);
    let w = copy(&held.w, comptime!(2 * SITES));
    let mut steps = Array::<f32>::new(STEPS);
    if comptime!(options.ptx) {
        self::steps::<f64>(of, span, &mut steps);
    } else {
        self::steps::<f32>(of, span, &mut steps);
    }
    let mut of_z = Array::<f32>::new(comptime!(2 * SITES));
    let mut of_gamma = Array::<f32>::new(SITES);
    let mut carried = Complex { re: 0.0f32, im: 0.0f32 };
    let mut product = 1.0f32;
    for e in 0..number {
        let site = step(&steps, e);
        let w = complex_of(&w, e);
        let gamma = limited(beta[e] * site.scale * site.scale, CARRIED);
        let y = plus(times(w, times(site.x, site.x)), carried);
        carried = scaled(both_limited(y, CARRIED), gamma);
        product = limited(product * gamma, CARRIED);
        set(&mut of_z, e, twice(along(along(w, site.g), site.g), site.scale));
        of_gamma[e] = gamma;
    }
    let before = squared(first(&steps));
    let end = squared(step(&steps, number - 1).next);
    let after = over(max(end, f32::new(SMALLEST)), comptime!(options.ptx));
    let mut z = Complex { re: 0.0f32, im: 0.0f32 };
    for k in 0..number {
        let e = number - 1 - k;
        z = both_limited(plus(complex_of(&of_z, e), scaled(z, of_gamma[e])), CARRIED);
    }
    let mut total = Array::<f32>::new(5usize);
    total[0] = limited(product * before * after, CARRIED);
    total[1] = limited(carried.re * after, CARRIED);
    total[2] = limited(carried.im * after, CARRIED);
    total[3] = limited(z.re * before, CARRIED);
    total[4] = limited(z.im * before, CARRIED);
    Sums { total, w, steps, z: of_z, gamma: of_gamma, before, after }
}

/// S and Re Q of a unit's sites, within what stands around it.
#[cube]
pub(super) fn gradients(of: &Recorded, span: &Span, held: &Held, sides: &Sides) -> Found {
    let causal = comptime!(held.options.causal);
    let number = held.sites.number;
    let of = sums(of, span, held);
    // Z behind each site.
    let mut behind = Array::<f32>::new(comptime!(2 * SITES));
    let mut z = Complex { re: sides.right[0] * of.after, im: sides.right[1] * of.after };
    for k in 0..number {
        let e = number - 1 - k;
        set(&mut behind, e, z);
        z = both_limited(plus(complex_of(&of.z, e), scaled(z, of.gamma[e])), CARRIED);
    }
    let mut carried = Complex { re: sides.left[0] * of.before, im: sides.left[1] * of.before };
    let mut of_s = Array::<f32>::new(comptime!(2 * SITES));
    let mut of_q = Array::<f32>::new(SITES);
    for e in 0..number {
        let site = step(&of.steps, e);
        let mut y = times(complex_of(&of.w, e), times(site.x, site.x));
        if comptime!(!causal) {
            y = both_limited(plus(y, carried), CARRIED);
            carried = scaled(y, of.gamma[e]);
        }
        let z = complex_of(&behind, e);
        let g_y = along(y, site.g);
        let before_and_here = twice(along(g_y, site.g), site.scale);
        let reaching = both_limited(scaled(z, of.gamma[e]), CARRIED);
        let of_behind = times(times(site.x, site.x), reaching);
        set(&mut of_s, e, both_limited(plus(before_and_here, of_behind), LARGEST));
        let mut q = scaled(times(times(site.x, site.next.x), z), site.scale).re;
        if comptime!(!causal) {
            q = limited(q, LARGEST) + twice(along(g_y, site.h), site.scale).re;
        }
        of_q[e] = q;
    }
    Found { s: of_s, q: of_q }
}
