//! What a warpgroup does: the attention of 64 queries of a tile, block by block, and its way out.
//!
//! The scores of a block are multiplied while those of the block before become weights: of each step the products
//! of the queries with the next keys are issued first, behind them those of the weights with their values, and the
//! softmax of the former is under the latter. Where warpgroups take turns, each issues both products at once and lets
//! the next one go on: the softmax of one is under the products of the others.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::block::{Reading, Rings, TURNS, Warpgroup, begin_block, end_block, pass, step};
use super::output::{store, write_lse};
use super::places::{Blocks, NONE, Places, QueryTile, blocks, query_tile};
use super::plan::Forward;
use super::softmax::{RowPair, begin, inverses, sight};
use crate::tile::cuda::fragment::{origin, row_sum, scale_rows};
use crate::tile::cuda::pipeline::PipelineState;
use crate::tile::cuda::ptx::*;
use crate::tile::cuda::store::{Stored, chunk_addresses};
use cubecl::prelude::*;

/// Makes 64 rows of all tiles of this cube; for the units of a warpgroup.
#[cube]
pub(super) fn consume(
    shared: &Shared<[u32]>,
    base: u32,
    warp: u32,
    rings: &Rings,
    out_map: u64,
    lse: &mut [f32],
    documents: &[u32],
    places: &Places,
    #[comptime] forward: Forward,
) {
    let size!(Scores) = comptime!(forward.scores().op.held());
    let size!(Weights) = comptime!(forward.weights_held());
    let size!(Out) = comptime!(forward.values().op.held());
    let me = warpgroup(base, warp / 4, forward);
    let chunk_at = chunk_addresses(me.staging, me.unit, comptime!(Stored::Float16(forward.float)));
    let word = comptime!(forward.number_at() as usize / 4);
    let rows = comptime!(forward.rows());
    if comptime!(forward.tile.turns) && me.number == 0u32 {
        arrive_units(comptime!(TURNS).runtime(), 256u32);
    }

    let mut reading = Reading { k: PipelineState::start(), v: PipelineState::start() };
    let mut q_phase = 0u32;
    rings.q.wait(0u32, q_phase);
    let mut at = shared[word];
    while at != NONE {
        let tile = query_tile(at, places, rows);
        let last = min(tile.first + rows, places.queries) - 1;
        let all = blocks(tile.first, last, documents, places, forward.keys(), forward.limited);
        let mut out = Array::<Vector<f32, Out>>::new(1usize);
        let mut stats = Array::<RowPair>::new(2usize);
        out[0] = Vector::new(0.0f32);
        begin(&mut stats);
        attend::<Scores, Weights, Out>(
            &me,
            rings,
            &mut reading,
            &mut out,
            &mut stats,
            &tile,
            &all,
            documents,
            places,
            forward,
        );
        let sums = row_sum(stats[1]);
        if comptime!(forward.lse) {
            write_lse(lse, &me, &tile, stats[0], sums, places);
        }
        out[0] = scale_rows::<Out>(out[0], inverses(sums));
        store::<Out>(out[0], &me, rings, &chunk_at, out_map, &tile, places, forward);
        q_phase ^= 1;
        rings.q.wait(0u32, q_phase);
        at = shared[word];
    }
    if me.unit == 0u32 {
        tma_store_wait();
    }
}

/// A unit's warpgroup, of a cube whose shared memory begins at `base`.
#[cube]
pub(super) fn warpgroup(base: u32, number: u32, #[comptime] forward: Forward) -> Warpgroup {
    let own = comptime!(if forward.tile.staged { forward.chunks() * 8192 } else { 8192 });
    Warpgroup {
        number,
        unit: UNIT_POS % 128,
        q: descriptor(base + number * 8192, 1u32),
        k: descriptor(base + comptime!(forward.k_at()), 1u32),
        // Chunks of 64 columns follow each other at all keys of a block.
        v: descriptor(base + comptime!(forward.v_at()), comptime!(forward.keys() * 8)),
        staging: base + comptime!(forward.out_at()) + number * own,
    }
}

/// The weighted sums of the values for 64 queries, not yet divided. Releases the queries, unless the results are
/// staged there.
#[cube]
pub(super) fn attend<S: Size, W: Size, O: Size>(
    me: &Warpgroup,
    rings: &Rings,
    reading: &mut Reading,
    out: &mut Array<Vector<f32, O>>,
    stats: &mut Array<RowPair>,
    tile: &QueryTile,
    all: &Blocks,
    documents: &[u32],
    places: &Places,
    #[comptime] forward: Forward,
) {
    let first = tile.first + me.number * 64;
    let last = min(first + 64, places.queries) - 1;
    let (row, col) = origin(me.unit);
    let mine = blocks(first, last, documents, places, forward.keys(), forward.limited);
    // Rows behind the last query see nothing.
    let any = first < places.queries && mine.end > mine.begin;
    let mut block = all.end * 1u32;
    if any {
        while block > mine.end {
            block -= 1;
            pass(me, rings, reading, true, forward);
        }
        let sight = sight(first + row, col, documents, places, forward);
        let mut weights = Array::<Vector<u32, W>>::new(1usize);
        block -= 1;
        begin_block::<S, W>(
            me,
            rings,
            reading,
            &mut weights,
            stats,
            block + 0,
            &sight,
            places,
            forward,
        );
        // From the last block on: those that not all queries see to the end, those that they see whole, and
        // those that not all see from the beginning.
        let stop = max(mine.crossed, mine.begin);
        while block > stop {
            block -= 1;
            step::<S, W, O>(
                me,
                rings,
                reading,
                out,
                &mut weights,
                stats,
                block + 0,
                &sight,
                places,
                true,
                forward,
            );
        }
        let stop = if comptime!(forward.limited.below()) {
            max(mine.whole, mine.begin)
        } else {
            mine.begin
        };
        while block > stop {
            block -= 1;
            step::<S, W, O>(
                me,
                rings,
                reading,
                out,
                &mut weights,
                stats,
                block + 0,
                &sight,
                places,
                false,
                forward,
            );
        }
        if comptime!(forward.limited.below()) {
            while block > mine.begin {
                block -= 1;
                step::<S, W, O>(
                    me,
                    rings,
                    reading,
                    out,
                    &mut weights,
                    stats,
                    block + 0,
                    &sight,
                    places,
                    true,
                    forward,
                );
            }
        }
        if comptime!(forward.tile.staged) && me.unit == 0u32 {
            rings.q.release(0u32);
        }
        end_block::<W, O>(me, rings, reading, out, &weights, forward);
        if comptime!(forward.limited.below()) {
            while block > all.begin {
                block -= 1;
                pass(me, rings, reading, true, forward);
            }
        }
    } else {
        while block > all.begin {
            // As many turns as those that begin without one.
            pass(me, rings, reading, block != all.end, forward);
            block -= 1;
        }
        // All units have read the tile's number.
        sync_units(me.number + 1, 128u32);
        if comptime!(forward.tile.staged) && me.unit == 0u32 {
            rings.q.release(0u32);
        }
    }
}
