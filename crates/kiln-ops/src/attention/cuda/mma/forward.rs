//! The forward kernel.
//!
//! A cube makes a tile of queries of one head. Warps have rows of their own, and nothing to say to each other: scores of a
//! block of keys stay in registers, where they become weights, which are the left operand of the product with
//! the values. While a block is attended to the next one is on its way.

use super::mask::{Limits, Reach, Side, Span};
use super::plan::Plan;
use super::product::{
    Product, for_rows, lanes, multiply_columns, multiply_rows, round_sums, zeros,
};
use super::rows::{stage_sums, store_rows};
use super::score::{Numbers, Score, exponent_factor, shaped};
use super::work::{Heads, Sizes, head_of};
use crate::exponential::exp2;
use crate::tile::cuda::fragment::{origin, quad_max, quad_sum};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// What the kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Forward {
    pub(super) plan: Plan,
    pub(super) limits: Limits,
    pub(super) score: Score,
    pub(super) lse: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn forward_kernel<E: Float, C: Size>(
    q: &[E],
    k: &[E],
    v: &[E],
    documents: &[u32],
    o: &mut [Vector<E, C>],
    lse: &mut [f32],
    q_heads: Heads,
    k_heads: Heads,
    v_heads: Heads,
    o_heads: Heads,
    sizes: Sizes,
    numbers: Numbers,
    #[comptime] spec: Forward,
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
    let query_rows = head_of::<E>(q, &q_heads, batch, head, sizes.queries);
    let key_rows = head_of::<E>(k, &k_heads, batch, kv_head, sizes.keys);
    let value_rows = head_of::<E>(v, &v_heads, batch, kv_head, sizes.keys);
    let span = Span::new(work.tile, &sizes, documents, Side::Queries, plan, limits);
    let (own, count) = (span.own, span.count);

    let ring = base + comptime!(plan.ring());
    let (stage_bytes, block_bytes) = comptime!((plan.stage_bytes(), plan.block_bytes()));
    query_rows.load(base, span.first, comptime!(tile.rows()), rows);
    if count > 0 {
        let first = span.begin * block;
        key_rows.load(ring, first, block, rows);
        if comptime!(double) {
            value_rows.load(ring + block_bytes, first, block, rows);
        }
    }
    copy_commit();

    let lanes = lanes(pitch);
    let q_lane = base + span.own_in_cube * pitch + lanes.along;
    let mut totals = zeros(totals_of);
    let mut largest = for_rows(f32::new(f32::NEG_INFINITY), scores_of);
    let mut sums = for_rows(f32::new(0.0), scores_of);
    let mut scores = Array::<Vector<f32, Const<4>>>::new(comptime!(scores_of.sums()));
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
        } else {
            value_rows.load(ring + block_bytes, key0, block, rows);
        }
        copy_commit();
        multiply_rows(&mut scores, q_lane, stage + lanes.across, scores_of);
        if comptime!(!double) {
            copy_wait(0u32);
            sync_cube();
            if j + 1 < count {
                key_rows.load(ring, next, block, rows);
            }
            copy_commit();
        }
        if comptime!(spec.score != Score::Positive) {
            shape_scores(&mut scores, &numbers, scores_of, spec.score);
        }
        if !span.clear(key0, block) {
            let side = comptime!(Side::Queries);
            let reach = span.reach(key0, &sizes, documents, side, fragments, limits);
            mask_scores(&mut scores, &reach, scores_of);
        }
        let factor = exponent_factor(&numbers, spec.score);
        soften(&mut scores, &mut totals, &mut largest, &mut sums, factor, scores_of, totals_of);
        round_sums(&scores, &mut weights, scores_of);
        multiply_columns(&mut totals, &weights, stage + block_bytes + lanes.along, totals_of);
    }

    let factors = settle(&sums, &largest, lse, own, work.owner, &sizes, &numbers, spec);
    // Where nothing was seen, the queries may still be on their way to where the result goes.
    copy_wait(0u32);
    sync_cube();
    let staged = span.own_in_cube * pitch;
    stage_sums(&totals, &factors, base + staged, totals_of);
    let place = o_heads.place(batch, head, own, sizes.queries, 0u32.runtime());
    store_rows::<E, C>(&shared, o, staged, &place, totals_of, rows);
}

