//! The diagonal.

use super::cap::cap_factor;
use super::complex::{Complex, complex_of, minus, over, scaled, set, times};
use super::minors::PLAIN;
use super::moebius::{Moebius, product};
use super::sites::{Sites, alpha, in_memory, reread, sites};
use super::vectors::{Pair, from_left, normalised, pair_of, rights, scaled_g, site, write_pair};
use super::{FORWARD, Inputs, LARGEST, Matrix, Options, RECORD, SITES};
use crate::bk::BkMode;
use crate::launch;
use crate::scan::runs::{self, Across, of_plane, to_across, together, write_across};
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
    /// G is written in vectors of four.
    #[cube(comptime)]
    fours: bool,
}

struct Diagonal;

#[cube]
impl Around for Diagonal {
    type Combine = Moebius;
    type Buffers = Buffers;
    type Held = Sites;
    const ITEMS: usize = FORWARD;
    const SHARED: usize = 2 * runs::shared(FORWARD);

    fn load(buffers: &Self::Buffers, span: &Span, memory: &mut [f32]) -> Self::Held {
        sites(&buffers.matrix, span, memory, FORWARD)
    }

    fn total(_buffers: &Self::Buffers, _span: &Span, held: &mut Self::Held) -> Array<f32> {
        product(&*held)
    }

    fn store(
        buffers: &mut Self::Buffers,
        span: &Span,
        held: &mut Self::Held,
        sides: &Sides,
        memory: &mut [f32],
    ) {
        reread(held, span, &*memory);
        let options = comptime!(buffers.matrix.options);
        let left = pair_of(&sides.left, 0usize);
        let right = pair_of(&sides.right, 0usize);
        let mut found = by_pivots(&*held, left, right, options);
        if comptime!(span.lanes > 0) {
            // For the compiler: see `reread`.
            sync_plane();
        }
        if !found.exact {
            reread(held, span, &*memory);
            by_minors(&mut found, &*held, left, right, options);
        }
        if comptime!(options.capped) {
            #[unroll]
            for e in 0..FORWARD {
                let g = complex_of(&found.g, e);
                let factor = cap_factor(g, buffers.cap, comptime!(options.ptx));
                set(&mut found.g, e, scaled(g, factor));
            }
        }
        if comptime!(buffers.keep) {
            reread(held, span, &*memory);
            write_records(buffers, span, &*held, &found, left, right);
        }
        write_g(buffers, span, &found.g, memory);
    }
}

/// Where the recurrences stand at both halves of a unit, for the backward.
#[cube]
fn write_records(
    buffers: &mut Buffers,
    span: &Span,
    sites: &Sites,
    found: &Found,
    left: Pair,
    right: Pair,
) {
    if span.own && span.first < span.end {
        let at = (span.sequence * buffers.units + span.first / SITES) * RECORD;
        write_pair(&mut buffers.records, at, left);
        write_pair(&mut buffers.records, at + 4, found.right);
        let mut middle = left;
        #[unroll]
        for e in 0..SITES {
            middle = from_left(middle, alpha(sites, e), sites.beta[e]).next;
        }
        if span.first + SITES < span.end {
            write_pair(&mut buffers.records, at + RECORD, middle);
            write_pair(&mut buffers.records, at + (RECORD + 4), right);
        }
    }
}

#[cube]
fn write_g(buffers: &mut Buffers, span: &Span, g: &Array<f32>, memory: &mut [f32]) {
    let place = 2 * (span.sequence * span.end + span.first);
    let mut written = false;
    if comptime!(span.lanes > 0) {
        written = together(span, FORWARD);
        if written {
            // All have read their sites.
            sync_plane();
            // Two numbers a site: as many as there is memory for, but in runs of their own length.
            let narrow = comptime!(buffers.matrix.options.narrow);
            let across = comptime!(Across::new(2 * FORWARD, span.lanes, buffers.fours, narrow));
            let at = of_plane(span, comptime!(2 * runs::shared(FORWARD)));
            let size = comptime!(span.lanes as usize * runs::shared(2 * FORWARD));
            let numbers = to_across(&mut memory[at..at + size], g, across);
            if span.own {
                write_across(&mut buffers.g, place, &numbers, across);
            }
        }
    }
    if span.own && span.first < span.end && !written {
        #[unroll]
        for k in 0..comptime!(2 * FORWARD) {
            if span.first + comptime!(k / 2) < span.end {
                buffers.g[place + k] = g[k];
            }
        }
    }
}

/// The diagonal at the sites of a unit.
#[derive(CubeType)]
struct Found {
    g: Array<f32>,
    /// The vector from the right at the end of the first half, up to a complex factor.
    right: Pair,
    /// Nothing left the range in which it is exact.
    exact: bool,
}

/// The largest square of a pivot: its reciprocal is within f32.
const SQUARE: f32 = (1u128 << 100) as f32;

/// A reciprocal in parts: 1/a = conj(a)·over, and |a|².
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Reciprocal {
    over: f32,
    square: f32,
}

#[cube]
fn reciprocal(a: Complex, #[comptime] ptx: bool) -> Reciprocal {
    let square = a.re * a.re + a.im * a.im;
    Reciprocal { over: over(square, ptx), square }
}

/// factor/a.
#[cube]
fn divided(factor: f32, a: Complex, by: Reciprocal) -> Complex {
    let factor = factor * by.over;
    Complex { re: a.re * factor, im: -(a.im * factor) }
}

