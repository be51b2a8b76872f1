//! The way out of 64 rows.

use super::block::{Rings, Warpgroup};
use super::places::{Places, QueryTile};
use super::plan::Forward;
use super::softmax::{RowPair, log_sum_exp};
use crate::tile::cuda::fragment::origin;
use crate::tile::cuda::ptx::*;
use crate::tile::cuda::store::{ChunkAddresses, Stored, store_parts};
use cubecl::prelude::*;

/// Writes the log-sum-exp of the rows of a unit; of the four that share rows the first.
#[cube]
pub(super) fn write_lse(
    lse: &mut [f32],
    me: &Warpgroup,
    tile: &QueryTile,
    shifts: RowPair,
    sums: RowPair,
    places: &Places,
) {
    let (row, col) = origin(me.unit);
    let row = tile.first + me.number * 64 + row;
    if col == 0u32 {
        #[unroll]
        for r in 0..2usize {
            let row = row + comptime!(8 * r as u32);
            if row < places.queries {
                let at = tile.number as usize * places.queries as usize + row as usize;
                lse[at] = log_sum_exp(shifts, sums, r);
            }
        }
    }
}

/// Stores 64 rows through shared memory and TMA. Rows behind the last query and columns behind the width are left
/// out there.
#[cube]
pub(super) fn store<O: Size>(
    out: Vector<f32, O>,
    me: &Warpgroup,
    rings: &Rings,
    chunk_at: &ChunkAddresses,
    map: u64,
    tile: &QueryTile,
    places: &Places,
    #[comptime] forward: Forward,
) {
    let staged = comptime!(forward.tile.staged);
    let chunks = comptime!(forward.chunks());
    let step = comptime!(if staged { 8192u32 } else { forward.rows() * 128 });
    // The results of the last tile have been read, or the queries of this one by all warps.
    if comptime!(staged) && me.unit == 0u32 {
        tma_store_read(0u32);
    }
    sync_units(me.number + 1, 128u32);
    #[unroll]
    for c in 0..chunks {
        let parts = comptime!((forward.width - 64 * c as usize).div_ceil(16).min(4));
        store_parts::<O>(
            out,
            chunk_at,
            comptime!(c * step),
            comptime!(c as usize),
            parts,
            comptime!(Stored::Float16(forward.float)),
            false,
        );
    }
    async_proxy_fence();
    sync_units(me.number + 1, 128u32);
    if me.unit == 0u32 {
        let row = tile.first + me.number * 64;
        let head = tile.head + places.o_first;
        #[unroll]
        for c in 0..chunks {
            let x = comptime!(c * 64).runtime();
            tma_store_rank4(map, me.staging + comptime!(c * step), (x, row, head, tile.batch));
        }
        tma_store_commit();
        if comptime!(!staged) {
            tma_store_read(0u32);
            rings.q.release(0u32);
        }
    }
}
