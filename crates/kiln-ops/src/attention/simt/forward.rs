//! The forward: a cube for a tile of queries of a head, which walks over the keys that they see.

use super::block::{Heads, Numbers, Rules, accumulate, score, scores, seen, store};
use super::tile::Tile;
use crate::exponential::{factor, unit_of_shifts};
use crate::tile::simt::place;
use cubecl::prelude::*;

/// Scores are above; a row has seen nothing yet.
pub(in crate::attention) const LOWEST: f32 = -1e30;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn forward_kernel<E: Float, N: Size, M: Size>(
    q: &Heads<E, N>,
    k: &Heads<E, N>,
    v: &Heads<E, N>,
    documents: &[u32],
    o: &mut Heads<E, M>,
    lse: &mut [f32],
    of: Numbers,
    #[comptime] tile: Tile,
    #[comptime] rules: Rules,
    #[comptime] keep: bool,
    #[define(E)] _dtype: ElemType,
) {
    let (across, down) = comptime!((tile.across(), tile.down()));
    let mut left = Shared::<[f32]>::new_aligned_slice(comptime!(tile.depth * tile.own), 16usize);
    let mut right = Shared::<[f32]>::new_aligned_slice(comptime!(tile.right()), 16usize);
    let mut p = Shared::<[f32]>::new_aligned_slice(comptime!(tile.own * tile.other), 16usize);
    // One number of each own row from every unit that shares it.
    let mut parts = Shared::<[f32]>::new_aligned_slice(comptime!(tile.own * across), 16usize);

    // Cubes past the end make the last tile again and write nothing: all units meet the barriers.
    let tiles = of.queries.div_ceil(tile.own);
    let jobs = tiles * of.heads * of.batches;
    let job = min(CUBE_POS, jobs - 1);
    let (which, stack) = (job % tiles, job / tiles);
    let (head, batch) = (stack % of.heads, stack / of.heads);
    // The long rows first.
    let row0 = (tiles - 1 - which) * tile.own;
    let kv_head = head / (of.heads / of.kv_heads);
    let (q_head, k_head) = (q.head(batch, head), k.head(batch, kv_head));
    let v_head = v.head(batch, kv_head);

    let (ty, tx) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    let columns = comptime!(tile.columns());
    let mut sums = Array::<f32>::new(comptime!(tile.unit_own * columns));
    let mut largest = Array::<f32>::new(tile.unit_own);
    let mut total_p = Array::<f32>::new(tile.unit_own);
    #[unroll]
    for i in 0..comptime!(tile.unit_own * columns) {
        sums[i] = 0.0f32;
    }
    #[unroll]
    for i in 0..tile.unit_own {
        largest[i] = LOWEST;
        total_p[i] = 0.0f32;
    }
    let first = seen(row0, &of, documents, rules);
    let last = seen(row0 + comptime!(tile.own - 1), &of, documents, rules);
    for key0 in range_stepped(first.start, last.end, tile.other) {
        let mut s = Array::<f32>::new(comptime!(tile.unit_own * tile.unit_other));
        scores::<E, N>(
            q, q_head, row0, of.queries, k, k_head, key0, last.end, of.width, &mut left,
            &mut right, &mut s, tile,
        );
        // Whether all rows see all keys of the block.
        let whole = key0 >= last.start && key0 + tile.other <= first.end;
        find_largest(&mut s, &mut parts, whole, row0, key0, &of, documents, tile, rules);
        sync_cube();
        weigh(
            &s,
            &parts,
            &mut p,
            &mut largest,
            &mut total_p,
            &mut sums,
            whole,
            row0,
            key0,
            &of,
            documents,
            tile,
            rules,
        );
        accumulate::<E, N>(&p, v, v_head, key0, last.end, of.width, &mut right, &mut sums, tile);
    }

    sync_cube();
    #[unroll]
    for i in 0..tile.unit_own {
        parts[place(ty, i, down) * across + tx] = total_p[i];
    }
    sync_cube();
    let mut inverse = Array::<f32>::new(tile.unit_own);
    #[unroll]
    for i in 0..tile.unit_own {
        let at = place(ty, i, down);
        let mut total = f32::new(0.0);
        #[unroll]
        for unit in 0..across {
            total += parts[at * across + unit];
        }
        let blind = total == 0.0f32;
        inverse[i] = select(blind, f32::new(0.0), 1.0f32 / total);
        if comptime!(keep) {
            let row = row0 + at;
            if CUBE_POS < jobs && tx == 0 && row < of.queries {
                let sum = largest[i] + unit_of_shifts(rules.ptx) * f32::ln(total);
                lse[stack * of.queries + row] = select(blind, of.infinity, sum);
            }
        }
    }
    if CUBE_POS < jobs {
        let o_head = o.head(batch, head);
        store::<E, M>(&sums, &inverse, o, o_head, row0, of.queries, of.width, tile);
    }
}

