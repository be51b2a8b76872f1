//! dk and dv: a cube for a tile of keys of a head, which walks over the queries that see them, head by head of its
//! group, in order.

use super::block::{Heads, Numbers, Rules, accumulate, gradient, probability, score};
use super::block::{scores, seeing, seen, store};
use super::tile::Tile;
use crate::tile::simt::place;
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn keys_kernel<E: Float, N: Size, M: Size>(
    q: &Heads<E, N>,
    k: &Heads<E, N>,
    v: &Heads<E, N>,
    dy: &Heads<E, N>,
    lse: &[f32],
    delta: &[f32],
    documents: &[u32],
    dk: &mut Heads<E, M>,
    dv: &mut Heads<E, M>,
    of: Numbers,
    #[comptime] tile: Tile,
    #[comptime] rules: Rules,
    #[define(E)] _dtype: ElemType,
) {
    let (across, down) = comptime!((tile.across(), tile.down()));
    let mut left = Shared::<[f32]>::new_aligned_slice(comptime!(tile.depth * tile.own), 16usize);
    let mut right = Shared::<[f32]>::new_aligned_slice(comptime!(tile.right()), 16usize);
    let mut held = Shared::<[f32]>::new_aligned_slice(comptime!(tile.own * tile.other), 16usize);

    // Cubes past the end make the last tile again and write nothing: all units meet the barriers. The first
    // keys are those that most queries see.
    let tiles = of.keys.div_ceil(tile.own);
    let jobs = tiles * of.kv_heads * of.batches;
    let job = min(CUBE_POS, jobs - 1);
    let (which, stack) = (job % tiles, job / tiles);
    let (kv_head, batch) = (stack % of.kv_heads, stack / of.kv_heads);
    let key0 = which * tile.own;
    let end = min(key0 + tile.own, of.keys);
    let (k_head, v_head) = (k.head(batch, kv_head), v.head(batch, kv_head));

    let (ty, tx) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    let columns = comptime!(tile.columns());
    let mut dk_sums = Array::<f32>::new(comptime!(tile.unit_own * columns));
    let mut dv_sums = Array::<f32>::new(comptime!(tile.unit_own * columns));
    #[unroll]
    for i in 0..comptime!(tile.unit_own * columns) {
        dk_sums[i] = 0.0f32;
        dv_sums[i] = 0.0f32;
    }
    let group = of.heads / of.kv_heads;
    let rows = seeing(key0, end, &of, documents, rules);
    for member in 0..group {
        let head = kv_head * group + member;
        let (q_head, dy_head) = (q.head(batch, head), dy.head(batch, head));
        let statistics = (batch * of.heads + head) * of.queries;
        for row0 in range_stepped(rows.start, rows.end, tile.other) {
            let mut s = Array::<f32>::new(comptime!(tile.unit_own * tile.unit_other));
            let mut dp = Array::<f32>::new(comptime!(tile.unit_own * tile.unit_other));
            scores::<E, N>(
                k, k_head, key0, of.keys, q, q_head, row0, rows.end, of.width, &mut left,
                &mut right, &mut s, tile,
            );
            scores::<E, N>(
                v, v_head, key0, of.keys, dy, dy_head, row0, rows.end, of.width, &mut left,
                &mut right, &mut dp, tile,
            );
            descend(
                &s, &mut dp, &mut held, lse, delta, statistics, key0, row0, rows.end, &of,
                documents, tile, rules,
            );
            accumulate::<E, N>(
                &held,
                dy,
                dy_head,
                row0,
                rows.end,
                of.width,
                &mut right,
                &mut dv_sums,
                tile,
            );
            sync_cube();
            #[unroll]
            for j in 0..tile.unit_other {
                #[unroll]
                for i in 0..tile.unit_own {
                    let ds = dp[comptime!(i * tile.unit_other + j)];
                    held[place(tx, j, across) * tile.own + place(ty, i, down)] = ds;
                }
            }
            accumulate::<E, N>(
                &held,
                q,
                q_head,
                row0,
                rows.end,
                of.width,
                &mut right,
                &mut dk_sums,
                tile,
            );
        }
    }
    if CUBE_POS < jobs {
        let mut ones = Array::<f32>::new(tile.unit_own);
        let mut scales = Array::<f32>::new(tile.unit_own);
        #[unroll]
        for i in 0..tile.unit_own {
            ones[i] = 1.0f32;
            scales[i] = of.scale;
        }
        let dk_head = dk.head(batch, kv_head);
        let dv_head = dv.head(batch, kv_head);
        store::<E, M>(&dk_sums, &scales, dk, dk_head, key0, of.keys, of.width, tile);
        store::<E, M>(&dv_sums, &ones, dv, dv_head, key0, of.keys, of.width, tile);
    }
}

/// Lays down the probabilities of a block of queries and makes their gradients those of scores.
#[cube]
fn descend(
    s: &Array<f32>,
    dp: &mut Array<f32>,
    held: &mut [f32],
    lse: &[f32],
    delta: &[f32],
    statistics: usize,
    key0: usize,
    row0: usize,
    row_end: usize,
    of: &Numbers,
    documents: &[u32],
    #[comptime] tile: Tile,
    #[comptime] rules: Rules,
) {
    let (across, down) = comptime!((tile.across(), tile.down()));
    let (ty, tx) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    #[unroll]
    for j in 0..tile.unit_other {
        let row = row0 + place(tx, j, across);
        let inside = row < row_end;
        let span = seen(row, of, documents, rules);
        let at = statistics + min(row, of.queries - 1);
        let (row_lse, row_delta) = (lse[at], delta[at]);
        #[unroll]
        for i in 0..tile.unit_own {
            let key = key0 + place(ty, i, down);
            let visible = inside && key >= span.start && key < span.end;
            let sum = s[comptime!(i * tile.unit_other + j)];
            let p = probability(score(sum, of, rules), row_lse, visible, rules);
            let dp_at = dp[comptime!(i * tile.unit_other + j)];
            let ds = gradient(sum, p, dp_at, row_delta, of, rules);
            dp[comptime!(i * tile.unit_other + j)] = ds;
            held[place(tx, j, across) * tile.own + place(ty, i, down)] = p;
        }
    }
}
