//! The gradients of keys and values.
//!
//! A cube makes a tile of keys of one KV head, of all query heads that read it one after the other, and blocks of
//! queries pass by. All is transposed: rows of scores are keys, so that weights and the gradients of scores are in
//! registers where the next products take them, and nothing goes through shared memory. Of wide heads, two warps have
//! the same rows and half of the columns of the result each.

use super::mask::{Reach, Side, Span};
use super::product::{
    Product, for_rows, lanes, multiply_columns, multiply_rows, round_sums, zeros,
};
use super::queries::Gradient;
use super::rows::{Head, Rows, stage_sums, store_rows};
use super::score::{Numbers, Score, weigh};
use super::work::{Heads, Sizes, head_of};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn keys_kernel<E: Float, C: Size>(
    q: &[E],
    k: &[E],
    v: &[E],
    dy: &[E],
    lse: &[f32],
    delta: &[f32],
    documents: &[u32],
    dk: &mut [Vector<E, C>],
    dv: &mut [Vector<E, C>],
    q_heads: Heads,
    k_heads: Heads,
    v_heads: Heads,
    dy_heads: Heads,
    dk_heads: Heads,
    dv_heads: Heads,
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
    let double = comptime!(tile.stages == 2);
    let shared =
        Shared::<[Vector<E, C>]>::new_aligned_slice(comptime!(plan.bytes() / 16), 128usize);
    let base = generic_to_shared::<Vector<E, C>>(shared.as_ptr());
    let at = CUBE_POS as u32;
    if !sizes.has(at) {
        terminate!();
    }
    let work = sizes.work(at, false);
    let kv_heads = sizes.heads / sizes.group;
    let (batch, kv_head) = (work.owner / kv_heads, work.owner % kv_heads);
    let key_rows = head_of::<E>(k, &k_heads, batch, kv_head, sizes.keys);
    let value_rows = head_of::<E>(v, &v_heads, batch, kv_head, sizes.keys);
    let (head, queries) = (kv_head * sizes.group, sizes.queries);
    let passing = Passing {
        q: head_of::<E>(q, &q_heads, batch, head, queries),
        dy: head_of::<E>(dy, &dy_heads, batch, head, queries),
        q_head: u64::cast_from(q_heads.head) * 2,
        dy_head: u64::cast_from(dy_heads.head) * 2,
        lse: global_address::<f32>(lse.as_ptr()),
        delta: global_address::<f32>(delta.as_ptr()),
        first_head: work.owner * sizes.group,
    };
    let span = Span::new(work.tile, &sizes, documents, Side::Keys, plan, limits);
    let (own, count) = (span.own, span.count);
    let total = count * sizes.group;

    let ring = base + comptime!(plan.ring());
    let stay_bytes = comptime!(plan.stay_bytes());
    let (stage_bytes, block_bytes) = comptime!((plan.stage_bytes(), plan.block_bytes()));
    key_rows.load(base, span.first, comptime!(tile.rows()), rows);
    value_rows.load(base + stay_bytes, span.first, comptime!(tile.rows()), rows);
    if total > 0 {
        passing.load(ring, 0u32.runtime(), span.begin * block, block, rows);
    }
    copy_commit();

    let lane = UNIT_POS % 32;
    let lanes = lanes(pitch);
    let k_lane = base + span.own_in_cube * pitch + lanes.along;
    // This warp's columns of the results.
    let part = plane_broadcast(UNIT_POS / 32, 0u32) / comptime!(tile.owners())
        * comptime!(totals_of.cols as u32 * 32);
    let mut sums = Sums::new(scores_of, totals_of);
    let mut cursor = Cursor { at: 0u32.runtime(), head: 0u32.runtime() };
    for j in 0..total {
        let query0 = (span.begin + cursor.at) * block;
        cursor.step(count);
        let (next_head, next) = (cursor.head, (span.begin + cursor.at) * block);
        // The block is there, and the stage that is filled now has been read.
        copy_wait(0u32);
        sync_cube();
        let stage = ring + j % comptime!(tile.stages) * stage_bytes;
        if comptime!(double) {
            if j + 1 < total {
                passing.load(ring + (j + 1) % 2 * stage_bytes, next_head, next, block, rows);
            }
            copy_commit();
        }
        let right = stage + lanes.across;
        multiply_rows(&mut sums.scores, k_lane, right, scores_of);
        multiply_rows(&mut sums.slopes, k_lane + stay_bytes, right + block_bytes, scores_of);
        let numbers_at = stage + comptime!(2 * plan.block_bytes()) + lane % 4 * 8;
        descend_block(&mut sums, numbers_at, &numbers, &span, query0, &sizes, documents, spec);
        sums.round(scores_of);
        sums.add(stage + lanes.along + part, block_bytes, totals_of);
        if comptime!(!double) {
            sync_cube();
            if j + 1 < total {
                passing.load(ring, next_head, next, block, rows);
            }
            copy_commit();
        }
    }

    let ones = for_rows(f32::new(1.0), totals_of);
    let scales = for_rows(numbers.scale, totals_of);
    // Keys and values make room for their gradients: others may have the same rows, and where no query sees them
    // they may still be on their way.
    copy_wait(0u32);
    sync_cube();
    let staged = span.own_in_cube * pitch + part;
    stage_sums(&sums.dk, &scales, base + staged, totals_of);
    stage_sums(&sums.dv, &ones, base + staged + stay_bytes, totals_of);
    let dk_place = dk_heads.place(batch, kv_head, own, sizes.keys, part / 16);
    let dv_place = dv_heads.place(batch, kv_head, own, sizes.keys, part / 16);
    store_rows::<E, C>(&shared, dk, staged, &dk_place, totals_of, rows);
    store_rows::<E, C>(&shared, dv, staged + stay_bytes, &dv_place, totals_of, rows);
}

