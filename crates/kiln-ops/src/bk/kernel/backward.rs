//! The gradients: two scans with first-order recurrences, as one scan to both sides.
//!
//! With w the cotangent and v_j the vector from the left at site j, scaled,
//!
//! * from the left Y_j = w_j x_j² + γ_{j−1} Y_{j−1}, γ_j = β_j s_j²: the sites before j, Σ_i≤j w_i G_ij G_ji = g_j² Y_j,
//! * from the right Z_j = w_j g_j² + γ_j Z_{j+1}: those behind it, Σ_i≥j w_i G_ij G_ji = x_j² Z_j,
//!
//! in which s_j are powers of two and γ is real. Between units, whose vectors have scales of their own, Y is
//! carried over |v|² and Z times |v|².

use super::forward::{self, cap_factor, complex_of, rights, scaled_g, set};
use super::lanes::{self as planes, Across, number, run, write_run};
use super::steps::{self, Complex, Pair, Sites, both_limited, limited, over, plus, scaled, times};
use super::{Inputs, LARGEST, Matrix, Options, RECORD, SITES, SMALLEST};
use crate::bk::BkMode;
use crate::launch;
use crate::reduce::{self, Combine, Sums};
use crate::scan::{Acts, Around, AroundRequest, Sides, Span, around, lanes};
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// What the gradients are computed from.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// The operator, for the audit.
    pub op: &'static str,
    /// The cotangent of G, `[B, N, 2]`.
    pub dg: FloatTensor<B>,
    /// `[B, N]`.
    pub a: FloatTensor<B>,
    /// `[B or 1, N − 1]`.
    pub b: FloatTensor<B>,
    /// `[B or 1, N − 1]`.
    pub c: FloatTensor<B>,
    /// `[B or 1, 2]`.
    pub z: FloatTensor<B>,
    /// What the forward kept.
    pub records: FloatTensor<B>,
    /// Which resolvent.
    pub mode: BkMode,
    /// Largest |G|.
    pub max_abs: Option<f64>,
    /// Whose gradients are wanted: a, b, c, z.
    pub wanted: [bool; 4],
}

/// Cotangents and sums beyond 2⁸⁰ are limited to it: times a G that nearly is none they are f32 still.
const CARRIED: f32 = (1u128 << 80) as f32;

/// Affine maps Y → m·Y + y from the left and Z → m·Z + z from the right, with one real m.
struct Affine;

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

#[derive(CubeType, CubeLaunch)]
struct Buffers {
    matrix: Matrix,
    dg: Box<[f32]>,
    records: Box<[f32]>,
    da: Box<[f32]>,
    db: Box<[f32]>,
    dc: Box<[f32]>,
    /// The sums of S over the sites of each unit, or of each plane's.
    dz: Box<[f32]>,
    /// How many there are of a row.
    sums: usize,
    /// Units of a row.
    units: usize,
    cap: f32,
    #[cube(comptime)]
    wanted: [bool; 4],
    #[cube(comptime)]
    vectors: Vectors,
}

/// Which rows begin where vectors may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Vectors {
    dg: bool,
    da: bool,
}

/// A unit's sites, its cotangents, and where the recurrences stand.
#[derive(CubeType)]
struct Held {
    sites: Sites,
    /// w, two f32 each; with a cap, that of the G before it.
    w: Array<f32>,
    left: Pair,
    rights: Array<f32>,
    /// s_j² w_j g_j² of each site; then Z of the next site.
    z: Array<f32>,
    /// γ.
    gamma: Array<f32>,
    /// |v|² at the first site, and one over that behind the last.
    before: f32,
    after: f32,
    cap: f32,
    #[cube(comptime)]
    options: Options,
}

struct Gradients;

#[cube]
fn read_pair(from: &[f32], at: usize) -> Pair {
    Pair {
        x: Complex { re: from[at], im: from[at + 1] },
        y: Complex { re: from[at + 2], im: from[at + 3] },
    }
}

