//! The recurrences of the gradients.
//!
//! With w the cotangent and the [minors](super::minors) θ and φ of a unit's sites, φ over the determinant,
//!
//! * from the left Y_j = w_j θ_j² + β_{j−1} Y_{j−1}: the sites before j, Σ_i≤j w_i G_ij G_ji = φ_j² Y_j,
//! * from the right Z_j = w_j φ_j² + β_j Z_{j+1}: those behind it, Σ_i≥j w_i G_ij G_ji = θ_j² Z_j.
//!
//! Between units, whose minors have factors of their own, Y is carried over |v|² and Z times |v|², v being the vector
//! from the left there. Where a number leaves f32 or, on CUDA, a site is nearly singular, the unit's sites are gone through
//! again, [carefully](super::careful).

use super::careful;
use super::complex::{Complex, complex_of, limited, over, plus, plus_times, scaled, set, times};
use super::minors::{Divided, divided, theta_behind, thetas};
use super::sites::Sites;
use super::steps::Recorded;
use super::vectors::Pair;
use super::{Options, SITES};
use crate::reduce::Combine;
use crate::scan::{Acts, Sides, Span};
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
    /// The vectors before the first site and behind the last.
    pub(super) left: Pair,
    pub(super) right: Pair,
    /// φ over the determinant.
    divided: Divided,
    /// w_j φ_j² of each site.
    z: Array<f32>,
    /// |v|² at the first site, and one over that behind the last.
    before: f32,
    after: f32,
    #[cube(comptime)]
    pub(super) options: Options,
}

/// With the cotangents of G behind its `cap`.
#[cube]
pub(super) fn held(
    sites: Sites,
    w: Array<f32>,
    left: Pair,
    right: Pair,
    cap: f32,
    #[comptime] options: Options,
) -> Held {
    let ptx = comptime!(options.ptx);
    let of = thetas(&sites, left);
    let divided = divided(&of, &sites, left, right, comptime!(options.causal), ptx);
    let after = over(squared(of.next), ptx);
    let mut held = Held {
        sites,
        w,
        left,
        right,
        divided,
        z: Array::<f32>::new(comptime!(2 * SITES)),
        before: squared(left),
        after,
        options,
    };
    if comptime!(options.capped) {
        careful::uncap(&mut held, cap);
    }
    held
}

#[cube]
pub(super) fn squared(of: Pair) -> f32 {
    of.x.re * of.x.re + of.x.im * of.x.im + of.y.re * of.y.re + of.y.im * of.y.im
}

/// What the recurrences make of a unit's sites.
#[cube]
pub(super) fn total(of: &Recorded, span: &Span, held: &mut Held) -> Array<f32> {
    let mut total = sums(held);
    let mut size = f32::new(0.0);
    #[unroll]
    for k in 0..5usize {
        size += f32::abs(total[k]);
    }
    // Infinities and NaN stay.
    held.divided.exact = held.divided.exact && size < f32::new(CARRIED);
    if !held.divided.exact {
        let careful = careful::sums(of, span, &*held).total;
        #[unroll]
        for k in 0..5usize {
            total[k] = careful[k];
        }
    }
    total
}

#[cube]
fn sums(held: &mut Held) -> Array<f32> {
    let of = thetas(&held.sites, held.left);
    let mut carried = Complex { re: 0.0f32, im: 0.0f32 };
    let mut product = 1.0f32;
    #[unroll]
    for e in 0..SITES {
        let theta = complex_of(&of.theta, e);
        let phi = complex_of(&held.divided.phi, e);
        let w = complex_of(&held.w, e);
        let y = plus_times(carried, w, times(theta, theta));
        carried = scaled(y, held.sites.beta[e]);
        product *= held.sites.beta[e];
        set(&mut held.z, e, times(times(w, phi), phi));
    }
    let mut z = Complex { re: 0.0f32, im: 0.0f32 };
    #[unroll]
    for k in 0..SITES {
        let e = comptime!(SITES - 1 - k);
        z = plus(complex_of(&held.z, e), scaled(z, held.sites.beta[e]));
    }
    let mut total = Array::<f32>::new(5usize);
    total[0] = product * held.before * held.after;
    total[1] = carried.re * held.after;
    total[2] = carried.im * held.after;
    total[3] = z.re * held.before;
    total[4] = z.im * held.before;
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
pub(super) fn found(of: &Recorded, span: &Span, held: &Held, sides: &Sides) -> Found {
    let mut found = gradients(held, sides);
    let mut size = f32::new(0.0);
    #[unroll]
    for k in 0..SITES {
        let of_s = f32::abs(found.s[comptime!(2 * k)]) + f32::abs(found.s[comptime!(2 * k + 1)]);
        size += of_s + f32::abs(found.q[k]);
    }
    let within = held.divided.exact && size < f32::new(CARRIED);
    if !within {
        let careful = careful::gradients(of, span, held, sides);
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
fn gradients(held: &Held, sides: &Sides) -> Found {
    let causal = comptime!(held.options.causal);
    // Z behind each site.
    let mut behind = Array::<f32>::new(comptime!(2 * SITES));
    let mut z = Complex { re: sides.right[0] * held.after, im: sides.right[1] * held.after };
    #[unroll]
    for k in 0..SITES {
        let e = comptime!(SITES - 1 - k);
        set(&mut behind, e, z);
        z = plus(complex_of(&held.z, e), scaled(z, held.sites.beta[e]));
    }
    let of = thetas(&held.sites, held.left);
    let mut carried = Complex { re: 0.0f32, im: 0.0f32 };
    if comptime!(!causal) {
        carried = Complex { re: sides.left[0] * held.before, im: sides.left[1] * held.before };
    }
    let mut of_s = Array::<f32>::new(comptime!(2 * SITES));
    let mut of_q = Array::<f32>::new(SITES);
    #[unroll]
    for e in 0..SITES {
        let theta = complex_of(&of.theta, e);
        let phi = complex_of(&held.divided.phi, e);
        let beta = held.sites.beta[e];
        let square = times(theta, theta);
        let z = complex_of(&behind, e);
        let mut y = times(complex_of(&held.w, e), square);
        if comptime!(!causal) {
            y = plus(y, carried);
            carried = scaled(y, beta);
        }
        let y_phi = times(y, phi);
        set(&mut of_s, e, plus_times(times(y_phi, phi), square, scaled(z, beta)));
        let mut q = times(times(theta, theta_behind(&of, e)), z).re;
        if comptime!(!causal) {
            q += times(y_phi, complex_of(&held.divided.behind, e)).re;
        }
        of_q[e] = q;
    }
    Found { s: of_s, q: of_q }
}
