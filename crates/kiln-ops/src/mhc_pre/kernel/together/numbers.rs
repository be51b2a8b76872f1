//! The warps that make the numbers of tokens: of ⟨dh_in, x[i]⟩, which they [add up](super::exchange), what the warps that
//! multiply take of each token, and what that gives dbias and the first dα.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::exchange::{Exchange, add_up, leave_group};
use super::kernel::{Inputs, Partials, Place, Rings, Sizes, words_of};
use super::plan::{TOKENS, Together};
use crate::tile::cuda::pipeline::PipelineState;
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

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
