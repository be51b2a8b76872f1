//! The gradients: two scans with first-order recurrences, as one scan to both sides.
//!
//! With w the cotangent and v_j the vector from the left at site j, scaled,
//!
//! * from the left Y_j = w_j x_j² + γ_{j−1} Y_{j−1}, γ_j = β_j s_j²: the sites before j, Σ_i≤j w_i G_ij G_ji = g_j² Y_j,
//! * from the right Z_j = w_j g_j² + γ_j Z_{j+1}: those behind it, Σ_i≥j w_i G_ij G_ji = x_j² Z_j,
//!
//! in which s_j are powers of two and γ is real. Between units, whose vectors have scales of their own, Y is
//! carried over |v|² and Z times |v|².

use super::forward::{self, cap_factor, rights, scaled_g};
use super::steps::{
    self, Complex, Pair, Sites, both_limited, coupling, limited, over, plus, scaled, times,
};
use super::{Inputs, LARGEST, Matrix, Options, RECORD, SITES, SMALLEST};
use crate::bk::BkMode;
use crate::launch;
use crate::reduce::Combine;
use crate::scan::{Acts, Around, AroundRequest, Sides, Span, around};
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

    fn from_left(state: &Array<f32>, item: &Array<f32>) -> Array<f32> {
        let mut next = Array::<f32>::new(2usize);
        next[0] = limited(item[1] + item[0] * state[0], CARRIED);
        next[1] = limited(item[2] + item[0] * state[1], CARRIED);
        next
    }

    fn from_right(state: &Array<f32>, item: &Array<f32>) -> Array<f32> {
        let mut next = Array::<f32>::new(2usize);
        next[0] = limited(item[3] + item[0] * state[0], CARRIED);
        next[1] = limited(item[4] + item[0] * state[1], CARRIED);
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
    /// The sum of S over the sites of each unit, re and im.
    dz: Box<[f32]>,
    /// Units of a row.
    units: usize,
    cap: f32,
    #[cube(comptime)]
    wanted: [bool; 4],
}

