//! The warps that weight: they load tokens, have the sums of all cubes of the group, and add the streams up.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`, and no `div_ceil`.
#![allow(clippy::manual_is_multiple_of, clippy::manual_div_ceil)]

use super::super::token::sigmoid;
use super::coefficients::InHand;
use super::exchange::{exchange, leave_group};
use super::kernel::{Place, Sizes};
use super::multiply::{numbers, phi_is_held};
use super::plan::{BOX, OWNERS, Once, TOKENS};
use crate::exponential::reciprocal;
use crate::tile::cuda::pipeline::Ring;
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// What warps that weight are given.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Weighting {
    pub(super) map: u64,
    /// If the streams are mixed: the maps of the layer's output and of the streams after it, and the addresses of h_post
    /// and h_res.
    pub(super) layer: u64,
    pub(super) mixed: u64,
    pub(super) post: u64,
    pub(super) res: u64,
    /// Addresses of the workspace and of h_in.
    pub(super) parts: u64,
    pub(super) out: u64,
    /// α of h_pre.
    pub(super) alpha_pre: f32,
    /// Which of the warps.
    pub(super) owner: u32,
}

/// Loads the tokens that come as number `number` into their stage; by a warp.
#[cube]
fn load(
    of: &Weighting,
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
    if lane < boxes {
        let all = comptime!((once.streams * once.box_bytes()) as u32);
        let to = place.base + stage * bytes + lane * all;
        let column = (place.rank * boxes + lane) * comptime!(BOX as u32);
        tma_load(to, of.map, ring.filling(stage), column, place.token(number, sizes), 0u32);
    }
    if comptime!(once.mixes) {
        load_layer(of, number, stage, ring, place, sizes, once);
    }
}

/// Loads what their streams are mixed with, beside [`load`].
#[cube]
fn load_layer(
    of: &Weighting,
    number: u32,
    stage: u32,
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let lane = UNIT_POS % 32;
    let boxes = comptime!(once.boxes as u32);
    let token = place.token(number, sizes);
    let full = ring.filling(stage);
    if lane < boxes {
        let before = comptime!((once.streams * once.boxes * once.box_bytes()) as u32);
        let at = place.base + stage * comptime!(once.stage_bytes() as u32) + before;
        let column = (place.rank * boxes + lane) * comptime!(BOX as u32);
        let to = at + lane * comptime!(once.box_bytes() as u32);
        tma_load(to, of.layer, full + 0, column, token + 0, 0u32);
    }
    // Of h_post, and of h_res.
    let post = comptime!(4 * once.streams as u32);
    let bytes = select(lane == 0, post, comptime!(post * once.streams as u32));
    let behind = select(lane == 0, 0u32, comptime!(post * TOKENS as u32));
    let from = select(lane == 0, of.post, of.res);
    if lane < 2 {
        let to = place.base
            + comptime!(once.weights_at() as u32)
            + stage * comptime!(once.weight_bytes() as u32)
            + behind;
        let there = min(sizes.tokens - token, comptime!(TOKENS as u32)) * bytes;
        let from = from + u64::cast_from(token) * u64::cast_from(bytes);
        bulk_load_arriving(to, from + 0, there, full + 0);
    }
}

/// Stores the streams of tokens that are mixed; by a warp, after those that multiplied have done it.
#[cube]
pub(super) fn store_mixed(
    of: &Weighting,
    number: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let lane = UNIT_POS % 32;
    let boxes = comptime!(once.boxes as u32);
    if lane < boxes {
        let stage = number % comptime!(once.stages as u32);
        let at = place.base + stage * comptime!(once.stage_bytes() as u32);
        let column = (place.rank * boxes + lane) * comptime!(BOX as u32);
        let from = at + lane * comptime!((once.streams * once.box_bytes()) as u32);
        tma_store(of.mixed, from, column, place.token(number, sizes), 0u32);
    }
}

