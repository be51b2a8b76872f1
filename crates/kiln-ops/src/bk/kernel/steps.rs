//! A unit's sites one by one, for the [careful](super::careful) way.
//!
//! What is nearly singular makes roundings large: those of a unit's vectors, and those of the records that it starts
//! from. So both recurrences start one record further out, which they have mostly forgotten when they reach such a
//! site, and are in f64 on CUDA. It is rare, so it is in loops, on arrays in memory.

use super::complex::{Complex, complex_of, inverse, scaled, set, size, times, unit_of};
use super::sites::coupling;
use super::vectors::{Pair, Site, pair_of, read_pair};
use super::{LARGEST, Matrix, RECORD, SITES};
use crate::scan::Span;
use cubecl::prelude::*;

/// The matrix, and where the forward's recurrences stand at each [`SITES`]th site.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Recorded {
    pub(super) matrix: Matrix,
    pub(super) records: Box<[f32]>,
    /// How many there are of a row.
    pub(super) units: usize,
}

#[cube]
impl Recorded {
    /// The unit of a span, or the last of the row.
    fn unit(&self, span: &Span) -> usize {
        min(span.first, span.end - 1) / SITES
    }

    fn at(&self, span: &Span, unit: usize) -> usize {
        (span.sequence * self.units + unit) * RECORD
    }

    /// The vector before the first of a unit's sites.
    pub(super) fn left(&self, span: &Span) -> Pair {
        read_pair(&self.records, self.at(span, self.unit(span)))
    }

    /// The vector behind the last.
    pub(super) fn right(&self, span: &Span) -> Pair {
        read_pair(&self.records, self.at(span, self.unit(span)) + 4)
    }
}

/// Re α, Im α and β of site `i`, also past the end of the row.
#[cube]
fn site<P: Float>(matrix: &Matrix, span: &Span, i: usize) -> Array<P> {
    let z = span.sequence * matrix.z_stride;
    let a = matrix.a[span.sequence * matrix.a_stride + min(i, matrix.length - 1)];
    let b = coupling(&matrix.b, span.sequence * matrix.b_stride, i, matrix.length);
    let c = coupling(&matrix.c, span.sequence * matrix.c_stride, i, matrix.length);
    let re = P::cast_from(a) - P::cast_from(matrix.z[z]);
    let mut site = Array::<P>::new(3usize);
    site[0] = select(i < matrix.length, re, P::new(1.0));
    site[1] = -P::cast_from(matrix.z[z + 1]);
    site[2] = P::cast_from(b) * P::cast_from(c);
    let most = P::new(LARGEST);
    #[unroll]
    for k in 0..3usize {
        site[k] = select(site[k] > most, most, select(site[k] < -most, -most, site[k]));
    }
    site
}

/// x and y of a [`Pair`].
#[cube]
fn vector<P: Float>(of: Pair) -> Array<P> {
    let mut vector = Array::<P>::new(4usize);
    vector[0] = P::cast_from(of.x.re);
    vector[1] = P::cast_from(of.x.im);
    vector[2] = P::cast_from(of.y.re);
    vector[3] = P::cast_from(of.y.im);
    vector
}

#[cube]
fn rounded<P: Float>(re: P, im: P) -> Complex {
    Complex { re: f32::cast_from(re), im: f32::cast_from(im) }
}

/// Scales a vector by a power of two, which is returned.
#[cube]
fn normalise<P: Float>(vector: &mut Array<P>) -> f32 {
    let x = rounded::<P>(vector[0], vector[1]);
    let y = rounded::<P>(vector[2], vector[3]);
    let scale = unit_of(max(size(x), size(y)));
    #[unroll]
    for k in 0..4usize {
        vector[k] *= P::cast_from(scale);
    }
    scale
}

/// The vector behind a site.
#[cube]
fn from_left<P: Float>(at: &mut Array<P>, site: &Array<P>) -> f32 {
    let (re, im) = (at[0], at[1]);
    at[0] = site[0] * re - site[1] * im - at[2];
    at[1] = site[0] * im + site[1] * re - at[3];
    at[2] = site[2] * re;
    at[3] = site[2] * im;
    normalise::<P>(at)
}

