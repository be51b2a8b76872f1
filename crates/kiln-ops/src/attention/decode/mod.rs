//! Attention of few queries over many keys, as in decoding: keys and values pass once for a few queries together.
//!
//! Written for any device, as the portable family: f32 sums, everything added in order. A cube takes all queries
//! that read the same keys, up to a number of them, over a part of the keys, and leaves their weighted sums of
//! values, largest scores and sums of weights; a second kernel makes the parts one, if the first does not. Into how
//! many parts the keys are divided is a number of the launch: no kernel knows how long they are. Where several queries
//! read the same keys and there are tensor cores, `mma` does the same on these, and on Hopper `wgmma` for many heads.

mod combine;
mod job;
mod kernel;
#[cfg(feature = "cuda")]
mod mma;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod mma;
mod plan;
#[cfg(feature = "cuda")]
mod wgmma;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod wgmma;

use super::OP;
use super::problem::{HeadsView, Problem, vector_size};
use super::simt::heads;
use crate::exponential::has_ptx;
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use combine::combine_kernel;
use cubecl::prelude::*;
use kernel::decode_kernel;
use plan::{Plan, Work};

/// What the plans of these kernels begin with.
const NAME: &str = "attention of few queries";

/// Queries of a head at most.
const MOST_QUERIES: usize = 8;
/// Queries that read the same keys at most: of more, products on tensor cores are worth their tiles.
const MOST_TOGETHER: usize = 64;

/// Whether a problem is one of few queries.
pub(super) fn takes(problem: &Problem) -> bool {
    let s = &problem.sizes;
    s.queries <= MOST_QUERIES && s.together() <= MOST_TOGETHER && problem.documents.is_none()
}

/// Which kernel attends.
enum Kernel {
    /// In vectors of so many elements.
    Plain(Plan, usize),
    Mma(mma::Plan),
    Wgmma(wgmma::Plan),
}

impl Kernel {
    /// For `keys` keys that somebody sees.
    fn choose(problem: &Problem, keys: usize) -> (Self, Work) {
        if let Some((plan, work)) = wgmma::Plan::new(problem, keys) {
            return (Self::Wgmma(plan), work);
        }
        if let Some((plan, work)) = mma::Plan::new(problem, keys) {
            return (Self::Mma(plan), work);
        }
        let (p, s) = (problem, &problem.sizes);
        let size = vector_size(&[&p.q, &p.k, &p.v], s.width, 16);
        let (plan, work) = Plan::new(&p.q.tensor.client, s, keys, size);
        (Self::Plain(plan, size), work)
    }

    fn run(self, problem: &Problem, target: &Target<'_>, work: Work) {
        match self {
            Self::Plain(plan, size) => run_plain(problem, target, plan, work, size),
            Self::Mma(plan) => mma::run(problem, target, plan, work),
            Self::Wgmma(plan) => wgmma::run(problem, target, plan, work),
        }
    }
}

/// What a kernel writes: o, or that of every part and their statistics.
struct Target<'a> {
    o: &'a HeadsView,
    statistics: Option<&'a CubeTensor>,
}

impl Target<'_> {
    fn statistics(&self) -> BufferArg {
        match self.statistics {
            Some(statistics) => statistics.clone().into_buffer_arg(),
            // Positions count the buffers that are bound: q, k, v, o.
            None => BufferArg::alias(3, 1),
        }
    }
}

/// Writes o.
pub(super) fn forward(problem: &Problem, o: &HeadsView) {
    let s = &problem.sizes;
    let window = problem.mask.window.map_or(s.keys, |window| window.min(s.keys) + s.queries - 1);
    let (kernel, work) = Kernel::choose(problem, window.min(s.keys));
    if work.direct {
        return kernel.run(problem, &Target { o, statistics: None }, work);
    }
    let lines = s.batches * s.heads * s.queries;
    let workspace = |name, shape: [usize; 3]| {
        launch::output(&o.tensor, OP, name, Shape::from(shape), DType::F32)
    };
    let sums = workspace("part.sums", [work.parts, lines, s.width]);
    let statistics = workspace("part.statistics", [work.parts, lines, 2]);
    // The lines of a part are those of all heads.
    let view = HeadsView {
        tensor: sums.clone(),
        first: 0,
        batch_stride: s.heads * s.queries * s.width,
        head_stride: s.queries * s.width,
        row_stride: s.width,
    };
    kernel.run(problem, &Target { o: &view, statistics: Some(&statistics) }, work);
    combine(problem, o, sums, statistics, work.parts);
}

fn run_plain(problem: &Problem, target: &Target<'_>, plan: Plan, work: Work, size: usize) {
    let (p, s, o) = (problem, &problem.sizes, target.o);
    let client = &o.tensor.client;
    let rules = p.rules();
    let address = launch::address_type(&[&p.q.tensor, &p.k.tensor, &p.v.tensor, &o.tensor]);
    launch::plans::note(NAME, &(&plan, &rules, size, address), &work.ways(s));
    // SAFETY: keys are clamped to those that are there, columns to D, and queries are checked against their
    // number before a write; what stands in for documents and statistics is not touched.
    unsafe {
        decode_kernel::launch_unchecked(
            client,
            launch::grid(client, work.cubes(s)),
            CubeDim::new_1d(plan.units() as u32),
            address,
            size,
            1,
            heads(&p.q, size),
            heads(&p.k, size),
            heads(&p.v, size),
            p.bounds(),
            heads(o, 1),
            target.statistics(),
            p.numbers(),
            work.division(s),
            plan,
            rules,
            [p.q.tensor.dtype, o.tensor.dtype].map(dtype_to_elem_type),
        );
    }
}

/// Writes o, of all parts.
fn combine(
    problem: &Problem,
    o: &HeadsView,
    sums: CubeTensor,
    statistics: CubeTensor,
    parts: usize,
) {
    let s = &problem.sizes;
    let client = &o.tensor.client;
    let size = vector_size(&[o], s.width, 4 * o.tensor.dtype.size());
    let columns = (s.width / size).next_power_of_two().min(64);
    let most = client.properties().hardware.max_units_per_cube.min(256) as usize;
    let (groups, ptx) = (most / columns, has_ptx(client));
    let address = launch::address_type(&[&sums, &o.tensor]);
    launch::plans::note("attention of parts", &(columns, groups, size, address), &[]);
    // SAFETY: columns are clamped to D and lines to their number, and checked before a write.
    unsafe {
        combine_kernel::launch_unchecked(
            client,
            launch::grid(client, s.batches * s.heads * s.queries),
            CubeDim::new_2d(columns as u32, groups as u32),
            address,
            size,
            sums.into_buffer_arg(),
            statistics.into_buffer_arg(),
            heads(o, size),
            problem.numbers(),
            parts,
            columns,
            groups,
            ptx,
            dtype_to_elem_type(o.tensor.dtype),
        );
    }
}