/// What a warp has in registers: the gradients of its keys and values, and of a block scores and the gradients of their
/// weights, which become weights and the gradients of scores; and these rounded.
#[derive(CubeType)]
struct Sums {
    dk: Array<Vector<f32, Const<4>>>,
    dv: Array<Vector<f32, Const<4>>>,
    scores: Array<Vector<f32, Const<4>>>,
    slopes: Array<Vector<f32, Const<4>>>,
    weights: Array<Vector<u32, Const<4>>>,
    gradients: Array<Vector<u32, Const<4>>>,
}

#[cube]
impl Sums {
    fn new(#[comptime] scores_of: Product, #[comptime] totals_of: Product) -> Sums {
        Sums {
            dk: zeros(totals_of),
            dv: zeros(totals_of),
            scores: Array::<Vector<f32, Const<4>>>::new(comptime!(scores_of.sums())),
            slopes: Array::<Vector<f32, Const<4>>>::new(comptime!(scores_of.sums())),
            weights: Array::<Vector<u32, Const<4>>>::new(comptime!(scores_of.sums() / 2)),
            gradients: Array::<Vector<u32, Const<4>>>::new(comptime!(scores_of.sums() / 2)),
        }
    }

    fn round(&mut self, #[comptime] scores_of: Product) {
        round_sums(&self.scores, &mut self.weights, scores_of);
        round_sums(&self.slopes, &mut self.gradients, scores_of);
    }

    /// Adds what a block gives, whose queries are from `right` on and their gradients so many bytes behind.
    fn add(&mut self, right: u32, #[comptime] block_bytes: u32, #[comptime] totals_of: Product) {
        multiply_columns(&mut self.dv, &self.weights, right + block_bytes, totals_of);
        multiply_columns(&mut self.dk, &self.gradients, right, totals_of);
    }
}

/// A block of queries, of those that a cube takes of each head, and a head of the group.
#[derive(CubeType)]
struct Cursor {
    at: u32,
    head: u32,
}

#[cube]
impl Cursor {
    fn step(&mut self, count: u32) {
        self.at += 1;
        if self.at == count {
            self.at = 0u32.runtime();
            self.head += 1;
        }
    }
}

/// What passes by: queries, their gradients, and the two numbers of each; the heads of a group one after the other.
#[derive(CubeType, Clone, Copy)]
struct Passing {
    /// The first head of the group, and bytes from one to the next.
    q: Head,
    dy: Head,
    q_head: u64,
    dy_head: u64,
    lse: u64,
    delta: u64,
    /// The first head's number, which counts those of the batches before.
    first_head: u32,
}

