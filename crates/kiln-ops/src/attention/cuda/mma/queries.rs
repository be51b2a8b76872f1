//! The gradient of queries.
//!
//! As the forward kernel, a cube makes a tile of queries of one head, and warps have rows of their own. A kernel of its
//! own makes two products again that the one of keys makes too, seven in all in place of five; but nothing is added
//! up in memory, which would take as much of it in f32 as the heads in flight have, and cubes that wait for each
//! other's turn where bits are to repeat. What a score becomes on the way to its gradient stays in registers.

use super::mask::{Limits, Reach, end_of_keys, first_key, reach_of_queries};
use super::plan::Plan;
use super::product::{Product, lanes, multiply_columns, multiply_rows, round_sums};
use super::rows::{Place, load_rows, stage_sums, store_rows};
use super::score::{Numbers, Score, weigh};
use super::work::{Heads, Sizes, head_address};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// What a kernel of the backward is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Gradient {
    pub(super) plan: Plan,
    pub(super) limits: Limits,
    pub(super) score: Score,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn queries_kernel<E: Float, C: Size>(
    q: &[E],
    k: &[E],
    v: &[E],
    dy: &[E],
    lse: &[f32],
    delta: &[f32],
    documents: &[u32],
    dq: &mut [Vector<E, C>],
    q_heads: Heads,
    k_heads: Heads,
    v_heads: Heads,
    dy_heads: Heads,
    dq_heads: Heads,
    sizes: Sizes,
    numbers: Numbers,
    #[comptime] spec: Gradient,
    #[define(E)] _dtype: ElemType,
) {
    let (plan, limits) = comptime!((spec.plan, spec.limits));
    let (tile, rows) = comptime!((plan.tile, plan.rows));
    let (scores_of, totals_of) = comptime!((plan.scores(), plan.totals()));
    let pitch = comptime!(rows.pitch());
    let block = comptime!(tile.block);
    let (double, fragments) = comptime!((tile.stages == 2, tile.fragments));
    let shared =
        Shared::<[Vector<E, C>]>::new_aligned_slice(comptime!(plan.bytes() / 16), 128usize);
    let base = generic_to_shared::<Vector<E, C>>(shared.as_ptr());
    let at = CUBE_POS as u32;
    if !sizes.has(at) {
        terminate!();
    }
    let work = sizes.work(at, true);
    let (batch, head) = (work.owner / sizes.heads, work.owner % sizes.heads);
    let kv_head = head / sizes.group;
    let q_at = head_address::<E>(q, &q_heads, batch, head);
    let dy_at = head_address::<E>(dy, &dy_heads, batch, head);
    let k_at = head_address::<E>(k, &k_heads, batch, kv_head);
    let v_at = head_address::<E>(v, &v_heads, batch, kv_head);
    let (k_row, v_row) = (k_heads.row_bytes(), v_heads.row_bytes());

    // The keys that any query of the tile sees.
    let row0 = work.tile * comptime!(tile.rows());
    let last = min(row0 + comptime!(tile.rows()), sizes.queries) - 1;
    let begin = first_key(row0, &sizes, documents, limits) / block;
    let end = (end_of_keys(last, &sizes, documents, limits) + comptime!(block - 1)) / block;
    let count = end - min(begin, end);
    // Those that all of this warp's queries see.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let lane = UNIT_POS % 32;
    let warp_row = warp * comptime!(tile.warp_rows());
    let own = row0 + warp_row;
    let own_last = min(own + comptime!(tile.warp_rows()), sizes.queries) - 1;
    let clear_from = first_key(own_last, &sizes, documents, limits);
    let clear_to = end_of_keys(min(own, sizes.queries - 1), &sizes, documents, limits);

    let ring = base + comptime!(plan.ring());
    let stay_bytes = comptime!(plan.stay_bytes());
    let (stage_bytes, block_bytes) = comptime!((plan.stage_bytes(), plan.block_bytes()));
    let (tile_rows, queries) = (comptime!(tile.rows()), sizes.queries);
    load_rows(base, q_at, q_heads.row_bytes(), row0, queries, tile_rows, rows);
    load_rows(base + stay_bytes, dy_at, dy_heads.row_bytes(), row0, queries, tile_rows, rows);
    if count > 0 {
        let first = begin * block;
        load_rows(ring, k_at, k_row, first, sizes.keys, block, rows);
        load_rows(ring + block_bytes, v_at, v_row, first, sizes.keys, block, rows);
    }
    copy_commit();

    let lanes = lanes(pitch);
    let q_lane = base + warp_row * pitch + lanes.along;
    let mut exponents = Array::<f32>::new(comptime!(2 * fragments));
    let mut deltas = Array::<f32>::new(comptime!(2 * fragments));
    #[unroll]
    for i in 0..comptime!(2 * fragments) {
        let query = min(own + lane / 4 + comptime!(i as u32 * 8), queries - 1);
        let at = work.owner as usize * queries as usize + query as usize;
        exponents[i] = lse[at];
        deltas[i] = delta[at];
    }
    let mut totals = Array::<Vector<f32, Const<4>>>::new(comptime!(totals_of.sums()));
    #[unroll]
    for i in 0..comptime!(totals_of.sums()) {
        totals[i] = Vector::new(0.0f32);
    }
    let mut scores = Array::<Vector<f32, Const<4>>>::new(comptime!(scores_of.sums()));
    let mut slopes = Array::<Vector<f32, Const<4>>>::new(comptime!(scores_of.sums()));
    let mut weights = Array::<Vector<u32, Const<4>>>::new(comptime!(scores_of.sums() / 2));
    for j in 0..count {
        let key0 = (begin + j) * block;
        let next = key0 + block;
        // The block is there, and the stage that is filled now has been read.
        copy_wait(0u32);
        sync_cube();
        let stage = ring + j % comptime!(tile.stages) * stage_bytes;
        if comptime!(double) {
            if j + 1 < count {
                let into = ring + (j + 1) % 2 * stage_bytes;
                load_rows(into, k_at, k_row, next, sizes.keys, block, rows);
                load_rows(into + block_bytes, v_at, v_row, next, sizes.keys, block, rows);
            }
            copy_commit();
        }
        let right = stage + lanes.across;
        multiply_rows(&mut scores, q_lane, right, scores_of);
        multiply_rows(&mut slopes, q_lane + stay_bytes, right + block_bytes, scores_of);
        let col = key0 + lane % 4 * 2;
        if key0 < clear_from || next > clear_to {
            let reach = reach_of_queries(own + lane / 4, col, &sizes, documents, fragments, limits);
            descend(
                &mut scores,
                &slopes,
                &exponents,
                &deltas,
                &numbers,
                &reach,
                true,
                scores_of,
                spec.score,
            );
        } else {
            let reach = Reach::everything(fragments);
            descend(
                &mut scores,
                &slopes,
                &exponents,
                &deltas,
                &numbers,
                &reach,
                false,
                scores_of,
                spec.score,
            );
        }
        round_sums(&scores, &mut weights, scores_of);
        multiply_columns(&mut totals, &weights, stage + lanes.along, totals_of);
        if comptime!(!double) {
            sync_cube();
            if j + 1 < count {
                load_rows(ring, k_at, k_row, next, sizes.keys, block, rows);
                load_rows(ring + block_bytes, v_at, v_row, next, sizes.keys, block, rows);
            }
            copy_commit();
        }
    }

    let mut factors = Array::<f32>::new(comptime!(2 * fragments));
    #[unroll]
    for i in 0..comptime!(2 * fragments) {
        factors[i] = numbers.scale;
    }
    // Where nothing was seen, the queries may still be on their way to where the result goes.
    copy_wait(0u32);
    sync_cube();
    let staged = warp_row * pitch;
    stage_sums(&totals, &factors, base + staged, totals_of);
    let place = Place {
        base: dq_heads.element(batch, head),
        row: dq_heads.row,
        first: own,
        end: queries,
        chunk: 0u32.runtime(),
    };
    store_rows::<E, C>(&shared, dq, staged, &place, totals_of, rows);
}

/// Makes scores their gradients, but for the scale; `slopes` are those of the weights.
#[cube]
fn descend(
    scores: &mut Array<Vector<f32, Const<4>>>,
    slopes: &Array<Vector<f32, Const<4>>>,
    exponents: &Array<f32>,
    deltas: &Array<f32>,
    numbers: &Numbers,
    reach: &Reach,
    #[comptime] masked: bool,
    #[comptime] product: Product,
    #[comptime] kind: Score,
) {
    let across = comptime!(2 * product.cols);
    #[unroll]
    for c in 0..comptime!(product.sums()) {
        let (score, slope) = (scores[c], slopes[c]);
        let mut changed = score;
        #[unroll]
        for e in 0..4usize {
            let row = comptime!(c / across * 2 + e / 2);
            let (_, steep) = weigh(score.extract(e), exponents[row], numbers, kind);
            let mut gradient = steep * (slope.extract(e) - deltas[row]);
            if comptime!(masked) {
                let seen = reach.takes(row, comptime!((c % across * 8 + e % 2) as i32));
                gradient = select(seen, gradient, 0.0f32);
            }
            changed.insert(e, gradient);
        }
        scores[c] = changed;
    }
}
