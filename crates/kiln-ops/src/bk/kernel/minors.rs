//! The minors of [`SITES`] sites without scaling in between: sums and products, and one division a site.
//!
//! θ_e is of what stands before site e, from the left, and φ_e of what stands behind it, from the right, each up to a
//! factor that all of them have. G_e = θ_e φ_e / D_e with D_e = φ_e θ_{e+1} − β_e φ_{e+1} θ_e. But for roundings D_e is
//! the same at every site. Roundings are larger where a part of the matrix is nearly singular, so each site has its own:
//! what is coupled to such a part but weakly does not see them. In a causal model nothing stands behind: all φ are 1,
//! and D_e is θ_{e+1}.

use super::complex::{self, Complex, complex_of, minus, scaled, set, size, times, times_less};
use super::sites::{Sites, alpha};
use super::vectors::Pair;
use super::{SITES, SMALLEST};
use cubecl::prelude::*;

/// Numbers of a matrix below which no scaling is tried, and the least size of a product or determinant that holds:
/// 8 steps make of 1 no more than 2⁹⁴, so one below 2⁻¹⁰², where f32 begins to lose digits, is followed by 7 that leave
/// it below this.
pub(super) const PLAIN: f32 = (1u64 << 11) as f32;
pub(super) const LEAST: f32 = 1.0 / (1u64 << 16) as f32;
/// The largest vectors and determinants, 2³⁰: what is divided by D twice and multiplied with a small cotangent is
/// within f32.
const MOST: f32 = (1u64 << 30) as f32;

/// What a determinant has of the products that it is a difference of, 2⁻⁶, where a site counts as nearly singular:
/// of what is no smaller few roundings are left in a gradient, 2·2⁶·2⁻²⁴ each.
const NEARLY: f32 = 1.0 / 64.0;

/// The minors from the left.
#[derive(CubeType)]
pub(super) struct Thetas {
    /// θ of each site.
    pub(super) theta: Array<f32>,
    /// The vector behind the last one.
    pub(super) next: Pair,
}

#[cube]
pub(super) fn thetas(sites: &Sites, left: Pair) -> Thetas {
    let mut theta = Array::<f32>::new(comptime!(2 * SITES));
    let mut at = left;
    #[unroll]
    for e in 0..SITES {
        set(&mut theta, e, at.x);
        let x = times_less(alpha(sites, e), at.x, at.y);
        at = Pair { x, y: scaled(at.x, sites.beta[e]) };
    }
    Thetas { theta, next: at }
}

/// θ behind site `e`.
#[cube]
pub(super) fn theta_behind(of: &Thetas, #[comptime] e: usize) -> Complex {
    let mut next = of.next.x;
    if comptime!(e + 1 < SITES) {
        next = complex_of(&of.theta, comptime!(e + 1));
    }
    next
}

/// φ of each site over its D.
#[derive(CubeType)]
pub(super) struct Divided {
    pub(super) phi: Array<f32>,
    /// φ behind each site over the same D.
    pub(super) behind: Array<f32>,
    /// No number left the range in which f32 has them; nor is one a difference of far larger ones, where there is f64
    /// to go through them again.
    pub(super) exact: bool,
}

/// The largest and the smallest sizes on the way, and the least by which a determinant exceeds [`NEARLY`] of its products.
#[derive(CubeType)]
struct Sizes {
    most: f32,
    least: f32,
    excess: f32,
}

#[cube]
impl Sizes {
    /// 1/D, of a difference of two numbers of the size of `product` where it is small.
    fn over(&mut self, determinant: Complex, product: f32, #[comptime] ptx: bool) -> Complex {
        let size = size(determinant);
        self.most = max(self.most, size);
        self.least = min(self.least, size);
        self.excess = min(self.excess, size - product * f32::new(NEARLY));
        let Complex { re, im } = determinant;
        let factor = complex::over(re * re + im * im, ptx);
        Complex { re: re * factor, im: -(im * factor) }
    }
}

#[cube]
pub(super) fn divided(
    thetas: &Thetas,
    sites: &Sites,
    left: Pair,
    right: Pair,
    #[comptime] causal: bool,
    #[comptime] ptx: bool,
) -> Divided {
    let mut phi = Array::<f32>::new(comptime!(2 * SITES));
    let mut of_behind = Array::<f32>::new(comptime!(2 * SITES));
    let end = max(size(thetas.next.x), size(thetas.next.y));
    let mut sizes = Sizes { most: end, least: f32::new(MOST), excess: f32::new(MOST) };
    // Of what D would be without cancellation.
    let mut products = f32::new(0.0);
    let mut here = right.x;
    let mut behind = scaled(right.y, -1.0f32);
    #[unroll]
    for k in 0..SITES {
        let e = comptime!(SITES - 1 - k);
        if comptime!(causal) {
            // θ_e+1 = α_e θ_e − β_e−1 θ_e−1.
            let mut product = size(left.y);
            if comptime!(e > 0) {
                let before = complex_of(&thetas.theta, comptime!(e - 1));
                product = size(before) * f32::abs(sites.beta[comptime!(e - 1)]);
            }
            set(&mut phi, e, sizes.over(theta_behind(thetas, e), product, ptx));
        } else {
            let beta = sites.beta[e];
            let product = times(here, theta_behind(thetas, e));
            let other = times(behind, complex_of(&thetas.theta, e));
            let of_product = size(product);
            products = max(products, of_product);
            let over = sizes.over(minus(product, scaled(other, beta)), of_product, ptx);
            set(&mut phi, e, times(here, over));
            set(&mut of_behind, e, times(behind, over));
            let next = times_less(alpha(sites, e), here, scaled(behind, beta));
            behind = here;
            here = next;
        }
    }
    if comptime!(causal) {
        products = sizes.most;
    } else {
        sizes.most = max(sizes.most, max(size(here), size(behind)));
    }
    let floor = max(f32::new(LEAST), products * f32::new(SMALLEST));
    let mut exact = sizes.least > floor && sizes.most < f32::new(MOST);
    exact = exact && sites.largest < f32::new(PLAIN);
    if comptime!(ptx) {
        // There is f64 for it.
        exact = exact && sizes.excess > f32::new(0.0);
    }
    Divided { phi, behind: of_behind, exact }
}
