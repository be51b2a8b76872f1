//! The warps that make the numbers of tokens: ⟨dh_in, x[i]⟩ over all columns, with those of the other cubes of the group, and
//! with them what the warps that multiply take of each token.
//!
//! Cubes of a group leave what their columns have in a workspace and wait for each other, so all cubes run at a time. One warp
//! leaves it, as far ahead as x has come, and one or two others, by turns, look for what all have left: that takes as long as
//! memory to answer twice, and a cube waited for a warp that did all of it.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::back::eight_of;
use super::kernel::{Inputs, Partials, Place, Rings, Sizes, words_of, x_of};
use super::plan::{BOX, TOKENS, Together};
use crate::tile::cuda::pipeline::PipelineState;
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// Loads of parts of other cubes that are on their way at a time.
const AT_A_TIME: usize = 8;

/// What cubes of a group leave for each other.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Exchange {
    parts: Box<[f32]>,
    counters: Box<[Atomic<u32>]>,
}

/// Pairs of dm for a lane: of all lanes they are all.
fn turns(together: &Together) -> usize {
    together.part() / 32
}

/// Weights for a lane, and as many of what else there is n of for a token.
fn turns_of_weights(together: &Together) -> usize {
    (TOKENS * together.streams).div_ceil(32)
}

/// Of h_res for a lane.
fn turns_of_res(together: &Together) -> usize {
    (TOKENS * together.streams * together.streams).div_ceil(32)
}

/// f32 that a lane loads of a stage: of dm, of the factor of x with the norm, the slopes and y, of the weights, and of h_post
/// and h_res.
fn numbers(together: &Together) -> usize {
    if together.takes_back() {
        first_of_res(together) + turns_of_res(together)
    } else {
        first_of_post(together)
    }
}

/// The first of the factor of x among them; and so on.
fn first_of_along(together: &Together) -> usize {
    2 * turns(together)
}

fn first_of_weights(together: &Together) -> usize {
    first_of_along(together) + 2 + 2 * together.streams
}

fn first_of_post(together: &Together) -> usize {
    first_of_weights(together) + turns_of_weights(together)
}

fn first_of_res(together: &Together) -> usize {
    first_of_post(together) + turns_of_weights(together)
}

/// Leaves the cube's part of all tokens that it goes through; a warp. Its stages are vacated by those that multiply, which the
/// sum of all parts, and so this one, has come to before.
#[cube]
pub(super) fn leave_parts(
    exchange: &mut Exchange,
    rings: &Rings,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let mut of_x = PipelineState::start();
    for step in 0..place.count {
        rings.x.wait(of_x.stage, of_x.phase);
        leave(exchange, x_of(place, of_x.stage, together), step, place, sizes, together);
        of_x.advance(comptime!(together.stages_of_x as u32));
    }
}

/// Makes the numbers of every so manyth sixteen tokens that the cube goes through, from number `maker` on; a warp.
#[cube]
pub(super) fn make_numbers(
    inputs: &Inputs,
    exchange: &mut Exchange,
    shared: &mut Shared<[u32]>,
    partials: &mut Partials,
    maker: u32,
    rings: &Rings,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let makers = comptime!(together.makers() as u32);
    let dots = comptime!(together.dots_at()) + (maker * comptime!(together.dots() as u32)) as usize;
    let mut of_rest = PipelineState::start();
    for _ in 0..maker {
        of_rest.advance(comptime!(together.stages as u32));
    }
    // Of dbias, and of the first dα.
    let mut sums = Array::<f32>::new(comptime!(together.streams + 1));
    #[unroll]
    for i in 0..comptime!(together.streams + 1) {
        sums[i] = f32::new(0.0);
    }
    let alpha = inputs.alpha[0];
    let mut numbers = Array::<f32>::new(comptime!(numbers(&together)));
    let first = min(maker, place.count - 1);
    load(&mut numbers, inputs, place.token(first, sizes), sizes, together);
    for number in range_stepped(maker, place.count, makers) {
        let token = place.token(number, sizes);
        add_up(&*exchange, shared, dots, number + 0, place, sizes, together);
        rings.rest.vacant(of_rest.stage, of_rest.phase);
        let words = words_of(of_rest.stage, together);
        put(&numbers, alpha, &mut sums, shared, dots, words, token + 0, sizes, together);
        sync_plane();
        if UNIT_POS % 32 == 0 {
            rings.rest.arrive(of_rest.stage);
        }
        // Those of the next stage come while others leave what they have: the cube waited for this warp otherwise.
        let next = min(number + makers, place.count - 1);
        load(&mut numbers, inputs, place.token(next, sizes), sizes, together);
        #[unroll]
        for _ in 0..makers {
            of_rest.advance(comptime!(together.stages as u32));
        }
    }
    leave_sums(partials, &sums, maker, place, together);
    leave_group(exchange, place, sizes, together);
}

