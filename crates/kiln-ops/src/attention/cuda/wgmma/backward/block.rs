//! A block of queries, by a warpgroup.

// A product is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::plan::{Gradient, PART, STAGES};
use super::rings::{BOTH, READ, Rings, hand_over};
use super::rows::{COMPLETE, MASKED, OTHERS};
use super::weights::{Pairs, Sums, slopes, weigh};
use crate::attention::cuda::wgmma::places::Places;
use crate::tile::cuda::fragment::scale_rows;
use crate::tile::cuda::pipeline::PipelineState;
use crate::tile::cuda::ptx::*;
use crate::tile::cuda::store::{
    ChunkAddresses, Stored, chunk_addresses, store_parts, store_rounded,
};
use cubecl::prelude::*;

/// A warpgroup: its number, a unit's number in it, and its operands. Of Q and dO those of the first stage, as the
/// right operand of products over the width and over the queries.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Operands {
    pub(super) number: u32,
    pub(super) unit: u32,
    k: u64,
    v: u64,
    q: u64,
    dy: u64,
    q_rows: u64,
    dy_rows: u64,
    /// Its rows of dS and columns of K, for its part of dQ.
    ds: u64,
    k_columns: u64,
    /// The keys' part of dS.
    ds_rows: u64,
    /// Where it stores its keys' part of dS, and its part of dQ, in memory of others too.
    ds_at: ChunkAddresses,
    out: u32,
}

#[cube]
impl Operands {
    pub(super) fn new(base: u32, number: u32, unit: u32, #[comptime] gradient: Gradient) -> Self {
        let one = comptime!(gradient.chunks() == 1);
        // Chunks of 64 columns follow each other at all queries of a block.
        let columns = comptime!(gradient.queries() * 8);
        let (q, dy) = (base + comptime!(gradient.q_at()), base + comptime!(gradient.dy_at()));
        let ds = base + comptime!(gradient.ds_at());
        // Of one chunk of columns each warpgroup has half of the rows, which are a chunk of dSᵀ.
        let half = number * 16384;
        let (ds_half, k_half) = if one { (half, 0u32.runtime()) } else { (0u32.runtime(), half) };
        let stored = comptime!(Stored::Float16(gradient.float));
        Operands {
            number,
            unit,
            k: descriptor(base + number * 8192, 1u32),
            v: descriptor(base + comptime!(gradient.v_at()) + number * 8192, 1u32),
            q: descriptor(q, 1u32),
            dy: descriptor(dy, 1u32),
            q_rows: descriptor(q, columns),
            dy_rows: descriptor(dy, columns),
            ds: descriptor(ds + ds_half, 1u32),
            k_columns: descriptor(base + k_half, 1u32),
            ds_rows: descriptor(ds + number * 8192, 1u32),
            ds_at: chunk_addresses(ds + number * 8192, unit, stored),
            out: base + comptime!(gradient.out_at()) + number * PART,
        }
    }
}

/// Where a warpgroup is in the rings.
#[derive(CubeType)]
pub(super) struct Reading {
    pub(super) q: PipelineState,
    pub(super) out: PipelineState,
    pub(super) others: PipelineState,
}

