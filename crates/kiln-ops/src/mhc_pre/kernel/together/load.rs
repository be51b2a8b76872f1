//! The warp that loads: boxes by TMA, and what belongs to tokens by itself.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::kernel::{Inputs, Place, Sizes, words_of};
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
    pub(super) before: u64,
    pub(super) f: u64,
}

/// Pairs of dm for a lane: of all lanes they are all.
fn turns(together: &Together) -> usize {
    together.part() / 32
}

/// Weights for a lane.
fn turns_of_weights(together: &Together) -> usize {
    (TOKENS * together.streams).div_ceil(32)
}

/// Of h_res for a lane.
fn turns_of_res(together: &Together) -> usize {
    (TOKENS * together.streams * together.streams).div_ceil(32)
}

/// f32 that a lane loads of a stage beside the boxes: of dm, the factor of x, of the weights, and of h_post and h_res.
fn numbers(together: &Together) -> usize {
    if together.takes_back() {
        first_of_res(together) + turns_of_res(together)
    } else {
        first_of_post(together)
    }
}

/// Which of them are the first of h_post, and of h_res.
fn first_of_post(together: &Together) -> usize {
    2 * turns(together) + 1 + turns_of_weights(together)
}

fn first_of_res(together: &Together) -> usize {
    first_of_post(together) + turns_of_weights(together)
}

/// Loads them. What would be done with one here would wait for it: what is behind the last token, or the last row, is that of
/// another, which [`put`] makes zero where it is of dm. Other numbers there are multiplied with zeros, as TMA gives x and dh_in,
/// and nothing of those tokens is stored.
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
    let last = sizes.tokens - 1;
    #[unroll]
    for i in 0..turns {
        let at = lane + comptime!(32 * i as u32);
        let (row, j) = (min(token + at / pairs, last), at % pairs * 2);
        let of_row = row as usize * comptime!(rows as usize);
        #[unroll]
        for e in 0..2usize {
            let j = min(j + comptime!(e as u32), comptime!(rows - 1));
            numbers[comptime!(2 * i + e)] = inputs.dm[of_row + j as usize];
        }
    }
    let own = min(token + lane % comptime!(TOKENS as u32), last);
    numbers[comptime!(2 * turns)] = inputs.along[own as usize];
    #[unroll]
    for i in 0..comptime!(turns_of_weights(&together)) {
        let from = min(token * n + lane + comptime!(32 * i as u32), sizes.tokens * n - 1);
        numbers[comptime!(2 * turns + 1 + i)] = inputs.weights[from as usize];
        if comptime!(together.takes_back()) {
            numbers[comptime!(first_of_post(&together) + i)] = inputs.post[from as usize];
        }
    }
    if comptime!(together.takes_back()) {
        let first = comptime!(first_of_res(&together));
        #[unroll]
        for i in 0..comptime!(turns_of_res(&together)) {
            let all = sizes.tokens * n * n;
            let from = min(token * n * n + lane + comptime!(32 * i as u32), all - 1);
            numbers[comptime!(first + i)] = inputs.res[from as usize];
        }
    }
}

/// Writes them where the warps that multiply look for them; dm as the sum of two bf16.
#[cube]
fn put(
    numbers: &Array<f32>,
    shared: &mut Shared<[u32]>,
    words: usize,
    token: u32,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let tokens = comptime!(TOKENS as u32);
    let turns = comptime!(turns(&together));
    let (rows, pairs) = comptime!((together.rows as u32, 4 * together.eights() as u32));
    #[unroll]
    for i in 0..turns {
        let at = lane + comptime!(32 * i as u32);
        let there = token + at / pairs < sizes.tokens;
        let j = at % pairs * 2;
        let first = select(there && j < rows, numbers[comptime!(2 * i)], 0.0);
        let second = select(there && j + 1 < rows, numbers[comptime!(2 * i + 1)], 0.0);
        let (high, low) = two_bf16(first, second);
        shared[words + at as usize] = high;
        shared[words + comptime!(together.part()) + at as usize] = low;
    }
    let factors = words + comptime!(2 * together.part());
    if lane < tokens {
        shared[factors + lane as usize] = u32::reinterpret(numbers[comptime!(2 * turns)]);
    }
    #[unroll]
    for i in 0..comptime!(turns_of_weights(&together)) {
        let at = lane + comptime!(32 * i as u32);
        if at < comptime!((TOKENS * together.streams) as u32) {
            let weight = numbers[comptime!(2 * turns + 1 + i)];
            shared[factors + (tokens + at) as usize] = u32::reinterpret(weight);
            if comptime!(together.takes_back()) {
                let post = numbers[comptime!(first_of_post(&together) + i)];
                let to = words + comptime!(together.post_at());
                shared[to + at as usize] = u32::reinterpret(post);
            }
        }
    }
    if comptime!(together.takes_back()) {
        let first = comptime!(first_of_res(&together));
        let to = words + comptime!(together.res_at());
        #[unroll]
        for i in 0..comptime!(turns_of_res(&together)) {
            let at = lane + comptime!(32 * i as u32);
            if at < comptime!((TOKENS * together.streams * together.streams) as u32) {
                shared[to + at as usize] = u32::reinterpret(numbers[comptime!(first + i)]);
            }
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
    let boxes = comptime!(together.boxes as u32);
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
        // Boxes of x come first, then those of the others that there are.
        let mut of = Array::<u64>::new(1usize);
        let mut at = lane + 0;
        of[0] = maps.x;
        if lane >= comptime!(together.dh_in_at() as u32) {
            of[0] = maps.dh_in;
            at = lane - comptime!(together.dh_in_at() as u32);
        }
        if comptime!(together.also()) && lane >= comptime!(together.also_at() as u32) {
            of[0] = maps.also;
            at = lane - comptime!(together.also_at() as u32);
        }
        if comptime!(together.takes_back()) && lane >= comptime!(together.before_at() as u32) {
            of[0] = maps.before;
            at = lane - comptime!(together.before_at() as u32);
        }
        if comptime!(together.takes_back()) && lane >= comptime!(together.f_at() as u32) {
            of[0] = maps.f;
            at = lane - comptime!(together.f_at() as u32);
        }
        if lane < comptime!(together.boxes_of_stage() as u32) {
            let column = place.column + at % boxes * comptime!(BOX as u32);
            tma_load(to + 0, of[0], bar + 0, column, token, at / boxes);
        }
        let words = words_of(state.stage, together);
        put(&numbers, shared, words, token + 0, sizes, together);
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
