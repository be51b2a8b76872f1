//! ⟨dh_in, x[i]⟩ over all columns, with those of the other cubes of the group.
//!
//! Cubes of a group leave what their columns have in a workspace and wait for each other, so all cubes run at a time. One warp
//! leaves it, as far ahead as x has come, and those that make [numbers](super::numbers), by turns, look for what all have
//! left: that takes as long as memory to answer twice, and a cube waited for a warp that did all of it.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::back::eight_of;
use super::kernel::{Place, Rings, Sizes, x_of};
use super::plan::{BOX, Together};
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
pub(super) fn add_up(
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

/// Says that this warp waits for no more; the last one of the group makes the counters ready for the next launch.
#[cube]
pub(super) fn leave_group(
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