#[cube]
impl Passing {
    /// Begins to copy a block from query `first` of head `head` of the group on; zeros behind the last one, which
    /// are worth nothing.
    fn load(
        &self,
        dst: u32,
        head: u32,
        first: u32,
        #[comptime] block: u32,
        #[comptime] rows: Rows,
    ) {
        let block_bytes = comptime!(block * rows.pitch());
        let queries = self.q.end;
        self.q.after(u64::cast_from(head) * self.q_head).load(dst, first, block, rows);
        let dy = self.dy.after(u64::cast_from(head) * self.dy_head);
        dy.load(dst + block_bytes, first, block, rows);
        let before = u64::cast_from(self.first_head + head) * u64::cast_from(queries);
        let dst = dst + comptime!(2 * block_bytes);
        #[unroll]
        for i in 0..comptime!((2 * block).div_ceil(rows.units)) {
            let at = UNIT_POS + comptime!(i * rows.units);
            if at < comptime!(2 * block) {
                let query = first + at % block;
                let from = select(at < block, self.lse, self.delta);
                let from = from + (before + u64::cast_from(query)) * 4;
                copy_4(dst + at * 4, from, select(query < queries, 4u32, 0u32));
            }
        }
    }
}

/// [`descend`] in the block of queries from `query0` on.
#[cube]
fn descend_block(
    sums: &mut Sums,
    numbers_at: u32,
    numbers: &Numbers,
    span: &Span,
    query0: u32,
    sizes: &Sizes,
    documents: &[u32],
    #[comptime] spec: Gradient,
) {
    let (tile, scores_of) = comptime!((spec.plan.tile, spec.plan.scores()));
    let fragments = comptime!(tile.fragments);
    if span.clear(query0, comptime!(tile.block)) {
        let reach = Reach::everything(fragments);
        descend(
            &mut sums.scores,
            &mut sums.slopes,
            numbers_at,
            numbers,
            &reach,
            false,
            scores_of,
            spec.score,
        );
    } else {
        let side = comptime!(Side::Keys);
        let reach = span.reach(query0, sizes, documents, side, fragments, spec.limits);
        descend(
            &mut sums.scores,
            &mut sums.slopes,
            numbers_at,
            numbers,
            &reach,
            true,
            scores_of,
            spec.score,
        );
    }
}

/// Makes scores weights, and the gradients of weights those of scores, but for the scale. The log-sum-exps of the
/// columns are from `numbers_at` on, and behind those of the block what is taken off the gradients.
#[cube]
fn descend(
    scores: &mut Array<Vector<f32, Const<4>>>,
    slopes: &mut Array<Vector<f32, Const<4>>>,
    numbers_at: u32,
    numbers: &Numbers,
    reach: &Reach,
    #[comptime] masked: bool,
    #[comptime] product: Product,
    #[comptime] kind: Score,
) {
    let across = comptime!(2 * product.cols);
    #[unroll]
    for c in 0..across {
        let exponents = load_pair(numbers_at + comptime!(c as u32 * 32));
        let deltas = load_pair(numbers_at + comptime!((across + c) as u32 * 32));
        #[unroll]
        for i in 0..comptime!(product.rows) {
            let at = comptime!(i * across + c);
            let (mut weights, mut gradients) = (scores[at], slopes[at]);
            #[unroll]
            for e in 0..4usize {
                let (score, slope) = (weights.extract(e), gradients.extract(e));
                let (weight, steep) =
                    weigh(score, exponents.extract(comptime!(e % 2)), numbers, kind);
                let gradient = steep * (slope - deltas.extract(comptime!(e % 2)));
                if comptime!(masked) {
                    let seen =
                        reach.takes(comptime!(2 * i + e / 2), comptime!((c * 8 + e % 2) as i32));
                    weights.insert(e, select(seen, weight, 0.0f32));
                    gradients.insert(e, select(seen, gradient, 0.0f32));
                } else {
                    weights.insert(e, weight);
                    gradients.insert(e, gradient);
                }
            }
            scores[at] = weights;
            slopes[at] = gradients;
        }
    }
}