/// Leaves sums over the tokens of this warp; one cube of the group.
#[cube]
fn leave_sums(
    partials: &mut Partials,
    sums: &Array<f32>,
    maker: u32,
    place: &Place,
    #[comptime] together: Together,
) {
    let row = place.group * comptime!(together.makers() as u32) + maker;
    #[unroll]
    for i in 0..comptime!(together.streams + 1) {
        let sum = plane_sum(sums[i]);
        if place.rank == 0 && UNIT_POS % 32 == 0 {
            partials.dots[(row * comptime!(together.streams as u32 + 1)) as usize + i] = sum;
        }
    }
}

/// Leaves ⟨dh_in, x[i]⟩ of sixteen tokens over this cube's columns: of products of tokens with tokens what is on the diagonal.
#[cube]
fn leave(
    exchange: &mut Exchange,
    stage: u32,
    number: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let (n, boxes) = comptime!((together.streams, together.boxes));
    let float = comptime!(Float16::Bf16);
    // Of each stream the first eight tokens times themselves, and the last eight.
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(2 * n));
    #[unroll]
    for i in 0..comptime!(2 * n) {
        sums[i] = Vector::new(0.0f32);
    }
    // A lane names a row: of x the upper tokens, then the lower, of the first eight columns and then of the second; of dh_in
    // the columns of the upper ones first.
    let of_x = eight_of(lane % 16, lane / 16);
    let of_dy = eight_of(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    #[unroll]
    for number_of_box in 0..boxes {
        #[unroll]
        for pair in 0..comptime!(BOX / 16) {
            let further = comptime!(32 * pair as u32);
            let dy_at = stage
                + comptime!(((together.dh_in_at() + number_of_box) * together.box_bytes()) as u32);
            let mut dy = Array::<Vector<u32, Const<4>>>::new(1usize);
            dy[0] = load_matrices(dy_at + (of_dy ^ further), false);
            #[unroll]
            for i in 0..n {
                let x_at =
                    stage + comptime!(((i * boxes + number_of_box) * together.box_bytes()) as u32);
                let mut x = Array::<Vector<u32, Const<4>>>::new(1usize);
                x[0] = load_matrices(x_at + (of_x ^ further), false);
                #[unroll]
                for half in 0..2usize {
                    let (b0, b1) = comptime!((2 * half, 2 * half + 1));
                    let at = comptime!(2 * i + half);
                    let (b0, b1) = (dy[0].extract(b0), dy[0].extract(b1));
                    sums[at] = mma_16x8x16(x[0], b0, b1, sums[at], float);
                }
            }
        }
    }
    let part = part_of(number, place.rank + 0, place, sizes, together);
    // Row and column are the same in one of four lanes.
    if lane % 4 == lane / 8 {
        #[unroll]
        for half in 0..2usize {
            let token = lane / 4 + comptime!(8 * half as u32);
            #[unroll]
            for i in 0..n {
                let sum = sums[comptime!(2 * i + half)];
                let (even, odd) = comptime!((2 * half, 2 * half + 1));
                let dot = select(lane / 4 % 2 == 0, sum.extract(even), sum.extract(odd));
                exchange.parts[part + (token * comptime!(n as u32)) as usize + i] = dot;
            }
        }
    }
    sync_plane();
    if lane == 0 {
        let at = number % comptime!(together.places() as u32);
        counter_add(counter(&*exchange, place.group, at + 0, together));
    }
}

/// Where in the workspace a cube's part is.
#[cube]
fn part_of(
    number: u32,
    rank: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) -> usize {
    let places = comptime!(together.places() as u32);
    let at = (place.group * places + number % places) * sizes.across + rank;
    at as usize * comptime!(together.dots())
}