/// The vector before a site.
#[cube]
fn from_right<P: Float>(at: &mut Array<P>, site: &Array<P>) {
    let (re, im) = (at[0], at[1]);
    at[0] = site[0] * re - site[1] * im + site[2] * at[2];
    at[1] = site[0] * im + site[1] * re + site[2] * at[3];
    at[2] = -re;
    at[3] = -im;
    normalise::<P>(at);
}

/// Complex numbers of a site: x, the vector behind it, g, h, and the scale of the step.
const STEP: usize = 6;

/// f32 of the sites of a unit, behind which the vector before them stands.
pub(super) const STEPS: usize = 2 * (STEP * SITES + 2);

/// The sites of a unit, as [`step`] and [`first`] read them.
#[cube]
pub(super) fn steps<P: Float>(of: &Recorded, span: &Span, steps: &mut Array<f32>) {
    let causal = comptime!(of.matrix.options.causal);
    let ptx = comptime!(of.matrix.options.ptx);
    let number = of.matrix.number;
    let unit = of.unit(span);
    // φ of each site, and of what stands behind it with a factor of −1.
    let mut rights = Array::<P>::new(comptime!(4 * SITES));
    if comptime!(causal) {
        // Nothing stands behind.
        for e in 0..number {
            rights[4 * e] = P::new(1.0);
            rights[4 * e + 1] = P::new(0.0);
            rights[4 * e + 2] = P::new(0.0);
            rights[4 * e + 3] = P::new(0.0);
        }
    } else {
        let outer = min(unit + 1, of.units - 1);
        let mut at = vector::<P>(read_pair(&of.records, of.at(span, outer) + 4));
        for k in 0..(outer - unit) * number {
            from_right::<P>(&mut at, &site::<P>(&of.matrix, span, (outer + 1) * SITES - 1 - k));
        }
        for k in 0..number {
            let e = number - 1 - k;
            #[unroll]
            for part in 0..4usize {
                rights[4 * e + part] = at[part];
            }
            from_right::<P>(&mut at, &site::<P>(&of.matrix, span, span.first + e));
        }
    }
    let outer = max(unit, 1usize) - 1;
    let mut at = vector::<P>(read_pair(&of.records, of.at(span, outer)));
    for k in 0..(unit - outer) * number {
        from_left::<P>(&mut at, &site::<P>(&of.matrix, span, outer * SITES + k));
    }
    set(steps, comptime!(STEP * SITES), rounded::<P>(at[0], at[1]));
    set(steps, comptime!(STEP * SITES + 1), rounded::<P>(at[2], at[3]));
    for e in 0..number {
        let x = rounded::<P>(at[0], at[1]);
        let scale = from_left::<P>(&mut at, &site::<P>(&of.matrix, span, span.first + e));
        let (phi_re, phi_im) = (rights[4 * e], rights[4 * e + 1]);
        let (behind_re, behind_im) = (rights[4 * e + 2], rights[4 * e + 3]);
        let over = inverse(
            rounded::<P>(
                phi_re * at[0] - phi_im * at[1] + (behind_re * at[2] - behind_im * at[3]),
                phi_re * at[1] + phi_im * at[0] + (behind_re * at[3] + behind_im * at[2]),
            ),
            ptx,
        );
        let phi = rounded::<P>(phi_re, phi_im);
        let behind = rounded::<P>(behind_re, behind_im);
        set(steps, STEP * e, x);
        set(steps, STEP * e + 1, rounded::<P>(at[0], at[1]));
        set(steps, STEP * e + 2, rounded::<P>(at[2], at[3]));
        set(steps, STEP * e + 3, times(phi, over));
        set(steps, STEP * e + 4, scaled(times(behind, over), -1.0f32));
        set(steps, STEP * e + 5, Complex { re: scale, im: 0.0f32 });
    }
}

/// The vector before the first site.
#[cube]
pub(super) fn first(steps: &Array<f32>) -> Pair {
    pair_of(steps, comptime!(STEP / 2 * SITES))
}

/// Site `e`.
#[cube]
pub(super) fn step(steps: &Array<f32>, e: usize) -> Site {
    Site {
        x: complex_of(steps, STEP * e),
        next: Pair { x: complex_of(steps, STEP * e + 1), y: complex_of(steps, STEP * e + 2) },
        scale: complex_of(steps, STEP * e + 5).re,
        g: complex_of(steps, STEP * e + 3),
        h: complex_of(steps, STEP * e + 4),
    }
}
