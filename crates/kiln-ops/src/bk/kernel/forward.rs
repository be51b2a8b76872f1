//! The diagonal.

use super::cap::cap_factor;
use super::complex::{complex_of, scaled, set, times};
use super::minors::{Divided, PLAIN, Thetas, divided, divided_alone, phis, thetas};
use super::moebius::{Moebius, product};
use super::sites::{Sites, again, sites};
use super::vectors::{Pair, normalised, pair_of, rights, scaled_g, site, write_pair};
use super::{FORWARD, Inputs, Matrix, Options, RECORD, SITES};
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

    fn total(held: &mut Self::Held) -> Array<f32> {
        product(&*held)
    }

    fn store(
        buffers: &mut Self::Buffers,
        span: &Span,
        held: &mut Self::Held,
        sides: &Sides,
        memory: &mut [f32],
    ) {
        let options = comptime!(buffers.matrix.options);
        let sites = again(&*held, span, &*memory);
        let left = pair_of(&sides.left, 0usize);
        let right = pair_of(&sides.right, 0usize);
        let mut found = quickly(&sites, left, right, options);
        if !found.exact {
            carefully(&mut found, &sites, left, right, options);
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
            write_records(buffers, span, &found, left, right);
        }
        write_g(buffers, span, &found.g, memory);
    }
}

/// Where the recurrences stand at both halves of a unit, for the backward.
#[cube]
fn write_records(buffers: &mut Buffers, span: &Span, found: &Found, left: Pair, right: Pair) {
    if span.own && span.first < span.end {
        let at = (span.sequence * buffers.units + span.first / SITES) * RECORD;
        write_pair(&mut buffers.records, at, left);
        write_pair(&mut buffers.records, at + 4, found.right);
        if span.first + SITES < span.end {
            write_pair(&mut buffers.records, at + RECORD, found.middle);
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
            // Two numbers a site: as many as there is memory for, but in runs of their own length.
            let across = comptime!(Across::new(2 * FORWARD, span.lanes, buffers.fours));
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
    /// The vectors from the left and from the right behind the first half, each up to a complex factor.
    middle: Pair,
    right: Pair,
    /// Nothing left the range in which it is exact.
    exact: bool,
}

/// By the minors of both halves.
#[cube]
fn quickly(sites: &Sites, left: Pair, right: Pair, #[comptime] options: Options) -> Found {
    let ptx = comptime!(options.ptx);
    let of_first = thetas(sites, left, 0usize);
    let middle = normalised(of_first.next).next;
    let of_second = thetas(sites, middle, SITES);
    let mut g = Array::<f32>::new(comptime!(2 * FORWARD));
    if comptime!(options.causal) {
        let first = divided_alone(&of_first, ptx);
        let second = divided_alone(&of_second, ptx);
        of_half(&mut g, &of_first, &first, 0usize);
        of_half(&mut g, &of_second, &second, SITES);
        let exact = first.exact && second.exact && sites.largest < f32::new(PLAIN);
        Found { g, middle, right, exact }
    } else {
        let behind = phis(sites, right, SITES);
        let right = normalised(behind.before).next;
        let before = phis(sites, right, 0usize);
        let first = divided(&before, &of_first, sites, 0usize, ptx);
        let second = divided(&behind, &of_second, sites, SITES, ptx);
        of_half(&mut g, &of_first, &first, 0usize);
        of_half(&mut g, &of_second, &second, SITES);
        let exact = first.exact && second.exact && sites.largest < f32::new(PLAIN);
        Found { g, middle, right, exact }
    }
}

/// G of half a unit.
#[cube]
fn of_half(g: &mut Array<f32>, thetas: &Thetas, over: &Divided, #[comptime] first: usize) {
    #[unroll]
    for e in 0..SITES {
        let of_site = times(complex_of(&thetas.theta, e), complex_of(&over.phi, e));
        set(g, comptime!(first + e), of_site);
    }
}

/// By the vectors of both recurrences, scaled at every site.
#[cube]
fn carefully(
    found: &mut Found,
    sites: &Sites,
    left: Pair,
    right: Pair,
    #[comptime] options: Options,
) {
    let rights = rights(sites, right, comptime!(options.causal));
    let mut at = left;
    #[unroll]
    for e in 0..FORWARD {
        let site = site(sites, &rights, at, e, comptime!(options.ptx));
        set(&mut found.g, e, scaled_g(&site));
        at = site.next;
        if comptime!(e + 1 == SITES) {
            found.middle = at;
        }
    }
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
                fours,
            )
        });
    }
    (g, records)
}
