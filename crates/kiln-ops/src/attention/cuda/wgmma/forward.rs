//! The forward kernel: who does what, and the warp that loads.
//!
//! As many cubes as multiprocessors take tiles of queries of one head as they get done with others, the longest of a
//! few heads first. A warp loads: the tile's queries, then blocks of keys and of values into a ring each, from the
//! last block to the first, and runs ahead into the next tile. It says which tile that is beside the queries.
//! Two or three warpgroups, which take over its registers, multiply 64 queries each.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::block::Rings;
use super::consumer::consume;
use super::places::{NONE, Places, QueryTile, blocks, query_tile};
use super::plan::Forward;
use crate::tile::cuda::pipeline::{PipelineState, Ring, barrier_bytes, rings_ready};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn attention_wgmma_kernel<E: Float>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    o: &TensorMap<E, Tiled>,
    lse: &mut [f32],
    documents: &[u32],
    tickets: &mut [Atomic<u32>],
    places: Places,
    #[comptime] forward: Forward,
    #[define(E)] _dtype: ElemType,
) {
    let words = comptime!(forward.bytes() / 4);
    let mut shared = Shared::<[u32]>::new_aligned_slice(words, 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let groups = comptime!(forward.tile.groups as u32);
    let rings = rings(base, forward);
    rings_ready();
    // The same in all lanes, and known to be, so that descriptors stay in uniform registers.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp >= comptime!(4 * groups) {
        registers_decrease(comptime!(forward.registers()[1]));
        let lane = UNIT_POS % 32;
        if warp == comptime!(4 * groups) && lane == 0 {
            let maps = Maps {
                q: tensor_map_address(q),
                k: tensor_map_address(k),
                v: tensor_map_address(v),
            };
            produce(&mut shared, base, &maps, &rings, documents, tickets, &places, forward);
        }
    } else {
        registers_increase(comptime!(forward.registers()[0]));
        let out = tensor_map_address(o);
        consume(&shared, base, warp, &rings, out, lse, documents, &places, forward);
    }
}

/// The rings of a cube, whose shared memory begins at `base`.
#[cube]
pub(super) fn rings(base: u32, #[comptime] forward: Forward) -> Rings {
    let stages = comptime!(forward.tile.stages as u32);
    let groups = comptime!(forward.tile.groups as u32);
    let barriers = base + comptime!(forward.barriers_at());
    let of_ring = comptime!(barrier_bytes(forward.tile.stages) as u32);
    Rings {
        q: Ring::new(barriers, 1u32, 1u32, groups),
        k: Ring::new(barriers + 16, stages, 1u32, groups),
        v: Ring::new(barriers + 16 + of_ring, stages, 1u32, groups),
    }
}

/// The operands as TMA reads them.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Maps {
    pub(super) q: u64,
    pub(super) k: u64,
    pub(super) v: u64,
}

/// Loads the rows from `row` on of a head, all chunks of its width, `rows` each. What nobody else reads is to leave the
/// cache first: `once`.
#[cube]
pub(super) fn load_rows(
    dst: u32,
    map: u64,
    bar: u32,
    row: u32,
    head: u32,
    batch: u32,
    #[comptime] once: bool,
    #[comptime] rows: u32,
    #[comptime] chunks: u32,
) {
    #[unroll]
    for c in 0..chunks {
        let x = comptime!(c * 64).runtime();
        let (dst, at) = (dst + comptime!(c * rows * 128), (x, row, head, batch));
        if comptime!(once) {
            tma_load_rank4_once(dst, map, bar, at);
        } else {
            tma_load_rank4(dst, map, bar, at);
        }
    }
}

/// Loads what all tiles of this cube need; for one unit.
#[cube]
pub(super) fn produce(
    shared: &mut Shared<[u32]>,
    base: u32,
    maps: &Maps,
    rings: &Rings,
    documents: &[u32],
    tickets: &mut [Atomic<u32>],
    places: &Places,
    #[comptime] forward: Forward,
) {
    let stages = comptime!(forward.tile.stages as u32);
    let q_bytes = comptime!(forward.q_bytes());
    let (rows, keys, chunks) = comptime!((forward.rows(), forward.keys(), forward.chunks()));
    let k_base = base + comptime!(forward.k_at());
    let v_base = base + comptime!(forward.v_at());
    let word = comptime!(forward.number_at() as usize / 4);
    let mut q_at = PipelineState::start();
    let mut k_at = PipelineState::start();
    let mut v_at = PipelineState::start();
    let mut number = CUBE_POS_X + 0;
    while number < places.total {
        // Known by the time that this tile has been loaded.
        let next = tickets[0].fetch_add(1u32) + CUBE_COUNT_X;
        let tile = query_tile(number, places, rows);
        let last = min(tile.first + rows, places.queries) - 1;
        let seen = blocks(tile.first, last, documents, places, keys, forward.limited);
        let kv_head = tile.kv_head + places.k_first;
        let mut block = seen.end * 1u32;
        if seen.end > seen.begin {
            load_block(k_base, maps.k, &rings.k, &k_at, seen.end - 1, kv_head, &tile, forward);
            k_at.advance(stages);
        }
        rings.q.vacant(0u32, q_at.phase);
        shared[word] = number * 1u32;
        let bar = rings.q.expect(0u32, q_bytes);
        // All parts have the same queries.
        let row = if comptime!(forward.limited.parts) { 0u32.runtime() } else { tile.first };
        load_rows(
            base,
            maps.q,
            bar,
            row,
            tile.head + places.q_first,
            tile.batch,
            false,
            rows,
            chunks,
        );
        q_at.advance(1u32);
        // The keys of a block are needed before the values of the block after it.
        let v_head = tile.kv_head + places.v_first;
        while block > seen.begin {
            block -= 1;
            if block > seen.begin {
                load_block(k_base, maps.k, &rings.k, &k_at, block - 1, kv_head, &tile, forward);
                k_at.advance(stages);
            }
            load_block(v_base, maps.v, &rings.v, &v_at, block + 0, v_head, &tile, forward);
            v_at.advance(stages);
        }
        number = next;
    }
    rings.q.vacant(0u32, q_at.phase);
    shared[word] = NONE;
    rings.q.arrive(0u32);
    return_tickets(tickets);
}

/// Loads a block of the keys of a head, or of their values.
#[cube]
fn load_block(
    ring_base: u32,
    map: u64,
    ring: &Ring,
    at: &PipelineState,
    block: u32,
    head: u32,
    tile: &QueryTile,
    #[comptime] forward: Forward,
) {
    let bytes = comptime!(forward.kv_bytes());
    let (keys, chunks) = comptime!((forward.keys(), forward.chunks()));
    let bar = ring.acquire(at.stage, at.phase, bytes);
    let dst = ring_base + at.stage * bytes;
    let once = comptime!(forward.limited.parts);
    load_rows(dst, map, bar, block * keys, head, tile.batch, once, keys, chunks);
}

/// Says that this cube takes no more; the last one makes the counters ready for the next launch.
#[cube]
fn return_tickets(tickets: &mut [Atomic<u32>]) {
    // Whoever finds the others done finds what they took.
    gpu_asm!("fence.acq_rel.gpu;");
    let done = tickets[1].fetch_add(1u32) + 1;
    gpu_asm!("fence.acq_rel.gpu;");
    if done == CUBE_COUNT_X {
        tickets[0].store(0u32);
        tickets[1].store(0u32);
    }
}
