//! The warp that loads: boxes by TMA, and what belongs to tokens by itself.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::kernel::{Inputs, Place, Sizes};
use super::plan::{BOX, TOKENS, Together};
use crate::tile::cuda::pipeline::{PipelineState, Ring};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// What is loaded, and where from.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Maps {
    pub(super) x: u64,
    pub(super) dh_in: u64,
    pub(super) also: u64,
}

/// Pairs of dm for a lane.
fn turns(together: &Together) -> usize {
    (TOKENS * 4 * together.eights()).div_ceil(32)
}

/// Weights for a lane.
fn turns_of_weights(together: &Together) -> usize {
    (TOKENS * together.streams).div_ceil(32)
}

/// f32 that a lane loads of a stage beside the boxes: of dm, the factor of x, and of the weights.
fn numbers(together: &Together) -> usize {
    2 * turns(together) + 1 + turns_of_weights(together)
}

/// Loads them.
#[cube]
fn load(
    numbers: &mut Array<f32>,
    inputs: &Inputs,
    token: u32,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let (n, rows) = comptime!((together.streams as u32, together.rows as u32));
    let pairs = comptime!(4 * together.eights() as u32);
    let turns = comptime!(turns(&together));
    #[unroll]
    for i in 0..turns {
        let at = lane + comptime!(32 * i as u32);
        let (row, j) = (token + at / pairs, at % pairs * 2);
        #[unroll]
        for e in 0..2usize {
            let j = j + comptime!(e as u32);
            let there = row < sizes.tokens && j < rows;
            let from = select(there, row as usize * comptime!(rows as usize) + j as usize, 0);
            numbers[comptime!(2 * i + e)] = select(there, inputs.dm[from], 0.0);
        }
    }
    let last = sizes.tokens - 1;
    let own = min(token + lane % comptime!(TOKENS as u32), last);
    numbers[comptime!(2 * turns)] = inputs.along[own as usize];
    #[unroll]
    for i in 0..comptime!(turns_of_weights(&together)) {
        let from = min(token * n + lane + comptime!(32 * i as u32), sizes.tokens * n - 1);
        numbers[comptime!(2 * turns + 1 + i)] = inputs.weights[from as usize];
    }
}

/// Writes them where the warps that multiply look for them; dm as the sum of two bf16.
#[cube]
fn put(
    numbers: &Array<f32>,
    shared: &mut Shared<[u32]>,
    words: usize,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let tokens = comptime!(TOKENS as u32);
    let turns = comptime!(turns(&together));
    #[unroll]
    for i in 0..turns {
        let at = lane + comptime!(32 * i as u32);
        if at < comptime!(together.part() as u32) {
            let (high, low) = two_bf16(numbers[comptime!(2 * i)], numbers[comptime!(2 * i + 1)]);
            shared[words + at as usize] = high;
            shared[words + comptime!(together.part()) + at as usize] = low;
        }
    }
    let words = words + comptime!(2 * together.part());
    if lane < tokens {
        shared[words + lane as usize] = u32::reinterpret(numbers[comptime!(2 * turns)]);
    }
    #[unroll]
    for i in 0..comptime!(turns_of_weights(&together)) {
        let at = lane + comptime!(32 * i as u32);
        if at < comptime!((TOKENS * together.streams) as u32) {
            let weight = numbers[comptime!(2 * turns + 1 + i)];
            shared[words + (tokens + at) as usize] = u32::reinterpret(weight);
        }
    }
}

/// Loads what the cube goes through; a warp.
#[cube]
pub(super) fn produce(
    maps: &Maps,
    inputs: &Inputs,
    shared: &mut Shared<[u32]>,
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let (boxes, warps) = comptime!((together.boxes as u32, together.warps() as u32));
    let mut state = PipelineState::start();
    let mut numbers = Array::<f32>::new(comptime!(numbers(&together)));
    load(&mut numbers, inputs, place.token(0u32, sizes), sizes, together);
    for number in 0..place.count {
        let token = place.token(number, sizes);
        ring.vacant(state.stage, state.phase);
        let stage = place.base + state.stage * comptime!(together.stage_bytes() as u32);
        if lane == 0 {
            ring.expect(state.stage, comptime!(together.stage_bytes() as u32));
        }
        sync_plane();
        let to = stage + lane * comptime!(together.box_bytes() as u32);
        let bar = ring.filling(state.stage);
        if lane < warps {
            let column = place.column + lane % boxes * comptime!(BOX as u32);
            tma_load(to + 0, maps.x, bar + 0, column, token, lane / boxes);
        } else if lane < comptime!(warps + boxes) {
            let column = place.column + (lane - warps) * comptime!(BOX as u32);
            tma_load(to + 0, maps.dh_in, bar + 0, column, token, comptime!(0u32).runtime());
        } else if comptime!(together.also) {
            let at = lane - comptime!(together.also_at() as u32);
            if at < warps {
                let column = place.column + at % boxes * comptime!(BOX as u32);
                tma_load(to + 0, maps.also, bar + 0, column, token, at / boxes);
            }
        }
        let words =
            comptime!(together.words_at()) + (state.stage as usize) * comptime!(together.words());
        put(&numbers, shared, words, together);
        sync_plane();
        if lane == 0 {
            ring.arrive(state.stage);
        }
        // Those of the next stage come while it becomes empty: the cube waited for this warp otherwise.
        let next = min(number + 1, place.count - 1);
        load(&mut numbers, inputs, place.token(next, sizes), sizes, together);
        state.advance(comptime!(together.stages as u32));
    }
}