/// What makes totals results, and the log-sum-exps if they are kept.
#[cube]
fn settle(
    sums: &Array<f32>,
    largest: &Array<f32>,
    lse: &mut [f32],
    own: u32,
    owner: u32,
    sizes: &Sizes,
    numbers: &Numbers,
    #[comptime] spec: Forward,
) -> Array<f32> {
    let fragments = comptime!(spec.plan.tile.fragments);
    let mut factors = Array::<f32>::new(comptime!(2 * fragments));
    #[unroll]
    for i in 0..comptime!(2 * fragments) {
        let sum = quad_sum(sums[i]);
        let blind = sum == 0.0f32;
        factors[i] = select(blind, f32::new(0.0), 1.0f32 / sum);
        if comptime!(spec.lse) {
            let (row, col) = origin(UNIT_POS % 32);
            let row = own + row + comptime!(i as u32 * 8);
            if col == 0u32 && row < sizes.queries {
                let exponent = largest[i] * exponent_factor(numbers, spec.score) + log2(sum);
                let lse_at = owner as usize * sizes.queries as usize + row as usize;
                lse[lse_at] = select(blind, f32::new(f32::INFINITY), exponent);
            }
        }
    }
    factors
}

/// Scores that a factor alone does not make exponents.
#[cube]
fn shape_scores(
    scores: &mut Array<Vector<f32, Const<4>>>,
    numbers: &Numbers,
    #[comptime] product: Product,
    #[comptime] kind: Score,
) {
    #[unroll]
    for c in 0..comptime!(product.sums()) {
        let mut changed = scores[c];
        #[unroll]
        for e in 0..4usize {
            changed.insert(e, shaped(changed.extract(e), numbers, kind));
        }
        scores[c] = changed;
    }
}

/// Makes those that are not seen -∞.
#[cube]
fn mask_scores(
    scores: &mut Array<Vector<f32, Const<4>>>,
    reach: &Reach,
    #[comptime] product: Product,
) {
    let across = comptime!(2 * product.cols);
    #[unroll]
    for c in 0..comptime!(product.sums()) {
        let mut changed = scores[c];
        #[unroll]
        for e in 0..4usize {
            let seen = reach.takes(
                comptime!(c / across * 2 + e / 2),
                comptime!((c % across * 8 + e % 2) as i32),
            );
            changed.insert(e, select(seen, changed.extract(e), f32::new(f32::NEG_INFINITY)));
        }
        scores[c] = changed;
    }
}

/// Makes scores weights by the largest of their row so far, by which what has been added up is weighed anew.
#[cube]
fn soften(
    scores: &mut Array<Vector<f32, Const<4>>>,
    totals: &mut Array<Vector<f32, Const<4>>>,
    largest: &mut Array<f32>,
    sums: &mut Array<f32>,
    factor: f32,
    #[comptime] scores_of: Product,
    #[comptime] totals_of: Product,
) {
    let across = comptime!(2 * scores_of.cols);
    #[unroll]
    for i in 0..comptime!(2 * scores_of.rows) {
        // Row i / 2 of the sixteens, its upper or its lower half.
        let (first, half) = comptime!((i / 2 * across, i % 2 * 2));
        let mut found = largest[i];
        #[unroll]
        for c in 0..across {
            let pair = scores[comptime!(first + c)];
            found = max(found, max(pair.extract(half), pair.extract(comptime!(half + 1))));
        }
        found = quad_max(found);
        // A row that has seen nothing yet: -∞ less -∞ is not a number.
        let shift = select(found == f32::new(f32::NEG_INFINITY), f32::new(0.0), found * factor);
        let again = exp2(fma(largest[i], factor, -shift));
        largest[i] = found;
        let mut sum = sums[i] * again;
        #[unroll]
        for c in 0..across {
            let mut pair = scores[comptime!(first + c)];
            #[unroll]
            for e in 0..2usize {
                let weight = exp2(fma(pair.extract(comptime!(half + e)), factor, -shift));
                sum += weight;
                pair.insert(comptime!(half + e), weight);
            }
            scores[comptime!(first + c)] = pair;
        }
        sums[i] = sum;
        #[unroll]
        for c in 0..comptime!(2 * totals_of.cols) {
            let at = comptime!(i / 2 * 2 * totals_of.cols + c);
            let mut total = totals[at];
            #[unroll]
            for e in 0..2usize {
                total.insert(comptime!(half + e), total.extract(comptime!(half + e)) * again);
            }
            totals[at] = total;
        }
    }
}
