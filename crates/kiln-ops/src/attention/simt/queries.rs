//! dq: a cube for a tile of queries of a head, which walks over the keys that they see.

use super::block::{Heads, Numbers, Rules, accumulate, gradient, probability, score};
use super::block::{scores, seen, store};
use super::tile::Tile;
use crate::tile::simt::place;
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn queries_kernel<E: Float, N: Size, M: Size>(
    q: &Heads<E, N>,
    k: &Heads<E, N>,
    v: &Heads<E, N>,
    dy: &Heads<E, N>,
    lse: &[f32],
    delta: &[f32],
    documents: &[u32],
    dq: &mut Heads<E, M>,
    of: Numbers,
    #[comptime] tile: Tile,
    #[comptime] rules: Rules,
    #[define(E)] _dtype: ElemType,
) {
    let (across, down) = comptime!((tile.across(), tile.down()));
    let mut left = Shared::<[f32]>::new_aligned_slice(comptime!(tile.depth * tile.own), 16usize);
    let mut right = Shared::<[f32]>::new_aligned_slice(comptime!(tile.right()), 16usize);
    let mut held = Shared::<[f32]>::new_aligned_slice(comptime!(tile.own * tile.other), 16usize);

    // Cubes past the end make the last tile again and write nothing: all units meet the barriers.
    let tiles = of.queries.div_ceil(tile.own);
    let jobs = tiles * of.heads * of.batches;
    let job = min(CUBE_POS, jobs - 1);
    let (which, stack) = (job % tiles, job / tiles);
    let (head, batch) = (stack % of.heads, stack / of.heads);
    // The long rows first.
    let row0 = (tiles - 1 - which) * tile.own;
    let kv_head = head / (of.heads / of.kv_heads);
    let (q_head, dy_head) = (q.head(batch, head), dy.head(batch, head));
    let (k_head, v_head) = (k.head(batch, kv_head), v.head(batch, kv_head));

    let (ty, tx) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    let columns = comptime!(tile.columns());
    let mut sums = Array::<f32>::new(comptime!(tile.unit_own * columns));
    #[unroll]
    for i in 0..comptime!(tile.unit_own * columns) {
        sums[i] = 0.0f32;
    }
    let mut row_lse = Array::<f32>::new(tile.unit_own);
    let mut row_delta = Array::<f32>::new(tile.unit_own);
    let mut scales = Array::<f32>::new(tile.unit_own);
    #[unroll]
    for i in 0..tile.unit_own {
        let row = min(row0 + place(ty, i, down), of.queries - 1);
        row_lse[i] = lse[stack * of.queries + row];
        row_delta[i] = delta[stack * of.queries + row];
        scales[i] = of.scale;
    }
    let first = seen(row0, &of, documents, rules);
    let last = seen(row0 + comptime!(tile.own - 1), &of, documents, rules);
    for key0 in range_stepped(first.start, last.end, tile.other) {
        let mut s = Array::<f32>::new(comptime!(tile.unit_own * tile.unit_other));
        let mut dp = Array::<f32>::new(comptime!(tile.unit_own * tile.unit_other));
        scores::<E, N>(
            q, q_head, row0, of.queries, k, k_head, key0, last.end, of.width, &mut left,
            &mut right, &mut s, tile,
        );
        scores::<E, N>(
            dy, dy_head, row0, of.queries, v, v_head, key0, last.end, of.width, &mut left,
            &mut right, &mut dp, tile,
        );
        // Whether all rows see all keys of the block.
        let whole = key0 >= last.start && key0 + tile.other <= first.end;
        #[unroll]
        for i in 0..tile.unit_own {
            let at = place(ty, i, down);
            let span = seen(row0 + at, &of, documents, rules);
            #[unroll]
            for j in 0..tile.unit_other {
                let key = key0 + place(tx, j, across);
                let visible = whole || (key >= span.start && key < span.end);
                let sum = s[comptime!(i * tile.unit_other + j)];
                let p = probability(score(sum, &of, rules), row_lse[i], visible, rules);
                let dp = dp[comptime!(i * tile.unit_other + j)];
                let ds = gradient(sum, p, dp, row_delta[i], &of, rules);
                held[place(tx, j, across) * tile.own + at] = ds;
            }
        }
        accumulate::<E, N>(&held, k, k_head, key0, last.end, of.width, &mut right, &mut sums, tile);
    }
    if CUBE_POS < jobs {
        let dq_head = dq.head(batch, head);
        store::<E, M>(&sums, &scales, dq, dq_head, row0, of.queries, of.width, tile);
    }
}
