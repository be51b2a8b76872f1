//! The recurrences of the gradients.
//!
//! With w the cotangent and v_j the vector from the left at site j, scaled,
//!
//! * from the left Y_j = w_j x_j² + γ_{j−1} Y_{j−1}, γ_j = β_j s_j²: the sites before j, Σ_i≤j w_i G_ij G_ji = g_j² Y_j,
//! * from the right Z_j = w_j g_j² + γ_j Z_{j+1}: those behind it, Σ_i≥j w_i G_ij G_ji = x_j² Z_j,
//!
//! in which s_j are powers of two and γ is real. Between units, whose vectors have scales of their own, Y is
//! carried over |v|² and Z times |v|². Sums are limited only where one of a unit left f32: its sites are gone through
//! again then.

use super::cap::uncapped;
use super::complex::{Complex, both_limited, complex_of, limited, over, plus, scaled, set, times};
use super::sites::Sites;
use super::vectors::{Pair, scaled_g, site};
use super::{LARGEST, Options, SITES, SMALLEST};
use crate::reduce::Combine;
use crate::scan::{Acts, Sides};
use cubecl::prelude::*;

/// Cotangents and sums beyond 2⁸⁰ are limited to it: times a G that nearly is none they are f32 still.
pub(super) const CARRIED: f32 = (1u128 << 80) as f32;

/// Affine maps Y → m·Y + y from the left and Z → m·Z + z from the right, with one real m.
pub(super) struct Affine;

#[cube]
impl Combine for Affine {
    const REGISTERS: usize = 5;
    const COMMUTATIVE: bool = false;

    fn identity() -> Array<f32> {
        let mut one = Array::<f32>::new(5usize);
        one[0] = 1.0f32;
        one
    }

    fn combine(earlier: &Array<f32>, later: &Array<f32>) -> Array<f32> {
        let mut both = Array::<f32>::new(5usize);
        both[0] = limited(earlier[0] * later[0], CARRIED);
        both[1] = limited(later[1] + later[0] * earlier[1], CARRIED);
        both[2] = limited(later[2] + later[0] * earlier[2], CARRIED);
        both[3] = limited(earlier[3] + earlier[0] * later[3], CARRIED);
        both[4] = limited(earlier[4] + earlier[0] * later[4], CARRIED);
        both
    }
}

#[cube]
impl Acts for Affine {
    const STATE: usize = 2;

    fn start() -> Array<f32> {
        Array::<f32>::new(2usize)
    }

    fn end() -> Array<f32> {
        Array::<f32>::new(2usize)
    }

    fn act(state: &Array<f32>, item: &Array<f32>, reverse: bool) -> Array<f32> {
        let mut next = Array::<f32>::new(2usize);
        #[unroll]
        for k in 0..2usize {
            let own = select(reverse, item[comptime!(3 + k)], item[comptime!(1 + k)]);
            next[k] = limited(own + item[0] * state[k], CARRIED);
        }
        next
    }
}

/// A unit's sites, its cotangents, and where the recurrences stand.
#[derive(CubeType)]
pub(super) struct Held {
    pub(super) sites: Sites,
    /// w, two f32 each; with a cap, that of the G before it.
    pub(super) w: Array<f32>,
    pub(super) left: Pair,
    pub(super) rights: Array<f32>,
    /// s_j² w_j g_j² of each site; then Z of the next site.
    pub(super) z: Array<f32>,
    /// γ.
    pub(super) gamma: Array<f32>,
    /// |v|² at the first site, and one over that behind the last.
    pub(super) before: f32,
    pub(super) after: f32,
    pub(super) cap: f32,
    #[cube(comptime)]
    pub(super) options: Options,
}

#[cube]
pub(super) fn squared(of: Pair) -> f32 {
    of.x.re * of.x.re + of.x.im * of.x.im + of.y.re * of.y.re + of.y.im * of.y.im
}

/// Within ±`limit`, if that is to be seen to.
#[cube]
fn kept(a: Complex, #[comptime] limit: f32, #[comptime] careful: bool) -> Complex {
    let mut kept = a;
    if comptime!(careful) {
        kept = both_limited(a, limit);
    }
    kept
}

#[cube]
fn kept_real(x: f32, #[comptime] limit: f32, #[comptime] careful: bool) -> f32 {
    let mut kept = x;
    if comptime!(careful) {
        kept = limited(x, limit);
    }
    kept
}

/// s²·a, for an s² that may leave f32.
#[cube]
fn twice(a: Complex, s: f32, #[comptime] careful: bool) -> Complex {
    kept(scaled(scaled(a, s), s), LARGEST, careful)
}

/// The cotangents of G before its cap.
#[cube]
fn uncap(held: &mut Held) {
    let options = comptime!(held.options);
    let mut at = held.left;
    #[unroll]
    for e in 0..SITES {
        let site = site(&held.sites, &held.rights, at, e, comptime!(options.ptx));
        let w = complex_of(&held.w, e);
        let w = uncapped(w, scaled_g(&site), held.cap, comptime!(options.ptx));
        set(&mut held.w, e, w);
        at = site.next;
    }
}

/// What the recurrences make of a unit's sites.
#[cube]
pub(super) fn total(held: &mut Held) -> Array<f32> {
    let options = comptime!(held.options);
    if comptime!(options.capped) {
        uncap(held);
    }
    let mut total = sums(held, false);
    let mut size = f32::new(0.0);
    #[unroll]
    for k in 0..5usize {
        size += f32::abs(total[k]);
    }
    // Infinities and NaN stay.
    let within = size < f32::new(CARRIED);
    if !within {
        let careful = sums(held, true);
        #[unroll]
        for k in 0..5usize {
            total[k] = careful[k];
        }
    }
    total
}