#[cube]
fn counter(exchange: &Exchange, group: u32, at: u32, #[comptime] together: Together) -> u64 {
    let number = group * comptime!(together.counters() as u32) + at;
    global_address::<Atomic<u32>>(exchange.counters.as_ptr()) + u64::cast_from(number) * 4
}

/// Adds up what all cubes have left of tokens, in an order that is the same in all of them.
#[cube]
fn add_up(
    exchange: &Exchange,
    shared: &mut Shared<[u32]>,
    dots_at: usize,
    number: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let dots = comptime!(together.dots() as u32);
    let places = comptime!(together.places() as u32);
    let counter = counter(exchange, place.group, number % places, together);
    counter_wait(counter + 0, (number / places + 1) * sizes.across);
    // Lanes have four numbers of a cube each, of as many cubes as there are lanes for.
    let (quads, cubes) = comptime!((dots / 4, 128 / dots));
    let (quad, own) = (lane % quads, lane / quads);
    let first = part_of(number, 0u32.runtime(), place, sizes, together);
    let parts = global_address::<f32>(exchange.parts.as_ptr()) + u64::cast_from(first) * 4;
    let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
    for from in range_stepped(0u32, sizes.across, comptime!(AT_A_TIME as u32 * cubes)) {
        let mut some = Array::<Vector<f32, Const<4>>>::new(AT_A_TIME);
        #[unroll]
        for i in 0..AT_A_TIME {
            let rank = min(from + comptime!(i as u32 * cubes) + own, sizes.across - 1);
            some[i] = load_quad(parts + u64::cast_from((rank * dots + quad * 4) * 4));
        }
        #[unroll]
        for i in 0..AT_A_TIME {
            let there = from + comptime!(i as u32 * cubes) + own < sizes.across;
            sum += select(there, some[i], Vector::new(0.0f32));
        }
    }
    #[unroll]
    for e in 0..4usize {
        let mut all = f32::new(0.0);
        #[unroll]
        for of in 0..cubes {
            all += plane_shuffle(sum.extract(e), quad + comptime!(of * quads));
        }
        let at = quad * 4 + comptime!(e as u32);
        if lane < quads {
            shared[dots_at + at as usize] = u32::reinterpret(all);
        }
    }
    sync_plane();
}

/// ⟨dh_in, x[i]⟩ of a token of those that have been added up.
#[cube]
fn dot(
    shared: &Shared<[u32]>,
    dots_at: usize,
    token: u32,
    i: u32,
    #[comptime] together: Together,
) -> f32 {
    let at = token * comptime!(together.streams as u32) + i;
    f32::reinterpret(shared[dots_at + at as usize])
}

/// Loads what there is of tokens. What would be done with one here would wait for it: what is behind the last token, or the
/// last row, is that of another, which [`put`] makes zero where it is of dm. Other numbers there are multiplied with zeros,
/// as TMA gives x and dh_in, and nothing of those tokens is stored.
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
    let last = sizes.tokens - 1;
    #[unroll]
    for i in 0..comptime!(turns(&together)) {
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
    let first = comptime!(first_of_along(&together));
    numbers[first] = inputs.along[own as usize];
    numbers[comptime!(first + 1)] = inputs.norm[own as usize];
    #[unroll]
    for i in 0..comptime!(together.streams) {
        numbers[comptime!(first + 2 + i)] = inputs.slopes[(own * n) as usize + i];
        numbers[comptime!(first + 2 + together.streams + i)] = inputs.y[(own * n) as usize + i];
    }
    #[unroll]
    for i in 0..comptime!(turns_of_weights(&together)) {
        let from = min(token * n + lane + comptime!(32 * i as u32), sizes.tokens * n - 1);
        numbers[comptime!(first_of_weights(&together) + i)] = inputs.weights[from as usize];
        if comptime!(together.takes_back()) {
            numbers[comptime!(first_of_post(&together) + i)] = inputs.post[from as usize];
        }
    }
    if comptime!(together.takes_back()) {
        #[unroll]
        for i in 0..comptime!(turns_of_res(&together)) {
            let all = sizes.tokens * n * n;
            let from = min(token * n * n + lane + comptime!(32 * i as u32), all - 1);
            numbers[comptime!(first_of_res(&together) + i)] = inputs.res[from as usize];
        }
    }
}