/// A unit's sites, its cotangents, and where the recurrences stand.
#[derive(CubeType)]
struct Held {
    sites: Sites,
    b: Array<f32>,
    c: Array<f32>,
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

#[cube]
fn complex_of(values: &Array<f32>, #[comptime] e: usize) -> Complex {
    Complex { re: values[comptime!(2 * e)], im: values[comptime!(2 * e + 1)] }
}

#[cube]
fn set(values: &mut Array<f32>, #[comptime] e: usize, value: Complex) {
    values[comptime!(2 * e)] = value.re;
    values[comptime!(2 * e + 1)] = value.im;
}

/// s²·a, for an s² that may leave f32.
#[cube]
fn twice(a: Complex, s: f32) -> Complex {
    both_limited(scaled(scaled(a, s), s), LARGEST)
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

    fn load(buffers: &Self::Buffers, span: &Span) -> Self::Held {
        let options = comptime!(buffers.matrix.options);
        let matrix = &buffers.matrix;
        let sites = steps::sites(matrix, span);
        let mut b = Array::<f32>::new(SITES);
        let mut c = Array::<f32>::new(SITES);
        let mut w = Array::<f32>::new(comptime!(2 * SITES));
        let (b_row, c_row) = (span.sequence * matrix.b_stride, span.sequence * matrix.c_stride);
        let place = 2 * (span.sequence * span.end + span.first);
        if span.first + SITES < span.end {
            #[unroll]
            for e in 0..SITES {
                b[e] = matrix.b[b_row + span.first + e];
                c[e] = matrix.c[c_row + span.first + e];
            }
            #[unroll]
            for k in 0..comptime!(2 * SITES) {
                w[k] = buffers.dg[place + k];
            }
        } else {
            #[unroll]
            for e in 0..SITES {
                let i = span.first + e;
                b[e] = coupling(&matrix.b, b_row, i, matrix.length);
                c[e] = coupling(&matrix.c, c_row, i, matrix.length);
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
            b,
            c,
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
        let mut at = held.left;
        let mut carried = Complex { re: 0.0f32, im: 0.0f32 };
        let mut product = 1.0f32;
        #[unroll]
        for e in 0..SITES {
            let site = forward::site(&held.sites, &held.rights, at, e, comptime!(options.ptx));
            let mut w = complex_of(&held.w, e);
            if comptime!(options.capped) {
                w = uncapped(w, scaled_g(&site), held.cap, comptime!(options.ptx));
                set(&mut held.w, e, w);
            }
            let gamma = limited(held.sites.beta[e] * site.scale * site.scale, CARRIED);
            carried = next_carried(plus(of_left(w, site.x), carried), gamma);
            product = limited(product * gamma, CARRIED);
            set(&mut held.z, e, twice(along(along(w, site.g), site.g), site.scale));
            held.gamma[e] = gamma;
            at = site.next;
        }
        held.after = over(max(squared(at), f32::new(SMALLEST)), comptime!(options.ptx));
        let mut z = Complex { re: 0.0f32, im: 0.0f32 };
        #[unroll]
        for k in 0..SITES {
            let e = comptime!(SITES - 1 - k);
            let behind = scaled(z, held.gamma[e]);
            z = both_limited(plus(complex_of(&held.z, e), behind), CARRIED);
        }
        let mut total = Array::<f32>::new(5usize);
        total[0] = limited(product * held.before * held.after, CARRIED);
        total[1] = limited(carried.re * held.after, CARRIED);
        total[2] = limited(carried.im * held.after, CARRIED);
        total[3] = limited(z.re * held.before, CARRIED);
        total[4] = limited(z.im * held.before, CARRIED);
        total
    }

    fn store(buffers: &mut Self::Buffers, span: &Span, held: &mut Self::Held, sides: &Sides) {
        let options = comptime!(held.options);
        let wanted = comptime!(buffers.wanted);
        let mut z = Complex { re: sides.right[0] * held.after, im: sides.right[1] * held.after };
        #[unroll]
        for k in 0..SITES {
            let e = comptime!(SITES - 1 - k);
            let own = complex_of(&held.z, e);
            set(&mut held.z, e, z);
            z = both_limited(plus(own, scaled(z, held.gamma[e])), CARRIED);
        }
        let mut carried =
            Complex { re: sides.left[0] * held.before, im: sides.left[1] * held.before };
        let mut sum = Complex { re: 0.0f32, im: 0.0f32 };
        let own = span.own && span.first < span.end;
        let mut at = held.left;
        #[unroll]
        for e in 0..SITES {
            let site = forward::site(&held.sites, &held.rights, at, e, comptime!(options.ptx));
            let mut y = of_left(complex_of(&held.w, e), site.x);
            if comptime!(!options.causal) {
                y = both_limited(plus(y, carried), CARRIED);
                carried = scaled(y, held.gamma[e]);
            }
            let behind = complex_of(&held.z, e);
            let g_y = along(y, site.g);
            let before_and_here = twice(along(g_y, site.g), site.scale);
            let reaching = both_limited(scaled(behind, held.gamma[e]), CARRIED);
            let of_behind = times(times(site.x, site.x), reaching);
            let s = both_limited(plus(before_and_here, of_behind), LARGEST);
            let i = span.first + e;
            let here = own && i < span.end;
            if here {
                if comptime!(wanted[0]) {
                    buffers.da[span.sequence * span.end + i] = -s.re;
                }
                sum = both_limited(plus(sum, s), LARGEST);
            }
            if comptime!(wanted[1] || wanted[2]) {
                let mut q = scaled(times(times(site.x, site.next.x), behind), site.scale).re;
                if comptime!(!options.causal) {
                    q = limited(q, LARGEST) + twice(along(g_y, site.h), site.scale).re;
                }
                if own && i + 1 < span.end {
                    let place = span.sequence * (span.end - 1) + i;
                    if comptime!(wanted[1]) {
                        buffers.db[place] = limited(held.c[e] * q, LARGEST);
                    }
                    if comptime!(wanted[2]) {
                        buffers.dc[place] = limited(held.b[e] * q, LARGEST);
                    }
                }
            }
            at = site.next;
        }
        if comptime!(wanted[3]) && own {
            let place = 2 * span.sequence * buffers.units + span.first / SITES;
            buffers.dz[place] = sum.re;
            buffers.dz[place + buffers.units] = -sum.im;
        }
    }
}

/// w·x².
#[cube]
fn of_left(w: Complex, x: Complex) -> Complex {
    times(w, times(x, x))
}

/// a·g, limited.
#[cube]
fn along(a: Complex, g: Complex) -> Complex {
    both_limited(times(a, g), CARRIED)
}

/// γ·y, limited.
#[cube]
fn next_carried(y: Complex, gamma: f32) -> Complex {
    scaled(both_limited(y, CARRIED), gamma)
}

/// The gradients of a, b, c and z as far as they are wanted; those of b, c and z for each row, and that of z for
/// each record, `[B, 2, records]`.
pub(crate) fn backward(of: Backward<CubeBackend>) -> [Option<CubeTensor>; 4] {
    let Backward { op, dg, a, b, c, z, records, mode, max_abs, wanted } = of;
    let inputs = Inputs::new([a, b, c, z], mode, max_abs.is_some());
    let (rows, length) = (inputs.a.rows, inputs.a.width);
    let like = inputs.a.tensor.clone();
    let (dg, records) = (into_contiguous(dg), into_contiguous(records));
    let units = length.div_ceil(SITES);
    let output = |i: usize, name: &'static str, shape: Shape| {
        wanted[i].then(|| launch::output(&like, op, name, shape, DType::F32))
    };
    let couplings = || Shape::new([rows, length - 1]);
    let outputs = [
        output(0, "da", Shape::new([rows, length])),
        output(1, "db", couplings()),
        output(2, "dc", couplings()),
        output(3, "dz", Shape::new([rows, 2, units])),
    ];
    let request = AroundRequest { op, sequences: rows, length };
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
                units,
                max_abs.unwrap_or(0.0) as f32,
                wanted,
            )
        });
    }
    outputs
}
