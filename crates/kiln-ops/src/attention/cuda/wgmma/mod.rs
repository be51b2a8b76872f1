//! Attention on Hopper's tensor cores, after FlashAttention-3: wgmma fed by TMA.

mod backward;
mod block;
mod consumer;
mod forward;
mod maps;
mod meet;
mod output;
mod parts;
mod places;
mod plan;
mod softmax;
#[cfg(test)]
mod tests;

use super::super::problem::{HeadsView, Problem};
use crate::device::Hardware;
use crate::launch;
use crate::tile::cuda::ptx::Float16;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use forward::attention_wgmma_kernel;
use places::PlacesLaunch;
use plan::{ForwardTile, Limited};

pub(crate) use backward::{backward, takes_backward};
pub(crate) use parts::{Parts, attend_meeting, attend_parts, can_meet, plan as plan_of_parts};
pub(crate) use plan::Forward;

/// Bytes of keys and values that the cubes go through side by side: a part of the 50 MB of cache, where results and
/// queries pass too.
const CACHED: usize = 32 << 20;

/// Whether this family takes it: what [mma](super::mma) takes, on Hopper.
pub(crate) fn takes(problem: &Problem) -> bool {
    let s = &problem.sizes;
    let keys = [s.kv_heads, s.keys];
    Hardware::of(&problem.q.tensor.client).wgmma
        // The largest score is found before it is scaled.
        && problem.scale > 0.0
        && maps::takes(&problem.q, s, [s.heads, s.queries])
        && [&problem.k, &problem.v].into_iter().all(|view| maps::takes(view, s, keys))
        && super::mma::takes(problem)
}

/// Writes o; and lse if it is given.
pub(crate) fn forward(problem: &Problem, o: &HeadsView, lse: Option<&CubeTensor>) {
    let p = problem;
    let (client, sizes) = (&p.q.tensor.client, &p.sizes);
    let dtype = p.q.tensor.dtype;
    let forward = Forward {
        float: Float16::of(dtype),
        width: sizes.width,
        tile: ForwardTile::of(sizes.width, p.softcap.is_some()),
        limited: Limited::of(p),
        softcap: p.softcap.is_some(),
        lse: lse.is_some(),
    };
    let tiles = sizes.queries.div_ceil(forward.rows() as usize);
    let total = tiles * sizes.heads * sizes.batches;
    if total == 0 {
        return;
    }
    let cubes = total.min(launch::multiprocessors(client));
    let unused = |dtype| launch::unused(&p.q.tensor, dtype);
    let lse = lse.cloned().unwrap_or_else(|| unused(DType::F32));
    let documents = p.documents.clone().unwrap_or_else(|| unused(DType::U32));
    let address = launch::address_type(&[&lse, &documents]);
    let queries = [sizes.heads, sizes.queries];
    let keys = [sizes.kv_heads, sizes.keys];
    let ways = [
        ("several tiles a cube", total > cubes),
        ("heads that share keys", sizes.heads > sizes.kv_heads),
        ("ragged queries", !sizes.queries.is_multiple_of(forward.rows() as usize)),
        ("ragged keys", !sizes.keys.is_multiple_of(forward.tile.keys)),
        ("more queries than keys", sizes.queries > sizes.keys),
    ];
    launch::plans::note("attention on wgmma", &(&forward, address), &ways);
    // SAFETY: TMA keeps to the shapes of its maps, lse and documents are accessed at rows of queries only.
    unsafe {
        attention_wgmma_kernel::launch_unchecked(
            client,
            launch::grid(client, cubes),
            CubeDim::new_1d(forward.units()),
            address,
            maps::map(&p.q, sizes, queries, forward.rows()),
            maps::map(&p.k, sizes, keys, forward.keys()),
            maps::map(&p.v, sizes, keys, forward.keys()),
            maps::map(o, sizes, queries, 64),
            lse.into_buffer_arg(),
            documents.into_buffer_arg(),
            launch::kept::counters(client, "attention", 2),
            places(p, o, tiles, total),
            forward,
            dtype_to_elem_type(dtype),
        );
    }
}

fn places(p: &Problem, o: &HeadsView, tiles: usize, total: usize) -> PlacesLaunch {
    let sizes = &p.sizes;
    let group = sizes.heads / sizes.kv_heads;
    let kv_bytes = 4 * sizes.keys * sizes.width;
    let section = (CACHED / kv_bytes.max(1)).max(1) * group;
    let all_heads = sizes.batches * sizes.heads;
    let (scale, cap) = places::factors(p);
    PlacesLaunch::new(
        total as u32,
        tiles as u32,
        section.min(all_heads) as u32,
        all_heads as u32,
        sizes.heads as u32,
        group as u32,
        sizes.queries as u32,
        sizes.keys as u32,
        places::window(p),
        0,
        p.q.first as u32,
        p.k.first as u32,
        p.v.first as u32,
        o.first as u32,
        scale,
        cap,
    )
}
