//! The gradient of queries.
//!
//! As the forward kernel, a cube makes a tile of queries of one head, and warps have rows of their own. A kernel of its
//! own makes two products again that the one of keys makes too, seven in all in place of five; but nothing is added
//! up in memory, which would take as much of it in f32 as the heads in flight have, and cubes that wait for each
//! other's turn where bits are to repeat. What a score becomes on the way to its gradient stays in registers.

use super::mask::{Limits, Reach, Side, Span};
use super::plan::Plan;
use super::product::{
    Product, for_rows, lanes, multiply_columns, multiply_rows, round_sums, zeros,
};
use super::rows::{stage_sums, store_rows};
use super::score::{Numbers, Score, weigh};
use super::work::{Heads, Sizes, head_of};
use crate::tile::cuda::fragment::origin;
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
    let queries = sizes.queries;
    let query_rows = head_of::<E>(q, &q_heads, batch, head, queries);
    let dy_rows = head_of::<E>(dy, &dy_heads, batch, head, queries);
    let key_rows = head_of::<E>(k, &k_heads, batch, kv_head, sizes.keys);
    let value_rows = head_of::<E>(v, &v_heads, batch, kv_head, sizes.keys);
    let span = Span::new(work.tile, &sizes, documents, Side::Queries, plan, limits);
    let (own, count) = (span.own, span.count);

    let ring = base + comptime!(plan.ring());
    let stay_bytes = comptime!(plan.stay_bytes());
    let (stage_bytes, block_bytes) = comptime!((plan.stage_bytes(), plan.block_bytes()));
    query_rows.load(base, span.first, comptime!(tile.rows()), rows);
    dy_rows.load(base + stay_bytes, span.first, comptime!(tile.rows()), rows);
    if count > 0 {
        let first = span.begin * block;
        key_rows.load(ring, first, block, rows);
        value_rows.load(ring + block_bytes, first, block, rows);
    }
    copy_commit();

    let lanes = lanes(pitch);
    let q_lane = base + span.own_in_cube * pitch + lanes.along;
    let taken = Taken::new(lse, delta, own, work.owner, queries, fragments);
    let mut totals = zeros(totals_of);
    let mut scores = Array::<Vector<f32, Const<4>>>::new(comptime!(scores_of.sums()));
    let mut slopes = Array::<Vector<f32, Const<4>>>::new(comptime!(scores_of.sums()));
    let mut weights = Array::<Vector<u32, Const<4>>>::new(comptime!(scores_of.sums() / 2));
    for j in 0..count {
        let key0 = (span.begin + j) * block;
        let next = key0 + block;
        // The block is there, and the stage that is filled now has been read.
        copy_wait(0u32);
        sync_cube();
        let stage = ring + j % comptime!(tile.stages) * stage_bytes;
        if comptime!(double) {
            if j + 1 < count {
                let into = ring + (j + 1) % 2 * stage_bytes;
                key_rows.load(into, next, block, rows);
                value_rows.load(into + block_bytes, next, block, rows);
            }
            copy_commit();
        }
        let right = stage + lanes.across;
        multiply_rows(&mut scores, q_lane, right, scores_of);
        multiply_rows(&mut slopes, q_lane + stay_bytes, right + block_bytes, scores_of);
        descend_block(&mut scores, &slopes, &taken, &numbers, &span, key0, &sizes, documents, spec);
        round_sums(&scores, &mut weights, scores_of);
        multiply_columns(&mut totals, &weights, stage + lanes.along, totals_of);
        if comptime!(!double) {
            sync_cube();
            if j + 1 < count {
                key_rows.load(ring, next, block, rows);
                value_rows.load(ring + block_bytes, next, block, rows);
            }
            copy_commit();
        }
    }

    let factors = for_rows(numbers.scale, totals_of);
    // Where nothing was seen, the queries may still be on their way to where the result goes.
    copy_wait(0u32);
    sync_cube();
    let staged = span.own_in_cube * pitch;
    stage_sums(&totals, &factors, base + staged, totals_of);
    let place = dq_heads.place(batch, head, own, queries, 0u32.runtime());
    store_rows::<E, C>(&shared, dq, staged, &place, totals_of, rows);
}

/// What is taken off the scores of a lane's rows, and off the gradients of their weights.
#[derive(CubeType)]
struct Taken {
    exponents: Array<f32>,
    deltas: Array<f32>,
}

#[cube]
impl Taken {
    fn new(
        lse: &[f32],
        delta: &[f32],
        own: u32,
        owner: u32,
        queries: u32,
        #[comptime] fragments: usize,
    ) -> Taken {
        let mut exponents = Array::<f32>::new(comptime!(2 * fragments));
        let mut deltas = Array::<f32>::new(comptime!(2 * fragments));
        #[unroll]
        for i in 0..comptime!(2 * fragments) {
            let query = min(own + origin(UNIT_POS % 32).0 + comptime!(i as u32 * 8), queries - 1);
            let at = owner as usize * queries as usize + query as usize;
            exponents[i] = lse[at];
            deltas[i] = delta[at];
        }
        Taken { exponents, deltas }
    }
}

/// [`descend`] in the block of keys from `key0` on.
#[cube]
fn descend_block(
    scores: &mut Array<Vector<f32, Const<4>>>,
    slopes: &Array<Vector<f32, Const<4>>>,
    taken: &Taken,
    numbers: &Numbers,
    span: &Span,
    key0: u32,
    sizes: &Sizes,
    documents: &[u32],
    #[comptime] spec: Gradient,
) {
    let (tile, scores_of) = comptime!((spec.plan.tile, spec.plan.scores()));
    let fragments = comptime!(tile.fragments);
    if span.clear(key0, comptime!(tile.block)) {
        let reach = Reach::everything(fragments);
        descend(scores, slopes, taken, numbers, &reach, false, scores_of, spec.score);
    } else {
        let side = comptime!(Side::Queries);
        let reach = span.reach(key0, sizes, documents, side, fragments, spec.limits);
        descend(scores, slopes, taken, numbers, &reach, true, scores_of, spec.score);
    }
}

/// Makes scores their gradients, but for the scale; `slopes` are those of the weights.
#[cube]
fn descend(
    scores: &mut Array<Vector<f32, Const<4>>>,
    slopes: &Array<Vector<f32, Const<4>>>,
    taken: &Taken,
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
            let (_, steep) = weigh(score.extract(e), taken.exponents[row], numbers, kind);
            let mut gradient = steep * (slope.extract(e) - taken.deltas[row]);
            if comptime!(masked) {
                let seen = reach.takes(row, comptime!((c % across * 8 + e % 2) as i32));
                gradient = select(seen, gradient, 0.0f32);
            }
            changed.insert(e, gradient);
        }
        scores[c] = changed;
    }
}
