//! The warps that weight: they load tokens, gather the sums of all cubes of the group, and add the streams up.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::super::token::sigmoid;
use super::kernel::{Place, Sizes, counter};
use super::plan::{BOX, OWNERS, Once, TOKENS};
use crate::tile::cuda::pipeline::Ring;
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// What warps that weight are given.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Weighting {
    pub(super) map: u64,
    /// Addresses of the workspace and of h_in.
    pub(super) parts: u64,
    pub(super) out: u64,
    pub(super) alpha: f32,
    /// Which of the warps.
    pub(super) owner: u32,
}

/// Loads the tokens that come as number `number` into their stage; by a warp.
#[cube]
fn load(
    map: u64,
    number: u32,
    stage: u32,
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let lane = UNIT_POS % 32;
    let boxes = comptime!(once.boxes as u32);
    let bytes = comptime!(once.stage_bytes() as u32);
    if lane == 0 {
        ring.expect(stage, bytes);
    }
    sync_plane();
    // There are at most 24.
    if lane < comptime!((once.streams * once.boxes) as u32) {
        let to = place.base + stage * bytes + lane * comptime!(once.box_bytes() as u32);
        let column = (place.rank * boxes + lane % boxes) * comptime!(BOX as u32);
        let token = place.token(number, sizes);
        tma_load(to, map, ring.filling(stage), column, token, lane / boxes);
    }
}

/// The sum of all cubes of the four that are at `from`, an address.
#[cube]
fn of_all(from: u64, #[comptime] once: Once) -> Vector<f32, Const<4>> {
    let (bytes, cubes) = comptime!((4 * once.part() as u64, once.cubes));
    let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
    // Eight loads are on their way at a time.
    for eight in 0..comptime!((cubes / 8) as u32) {
        sum = of_some(sum, from + u64::cast_from(eight) * comptime!(8 * bytes), 8usize, once);
    }
    if comptime!(cubes % 8 > 0) {
        let rest = from + comptime!((cubes / 8 * 8) as u64 * bytes);
        sum = of_some(sum, rest, comptime!(cubes % 8), once);
    }
    sum
}

/// `sum` and the fours of `count` cubes.
#[cube]
fn of_some(
    sum: Vector<f32, Const<4>>,
    from: u64,
    #[comptime] count: usize,
    #[comptime] once: Once,
) -> Vector<f32, Const<4>> {
    let bytes = comptime!(4 * once.part() as u64);
    let mut quads = Array::<Vector<f32, Const<4>>>::new(count);
    #[unroll]
    for i in 0..count {
        quads[i] = load_quad(from + comptime!(i as u64 * bytes));
    }
    let mut all = sum;
    #[unroll]
    for i in 0..count {
        all += quads[i];
    }
    all
}

/// Weights the streams of the tokens that are this warp's turn, in this cube's columns.
#[cube]
pub(super) fn weight(
    of: &Weighting,
    mix: &mut [f32],
    norm: &mut [f32],
    shared: &mut Shared<[f32]>,
    counters: &mut [Atomic<u32>],
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let stages = comptime!(once.stages as u32);
    let (n, cubes) = comptime!((once.streams as u32, once.cubes as u32));
    let lane = UNIT_POS % 32;
    if of.owner == 0 {
        for number in 0..min(place.count, stages) {
            load(of.map, number, number, ring, place, sizes, once);
        }
    }
    let owned = comptime!(once.owned_at() as u32) + of.owner * comptime!(once.owned() as u32);
    for number in range_stepped(of.owner, place.count, comptime!(OWNERS as u32)) {
        let (stage, phase) = (number % stages, number / stages);
        ring.wait_released(stage, phase);
        if comptime!(cubes > 1) {
            let at = number % comptime!(once.places() as u32);
            let counter = counter(&*counters, place.group, at, once);
            if lane == 0 {
                counter_add(counter + 0);
            }
            let times = number / comptime!(once.places() as u32) + 1;
            counter_wait(counter + 0, times * cubes);
        }
        gather(of, mix, shared, owned, number, place, sizes, once);
        sync_plane();
        weights(of, mix, norm, shared, owned, number, place, sizes, once);
        sync_plane();
        // Has been filled, as those who multiplied saw; now this warp sees it too.
        ring.wait(stage, phase);
        let stage_at = place.base + stage * comptime!(once.stage_bytes() as u32);
        let weights_at = owned + comptime!(once.firsts() as u32);
        let token = place.token(number, sizes);
        for four in 0..comptime!(TOKENS as u32 / 4) {
            let row = four * 4 + lane / 8;
            mixed(of.out, &*shared, weights_at + row * n, stage_at, row, token, place, sizes, once);
        }
        // All lanes have read the stage.
        sync_plane();
        if number + stages < place.count {
            load(of.map, number + stages, stage, ring, place, sizes, once);
        }
    }
    if comptime!(cubes > 1) {
        sync_plane();
        if lane == 0 {
            leave(counters, place.group, once);
        }
    }
}