/// Makes sums scores, and leaves the largest of each row that a unit has in `parts`.
#[cube]
fn find_largest(
    s: &mut Array<f32>,
    parts: &mut [f32],
    whole: bool,
    row0: usize,
    key0: usize,
    of: &Numbers,
    documents: &[u32],
    #[comptime] tile: Tile,
    #[comptime] rules: Rules,
) {
    let (across, down) = comptime!((tile.across(), tile.down()));
    let (ty, tx) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    #[unroll]
    for i in 0..tile.unit_own {
        let at = place(ty, i, down);
        let mut most = f32::new(LOWEST);
        #[unroll]
        for j in 0..tile.unit_other {
            let x = score(s[comptime!(i * tile.unit_other + j)], of, rules);
            s[comptime!(i * tile.unit_other + j)] = x;
            if whole {
                most = max(most, x);
            }
        }
        if !whole {
            let span = seen(row0 + at, of, documents, rules);
            #[unroll]
            for j in 0..tile.unit_other {
                let key = key0 + place(tx, j, across);
                let visible = key >= span.start && key < span.end;
                let x = s[comptime!(i * tile.unit_other + j)];
                most = max(most, select(visible, x, f32::new(LOWEST)));
            }
        }
        parts[at * across + tx] = most;
    }
}

/// Lays down the weights of the scores by the largest of their row so far, by which what has been added up is weighed
/// anew.
#[cube]
fn weigh(
    s: &Array<f32>,
    parts: &[f32],
    p: &mut [f32],
    largest: &mut Array<f32>,
    total_p: &mut Array<f32>,
    sums: &mut Array<f32>,
    whole: bool,
    row0: usize,
    key0: usize,
    of: &Numbers,
    documents: &[u32],
    #[comptime] tile: Tile,
    #[comptime] rules: Rules,
) {
    let (across, down) = comptime!((tile.across(), tile.down()));
    let (ty, tx) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    let columns = comptime!(tile.columns());
    #[unroll]
    for i in 0..tile.unit_own {
        let at = place(ty, i, down);
        let mut most = largest[i];
        #[unroll]
        for unit in 0..across {
            most = max(most, parts[at * across + unit]);
        }
        let shrink = factor(largest[i] - most, rules.ptx);
        largest[i] = most;
        let mut total = total_p[i] * shrink;
        let span = seen(row0 + at, of, documents, rules);
        #[unroll]
        for j in 0..tile.unit_other {
            let key = key0 + place(tx, j, across);
            let x = factor(s[comptime!(i * tile.unit_other + j)] - most, rules.ptx);
            let visible = whole || (key >= span.start && key < span.end);
            let x = select(visible, x, f32::new(0.0));
            total += x;
            p[place(tx, j, across) * tile.own + at] = x;
        }
        total_p[i] = total;
        #[unroll]
        for j in 0..columns {
            sums[comptime!(i * columns + j)] *= shrink;
        }
    }
}
