//! The gradients, as one scan to both sides.

use super::complex::{Complex, both_limited, complex_of, limited, plus, set};
use super::recurrences::{Affine, CARRIED, Held, found, held, total};
use super::sites::sites;
use super::steps::{Recorded, RecordedLaunch};
use super::{Inputs, LARGEST, SITES};
use crate::bk::BkMode;
use crate::launch;
use crate::reduce::{self, Sums};
use crate::scan::runs::{
    self, Across, of_plane, read_across, to_across, to_runs, together, write_across,
};
use crate::scan::{Around, AroundRequest, Sides, Span, around, lanes};
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

#[derive(CubeType, CubeLaunch)]
struct Buffers {
    of: Recorded,
    dg: Box<[f32]>,
    da: Box<[f32]>,
    db: Box<[f32]>,
    dc: Box<[f32]>,
    /// The sums of S over the sites of each unit, or of each plane's: real parts, then imaginary ones, of each row, or of
    /// all rows if z is one for all.
    dz: Box<[f32]>,
    dz_places: Places,
    cap: f32,
    #[cube(comptime)]
    wanted: [bool; 4],
    #[cube(comptime)]
    vectors: Vectors,
}

/// The distances between rows, and between the parts of numbers.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Places {
    row: usize,
    part: usize,
}

/// Which rows begin where vectors may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Vectors {
    dg: bool,
    da: bool,
}

struct Gradients;

#[cube]
impl Around for Gradients {
    type Combine = Affine;
    type Buffers = Buffers;
    type Held = Held;
    const ITEMS: usize = SITES;
    const SHARED: usize = 2 * runs::shared(SITES);