#[cube]
fn sums(held: &mut Held, #[comptime] careful: bool) -> Array<f32> {
    let options = comptime!(held.options);
    let mut at = held.left;
    let mut carried = Complex { re: 0.0f32, im: 0.0f32 };
    let mut product = 1.0f32;
    #[unroll]
    for e in 0..SITES {
        let site = site(&held.sites, &held.rights, at, e, comptime!(options.ptx));
        let w = complex_of(&held.w, e);
        let gamma = kept_real(held.sites.beta[e] * site.scale * site.scale, CARRIED, careful);
        let y = plus(of_left(w, site.x), carried);
        carried = scaled(kept(y, CARRIED, careful), gamma);
        product = kept_real(product * gamma, CARRIED, careful);
        let of_right = along(along(w, site.g, careful), site.g, careful);
        set(&mut held.z, e, twice(of_right, site.scale, careful));
        held.gamma[e] = gamma;
        at = site.next;
    }
    held.after = over(max(squared(at), f32::new(SMALLEST)), comptime!(options.ptx));
    let mut z = Complex { re: 0.0f32, im: 0.0f32 };
    #[unroll]
    for k in 0..SITES {
        let e = comptime!(SITES - 1 - k);
        let behind = scaled(z, held.gamma[e]);
        z = kept(plus(complex_of(&held.z, e), behind), CARRIED, careful);
    }
    let mut total = Array::<f32>::new(5usize);
    total[0] = kept_real(product * held.before * held.after, CARRIED, careful);
    total[1] = kept_real(carried.re * held.after, CARRIED, careful);
    total[2] = kept_real(carried.im * held.after, CARRIED, careful);
    total[3] = kept_real(z.re * held.before, CARRIED, careful);
    total[4] = kept_real(z.im * held.before, CARRIED, careful);
    total
}

/// S of each site, and Re Q of each coupling.
#[derive(CubeType)]
pub(super) struct Found {
    pub(super) s: Array<f32>,
    pub(super) q: Array<f32>,
}

/// S and Re Q of a unit's sites, within what stands around it.
#[cube]
pub(super) fn found(held: &Held, sides: &Sides) -> Found {
    let mut found = gradients(held, sides, false);
    let mut size = f32::new(0.0);
    #[unroll]
    for k in 0..SITES {
        let of_s = f32::abs(found.s[comptime!(2 * k)]) + f32::abs(found.s[comptime!(2 * k + 1)]);
        size += of_s + f32::abs(found.q[k]);
    }
    let within = size < f32::new(CARRIED);
    if !within {
        let careful = gradients(held, sides, true);
        #[unroll]
        for k in 0..SITES {
            found.s[comptime!(2 * k)] = careful.s[comptime!(2 * k)];
            found.s[comptime!(2 * k + 1)] = careful.s[comptime!(2 * k + 1)];
            found.q[k] = careful.q[k];
        }
    }
    found
}

#[cube]
fn gradients(held: &Held, sides: &Sides, #[comptime] careful: bool) -> Found {
    let options = comptime!(held.options);
    // Z behind each site.
    let mut behind = Array::<f32>::new(comptime!(2 * SITES));
    let mut z = Complex { re: sides.right[0] * held.after, im: sides.right[1] * held.after };
    #[unroll]
    for k in 0..SITES {
        let e = comptime!(SITES - 1 - k);
        set(&mut behind, e, z);
        let next = plus(complex_of(&held.z, e), scaled(z, held.gamma[e]));
        z = kept(next, CARRIED, careful);
    }
    let mut carried = Complex { re: sides.left[0] * held.before, im: sides.left[1] * held.before };
    let mut at = held.left;
    let mut of_s = Array::<f32>::new(comptime!(2 * SITES));
    let mut of_q = Array::<f32>::new(SITES);
    #[unroll]
    for e in 0..SITES {
        let site = site(&held.sites, &held.rights, at, e, comptime!(options.ptx));
        let mut y = of_left(complex_of(&held.w, e), site.x);
        if comptime!(!options.causal) {
            y = kept(plus(y, carried), CARRIED, careful);
            carried = scaled(y, held.gamma[e]);
        }
        let z = complex_of(&behind, e);
        let g_y = along(y, site.g, careful);
        let before_and_here = twice(along(g_y, site.g, careful), site.scale, careful);
        let reaching = kept(scaled(z, held.gamma[e]), CARRIED, careful);
        let of_behind = times(times(site.x, site.x), reaching);
        set(&mut of_s, e, kept(plus(before_and_here, of_behind), LARGEST, careful));
        let mut q = scaled(times(times(site.x, site.next.x), z), site.scale).re;
        if comptime!(!options.causal) {
            let of_before = twice(along(g_y, site.h, careful), site.scale, careful);
            q = kept_real(q, LARGEST, careful) + of_before.re;
        }
        of_q[e] = q;
        at = site.next;
    }
    Found { s: of_s, q: of_q }
}

/// w·x².
#[cube]
fn of_left(w: Complex, x: Complex) -> Complex {
    times(w, times(x, x))
}

/// a·g.
#[cube]
fn along(a: Complex, g: Complex, #[comptime] careful: bool) -> Complex {
    kept(times(a, g), CARRIED, careful)
}
