//! The numbers of the rows of a block of queries on their way to shared memory.

use super::places::{key_tile, tiles_of};
use super::plan::{Gradient, KEYS, STAGES};
use super::rings::{Rings, Tiles};
use crate::attention::cuda::wgmma::places::{NONE, Places, limits};
use crate::tile::cuda::pipeline::PipelineState;
use cubecl::prelude::*;

/// What is known of a block: that some of its queries do not see some of the tile's keys, that dQ is complete with
/// this tile, and that other tiles were before it.
pub(super) const MASKED: u32 = 1;
pub(super) const COMPLETE: u32 = 2;
pub(super) const OTHERS: u32 = 4;

/// Loads the numbers of all blocks of this cube's tiles; for the units of a warp.
#[cube]
pub(super) fn load_numbers(
    shared: &mut Shared<[u32]>,
    rings: &Rings,
    lse: &[f32],
    delta: &[f32],
    documents: &[u32],
    places: &Places,
    #[comptime] gradient: Gradient,
) {
    let (rows, size) = comptime!((gradient.queries(), gradient.queries() as usize));
    let lane = UNIT_POS % 32;
    let mut at = PipelineState::start();
    let mut tiles = Tiles::start(&*shared, rings, gradient);
    while tiles.number != NONE {
        let tile = key_tile(tiles.number, places);
        let key = tile.index * KEYS;
        let first_head = (tile.batch * places.heads + tile.head) * places.group;
        let heads = select(tiles.end > tiles.begin, places.group, 0u32);
        for g in 0..heads {
            let head = (first_head + g) as usize * places.queries as usize;
            for block in tiles.begin..tiles.end {
                let stage = at.stage * comptime!(gradient.stage_bytes() / 4);
                let word = (stage + comptime!(gradient.rows_at() / 4)) as usize;
                let first = block * rows;
                rings.q.vacant(at.stage, at.phase);
                #[unroll]
                for i in 0..comptime!(rows / 32) {
                    let row = lane + comptime!(32 * i);
                    let t = first + row;
                    let here = word + row as usize;
                    let mut of_row = f32::new(f32::INFINITY);
                    let mut of_delta = f32::new(0.0);
                    if t < places.queries {
                        of_row = lse[head + t as usize];
                        of_delta = delta[head + t as usize];
                    }
                    let (low, high) = limits(t, documents, places, gradient.limited);
                    shared[here] = u32::reinterpret(of_row);
                    shared[here + size] = u32::reinterpret(of_delta);
                    shared[here + comptime!(2 * size)] = low;
                    shared[here + comptime!(3 * size)] = high;
                }
                let known = known(block, tile.index, key, documents, places, gradient);
                if lane == 0u32 {
                    shared[word + comptime!(4 * size)] = known;
                }
                sync_plane();
                if lane == 0u32 {
                    rings.q.arrive(at.stage);
                }
                at.advance(STAGES);
            }
        }
        tiles.next(&*shared, rings, gradient);
    }
}

/// What is known of block `block` with the tile whose first key is `key`.
#[cube]
fn known(
    block: u32,
    index: u32,
    key: u32,
    documents: &[u32],
    places: &Places,
    #[comptime] gradient: Gradient,
) -> u32 {
    let first = block * gradient.queries();
    let last = min(first + gradient.queries(), places.queries) - 1;
    let (_low, high) = limits(first, documents, places, gradient.limited);
    let (low, _high) = limits(last, documents, places, gradient.limited);
    let (first_tile, last_tile) = tiles_of(block, documents, places, gradient);
    let masked = select(low > key || high < key + KEYS, MASKED, 0u32);
    let complete = select(index == first_tile, COMPLETE, 0u32);
    let others = select(index < last_tile, OTHERS, 0u32);
    masked | complete | others
}