/// Adds what a block of queries gives to dK and dV, and hands out what this tile gives to its dQ. `key` is the unit's
/// first key; the shared memory of the cube, a unit's columns on, begins at `numbers`.
#[cube]
pub(super) fn step(
    shared: &Shared<[u32]>,
    numbers: u32,
    me: &Operands,
    rings: &Rings,
    reading: &mut Reading,
    out_at: &ChunkAddresses,
    key: u32,
    places: &Places,
    scale: f32,
    #[comptime] gradient: Gradient,
) {
    let (stage, phase) = (reading.q.stage * 1u32, reading.q.phase * 1u32);
    let operand = u64::cast_from(stage * comptime!(gradient.q_bytes() / 16));
    let of_rows = stage * comptime!(gradient.stage_bytes()) + comptime!(gradient.rows_at());
    let numbers = numbers + of_rows;
    let known = comptime!(4 * gradient.row_bytes());
    rings.q.wait(stage, phase);
    let known = shared[((of_rows + known) / 4) as usize];
    let size!(X) = comptime!(gradient.scores().op.sums());
    let halves = comptime!(gradient.halves());
    let mut scores = Array::<Vector<f32, X>>::new(1usize);
    let mut of_weights = Array::<Sums>::new(1usize);
    let mut pairs = Array::<Pairs>::new(2usize);
    scores[0] = wgmma_chain::<X>(me.k, me.q + operand, gradient.scores());
    wgmma_commit();
    rings.dy.wait(stage, phase);
    #[unroll]
    for half in 0..halves {
        // 64 rows are 8192 bytes.
        let rows = operand + comptime!(half as u64 * 512);
        let numbers = numbers + comptime!(half as u32 * 256);
        // With a soft-cap the gradients of the weights have no registers beside what makes the weights.
        let early = comptime!(!gradient.softcap);
        if comptime!(early) {
            of_weights[0] = wgmma_chain::<Const<32>>(me.v, me.dy + rows, gradient.of_weights());
            wgmma_commit();
        }
        if comptime!(half == 0) {
            let op = comptime!(gradient.scores().op);
            scores[0] = wgmma_wait::<X>(scores[0], comptime!(early as u32), op);
        }
        if known & MASKED != 0u32 {
            pairs[0] = weigh::<X>(&mut scores, half, numbers, key, places, true, gradient);
        } else {
            pairs[0] = weigh::<X>(&mut scores, half, numbers, key, places, false, gradient);
        }
        if comptime!(!early) {
            of_weights[0] = wgmma_chain::<Const<32>>(me.v, me.dy + rows, gradient.of_weights());
            wgmma_commit();
        }
        let rows = me.dy_rows + rows;
        sums_add_registers::<Const<16>>(pairs[0], rows, gradient.dv(), gradient.of_values());
        wgmma_commit();
        let op = comptime!(gradient.of_weights().op);
        of_weights[0] = wgmma_wait::<Const<32>>(of_weights[0], 1u32, op);
        pairs[1] = slopes::<X>(scores[0], half, of_weights[0], numbers, gradient);
        if comptime!(half == 0) {
            sync_units(me.number + READ, 256u32);
        }
        store_rounded::<Const<16>>(pairs[1], &me.ds_at, comptime!(half as u32 * 16384), 0usize);
    }
    async_proxy_fence();
    sync_units(comptime!(BOTH).runtime(), 256u32);

    let mut dq = Array::<Sums>::new(1usize);
    dq[0] = wgmma_chain::<Const<32>>(me.ds, me.k_columns, gradient.of_queries());
    wgmma_commit();
    sums_add(me.ds_rows, me.q_rows + operand, gradient.dk(), gradient.of_slopes());
    wgmma_commit();
    dq[0] = wgmma_wait::<Const<32>>(dq[0], 1u32, comptime!(gradient.of_queries().op));
    if me.unit == 0u32 {
        rings.dy.release(stage);
    }
    arrive_units(1 - me.number + READ, 256u32);
    write_queries(&mut dq, me, rings, reading, out_at, known, scale, gradient);
    wgmma_wait_pending(0u32);
    if me.unit == 0u32 {
        rings.q.release(stage);
    }
    reading.q.advance(STAGES);
}

/// Hands this warpgroup's part of dQ to the warp that stores: as it is, or complete and rounded.
#[cube]
fn write_queries(
    dq: &mut Array<Sums>,
    me: &Operands,
    rings: &Rings,
    reading: &mut Reading,
    out_at: &ChunkAddresses,
    known: u32,
    scale: f32,
    #[comptime] gradient: Gradient,
) {
    let op = comptime!(gradient.of_queries().op);
    rings.out.vacant(0u32, reading.out.phase);
    sync_plane();
    if known & COMPLETE != 0u32 {
        if known & OTHERS != 0u32 {
            let others = me.out + comptime!(gradient.others_at() - gradient.out_at());
            rings.others.wait(0u32, reading.others.phase);
            dq[0] = add_sent::<Const<32>>(dq[0], others, me.unit, op);
            sync_plane();
            let lane = me.unit % 32;
            if lane == 0u32 {
                rings.others.release(0u32);
            }
            reading.others.advance(1u32);
        }
        dq[0] = scale_rows::<Const<32>>(dq[0], Vector::new(scale));
        let stored = comptime!(Stored::Float16(gradient.float));
        store_parts::<Const<32>>(dq[0], out_at, 0u32, 0usize, 4usize, stored, false);
    } else {
        hand_sums::<Const<32>>(dq[0], me.out, me.unit, op);
    }
    hand_over(rings);
    reading.out.advance(1u32);
}
