//! The way out: sums of dQ in turns, and results.
//!
//! Of a block of queries the last tile of keys that it goes through writes its part of dQ to memory, as f32, those
//! before add theirs one after another, and the first one takes the sum and writes dQ. A counter for each block says
//! how many have had their turn. The sums of a head stand in one of a few slots: the next head in it has its turns
//! after all those of the one before.

use super::places::{GradientPlaces, KeyTile, key_tile, tiles_of};
use super::plan::{Gradient, KEYS, PART, SUMS};
use super::rings::{Rings, Tiles};
use crate::attention::cuda::wgmma::places::{NONE, Places};
use crate::tile::cuda::pipeline::PipelineState;
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// The results as TMA writes them, and where sums of dQ are kept and counted.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Stores {
    pub(super) dq: u64,
    pub(super) dk: u64,
    pub(super) dv: u64,
    pub(super) sums: u64,
    pub(super) turns: u64,
}

/// Stores what all tiles of this cube make; for the units of a warp, of which one does it.
#[cube]
pub(super) fn take_turns(
    shared: &Shared<[u32]>,
    base: u32,
    stores: &Stores,
    rings: &Rings,
    documents: &[u32],
    places: &Places,
    more: &GradientPlaces,
    #[comptime] gradient: Gradient,
) {
    let lane = UNIT_POS % 32;
    let one = lane == 0u32;
    let mut out = PipelineState::start();
    let mut others = PipelineState::start();
    let mut tiles = Tiles::start(shared, rings, gradient);
    while tiles.number != NONE {
        if one {
            let tile = key_tile(tiles.number, places);
            let first_head = tile.head * places.group;
            let heads = select(tiles.end > tiles.begin, places.group, 0u32);
            for g in 0..heads {
                for block in tiles.begin..tiles.end {
                    turn(
                        base,
                        stores,
                        rings,
                        &mut out,
                        &mut others,
                        &tile,
                        first_head + g,
                        block,
                        documents,
                        places,
                        more,
                        gradient,
                    );
                }
            }
            store_tile(base, stores, rings, &mut out, &tile, more, gradient);
        }
        sync_plane();
        tiles.next(shared, rings, gradient);
    }
    if one {
        tma_store_wait();
    }
}

/// This tile's turn at dQ of a block.
#[cube]
fn turn(
    base: u32,
    stores: &Stores,
    rings: &Rings,
    out: &mut PipelineState,
    others: &mut PipelineState,
    tile: &KeyTile,
    head: u32,
    block: u32,
    documents: &[u32],
    places: &Places,
    more: &GradientPlaces,
    #[comptime] gradient: Gradient,
) {
    let (first, last) = tiles_of(block, documents, places, gradient);
    let number = tile.batch * places.heads * places.group + head;
    let place = number % more.slots * more.blocks + block;
    let sums = stores.sums + u64::cast_from(place) * u64::cast_from(SUMS);
    let counter = stores.turns + u64::cast_from(place * 4);
    let before = number / more.slots * (last - first + 1) + (last - tile.index);
    let from = base + comptime!(gradient.out_at());
    counter_wait(counter, before);
    async_proxy_fence_global();
    if tile.index == first {
        if first < last {
            let bar = rings.others.acquire(0u32, others.phase, SUMS);
            bulk_load(base + comptime!(gradient.others_at()), sums, bar, SUMS);
            others.advance(1u32);
        }
        rings.out.wait(0u32, out.phase);
        store_queries(from, stores.dq, tile, head + more.dq_first, block, gradient);
        tma_store_commit();
        tma_store_read(0u32);
        rings.out.release(0u32);
        // The sums have been read, by those that made what was stored.
        counter_set(counter, before + 1);
    } else {
        rings.out.wait(0u32, out.phase);
        if tile.index == last {
            bulk_store(sums, from, SUMS);
        } else {
            bulk_add(sums, from, SUMS);
        }
        tma_store_commit();
        tma_store_read(0u32);
        rings.out.release(0u32);
        tma_store_wait();
        async_proxy_fence_global();
        counter_set(counter, before + 1);
    }
    out.advance(1u32);
}

/// Stores dQ of a block, of which each warpgroup has 64 rows and columns.
#[cube]
fn store_queries(
    from: u32,
    map: u64,
    tile: &KeyTile,
    head: u32,
    block: u32,
    #[comptime] gradient: Gradient,
) {
    let row = block * gradient.queries();
    #[unroll]
    for group in 0..2u32 {
        let at = from + comptime!(group * PART);
        if comptime!(gradient.chunks() == 1) {
            let row = row + comptime!(64 * group);
            tma_store_rank4(map, at, (0u32.runtime(), row, head, tile.batch));
        } else {
            let x = comptime!(64 * group).runtime();
            tma_store_rank4(map, at, (x, row, head, tile.batch));
        }
    }
}

/// Stores dV and dK of a tile.
#[cube]
fn store_tile(
    base: u32,
    stores: &Stores,
    rings: &Rings,
    out: &mut PipelineState,
    tile: &KeyTile,
    more: &GradientPlaces,
    #[comptime] gradient: Gradient,
) {
    rings.out.wait(0u32, out.phase);
    #[unroll]
    for group in 0..2u32 {
        let row = tile.index * KEYS + comptime!(64 * group);
        #[unroll]
        for c in 0..gradient.chunks() {
            let x = comptime!(64 * c).runtime();
            let at = base + comptime!(group * PART + c * 8192);
            let (dv, dk) = (at + gradient.out_at(), at + gradient.others_at());
            tma_store_rank4(stores.dv, dv, (x, row, tile.head + more.dv_first, tile.batch));
            tma_store_rank4(stores.dk, dk, (x, row, tile.head + more.dk_first, tile.batch));
        }
    }
    tma_store_commit();
    tma_store_read(0u32);
    rings.out.release(0u32);
    out.advance(1u32);
}
