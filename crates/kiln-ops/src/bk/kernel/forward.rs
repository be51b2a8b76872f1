//! The diagonal.

use super::steps::{self, Complex, Moebius, Pair, Sites, from_left, from_right, inverse, times};
use super::{Inputs, Matrix, RECORD, SCALED, SITES};
use crate::bk::BkMode;
use crate::launch;
use crate::scan::{Around, AroundRequest, Sides, Span, around};
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// What [`bk`](fn@crate::bk::bk) computes from.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Forward<B: Backend> {
    /// The operator, for the audit.
    pub op: &'static str,
    /// `[B, N]`.
    pub a: FloatTensor<B>,
    /// `[B or 1, N − 1]`.
    pub b: FloatTensor<B>,
    /// `[B or 1, N − 1]`.
    pub c: FloatTensor<B>,
    /// `[B or 1, 2]`.
    pub z: FloatTensor<B>,
    /// Which resolvent.
    pub mode: BkMode,
    /// Largest |G|.
    pub max_abs: Option<f64>,
}

#[derive(CubeType, CubeLaunch)]
struct Buffers {
    matrix: Matrix,
    g: Box<[f32]>,
    /// Where the recurrences stand at each unit, if that is kept.
    records: Box<[f32]>,
    /// Units of a row.
    units: usize,
    cap: f32,
    #[cube(comptime)]
    keep: bool,
}

struct Diagonal;

#[cube]
impl Around for Diagonal {
    type Combine = Moebius;
    type Buffers = Buffers;
    type Held = Sites;
    const ITEMS: usize = SITES;

    fn load(buffers: &Self::Buffers, span: &Span) -> Self::Held {
        steps::sites(&buffers.matrix, span)
    }

    fn total(held: &mut Self::Held) -> Array<f32> {
        steps::product(&*held)
    }

    fn store(buffers: &mut Self::Buffers, span: &Span, held: &mut Self::Held, sides: &Sides) {
        let options = comptime!(buffers.matrix.options);
        let left = steps::pair(&sides.left);
        let right = steps::pair(&sides.right);
        let own = span.own && span.first < span.end;
        if comptime!(buffers.keep) && own {
            let at = (span.sequence * buffers.units + span.first / SITES) * RECORD;
            write_pair(&mut buffers.records, at, left);
            write_pair(&mut buffers.records, at + 4, right);
        }
        let rights = rights(&*held, right, comptime!(options.causal));
        let mut at = left;
        let mut results = Array::<f32>::new(comptime!(2 * SITES));
        #[unroll]
        for e in 0..SITES {
            let site = site(&*held, &rights, at, e, comptime!(options.ptx));
            let mut g = scaled_g(&site);
            if comptime!(options.capped) {
                let factor = cap_factor(g, buffers.cap, comptime!(options.ptx));
                g = steps::scaled(g, factor);
            }
            results[comptime!(2 * e)] = g.re;
            results[comptime!(2 * e + 1)] = g.im;
            at = site.next;
        }
        let place = 2 * (span.sequence * span.end + span.first);
        if own && span.first + SITES <= span.end {
            #[unroll]
            for k in 0..comptime!(2 * SITES) {
                buffers.g[place + k] = results[k];
            }
        } else if own {
            #[unroll]
            for k in 0..comptime!(2 * SITES) {
                if span.first + comptime!(k / 2) < span.end {
                    buffers.g[place + k] = results[k];
                }
            }
        }
    }
}

#[cube]
fn write_pair(to: &mut [f32], at: usize, pair: Pair) {
    to[at] = pair.x.re;
    to[at + 1] = pair.x.im;
    to[at + 2] = pair.y.re;
    to[at + 3] = pair.y.im;
}

/// min(1, cap / |g|).
#[cube]
pub(super) fn cap_factor(g: Complex, cap: f32, #[comptime] ptx: bool) -> f32 {
    // Scaled, because squares leave f32 first.
    let scale = steps::unit_of(steps::size(g));
    let scaled = steps::scaled(g, scale);
    let length = f32::sqrt(scaled.re * scaled.re + scaled.im * scaled.im);
    let limit = cap * scale;
    select(length > limit, limit * steps::over(length, ptx), 1.0f32)
}

/// The vectors from the right at each site: four f32 each.
#[cube]
pub(super) fn rights(sites: &Sites, right: Pair, #[comptime] causal: bool) -> Array<f32> {
    let mut rights = Array::<f32>::new(comptime!(4 * SITES));
    if comptime!(!causal) {
        let mut at = right;
        #[unroll]
        for k in 0..SITES {
            let e = comptime!(SITES - 1 - k);
            rights[comptime!(4 * e)] = at.x.re;
            rights[comptime!(4 * e + 1)] = at.x.im;
            rights[comptime!(4 * e + 2)] = at.y.re;
            rights[comptime!(4 * e + 3)] = at.y.im;
            let alpha = Complex { re: sites.alpha[e], im: sites.imaginary };
            at = from_right(at, alpha, sites.beta[e]);
        }
    } else {
        // Nothing stands behind.
        #[unroll]
        for e in 0..SITES {
            rights[comptime!(4 * e)] = 1.0f32;
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
    #[comptime] e: usize,
    #[comptime] ptx: bool,
) -> Site {
    let alpha = Complex { re: sites.alpha[e], im: sites.imaginary };
    let step = from_left(at, alpha, sites.beta[e]);
    let phi = Complex { re: rights[comptime!(4 * e)], im: rights[comptime!(4 * e + 1)] };
    let behind = Complex { re: rights[comptime!(4 * e + 2)], im: rights[comptime!(4 * e + 3)] };
    let determinant = steps::plus_times(times(phi, step.next.x), behind, step.next.y);
    let over = inverse(determinant, ptx);
    let g = times(phi, over);
    let h = steps::scaled(times(behind, over), -1.0f32);
    Site { x: at.x, next: step.next, scale: step.scale, g, h }
}

/// G.
#[cube]
pub(super) fn scaled_g(site: &Site) -> Complex {
    steps::scaled(times(site.x, site.g), min(site.scale, f32::new(SCALED)))
}

/// G, `[B, N, 2]`; and, if `keep`, where the recurrences stand at every [`SITES`]th site.
pub(crate) fn forward(of: Forward<CubeBackend>, keep: bool) -> (CubeTensor, Option<CubeTensor>) {
    let Forward { op, a, b, c, z, mode, max_abs } = of;
    let inputs = Inputs::new([a, b, c, z], mode, max_abs.is_some());
    let (rows, length) = (inputs.a.rows, inputs.a.width);
    let like = inputs.a.tensor.clone();
    let g = launch::output(&like, op, "g", Shape::new([rows, length, 2]), DType::F32);
    let units = length.div_ceil(SITES);
    let shape = Shape::new([rows, units, RECORD]);
    let records = keep.then(|| launch::output(&like, op, "records", shape, DType::F32));
    let request = AroundRequest { op, sequences: rows, length };
    // SAFETY: spans are within rows; a row has its elements, `units` records and 2·N results.
    unsafe {
        around::<Diagonal>(&like, inputs.address(&g), request, &|| {
            let records = match &records {
                Some(records) => records.clone(),
                None => launch::unused(&like, DType::F32),
            };
            BuffersLaunch::new(
                inputs.argument(),
                g.clone().into_buffer_arg(),
                records.into_buffer_arg(),
                units,
                max_abs.unwrap_or(0.0) as f32,
                keep,
            )
        });
    }
    (g, records)
}