    fn load(buffers: &Self::Buffers, span: &Span, memory: &mut [f32]) -> Self::Held {
        let options = comptime!(buffers.of.matrix.options);
        let mut w = Array::<f32>::new(comptime!(2 * SITES));
        let place = 2 * (span.sequence * span.end + span.first);
        let mut taken = false;
        let across =
            comptime!(Across::new(2 * SITES, span.lanes, buffers.vectors.dg, options.narrow));
        if comptime!(span.lanes > 0) {
            taken = together(span, SITES);
            if taken {
                w = read_across(&buffers.dg, place, across);
            }
        }
        let sites = sites(&buffers.of.matrix, span, memory, SITES);
        if comptime!(span.lanes > 0) {
            let at = of_plane(span, comptime!(2 * runs::shared(SITES)));
            if taken {
                let size = comptime!(span.lanes as usize * runs::shared(2 * SITES));
                // All have their sites.
                sync_plane();
                w = to_runs(&mut memory[at..at + size], &w, across);
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
        let (left, right) = (buffers.of.left(span), buffers.of.right(span));
        held(sites, w, left, right, buffers.cap, options)
    }

    fn total(buffers: &Self::Buffers, span: &Span, held: &mut Self::Held) -> Array<f32> {
        total(&buffers.of, span, held)
    }

    fn store(
        buffers: &mut Self::Buffers,
        span: &Span,
        held: &mut Self::Held,
        sides: &Sides,
        memory: &mut [f32],
    ) {
        let found = found(&buffers.of, span, &*held, sides);
        let mut da = Array::<f32>::new(SITES);
        let mut sum = Complex { re: 0.0f32, im: 0.0f32 };
        #[unroll]
        for e in 0..SITES {
            let s = complex_of(&found.s, e);
            da[e] = -s.re;
            if span.first + e < span.end {
                sum = both_limited(plus(sum, s), LARGEST);
            }
        }
        write_each(buffers, span, &da, &found.q, memory);
        if comptime!(buffers.wanted[3]) {
            write_sum(buffers, span, sum);
        }
    }
}

/// da, db and dc.
#[cube]
fn write_each(
    buffers: &mut Buffers,
    span: &Span,
    da: &Array<f32>,
    q: &Array<f32>,
    memory: &mut [f32],
) {
    let wanted = comptime!(buffers.wanted);
    let narrow = comptime!(buffers.of.matrix.options.narrow);
    let a_at = span.sequence * span.end + span.first;
    let mut written = false;
    if comptime!(span.lanes > 0) {
        written = together(span, SITES);
        if written {
            let at = of_plane(span, comptime!(2 * runs::shared(SITES)));
            let half = comptime!(span.lanes as usize * runs::shared(SITES));
            if comptime!(wanted[0]) {
                let across = comptime!(Across::new(SITES, span.lanes, buffers.vectors.da, narrow));
                let da = to_across(&mut memory[at..at + half], da, across);
                if span.own {
                    write_across(&mut buffers.da, a_at, &da, across);
                }
            }
            if comptime!(wanted[1] || wanted[2]) {
                let across = comptime!(Across::new(SITES, span.lanes, false, narrow));
                let to = at + half;
                let q = to_across(&mut memory[to..to + half], q, across);
                if span.own {
                    let place = span.sequence * (span.end - 1) + span.first;
                    if comptime!(wanted[1]) {
                        let row = span.sequence * buffers.of.matrix.c_stride + span.first;
                        let db = couplings_across(&buffers.of.matrix.c, row, &q, across);
                        write_across(&mut buffers.db, place, &db, across);
                    }
                    if comptime!(wanted[2]) {
                        let row = span.sequence * buffers.of.matrix.b_stride + span.first;
                        let dc = couplings_across(&buffers.of.matrix.b, row, &q, across);
                        write_across(&mut buffers.dc, place, &dc, across);
                    }
                }
            }
        }
    }
    if span.own && span.first < span.end && !written {
        #[unroll]
        for e in 0..SITES {
            let i = span.first + e;
            if comptime!(wanted[0]) && i < span.end {
                buffers.da[a_at + e] = da[e];
            }
            if i + 1 < span.end {
                write_couplings(buffers, span, i, q[e]);
            }
        }
    }
}

/// A gradient of couplings, by Re Q and the other couplings, as the plane takes them.
#[cube]
fn couplings_across(
    others: &[f32],
    at: usize,
    q: &Array<f32>,
    #[comptime] across: Across,
) -> Array<f32> {
    let mut gradient = read_across(others, at, across);
    #[unroll]
    for k in 0..comptime!(across.count) {
        gradient[k] = limited(gradient[k] * q[k], LARGEST);
    }
    gradient
}

/// db and dc behind site `i`, of Re Q there.
#[cube]
fn write_couplings(buffers: &mut Buffers, span: &Span, i: usize, q: f32) {
    let place = span.sequence * (span.end - 1) + i;
    if comptime!(buffers.wanted[1]) {
        let db = buffers.of.matrix.c[span.sequence * buffers.of.matrix.c_stride + i] * q;
        buffers.db[place] = limited(db, LARGEST);
    }
    if comptime!(buffers.wanted[2]) {
        let dc = buffers.of.matrix.b[span.sequence * buffers.of.matrix.b_stride + i] * q;
        buffers.dc[place] = limited(dc, LARGEST);
    }
}

/// A part of dz, of a unit or of a plane.
#[cube]
fn write_sum(buffers: &mut Buffers, span: &Span, sum: Complex) {
    let mut of_z = Array::<f32>::new(2usize);
    of_z[0] = sum.re;
    of_z[1] = -sum.im;
    let mut at = span.first / SITES;
    let mut writes = span.own && span.first < span.end;
    if comptime!(span.lanes > 0) {
        // Units that shuffle have to be together again; those past the end add 0.
        sync_plane();
        reduce::plane::<Sums<2>>(&mut of_z, span.lanes, true);
        at /= comptime!(span.lanes as usize);
        let lane = UNIT_POS_X % comptime!(span.lanes);
        writes = writes && lane == 0;
    }
    if writes {
        let place = span.sequence * buffers.dz_places.row + at;
        buffers.dz[place] = of_z[0];
        buffers.dz[place + buffers.dz_places.part] = of_z[1];
    }
}

/// Sums of dz that one launch adds up.
const FEW: usize = 256;

/// The gradients of a, b and c for each row and that of z, as far as they are wanted.
pub(crate) fn backward(of: Backward<CubeBackend>) -> [Option<CubeTensor>; 4] {
    let Backward { op, dg, a, b, c, z, records, mode, max_abs, wanted } = of;
    let inputs = Inputs::new([a, b, c, z], mode, max_abs.is_some());
    let (rows, length) = (inputs.a.rows, inputs.a.width);
    let shared = inputs.z.rows == 1;
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
        output(3, "sums of dz", Shape::new(if shared { [2, rows, sums] } else { [rows, 2, sums] })),
    ];
    let (row, part) = if shared { (sums, rows * sums) } else { (2 * sums, sums) };
    let request = AroundRequest { op, sequences: rows, length };
    let begin = |size: usize| inputs.options.ptx && (rows == 1 || length.is_multiple_of(size));
    let offset = dg.handle.offset_start.unwrap_or(0);
    let vectors = Vectors { dg: begin(2) && offset.is_multiple_of(16), da: begin(4) };
    // SAFETY: spans are within rows; a row has its elements, `units` records and sums, and its couplings.
    unsafe {
        around::<Gradients>(&like, inputs.address, request, &|| {
            let [da, db, dc, dz] = outputs.each_ref().map(|tensor| match tensor {
                Some(tensor) if tensor.meta.num_elements() > 0 => tensor.clone().into_buffer_arg(),
                _ => launch::unused(&like, DType::F32).into_buffer_arg(),
            });
            BuffersLaunch::new(
                RecordedLaunch::new(inputs.argument(), records.clone().into_buffer_arg(), units),
                dg.clone().into_buffer_arg(),
                da,
                db,
                dc,
                dz,
                PlacesLaunch::new(row, part),
                max_abs.unwrap_or(0.0) as f32,
                wanted,
                vectors,
            )
        });
    }
    let [da, db, dc, dz] = outputs;
    [da, db, dc, dz.map(|dz| summed(dz, rows, sums, shared))]
}

/// dz of its sums: `[1, 2]` if z is one for all rows, else `[B, 2]`.
fn summed(sums: CubeTensor, rows: usize, count: usize, shared: bool) -> CubeTensor {
    let sum_last = |of: CubeTensor, shape: [usize; 2]| {
        CubeBackend::float_sum_dim(CubeBackend::float_reshape(of, Shape::new(shape)), 1)
    };
    let sums = match shared {
        true if rows * count <= FEW => sum_last(sums, [2, rows * count]),
        true => sum_last(sum_last(sums, [2 * rows, count]), [2, rows]),
        false => sum_last(sums, [2 * rows, count]),
    };
    CubeBackend::float_reshape(sums, Shape::new([if shared { 1 } else { rows }, 2]))
}
