//! The backward, after FlashAttention-3's: one kernel of five products, whose bits repeat.

mod block;
mod consumer;
mod kernel;
mod places;
mod plan;
mod rings;
mod rows;
mod turns;
mod weights;

use super::places::PlacesLaunch;
use super::plan::Limited;
use super::{maps, places as forward_places, takes};
use crate::attention::OP;
use crate::attention::problem::{Backward, HeadsView, Problem};
use crate::launch;
use crate::tile::cuda::ptx::Float16;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use cubecl::prelude::*;
use kernel::attention_wgmma_backward_kernel;
use places::GradientPlacesLaunch;
use plan::{Gradient, KEYS, SUMS, TICKETS};

/// Bytes of sums of dQ that are kept at a time, where fewer heads do.
const KEPT: usize = 96 << 20;

/// Whether the backward of this family takes it, of those problems that the family takes.
pub(crate) fn takes_backward(problem: &Problem, with: &Backward<'_>) -> bool {
    let sizes = &problem.sizes;
    let views = [with.dy, with.dq, with.dk, with.dv];
    takes(problem)
        && sizes.width <= 128
        && maps::takes(with.dy, sizes, [sizes.heads, sizes.queries])
        && views.into_iter().all(|view| view.aligned(sizes.width))
}

/// How the tiles of keys of a launch are handed out.
struct Order {
    cubes: usize,
    tiles: usize,
    blocks: usize,
    /// KV heads that are made side by side, and query heads of which sums are kept.
    section: usize,
    slots: usize,
}

impl Order {
    fn of(p: &Problem, gradient: &Gradient) -> Self {
        let sizes = &p.sizes;
        let tiles = sizes.keys.div_ceil(KEYS as usize);
        let blocks = sizes.queries.div_ceil(gradient.queries() as usize);
        let kv_heads = sizes.batches * sizes.kv_heads;
        let group = sizes.heads / sizes.kv_heads;
        let cubes = (kv_heads * tiles).min(launch::multiprocessors(&p.q.tensor.client));
        // Under a causal mask each tile begins later than the one that it follows. Else the tiles of a head begin
        // one block after another, and other heads are between them.
        let section = if p.mask.causal { 1 } else { cubes.div_ceil(group * blocks).min(kv_heads) };
        // A head waits for the one before in its slot, of tiles that were handed out before: of another section. From
        // its first tile to the end of its last one as many heads are begun as there are multiprocessors for each of
        // its tiles; under a causal mask twice as many, as its tiles have half of the blocks, and the last one all.
        let least = section * group;
        let begun = if p.mask.causal { 2 * cubes } else { cubes };
        let wanted = (begun / (tiles * section) + 2) * least;
        let kept = KEPT / (blocks * SUMS as usize);
        let slots = wanted.min(kept).max(least).min(kv_heads * group);
        Self { cubes, tiles, blocks, section, slots }
    }
}

/// Writes dq, dk, dv, all of every row. Bits repeat.
pub(crate) fn backward(problem: &Problem, with: &Backward<'_>) {
    let p = problem;
    let (client, sizes) = (&p.q.tensor.client, &p.sizes);
    let dtype = p.q.tensor.dtype;
    let gradient = Gradient {
        float: Float16::of(dtype),
        width: sizes.width,
        limited: Limited::of(p),
        softcap: p.softcap.is_some(),
    };
    if sizes.batches * sizes.kv_heads * sizes.queries == 0 {
        return;
    }
    let order = Order::of(p, &gradient);
    let total = order.tiles * sizes.kv_heads * sizes.batches;
    let documents = p.documents.clone().unwrap_or_else(|| launch::unused(&p.q.tensor, DType::U32));
    let address = launch::address_type(&[with.lse, with.delta, &documents]);
    let ways = [
        ("several tiles a cube", total > order.cubes),
        ("several heads a slot", sizes.batches * sizes.heads > order.slots),
        ("heads that share keys", sizes.heads > sizes.kv_heads),
        ("ragged queries", !sizes.queries.is_multiple_of(gradient.queries() as usize)),
        ("ragged keys", !sizes.keys.is_multiple_of(KEYS as usize)),
        ("more queries than keys", sizes.queries > sizes.keys),
    ];
    launch::plans::note("attention.grad on wgmma", &(&gradient, address), &ways);
    let kept = order.slots * order.blocks;
    let shape = Shape::new([kept * SUMS as usize / 4]);
    let sums = launch::scratch(&p.q.tensor, OP, "sums of dq", shape, DType::F32);
    let counters = launch::zeros(&p.q.tensor, Shape::new([TICKETS as usize + kept]), DType::U32);
    let queries =
        |view: &HeadsView, rows| maps::map(view, sizes, [sizes.heads, sizes.queries], rows);
    let keys = |view: &HeadsView, rows| maps::map(view, sizes, [sizes.kv_heads, sizes.keys], rows);
    // SAFETY: TMA keeps to the shapes of its maps; lse, delta and documents are accessed at rows of queries only,
    // sums and counters at slots.
    unsafe {
        attention_wgmma_backward_kernel::launch_unchecked(
            client,
            launch::grid(client, order.cubes),
            CubeDim::new_1d(gradient.units()),
            address,
            queries(&p.q, gradient.queries()),
            keys(&p.k, KEYS),
            keys(&p.v, KEYS),
            queries(with.dy, gradient.queries()),
            queries(with.dq, 64),
            keys(with.dk, 64),
            keys(with.dv, 64),
            with.lse.clone().into_buffer_arg(),
            with.delta.clone().into_buffer_arg(),
            documents.into_buffer_arg(),
            sums.into_buffer_arg(),
            counters.into_buffer_arg(),
            places(p, with, &order, total),
            more(p, with, &order),
            gradient,
            dtype_to_elem_type(dtype),
        );
    }
}

fn places(p: &Problem, with: &Backward<'_>, order: &Order, total: usize) -> PlacesLaunch {
    let sizes = &p.sizes;
    let (scale, cap) = forward_places::factors(p);
    PlacesLaunch::new(
        total as u32,
        order.tiles as u32,
        order.section as u32,
        (sizes.batches * sizes.kv_heads) as u32,
        sizes.kv_heads as u32,
        (sizes.heads / sizes.kv_heads) as u32,
        sizes.queries as u32,
        sizes.keys as u32,
        forward_places::window(p),
        0,
        p.q.first as u32,
        p.k.first as u32,
        p.v.first as u32,
        with.dy.first as u32,
        scale,
        cap,
    )
}

fn more(p: &Problem, with: &Backward<'_>, order: &Order) -> GradientPlacesLaunch {
    GradientPlacesLaunch::new(
        order.blocks as u32,
        order.slots as u32,
        with.dq.first as u32,
        with.dk.first as u32,
        with.dv.first as u32,
        p.scale,
    )
}