#[cube]
fn squared(of: Pair) -> f32 {
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

/// The cotangent of G before its cap: (m/|G|)·(w − Re(w·G)·conj(G)/|G|²).
#[cube]
fn uncapped(w: Complex, g: Complex, cap: f32, #[comptime] ptx: bool) -> Complex {
    let factor = cap_factor(g, cap, ptx);
    let unit = steps::unit_of(steps::size(g));
    let direction = scaled(g, unit);
    let square = direction.re * direction.re + direction.im * direction.im;
    let along = (w.re * direction.re - w.im * direction.im) * steps::over(square, ptx);
    let re = (w.re - along * direction.re) * factor;
    let im = (w.im + along * direction.im) * factor;
    let capped = factor < 1.0f32;
    Complex { re: select(capped, re, w.re), im: select(capped, im, w.im) }
}

#[cube]
impl Around for Gradients {
    type Combine = Affine;
    type Buffers = Buffers;
    type Held = Held;
    const ITEMS: usize = SITES;
    const SHARED: usize = 2 * planes::shared(SITES);

    fn load(buffers: &Self::Buffers, span: &Span, memory: &mut [f32]) -> Self::Held {
        let options = comptime!(buffers.matrix.options);
        let matrix = &buffers.matrix;
        let mut w = Array::<f32>::new(comptime!(2 * SITES));
        let place = 2 * (span.sequence * span.end + span.first);
        let mut taken = false;
        let across = comptime!(Across::new(2 * SITES, span.lanes, buffers.vectors.dg));
        if comptime!(span.lanes > 0) {
            taken = steps::together(span, SITES);
            if taken {
                let start = place - 2 * UNIT_POS_PLANE as usize * SITES;
                #[unroll]
                for k in 0..comptime!(across.steps()) {
                    let at = start + number(k, across);
                    let some = run(&buffers.dg, at, across.width, buffers.vectors.dg);
                    #[unroll]
                    for j in 0..comptime!(across.width) {
                        w[comptime!(k * across.width + j)] = some[j];
                    }
                }
            }
        }
        let sites = steps::sites(matrix, span, memory, SITES);
        if comptime!(span.lanes > 0) {
            let at = steps::of_plane(span, comptime!(2 * planes::shared(SITES)));
            if taken {
                let size = comptime!(span.lanes as usize * planes::shared(2 * SITES));
                // All have their sites.
                sync_plane();
                w = planes::to_runs(&mut memory[at..at + size], &w, across);
            }
        }
        if !taken {
            #[unroll]
            for e in 0..SITES {
                let i = span.first + e;
                let at = 2 * (span.sequence * span.end + min(i, span.end - 1));
                w[comptime!(2 * e)] = select(i < span.end, buffers.dg[at], 0.0f32);
                w[comptime!(2 * e + 1)] = select(i < span.end, buffers.dg[at + 1], 0.0f32);
            }
        }
        #[unroll]
        for e in 0..SITES {
            // The conjugate of the cotangent: dL = Re Σ w dG.
            let of = complex_of(&w, e);
            set(&mut w, e, both_limited(Complex { re: of.re, im: -of.im }, CARRIED));
        }
        let last = (span.end - 1) / SITES;
        let at = (span.sequence * buffers.units + min(span.first / SITES, last)) * RECORD;
        let left = read_pair(&buffers.records, at);
        let right = read_pair(&buffers.records, at + 4);
        let rights = rights(&sites, right, comptime!(options.causal));
        Held {
            sites,
            w,
            left,
            rights,
            z: Array::<f32>::new(comptime!(2 * SITES)),
            gamma: Array::<f32>::new(SITES),
            before: squared(left),
            after: f32::new(0.0),
            cap: buffers.cap,
            options,
        }
    }

    fn total(held: &mut Self::Held) -> Array<f32> {
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

    fn store(
        buffers: &mut Self::Buffers,
        span: &Span,
        held: &mut Self::Held,
        sides: &Sides,
        memory: &mut [f32],
    ) {
        let wanted = comptime!(buffers.wanted);
        let mut found = gradients(&*held, sides, false);
        let mut size = f32::new(0.0);
        #[unroll]
        for k in 0..SITES {
            let of_s =
                f32::abs(found.s[comptime!(2 * k)]) + f32::abs(found.s[comptime!(2 * k + 1)]);
            size += of_s + f32::abs(found.q[k]);
        }
        let within = size < f32::new(CARRIED);
        if !within {
            let careful = gradients(&*held, sides, true);
            #[unroll]
            for k in 0..SITES {
                found.s[comptime!(2 * k)] = careful.s[comptime!(2 * k)];
                found.s[comptime!(2 * k + 1)] = careful.s[comptime!(2 * k + 1)];
                found.q[k] = careful.q[k];
            }
        }
        let mut sum = Complex { re: 0.0f32, im: 0.0f32 };
        let own = span.own && span.first < span.end;
        let matrix = &buffers.matrix;
        let (b_row, c_row) = (span.sequence * matrix.b_stride, span.sequence * matrix.c_stride);
        let a_at = span.sequence * span.end + span.first;
        let b_at = span.sequence * (span.end - 1) + span.first;
        let mut da = Array::<f32>::new(SITES);
        #[unroll]
        for e in 0..SITES {
            let s = complex_of(&found.s, e);
            da[e] = -s.re;
            if span.first + e < span.end {
                sum = both_limited(plus(sum, s), LARGEST);
            }
        }
        let mut written = false;
        if comptime!(span.lanes > 0) {
            written = steps::together(span, SITES);
            if written {
                let at = steps::of_plane(span, comptime!(2 * planes::shared(SITES)));
                let half = comptime!(span.lanes as usize * planes::shared(SITES));
                let back = UNIT_POS_PLANE as usize * SITES;
                let across = comptime!(Across::new(SITES, span.lanes, buffers.vectors.da));
                if comptime!(wanted[0]) {
                    let da = planes::to_across(&mut memory[at..at + half], &da, across);
                    if span.own {
                        #[unroll]
                        for k in 0..comptime!(across.steps()) {
                            let from = comptime!(k * across.width);
                            let i = a_at - back + number(k, across);
                            write_run(
                                &mut buffers.da,
                                i,
                                &da,
                                from,
                                across.width,
                                buffers.vectors.da,
                            );
                        }
                    }
                }
                if comptime!(wanted[1] || wanted[2]) {
                    let across = comptime!(Across::new(SITES, span.lanes, false));
                    let to = at + half;
                    let q = planes::to_across(&mut memory[to..to + half], &found.q, across);
                    if span.own {
                        #[unroll]
                        for k in 0..SITES {
                            let i = number(k, across);
                            let first = span.first - back + i;
                            if comptime!(wanted[1]) {
                                let db = buffers.matrix.c[c_row + first] * q[k];
                                buffers.db[b_at - back + i] = limited(db, LARGEST);
                            }
                            if comptime!(wanted[2]) {
                                let dc = buffers.matrix.b[b_row + first] * q[k];
                                buffers.dc[b_at - back + i] = limited(dc, LARGEST);
                            }
                        }
                    }
                }
            }
        }
        if own && !written {
            #[unroll]
            for e in 0..SITES {
                let i = span.first + e;
                if comptime!(wanted[0]) && i < span.end {
                    buffers.da[a_at + e] = da[e];
                }
                if i + 1 < span.end {
                    if comptime!(wanted[1]) {
                        let db = buffers.matrix.c[c_row + i] * found.q[e];
                        buffers.db[b_at + e] = limited(db, LARGEST);
                    }
                    if comptime!(wanted[2]) {
                        let dc = buffers.matrix.b[b_row + i] * found.q[e];
                        buffers.dc[b_at + e] = limited(dc, LARGEST);
                    }
                }
            }
        }
        if comptime!(wanted[3]) {
            let mut of_z = Array::<f32>::new(2usize);
            of_z[0] = sum.re;
            of_z[1] = -sum.im;
            let mut at = span.first / SITES;
            let mut writes = own;
            if comptime!(span.lanes > 0) {
                // Units past the end have none.
                sync_cube();
                reduce::plane::<Sums<2>>(&mut of_z, span.lanes);
                at /= comptime!(span.lanes as usize);
                writes = own && UNIT_POS_PLANE == 0;
            }
            if writes {
                let place = 2 * span.sequence * buffers.sums + at;
                buffers.dz[place] = of_z[0];
                buffers.dz[place + buffers.sums] = of_z[1];
            }
        }
    }
}

/// The cotangents of G before its cap.
#[cube]
fn uncap(held: &mut Held) {
    let options = comptime!(held.options);
    let mut at = held.left;
    #[unroll]
    for e in 0..SITES {
        let site = forward::site(&held.sites, &held.rights, at, e, comptime!(options.ptx));
        let w = complex_of(&held.w, e);
        let w = uncapped(w, scaled_g(&site), held.cap, comptime!(options.ptx));
        set(&mut held.w, e, w);
        at = site.next;
    }
}

/// What the recurrences make of a unit's sites.
#[cube]
fn sums(held: &mut Held, #[comptime] careful: bool) -> Array<f32> {
    let options = comptime!(held.options);
    let mut at = held.left;
    let mut carried = Complex { re: 0.0f32, im: 0.0f32 };
    let mut product = 1.0f32;
    #[unroll]
    for e in 0..SITES {
        let site = forward::site(&held.sites, &held.rights, at, e, comptime!(options.ptx));
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
struct Found {
    s: Array<f32>,
    q: Array<f32>,
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
        let site = forward::site(&held.sites, &held.rights, at, e, comptime!(options.ptx));
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

/// The gradients of a, b, c and z for each row, as far as they are wanted.
pub(crate) fn backward(of: Backward<CubeBackend>) -> [Option<CubeTensor>; 4] {
    let Backward { op, dg, a, b, c, z, records, mode, max_abs, wanted } = of;
    let inputs = Inputs::new([a, b, c, z], mode, max_abs.is_some());
    let (rows, length) = (inputs.a.rows, inputs.a.width);
    let like = inputs.a.tensor.clone();
    let (dg, records) = (into_contiguous(dg), into_contiguous(records));
    let units = length.div_ceil(SITES);
    let sums = units.div_ceil(lanes::<Gradients>(&like.client, length).max(1) as usize);
    let output = |i: usize, name: &'static str, shape: Shape| {
        wanted[i].then(|| launch::output(&like, op, name, shape, DType::F32))
    };
    let couplings = || Shape::new([rows, length - 1]);
    let outputs = [
        output(0, "da", Shape::new([rows, length])),
        output(1, "db", couplings()),
        output(2, "dc", couplings()),
        output(3, "sums of dz", Shape::new([rows, 2, sums])),
    ];
    let request = AroundRequest { op, sequences: rows, length };
    let begin = |size: usize| inputs.options.ptx && (rows == 1 || length.is_multiple_of(size));
    let offset = dg.handle.offset_start.unwrap_or(0);
    let vectors = Vectors { dg: begin(2) && offset.is_multiple_of(16), da: begin(4) };
    // SAFETY: spans are within rows; a row has its elements, `units` records and sums, and its couplings.
    unsafe {
        around::<Gradients>(&like, inputs.address(&dg), request, &|| {
            let [da, db, dc, dz] = outputs.each_ref().map(|tensor| match tensor {
                Some(tensor) if tensor.meta.num_elements() > 0 => tensor.clone().into_buffer_arg(),
                _ => launch::unused(&like, DType::F32).into_buffer_arg(),
            });
            BuffersLaunch::new(
                inputs.argument(),
                dg.clone().into_buffer_arg(),
                records.clone().into_buffer_arg(),
                da,
                db,
                dc,
                dz,
                sums,
                units,
                max_abs.unwrap_or(0.0) as f32,
                wanted,
                vectors,
            )
        });
    }
    let [da, db, dc, dz] = outputs;
    let summed = |dz: CubeTensor| {
        CubeBackend::float_reshape(CubeBackend::float_sum_dim(dz, 2), Shape::new([rows, 2]))
    };
    [da, db, dc, dz.map(summed)]
}
