//! The minors of [`SITES`] sites without scaling in between: sums and products, and one division for all of them.
//!
//! θ_e is of what stands before site e, from the left, and φ_e of what stands behind it, from the right, each up to a
//! factor that all of them have. G_e = θ_e φ_e / D with D = φ_e θ_{e+1} − β_e φ_{e+1} θ_e, which is the same at every
//! site. In a causal model nothing stands behind: all φ are 1, and D of site e is θ_{e+1}.

use super::complex::{self, Complex, complex_of, minus, scaled, set, size, times, times_less};
use super::sites::{Sites, alpha};
use super::vectors::Pair;
use super::{SITES, SMALLEST};
use cubecl::prelude::*;

/// Numbers of a matrix up to which no scaling is tried, and the least size of a product or determinant that holds:
/// 8 steps make of 1 no more than 2⁹⁴, so one below 2⁻¹⁰², where f32 begins to lose digits, is followed by 7 that leave
/// it below this.
pub(super) const PLAIN: f32 = (1u64 << 11) as f32;
pub(super) const LEAST: f32 = 1.0 / (1u64 << 16) as f32;
/// The largest vector behind the sites, 2⁶⁰: its square, and that of D, are within f32.
const MOST: f32 = (1u64 << 60) as f32;

/// The minors from the left.
#[derive(CubeType)]
pub(super) struct Thetas {
    /// θ of each site.
    pub(super) theta: Array<f32>,
    /// The vector behind the last one.
    pub(super) next: Pair,
}

#[cube]
pub(super) fn thetas(sites: &Sites, left: Pair, #[comptime] first: usize) -> Thetas {
    let mut theta = Array::<f32>::new(comptime!(2 * SITES));
    let mut at = left;
    #[unroll]
    for e in 0..SITES {
        let i = comptime!(first + e);
        set(&mut theta, e, at.x);
        let x = times_less(alpha(sites, i), at.x, at.y);
        at = Pair { x, y: scaled(at.x, sites.beta[i]) };
    }
    Thetas { theta, next: at }
}

/// The minors from the right.
#[derive(CubeType)]
pub(super) struct Phis {
    /// φ of each site, and of the one behind them.
    pub(super) phi: Array<f32>,
    /// The vector before the first one.
    pub(super) before: Pair,
}

#[cube]
pub(super) fn phis(sites: &Sites, right: Pair, #[comptime] first: usize) -> Phis {
    let mut phi = Array::<f32>::new(comptime!(2 * SITES + 2));
    let mut behind = scaled(right.y, -1.0f32);
    let mut here = right.x;
    set(&mut phi, SITES, behind);
    #[unroll]
    for k in 0..SITES {
        let e = comptime!(SITES - 1 - k);
        let i = comptime!(first + e);
        set(&mut phi, e, here);
        let next = times_less(alpha(sites, i), here, scaled(behind, sites.beta[i]));
        behind = here;
        here = next;
    }
    Phis { phi, before: Pair { x: here, y: scaled(behind, -1.0f32) } }
}

/// φ over D, of each site and of the one behind them.
#[derive(CubeType)]
pub(super) struct Divided {
    pub(super) phi: Array<f32>,
    /// No number left the range in which f32 has them, if the matrix has none above [`PLAIN`].
    pub(super) exact: bool,
}

/// Within what stands to the right.
#[cube]
pub(super) fn divided(
    phis: &Phis,
    thetas: &Thetas,
    sites: &Sites,
    #[comptime] first: usize,
    #[comptime] ptx: bool,
) -> Divided {
    // In the middle, as many roundings from the one end as from the other.
    let e = comptime!(SITES / 2 - 1);
    let product = times(complex_of(&phis.phi, e), complex_of(&thetas.theta, comptime!(e + 1)));
    let other = times(complex_of(&phis.phi, comptime!(e + 1)), complex_of(&thetas.theta, e));
    let determinant = minus(product, scaled(other, sites.beta[comptime!(first + e)]));
    let inverse = over(determinant, ptx);
    let mut phi = Array::<f32>::new(comptime!(2 * SITES + 2));
    #[unroll]
    for k in 0..comptime!(SITES + 1) {
        set(&mut phi, k, times(complex_of(&phis.phi, k), inverse));
    }
    let least = max(f32::new(LEAST), size(product) * f32::new(SMALLEST));
    let end = max(size(thetas.next.x), size(thetas.next.y));
    Divided { phi, exact: size(determinant) > least && end < f32::new(MOST) }
}

/// Nothing stands behind any site: all φ are 1, and D of a site is the next θ.
#[cube]
pub(super) fn divided_alone(thetas: &Thetas, #[comptime] ptx: bool) -> Divided {
    let mut phi = Array::<f32>::new(comptime!(2 * SITES + 2));
    let mut least = size(thetas.next.x);
    let mut most = max(least, size(thetas.next.y));
    set(&mut phi, SITES, Complex { re: 0.0f32, im: 0.0f32 });
    #[unroll]
    for e in 0..SITES {
        if comptime!(e + 1 < SITES) {
            let determinant = complex_of(&thetas.theta, comptime!(e + 1));
            least = min(least, size(determinant));
            most = max(most, size(determinant));
            set(&mut phi, e, over(determinant, ptx));
        } else {
            set(&mut phi, e, over(thetas.next.x, ptx));
        }
    }
    let floor = max(f32::new(LEAST), most * f32::new(SMALLEST));
    Divided { phi, exact: least > floor && most < f32::new(MOST) }
}

/// 1/a.
#[cube]
fn over(a: Complex, #[comptime] ptx: bool) -> Complex {
    let factor = complex::over(a.re * a.re + a.im * a.im, ptx);
    Complex { re: a.re * factor, im: -(a.im * factor) }
}
