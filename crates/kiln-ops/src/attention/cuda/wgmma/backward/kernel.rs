//! The backward kernel: who does what, and the warps that load.
//!
//! As many cubes as multiprocessors take tiles of keys of one head as they get done with others. A tile goes through
//! the blocks of queries that see it. One warp loads the tile's keys and values, which stay, and Q and dO of the
//! blocks, a ring each; one the numbers of their rows; one stores. Two warpgroups, which take over their registers,
//! multiply 64 keys each.

// A product is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::consumer::consume;
use super::places::{GradientPlaces, KeyTile, blocks_of, key_tile};
use super::plan::{Gradient, KEYS, STAGES, TICKETS};
use super::rings::Rings;
use super::rows::load_numbers;
use super::turns::{Stores, take_turns};
use crate::attention::cuda::wgmma::forward::load_rows;
use crate::attention::cuda::wgmma::places::{NONE, Places};
use crate::tile::cuda::pipeline::{PipelineState, rings_ready};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn attention_wgmma_backward_kernel<E: Float>(
    q: &TensorMap<E, Tiled>,
    k: &TensorMap<E, Tiled>,
    v: &TensorMap<E, Tiled>,
    dy: &TensorMap<E, Tiled>,
    dq: &TensorMap<E, Tiled>,
    dk: &TensorMap<E, Tiled>,
    dv: &TensorMap<E, Tiled>,
    lse: &[f32],
    delta: &[f32],
    documents: &[u32],
    sums: &mut [f32],
    counters: &mut [Atomic<u32>],
    places: Places,
    more: GradientPlaces,
    #[comptime] gradient: Gradient,
    #[define(E)] _dtype: ElemType,
) {
    sums_declare(gradient.dk());
    sums_declare(gradient.dv());
    let words = comptime!(gradient.bytes() / 4);
    let mut shared = Shared::<[u32]>::new_aligned_slice(words, 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let rings = Rings::new(base + comptime!(gradient.barriers_at()));
    rings_ready();
    // The same in all lanes, and known to be, so that descriptors stay in uniform registers.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp >= 8u32 {
        registers_decrease(comptime!(gradient.registers()[1]));
        let lane = UNIT_POS % 32;
        if warp == 8u32 && lane == 0u32 {
            let maps = Loaded {
                q: tensor_map_address(q),
                k: tensor_map_address(k),
                v: tensor_map_address(v),
                dy: tensor_map_address(dy),
            };
            produce(
                &mut shared,
                base,
                &maps,
                &rings,
                documents,
                counters,
                &places,
                &more,
                gradient,
            );
        }
        if warp == 9u32 {
            load_numbers(&mut shared, &rings, lse, delta, documents, &places, gradient);
        }
        if warp == 10u32 {
            let stored = Stores {
                dq: tensor_map_address(dq),
                dk: tensor_map_address(dk),
                dv: tensor_map_address(dv),
                sums: global_address::<f32>(sums.as_ptr()),
                turns: global_address::<Atomic<u32>>(counters.as_ptr())
                    + comptime!(4 * TICKETS as u64),
            };
            take_turns(&shared, base, &stored, &rings, documents, &places, &more, gradient);
        }
    } else {
        registers_increase(comptime!(gradient.registers()[0]));
        consume(&shared, base, warp, &rings, &places, more.scale, gradient);
    }
}

/// The operands as TMA reads them.
#[derive(CubeType, Clone, Copy)]
struct Loaded {
    q: u64,
    k: u64,
    v: u64,
    dy: u64,
}

/// Loads what all tiles of this cube need; for one unit. It takes a tile no sooner than it has loaded the one before:
/// others wait for those that are taken.
#[cube]
fn produce(
    shared: &mut Shared<[u32]>,
    base: u32,
    maps: &Loaded,
    rings: &Rings,
    documents: &[u32],
    counters: &mut [Atomic<u32>],
    places: &Places,
    more: &GradientPlaces,
    #[comptime] gradient: Gradient,
) {
    let bytes = comptime!(gradient.q_bytes());
    let (rows, chunks) = comptime!((gradient.queries(), gradient.chunks()));
    let q_base = base + comptime!(gradient.q_at());
    let dy_base = base + comptime!(gradient.dy_at());
    let mut tile_at = PipelineState::start();
    let mut kv_at = PipelineState::start();
    let mut at = PipelineState::start();
    let mut number = counters[0].fetch_add(1u32);
    while number < places.total {
        let tile = key_tile(number, places);
        let (begin, end) = blocks_of(tile.index, documents, places, more, gradient);
        announce(shared, rings, &tile_at, number + 0, begin, end, gradient);
        tile_at.advance(STAGES);
        let first_head = tile.head * places.group;
        let heads = select(end > begin, places.group, 0u32);
        for g in 0..heads {
            let head = first_head + g;
            for block in begin..end {
                let row = block * rows;
                let bar = rings.q.acquire(at.stage, at.phase, bytes);
                let to = q_base + at.stage * bytes;
                load_rows(
                    to,
                    maps.q,
                    bar,
                    row,
                    head + places.q_first,
                    tile.batch,
                    false,
                    rows,
                    chunks,
                );
                if g == 0u32 && block == begin {
                    load_tile(base, maps, rings, &kv_at, &tile, places, gradient);
                    kv_at.advance(1u32);
                }
                let bar = rings.dy.acquire(at.stage, at.phase, bytes);
                let to = dy_base + at.stage * bytes;
                load_rows(
                    to,
                    maps.dy,
                    bar,
                    row,
                    head + places.o_first,
                    tile.batch,
                    false,
                    rows,
                    chunks,
                );
                at.advance(STAGES);
            }
        }
        number = counters[0].fetch_add(1u32);
    }
    announce(shared, rings, &tile_at, comptime!(NONE).runtime(), 0u32, 0u32, gradient);
}

/// Says which tile is next.
#[cube]
fn announce(
    shared: &mut Shared<[u32]>,
    rings: &Rings,
    at: &PipelineState,
    number: u32,
    begin: u32,
    end: u32,
    #[comptime] gradient: Gradient,
) {
    rings.tile.vacant(at.stage, at.phase);
    let word = (at.stage * 4 + comptime!(gradient.tile_at() / 4)) as usize;
    shared[word] = number;
    shared[word + 1] = begin;
    shared[word + 2] = end;
    rings.tile.arrive(at.stage);
}

/// Loads the keys of a tile and their values.
#[cube]
fn load_tile(
    base: u32,
    maps: &Loaded,
    rings: &Rings,
    at: &PipelineState,
    tile: &KeyTile,
    places: &Places,
    #[comptime] gradient: Gradient,
) {
    let bytes = comptime!(gradient.kv_bytes());
    let chunks = comptime!(gradient.chunks());
    let row = tile.index * KEYS;
    let bar = rings.k.acquire(0u32, at.phase, bytes);
    let head = tile.head + places.k_first;
    load_rows(base, maps.k, bar, row, head, tile.batch, false, KEYS, chunks);
    let bar = rings.v.acquire(0u32, at.phase, bytes);
    let head = tile.head + places.v_first;
    let to = base + comptime!(gradient.v_at());
    load_rows(to, maps.v, bar, row, head, tile.batch, false, KEYS, chunks);
}