/// Adds up what all cubes have left: y of the weights and the sums of the squares, for this warp, and the rest of x·φᵀ
/// of the tokens that this cube writes.
#[cube]
fn gather(
    of: &Weighting,
    mix: &mut [f32],
    shared: &mut Shared<[f32]>,
    owned: u32,
    number: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (n, rows, cubes) = comptime!((once.streams as u32, once.rows as u32, once.cubes));
    let firsts = comptime!(once.firsts() as u32 / 4);
    // Fours of a token.
    let fours = comptime!(once.rest() as u32 / 4);
    let all = comptime!(firsts + TOKENS.div_ceil(cubes) as u32 * fours);
    let workspace = of.parts + u64::cast_from(place.workspace(number, once)) * 4;
    let first_token = place.token(number, sizes);
    for turn in 0..comptime!(all.div_ceil(32)) {
        let four = turn * 32 + UNIT_POS % 32;
        if four < firsts {
            let sum = of_all(workspace + u64::cast_from(four) * 16, once);
            #[unroll]
            for e in 0..4usize {
                shared[(owned + four * 4) as usize + e] = sum.extract(e);
            }
        } else {
            let (nth, piece) = ((four - firsts) / fours, (four - firsts) % fours);
            let row = place.rank + nth * comptime!(cubes as u32);
            if row < comptime!(TOKENS as u32) && first_token + row < sizes.tokens {
                let from = firsts + row * fours + piece;
                let sum = of_all(workspace + u64::cast_from(from) * 16, once);
                let j = n + piece * 4;
                let to = (first_token + row) as usize * comptime!(rows as usize) + j as usize;
                #[unroll]
                for e in 0..4usize {
                    if j + comptime!(e as u32) < rows {
                        mix[to + e] = sum.extract(e);
                    }
                }
            }
        }
    }
}

/// Makes the weights of the streams, and writes the rest of what this cube writes of tokens.
#[cube]
fn weights(
    of: &Weighting,
    mix: &mut [f32],
    norm: &mut [f32],
    shared: &mut Shared<[f32]>,
    owned: u32,
    number: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (n, cubes) = comptime!((once.streams as u32, once.cubes as u32));
    let all = comptime!(TOKENS as u32 * n);
    let width = f32::cast_from(sizes.width * n);
    let first_token = place.token(number, sizes);
    for turn in 0..comptime!(all.div_ceil(32)) {
        let at = turn * 32 + UNIT_POS % 32;
        if at < all {
            let (row, i) = (at / n, at % n);
            let from = owned + row * comptime!(n + 1);
            let squares = shared[(from + n) as usize];
            let r = 1.0 / f32::sqrt(squares / width + sizes.norm_eps);
            let y = shared[(from + i) as usize];
            let bias = shared[comptime!(once.biases_at()) + i as usize];
            let weight = sigmoid(of.alpha * (y * r) + bias, true) + sizes.hc_eps;
            shared[(owned + comptime!(once.firsts() as u32) + at) as usize] = weight;
            let token = first_token + row;
            if row % cubes == place.rank && token < sizes.tokens {
                mix[token as usize * comptime!(once.rows) + i as usize] = y;
                if i == 0 {
                    norm[token as usize] = r;
                }
            }
        }
    }
}

/// Writes h_in of a row of the stage, 16 bytes of each box a lane, with the weights at `weights_at`.
#[cube]
fn mixed(
    out: u64,
    shared: &Shared<[f32]>,
    weights_at: u32,
    stage_at: u32,
    row: u32,
    first_token: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let n = comptime!(once.streams);
    let vector = UNIT_POS % 8;
    let mut weights = Array::<f32>::new(n);
    #[unroll]
    for i in 0..n {
        weights[i] = shared[weights_at as usize + i];
    }
    let from = stage_at + row * 128 + ((vector ^ (row % 8)) << 4);
    let token = first_token + row;
    let first = place.rank * comptime!((once.boxes * BOX) as u32) + vector * 8;
    let line = out + u64::cast_from(token) * u64::cast_from(sizes.width) * 2;
    #[unroll]
    for b in 0..comptime!(once.boxes) {
        let mut sums = Array::<f32>::new(8usize);
        #[unroll]
        for e in 0..8usize {
            sums[e] = f32::new(0.0);
        }
        #[unroll]
        for i in 0..n {
            let words =
                load_16_shared(from + comptime!(((i * once.boxes + b) * once.box_bytes()) as u32));
            #[unroll]
            for word in 0..4usize {
                let (low, high) = bf16_pair(words.extract(word));
                sums[comptime!(2 * word)] += weights[i] * low;
                sums[comptime!(2 * word + 1)] += weights[i] * high;
            }
        }
        let column = first + comptime!((b * BOX) as u32);
        if token < sizes.tokens && column < sizes.width {
            store_eight(line + u64::cast_from(column) * 2, &sums, Float16::Bf16);
        }
    }
}

/// Says that this warp waits for no more; the last one of the group makes the counters ready for the next launch.
#[cube]
fn leave(counters: &mut [Atomic<u32>], group: u32, #[comptime] once: Once) {
    let first = (group * comptime!(once.counters() as u32)) as usize;
    gpu_asm!("fence.acq_rel.gpu;");
    let done = counters[first + comptime!(once.places())].fetch_add(1u32) + 1;
    gpu_asm!("fence.acq_rel.gpu;");
    if done == comptime!((once.cubes * OWNERS) as u32) {
        for i in 0..comptime!(once.counters()) {
            counters[first + i].store(0u32);
        }
    }
}