/// The continued fractions, as far as they have been followed.
#[derive(CubeType)]
struct Fractions {
    /// β_{j−1}/δ_{j−1} of the next site from the left, β_j/ε_{j+1} of the next one from the right.
    before: Complex,
    behind: Complex,
    /// The largest square of a pivot.
    largest: f32,
    /// Of numbers that are infinite or NaN where something left f32, and stay so.
    sum: f32,
    #[cube(comptime)]
    ptx: bool,
}

#[cube]
impl Fractions {
    fn reciprocal(&mut self, pivot: Complex) -> Reciprocal {
        let by = reciprocal(pivot, comptime!(self.ptx));
        self.largest = max(self.largest, by.square);
        by
    }

    /// G of a pivot from the left and what stands behind it.
    fn g(&mut self, pivot: Complex, behind: Complex) -> Complex {
        let both = minus(pivot, behind);
        let by = self.reciprocal(both);
        self.sum += by.over;
        divided(1.0f32, both, by)
    }
}

/// By the continued fractions δ_j = α_j − β_{j−1}/δ_{j−1} and ε_j = α_j − β_j/ε_{j+1}, which is quick. A pivot so small
/// that its square leaves f32 shows in the end: infinities and NaN stay.
#[cube]
fn by_pivots(sites: &Sites, left: Pair, right: Pair, #[comptime] options: Options) -> Found {
    let ptx = comptime!(options.ptx);
    let mut g = Array::<f32>::new(comptime!(2 * FORWARD));
    let mut half = Complex { re: 0.0f32, im: 0.0f32 };
    let mut of = Fractions {
        before: times(left.y, divided(1.0f32, left.x, reciprocal(left.x, ptx))),
        behind: half,
        largest: f32::new(0.0),
        sum: f32::new(0.0),
        ptx,
    };
    if comptime!(options.causal) {
        #[unroll]
        for e in 0..FORWARD {
            let pivot = minus(alpha(sites, e), of.before);
            let by = of.reciprocal(pivot);
            of.before = divided(sites.beta[e], pivot, by);
            of.sum += by.over;
            set(&mut g, e, divided(1.0f32, pivot, by));
        }
    } else {
        let by = reciprocal(right.x, ptx);
        let over = divided(-sites.beta[comptime!(FORWARD - 1)], right.x, by);
        of.behind = times(right.y, over);
        // Both at once: divisions of one are under those of the other. They leave what the other will need, and meet
        // in the middle.
        let mut met = Array::<f32>::new(comptime!(2 * FORWARD));
        #[unroll]
        for e in 0..FORWARD {
            let r = comptime!(FORWARD - 1 - e);
            let from_left = minus(alpha(sites, e), of.before);
            let from_right = minus(alpha(sites, r), of.behind);
            if comptime!(e < r) {
                set(&mut met, e, from_left);
                set(&mut met, r, of.behind);
            } else {
                set(&mut g, e, of.g(from_left, complex_of(&met, e)));
                set(&mut g, r, of.g(complex_of(&met, r), of.behind));
            }
            let by = of.reciprocal(from_left);
            of.before = divided(sites.beta[e], from_left, by);
            if comptime!(r > 0) {
                let by = of.reciprocal(from_right);
                of.behind = divided(sites.beta[comptime!(r - 1)], from_right, by);
                if comptime!(r == SITES) {
                    half = divided(-1.0f32, from_right, by);
                }
            }
        }
        of.sum += f32::abs(of.behind.re) + f32::abs(of.behind.im);
    }
    of.sum += f32::abs(of.before.re) + f32::abs(of.before.im);
    let within = of.largest < f32::new(SQUARE) && sites.largest < f32::new(PLAIN);
    let one = Complex { re: 1.0f32, im: 0.0f32 };
    Found {
        g,
        right: normalised(Pair { x: one, y: half }).next,
        exact: within && of.sum < f32::new(LARGEST),
    }
}

/// By the vectors of both recurrences, scaled at every site: rare, so in loops.
#[cube]
fn by_minors(
    found: &mut Found,
    sites: &Sites,
    left: Pair,
    right: Pair,
    #[comptime] options: Options,
) {
    let sites = in_memory(sites);
    let rights = rights(&sites, right, comptime!(options.causal));
    let mut g = Array::<f32>::new(comptime!(2 * FORWARD));
    let mut at = left;
    for e in 0..sites.number {
        let site = site(&sites, &rights, at, e, comptime!(options.ptx));
        set(&mut g, e, scaled_g(&site));
        at = site.next;
    }
    found.g = g;
    found.right = pair_of(&rights, comptime!(SITES - 1));
}

/// G, `[B, N, 2]`; and, if `keep`, where the recurrences stand at every [`SITES`]th site.
pub(crate) fn forward(of: Forward<CubeBackend>, keep: bool) -> (CubeTensor, Option<CubeTensor>) {
    let Forward { op, a, b, c, z, mode, max_abs } = of;
    let inputs = Inputs::new([a, b, c, z], mode, max_abs.is_some());
    let (rows, length) = (inputs.a.rows, inputs.a.width);
    let like = inputs.a.tensor.clone();
    let g = launch::output(&like, op, "g", Shape::new([rows, length, 2]), DType::F32);
    let fours = inputs.options.ptx && (rows == 1 || length.is_multiple_of(2));
    let units = length.div_ceil(SITES);
    let shape = Shape::new([rows, units, RECORD]);
    let records = keep.then(|| launch::output(&like, op, "records", shape, DType::F32));
    let request = AroundRequest { op, sequences: rows, length };
    // SAFETY: spans are within rows; a row has its elements, `units` records and 2·N results.
    unsafe {
        around::<Diagonal>(&like, inputs.address, request, &|| {
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
                fours,
            )
        });
    }
    (g, records)
}