/// Writes them where the warps that multiply look for them, dm as the sum of two bf16; and adds to dbias and the first dα.
#[cube]
fn put(
    numbers: &Array<f32>,
    alpha: f32,
    sums: &mut Array<f32>,
    shared: &mut Shared<[u32]>,
    dots_at: usize,
    words: usize,
    token: u32,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let (n, rows) = comptime!((together.streams as u32, together.rows as u32));
    let pairs = comptime!(4 * together.eights() as u32);
    #[unroll]
    for i in 0..comptime!(turns(&together)) {
        let at = lane + comptime!(32 * i as u32);
        let (row, j) = (at / pairs, at % pairs * 2);
        let there = token + row < sizes.tokens;
        let mut pair = Array::<f32>::new(2usize);
        #[unroll]
        for e in 0..2usize {
            let j = j + comptime!(e as u32);
            // The first rows are multiplied with ⟨dh_in, x[i]⟩.
            let dot = dot(&*shared, dots_at, row, min(j, comptime!(n - 1)), together);
            let number = numbers[comptime!(2 * i + e)];
            let number = select(j < n, number * dot, number);
            pair[e] = select(there && j < rows, number, 0.0);
        }
        let (high, low) = two_bf16(pair[0], pair[1]);
        shared[words + at as usize] = high;
        shared[words + comptime!(together.part()) + at as usize] = low;
    }
    let factors = words + comptime!(2 * together.part());
    let tokens = comptime!(TOKENS as u32);
    if lane < tokens {
        let first = comptime!(first_of_along(&together));
        let norm = numbers[comptime!(first + 1)];
        let mut of_dots = f32::new(0.0);
        #[unroll]
        for i in 0..comptime!(together.streams) {
            let slope = numbers[comptime!(first + 2 + i)];
            let y = numbers[comptime!(first + 2 + together.streams + i)];
            let g = slope * dot(&*shared, dots_at, lane, comptime!(i as u32).runtime(), together);
            let there = token + lane < sizes.tokens;
            sums[i] += select(there, g, 0.0);
            sums[comptime!(together.streams)] += select(there, g * y, 0.0);
            of_dots += g * y;
        }
        // r² by itself may be too large, or too small.
        let width = f32::cast_from(sizes.width * n);
        let along = numbers[first] - alpha * of_dots * norm / width * norm;
        shared[factors + lane as usize] = u32::reinterpret(along);
    }
    #[unroll]
    for i in 0..comptime!(turns_of_weights(&together)) {
        let at = lane + comptime!(32 * i as u32);
        if at < comptime!((TOKENS * together.streams) as u32) {
            let weight = numbers[comptime!(first_of_weights(&together) + i)];
            shared[factors + (tokens + at) as usize] = u32::reinterpret(weight);
            if comptime!(together.takes_back()) {
                let post = numbers[comptime!(first_of_post(&together) + i)];
                let to = words + comptime!(together.post_at());
                shared[to + at as usize] = u32::reinterpret(post);
            }
        }
    }
    if comptime!(together.takes_back()) {
        let to = words + comptime!(together.res_at());
        #[unroll]
        for i in 0..comptime!(turns_of_res(&together)) {
            let at = lane + comptime!(32 * i as u32);
            if at < comptime!((TOKENS * together.streams * together.streams) as u32) {
                let number = numbers[comptime!(first_of_res(&together) + i)];
                shared[to + at as usize] = u32::reinterpret(number);
            }
        }
    }
}

/// Says that this warp waits for no more; the last one of the group makes the counters ready for the next launch.
#[cube]
fn leave_group(
    exchange: &mut Exchange,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    if UNIT_POS % 32 == 0 {
        let first = (place.group * comptime!(together.counters() as u32)) as usize;
        gpu_asm!("fence.acq_rel.gpu;");
        let done = exchange.counters[first + comptime!(together.places())].fetch_add(1u32) + 1;
        gpu_asm!("fence.acq_rel.gpu;");
        if done == sizes.across * comptime!(together.makers() as u32) {
            #[unroll]
            for i in 0..comptime!(together.counters()) {
                exchange.counters[first + i].store(0u32);
            }
        }
    }
}
