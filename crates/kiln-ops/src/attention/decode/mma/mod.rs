//! Several queries that read the same keys, on mma.sync: compute capability 8.0 and later, bf16 and f16.
//!
//! On plain units queries that share keys cost multiply-adds, conversions and shuffles for each of them. Here
//! a warp reads 16 keys and their values once for up to 32 queries, and what that costs hides behind memory.
//!
//! Fragments come straight from global memory, 16 bytes a lane: which of the elements of a head an instruction
//! multiplies at which place is free, as long as both operands agree.
//!
//! * S = Q·Kᵀ. Lane 4g + t has elements 32c + 8t .. + 8 of key g: the right operands of two steps of 16. The queries
//!   stand in shared memory as left operands with the elements in that order, 16 queries an instruction.
//! * Oᵀ = Vᵀ·Pᵀ, 8 queries an instruction. Lane 4g + t has elements 64c + 8g .. + 8 of the values of keys 2t, 2t + 1,
//!   2t + 8 and 2t + 9; pairs of keys side by side are four left operands of 16 elements. The weights are
//!   scores, rounded, in the lanes where they are.
//!
//! The next keys are on their way once the scores of these are made, and the next values once these are added.

mod kernel;

use super::job::Found;
use super::plan::{Work, parts};
use super::{NAME, Target};
use crate::attention::problem::Problem;
use crate::attention::simt::heads;
use crate::device::Hardware;
use crate::launch;
use crate::tile::cuda::ptx::Float16;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use cubecl::prelude::*;
use kernel::decode_mma_kernel;

/// Queries that read the same keys for which this is faster than plain units.
const FEWEST_TOGETHER: usize = 2;

const WARPS: usize = 4;

/// Cubes that a multiprocessor has at a time. (67 MB of keys and values in bf16 on an H200, 8 query heads for each KV
/// head, share of the copy bandwidth: 0.73 with 2, 0.70 with 3, 0.62 with 4, 0.60 with 8.)
const RESIDENT: usize = 2;

/// Elements of 16 bytes.
const CHUNK: usize = 8;

/// What the kernel is specialised on; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    width: usize,
    /// Queries of a cube, in eights.
    eights: usize,
    /// Keys that a warp takes at a time, in sixteens.
    sixteens: usize,
    float: Float16,
    /// All queries of a head see the same keys: there is one.
    single: bool,
    /// A cube sees all keys: its results are those of the call.
    direct: bool,
}

/// Eights of queries that a warp has registers for beside keys and values, for heads of this width.
fn most_eights(width: usize) -> Option<usize> {
    match width {
        64 | 128 => Some(4),
        192 => Some(2),
        256 => Some(1),
        _ => None,
    }
}

impl Plan {
    /// With the work, for `keys` keys that somebody sees; none where plain units are to do it.
    pub(super) fn new(problem: &Problem, keys: usize) -> Option<(Self, Work)> {
        let (sizes, tensor) = (&problem.sizes, &problem.q.tensor);
        let (client, width) = (&tensor.client, sizes.width);
        let takes = sizes.together() >= FEWEST_TOGETHER
            && Hardware::of(client).async_copies
            && matches!(tensor.dtype, DType::BF16 | DType::F16)
            && [&problem.q, &problem.k, &problem.v].into_iter().all(|view| view.aligned(width));
        let most = most_eights(width).filter(|_| takes)?;
        let eights = sizes.together().div_ceil(8);
        let mut plan = Self {
            width,
            eights: eights.div_ceil(eights.div_ceil(most)),
            sixteens: if width == 64 { 2 } else { 1 },
            float: Float16::of(tensor.dtype),
            single: sizes.queries == 1,
            direct: false,
        };
        if plan.shared() > client.properties().hardware.max_shared_memory_size {
            return None;
        }
        let (rows, round) = (plan.rows(), WARPS * plan.block());
        let slots = RESIDENT * launch::multiprocessors(client);
        let parts = |cubes| parts(cubes, slots, launch::limits::reckoned(keys), round);
        let work = Work::new(sizes, keys, rows, round, parts);
        plan.direct = work.direct;
        Some((plan, work))
    }

    /// Queries of a cube, those that are not there included.
    fn rows(&self) -> usize {
        8 * self.eights
    }

    /// Left operands of the queries, of 16 each.
    fn tiles(&self) -> usize {
        self.eights.div_ceil(2)
    }

    /// Keys that a warp takes at a time.
    fn block(&self) -> usize {
        16 * self.sixteens
    }

    /// Sixteens of a head's elements.
    fn steps(&self) -> usize {
        self.width / 16
    }

    /// Words of four that a lane has of the keys of a block, or of the values.
    fn held(&self) -> usize {
        self.sixteens * self.steps()
    }

    /// Bytes of shared memory.
    fn shared(&self) -> usize {
        let found = self.found();
        self.tiles() * self.steps() * 32 * 16 + 4 * found.lines() * (found.pitch + 2)
    }

    fn found(&self) -> Found {
        Found {
            slots: WARPS,
            rows: self.rows(),
            // Rows that lanes write side by side fall into different banks.
            pitch: self.width + 1,
            units: 32 * WARPS,
            direct: self.direct,
        }
    }
}

/// Writes o, or that of every part and their statistics.
pub(super) fn run(problem: &Problem, target: &Target<'_>, plan: Plan, work: Work) {
    let (p, s, o) = (problem, &problem.sizes, target.o);
    let client = &o.tensor.client;
    let rules = p.rules();
    let address = launch::address_type(&[&p.q.tensor, &p.k.tensor, &p.v.tensor, &o.tensor]);
    let name = format!("{NAME} on mma.sync");
    launch::plans::note(&name, &(&plan, &rules, address), &work.ways(s));
    // SAFETY: keys are clamped to those that are there, and queries are checked against their number before a
    // write; what stands in for documents and statistics is not touched.
    unsafe {
        decode_mma_kernel::launch_unchecked(
            client,
            launch::grid(client, work.cubes(s)),
            CubeDim::new_1d(32 * WARPS as u32),
            address,
            CHUNK,
            1,
            heads(&p.q, CHUNK),
            heads(&p.k, CHUNK),
            heads(&p.v, CHUNK),
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
