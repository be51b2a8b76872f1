//! A block of keys and its values, by a warpgroup.

use super::places::Places;
use super::plan::Forward;
use super::softmax::{RowPair, Sight, settle, soften};
use crate::tile::cuda::fragment::{operand, scale_rows};
use crate::tile::cuda::pipeline::{PipelineState, Ring};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// Barriers of the hardware: one for each warpgroup from 1 on, and one for its turn.
pub(super) const TURNS: u32 = 4;

/// The rings of a cube's operands; that of the queries has one stage.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Rings {
    pub(super) q: Ring,
    pub(super) k: Ring,
    pub(super) v: Ring,
}

/// A warpgroup: its number, a unit's number in it, its operands, and where its results are staged.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Warpgroup {
    pub(super) number: u32,
    pub(super) unit: u32,
    pub(super) q: u64,
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) staging: u32,
}

/// Where a warpgroup is in the rings of keys and values.
#[derive(CubeType)]
pub(super) struct Reading {
    pub(super) k: PipelineState,
    pub(super) v: PipelineState,
}

/// Waits for this warpgroup's turn to issue products.
#[cube]
fn take_turn(me: &Warpgroup, #[comptime] forward: Forward) {
    if comptime!(forward.tile.turns) {
        sync_units(me.number + comptime!(TURNS), 256u32);
    }
}

/// Gives the turn to the next warpgroup.
#[cube]
fn pass_turn(me: &Warpgroup, #[comptime] forward: Forward) {
    if comptime!(forward.tile.turns) {
        let groups = comptime!(forward.tile.groups as u32);
        let next = select(me.number + 1 == groups, 0u32, me.number + 1);
        arrive_units(next + comptime!(TURNS), 256u32);
    }
}

/// Leaves out a block of which no query of this warpgroup sees a key, with a turn or without.
#[cube]
pub(super) fn pass(
    me: &Warpgroup,
    rings: &Rings,
    reading: &mut Reading,
    turn: bool,
    #[comptime] forward: Forward,
) {
    let stages = comptime!(forward.tile.stages as u32);
    if turn {
        take_turn(me, forward);
        pass_turn(me, forward);
    }
    rings.k.wait(reading.k.stage, reading.k.phase);
    rings.v.wait(reading.v.stage, reading.v.phase);
    if me.unit == 0u32 {
        rings.k.release(reading.k.stage);
        rings.v.release(reading.v.stage);
    }
    reading.k.advance(stages);
    reading.v.advance(stages);
}

/// Issues the product of the queries with the block of keys at hand.
#[cube]
fn multiply_keys<S: Size>(
    me: &Warpgroup,
    stage: u32,
    #[comptime] forward: Forward,
) -> Vector<f32, S> {
    let stage = u64::cast_from(stage * comptime!(forward.kv_bytes() / 16));
    wgmma_chain::<S>(me.q, me.k + stage, forward.scores())
}

/// Issues the product of the weights with the block of values at hand.
#[cube]
fn multiply_values<W: Size, O: Size>(
    me: &Warpgroup,
    stage: u32,
    out: Vector<f32, O>,
    weights: Vector<u32, W>,
    #[comptime] forward: Forward,
) -> Vector<f32, O> {
    let stage = u64::cast_from(stage * comptime!(forward.kv_bytes() / 16));
    wgmma_chain_registers::<O, W>(out, weights, me.v + stage, forward.values())
}

/// Releases the block of keys at hand.
#[cube]
fn release_keys(
    me: &Warpgroup,
    rings: &Rings,
    reading: &mut Reading,
    #[comptime] forward: Forward,
) {
    if me.unit == 0u32 {
        rings.k.release(reading.k.stage);
    }
    reading.k.advance(comptime!(forward.tile.stages as u32));
}

/// Likewise that of values.
#[cube]
fn release_values(
    me: &Warpgroup,
    rings: &Rings,
    reading: &mut Reading,
    #[comptime] forward: Forward,
) {
    if me.unit == 0u32 {
        rings.v.release(reading.v.stage);
    }
    reading.v.advance(comptime!(forward.tile.stages as u32));
}

/// The weights of the first block of a tile.
#[cube]
pub(super) fn begin_block<S: Size, W: Size>(
    me: &Warpgroup,
    rings: &Rings,
    reading: &mut Reading,
    weights: &mut Array<Vector<u32, W>>,
    stats: &mut Array<RowPair>,
    block: u32,
    sight: &Sight,
    places: &Places,
    #[comptime] forward: Forward,
) {
    let mut scores = Array::<Vector<f32, S>>::new(1usize);
    rings.k.wait(reading.k.stage, reading.k.phase);
    scores[0] = multiply_keys::<S>(me, reading.k.stage, forward);
    wgmma_commit();
    scores[0] = wgmma_wait::<S>(scores[0], 0u32, comptime!(forward.scores().op));
    release_keys(me, rings, reading, forward);
    let _factors = soften::<S>(&mut scores, stats, block, sight, places, true, forward);
    weights[0] = operand::<S, W>(scores[0], comptime!(forward.weights()), comptime!(forward.float));
}

/// The weights of the next block, while those of the one before are multiplied with their values.
#[cube]
pub(super) fn step<S: Size, W: Size, O: Size>(
    me: &Warpgroup,
    rings: &Rings,
    reading: &mut Reading,
    out: &mut Array<Vector<f32, O>>,
    weights: &mut Array<Vector<u32, W>>,
    stats: &mut Array<RowPair>,
    block: u32,
    sight: &Sight,
    places: &Places,
    #[comptime] masked: bool,
    #[comptime] forward: Forward,
) {
    let mut scores = Array::<Vector<f32, S>>::new(1usize);
    rings.k.wait(reading.k.stage, reading.k.phase);
    take_turn(me, forward);
    scores[0] = multiply_keys::<S>(me, reading.k.stage, forward);
    wgmma_commit();
    rings.v.wait(reading.v.stage, reading.v.phase);
    out[0] = multiply_values::<W, O>(me, reading.v.stage, out[0], weights[0], forward);
    wgmma_commit();
    pass_turn(me, forward);
    scores[0] = wgmma_wait::<S>(scores[0], 1u32, comptime!(forward.scores().op));
    release_keys(me, rings, reading, forward);
    let factors = soften::<S>(&mut scores, stats, block, sight, places, masked, forward);
    settle(stats[1]);
    out[0] = wgmma_wait::<O>(out[0], 0u32, comptime!(forward.values().op));
    release_values(me, rings, reading, forward);
    out[0] = scale_rows::<O>(out[0], factors);
    weights[0] = operand::<S, W>(scores[0], comptime!(forward.weights()), comptime!(forward.float));
}

/// The values of the last block of a tile.
#[cube]
pub(super) fn end_block<W: Size, O: Size>(
    me: &Warpgroup,
    rings: &Rings,
    reading: &mut Reading,
    out: &mut Array<Vector<f32, O>>,
    weights: &Array<Vector<u32, W>>,
    #[comptime] forward: Forward,
) {
    rings.v.wait(reading.v.stage, reading.v.phase);
    out[0] = multiply_values::<W, O>(me, reading.v.stage, out[0], weights[0], forward);
    wgmma_commit();
    out[0] = wgmma_wait::<O>(out[0], 0u32, comptime!(forward.values().op));
    release_values(me, rings, reading, forward);
}