/// Weights the streams of the tokens that are this warp's turn, in this cube's columns.
#[cube]
pub(super) fn weight(
    of: &Weighting,
    mix: &mut [f32],
    norm: &mut [f32],
    alpha: &[f32],
    bias: &[f32],
    h_post: &mut [f32],
    h_res: &mut [f32],
    parts: &mut [f32],
    shared: &mut Shared<[f32]>,
    counters: &mut [Atomic<u32>],
    ring: &Ring,
    sides: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let stages = comptime!(once.stages as u32);
    let n = comptime!(once.streams as u32);
    let lane = UNIT_POS % 32;
    if of.owner == 0 {
        let early = comptime!(once.early() as u32);
        for number in 0..min(place.count, early) {
            load(of, number, number, ring, place, sizes, once);
        }
        phi_is_held();
        for number in early..min(place.count, stages) {
            load(of, number, number, ring, place, sizes, once);
        }
    }
    let mut first = of.owner + 0;
    let mut in_hand = InHand::none(sizes, once);
    // This warp's turns are cut into as few batches as its lanes hold, as long as each other but for the last. While a batch
    // comes the repeats of the one before are made, and the rest at its end, which is much where it is shorter.
    let turns = (place.count + (OWNERS as u32 - 1) - of.owner) / OWNERS as u32;
    let (full, before) = comptime!((once.turns() as u32, once.turns() as u32 - 1));
    let batches = max((turns + before) / full, 1u32);
    let batch = max((turns + (batches - 1)) / batches, 1u32);
    // Repeats a turn: all are made in a batch that is no shorter.
    let some = (sizes.repeats + (batch - 1)) / batch;
    let owned = comptime!(once.owned_at() as u32) + of.owner * comptime!(once.owned() as u32);
    for number in range_stepped(of.owner, place.count, comptime!(OWNERS as u32)) {
        let (stage, phase) = (number % stages, number / stages);
        exchange(of, mix, parts, counters, sides, owned, number, place, sizes, once);
        weights(of, mix, norm, shared, owned, number, place, sizes, once);
        sync_plane();
        // Has been filled, as those who multiplied saw; now this warp sees it too.
        ring.wait(stage, phase);
        let stage_at = place.base + stage * comptime!(once.stage_bytes() as u32);
        let weights_at = owned + comptime!(once.firsts() as u32);
        let token = place.token(number, sizes);
        for four in 0..comptime!(TOKENS as u32 / 4) {
            let row = four * 4 + lane / 8;
            write_h_in(of.out, weights_at + row * n, stage_at, row, token, place, sizes, once);
        }
        // All lanes have read the stage.
        if comptime!(once.mixes) {
            tma_store_read(0u32);
        }
        sync_plane();
        if number + stages < place.count {
            load(of, number + stages, stage, ring, place, sizes, once);
        }
        let next = number + comptime!(OWNERS as u32);
        let ends = next == first + batch * OWNERS as u32 || next >= place.count;
        in_hand.go_on(select(ends, sizes.repeats, some), sizes, once);
        if ends {
            in_hand.end(h_res, sizes, once);
            in_hand.begin(&*mix, &*norm, alpha, bias, h_post, first, number, place, sizes, once);
            first = next + 0;
        }
    }
    in_hand.go_on(sizes.repeats, sizes, once);
    in_hand.end(h_res, sizes, once);
    if comptime!(once.mixes) {
        tma_store_wait();
    }
    if comptime!(!once.clustered()) {
        sync_plane();
        if lane == 0 {
            leave_group(counters, place.group, once);
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
    let share = reciprocal(f32::cast_from(sizes.width * n));
    let first_token = place.token(number, sizes);
    for turn in 0..comptime!(all.div_ceil(32)) {
        let at = turn * 32 + UNIT_POS % 32;
        if at < all {
            let (row, i) = (at / n, at % n);
            let heads = comptime!(once.heads() as u32);
            let squares = shared[(owned + comptime!(heads * TOKENS as u32) + row) as usize];
            let r = f32::inverse_sqrt(squares * share + sizes.norm_eps);
            let y = shared[(owned + row * heads + i) as usize];
            let bias = shared[comptime!(once.biases_at()) + i as usize];
            let weight = sigmoid(of.alpha_pre * (y * r) + bias, true) + sizes.hc_eps;
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
fn write_h_in(
    out: u64,
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
    let weights = numbers(place.base + weights_at * 4, n);
    let from = stage_at + row * 128 + ((vector ^ (row % 8)) << 4);
    let token = first_token + row;
    let first = place.rank * comptime!((once.boxes * BOX) as u32) + vector * 8;
    let line = out + u64::cast_from(token) * u64::cast_from(sizes.width) * 2;
    let together = comptime!(once.together());
    #[unroll]
    for some in 0..comptime!(once.boxes.div_ceil(together)) {
        // Some are on their way before the first is waited for.
        let (begin, end) = comptime!((some * together, once.boxes.min((some + 1) * together)));
        let mut held = Array::<Vector<u32, Const<4>>>::new(comptime!(n * together));
        #[unroll]
        for i in 0..comptime!(n * (end - begin)) {
            let at = comptime!(((n * begin + i) * once.box_bytes()) as u32);
            held[i] = load_16_shared(from + at);
        }
        #[unroll]
        for b in begin..end {
            let mut sums = Array::<f32>::new(8usize);
            #[unroll]
            for e in 0..8usize {
                sums[e] = f32::new(0.0);
            }
            #[unroll]
            for i in 0..n {
                let words = held[comptime!((b - begin) * n + i)];
                #[unroll]
                for word in 0..4usize {
                    let (low, high) = bf16_pair(words.extract(word));
                    sums[comptime!(2 * word)] += weights[i] * low;
                    sums[comptime!(2 * word + 1)] += weights[i] * high;
                }
            }
            let column = first + comptime!((b * BOX) as u32);
            let there = token < sizes.tokens && column < sizes.width;
            store_eight_if(there, line + u64::cast_from(column) * 2, &sums, Float16::Bf16);
        }
    }
}
