//! The two recurrences: the vectors of minors from the left and from the right, each up to a factor.

use super::SCALED;
use super::complex::{
    Complex, complex_of, inverse, plus_times, scaled, set, size, times, times_less, unit_of,
};
use super::sites::{Sites, alpha};
use cubecl::prelude::*;

/// A vector of one of the recurrences, up to a factor.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Pair {
    pub(super) x: Complex,
    pub(super) y: Complex,
}

/// The next vector, and the power of two that it was scaled by.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Step {
    pub(super) next: Pair,
    pub(super) scale: f32,
}

#[cube]
pub(super) fn normalised(of: Pair) -> Step {
    let scale = unit_of(max(size(of.x), size(of.y)));
    Step { next: Pair { x: scaled(of.x, scale), y: scaled(of.y, scale) }, scale }
}

/// (αx − y, βx).
#[cube]
pub(super) fn from_left(at: Pair, alpha: Complex, beta: f32) -> Step {
    let x = times_less(alpha, at.x, at.y);
    normalised(Pair { x, y: scaled(at.x, beta) })
}

/// (αx + βy, −x).
#[cube]
pub(super) fn from_right(at: Pair, alpha: Complex, beta: f32) -> Pair {
    let x = plus_times(scaled(at.y, beta), alpha, at.x);
    normalised(Pair { x, y: scaled(at.x, -1.0f32) }).next
}

/// Vector `e` of an array that holds four f32 for each.
#[cube]
pub(super) fn pair_of(values: &Array<f32>, e: usize) -> Pair {
    Pair { x: complex_of(values, 2 * e), y: complex_of(values, 2 * e + 1) }
}

#[cube]
pub(super) fn read_pair(from: &[f32], at: usize) -> Pair {
    Pair {
        x: Complex { re: from[at], im: from[at + 1] },
        y: Complex { re: from[at + 2], im: from[at + 3] },
    }
}

#[cube]
pub(super) fn write_pair(to: &mut [f32], at: usize, pair: Pair) {
    to[at] = pair.x.re;
    to[at + 1] = pair.x.im;
    to[at + 2] = pair.y.re;
    to[at + 3] = pair.y.im;
}

/// The vectors from the right at each of the sites, which are [`in_memory`](super::sites::in_memory): four f32 each.
#[cube]
pub(super) fn rights(sites: &Sites, right: Pair, #[comptime] causal: bool) -> Array<f32> {
    let count = comptime!(sites.count);
    let mut rights = Array::<f32>::new(comptime!(4 * count));
    if comptime!(!causal) {
        let mut at = right;
        for k in 0..sites.number {
            let e = sites.number - 1 - k;
            set(&mut rights, 2 * e, at.x);
            set(&mut rights, 2 * e + 1, at.y);
            at = from_right(at, alpha(sites, e), sites.beta[e]);
        }
    } else {
        // Nothing stands behind.
        for e in 0..sites.number {
            rights[4 * e] = 1.0f32;
        }
    }
    rights
}

/// A site between its neighbours. With s the scale of the step, G = s·x·g.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Site {
    /// θ, of what stands before.
    pub(super) x: Complex,
    /// The next vector.
    pub(super) next: Pair,
    pub(super) scale: f32,
    /// φ over the scaled determinant.
    pub(super) g: Complex,
    /// The same of φ behind the next site.
    pub(super) h: Complex,
}

#[cube]
pub(super) fn site(
    sites: &Sites,
    rights: &Array<f32>,
    at: Pair,
    e: usize,
    #[comptime] ptx: bool,
) -> Site {
    let step = from_left(at, alpha(sites, e), sites.beta[e]);
    let Pair { x: phi, y: behind } = pair_of(rights, e);
    let determinant = plus_times(times(phi, step.next.x), behind, step.next.y);
    let over = inverse(determinant, ptx);
    let g = times(phi, over);
    let h = scaled(times(behind, over), -1.0f32);
    Site { x: at.x, next: step.next, scale: step.scale, g, h }
}

/// G.
#[cube]
pub(super) fn scaled_g(site: &Site) -> Complex {
    scaled(times(site.x, site.g), min(site.scale, f32::new(SCALED)))
}
