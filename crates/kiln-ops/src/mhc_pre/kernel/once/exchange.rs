//! The sums of a cube on their way to the others of its group: to the memory of the cluster's, or through a workspace where
//! the group is too large for a cluster.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::kernel::{Place, Sizes, counter};
use super::plan::{OWNERS, Once, TOKENS, WARPS};
use super::weight::{Weighting, store_mixed};
use crate::tile::cuda::pipeline::Ring;
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// Adds up what all warps of this cube have of tokens, hands it to the others, and adds up what all have: y of the weights
/// and the sums of the squares, for this warp, and the rest of x·φᵀ of the tokens that this cube writes.
#[cube]
pub(super) fn exchange(
    of: &Weighting,
    mix: &mut [f32],
    parts: &mut [f32],
    counters: &mut [Atomic<u32>],
    sides: &Ring,
    owned: u32,
    number: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let lane = UNIT_POS % 32;
    let side = number % comptime!(once.sides as u32);
    sides.wait(of.owner, number / comptime!(OWNERS as u32));
    if comptime!(once.mixes) {
        store_mixed(of, number, place, sizes, once);
    }
    let side_at =
        place.base + (comptime!(once.sides_at() as u32) + side * comptime!(once.side() as u32)) * 4;
    if comptime!(once.clustered()) {
        send(side_at, number, place, once);
    } else {
        leave(side_at, parts, number, place, once);
    }
    sync_plane();
    if lane == 0 {
        sides.release(side);
    }
    if comptime!(once.clustered()) {
        let slot = place.slot(number, once);
        barrier_wait(slot.full + 0, slot.time & 1);
        collect(of, mix, owned, number, place, sizes, once);
        sync_plane();
        // To all that send to it.
        if comptime!(once.cubes == 1) {
            if lane == 0 {
                barrier_arrive(slot.empty + 0);
            }
        } else if lane < comptime!(once.cubes as u32) {
            barrier_arrive_there(cluster_address(slot.empty + 0, lane));
        }
    } else {
        let (places, cubes) = comptime!((once.places() as u32, once.cubes as u32));
        let counter = counter(&*counters, place.group, number % places, once);
        if lane == 0 {
            counter_add(counter + 0);
        }
        counter_wait(counter + 0, (number / places + 1) * cubes);
        collect(of, mix, owned, number, place, sizes, once);
        sync_plane();
    }
}

/// The sums of all warps of four of what is left: the fours of y that weights are made of, token by token, then the squares of
/// four tokens, then the rest of tokens.
#[cube]
fn of_warps(side: u32, four: u32, #[comptime] once: Once) -> Vector<f32, Const<4>> {
    let line = comptime!(once.line() as u32);
    // Fours of a token.
    let (heads, fours) = comptime!((once.heads() as u32 / 4, once.rest() as u32 / 4));
    let (ys, firsts) = comptime!((TOKENS as u32 * heads, once.firsts() as u32 / 4));
    let of_head = four / heads * line + comptime!(once.rest() as u32) + four % heads * 4;
    let behind = four - min(four, firsts);
    let of_rest = behind / fours * line + behind % fours * 4;
    let of_squares = (four - min(four, ys)) * 4 + comptime!(TOKENS as u32) * line;
    let of_first = select(four < ys, of_head, of_squares);
    let from = side + select(four < firsts, of_first, of_rest) * 4;
    let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for warp in 0..WARPS {
        let words = load_16_shared(from + comptime!((4 * warp * once.of_warp()) as u32));
        sum += Vector::reinterpret(words);
    }
    sum
}

/// Leaves the sums of this cube in the workspace.
#[cube]
fn leave(side: u32, parts: &mut [f32], number: u32, place: &Place, #[comptime] once: Once) {
    let part = comptime!(once.part() as u32);
    let workspace = place.workspace(number, once) + (place.rank * part) as usize;
    for turn in 0..comptime!((part / 4).div_ceil(32)) {
        let four = turn * 32 + UNIT_POS % 32;
        if four < comptime!(part / 4) {
            let quad = of_warps(side, four, once);
            #[unroll]
            for e in 0..4usize {
                parts[workspace + (four * 4) as usize + e] = quad.extract(e);
            }
        }
    }
}

/// Sends the sums of this cube to those of the cluster: what weights are made of to all, the rest of a token to the one
/// that adds it up.
#[cube]
fn send(side: u32, number: u32, place: &Place, #[comptime] once: Once) {
    let cubes = comptime!(once.cubes as u32);
    let (firsts, fours) = comptime!((once.firsts() as u32 / 4, once.rest() as u32 / 4));
    let (part, letter) = comptime!((once.part() as u32 / 4, once.letter() as u32 / 4));
    let slot = place.slot(number, once);
    // All cubes have read what was there.
    if slot.time > 0 {
        barrier_wait(slot.empty + 0, (slot.time - 1) & 1);
    }
    if comptime!(cubes > 1) && UNIT_POS % 32 == 0 {
        // Tokens of sixteen that this cube adds up.
        let own = (comptime!(TOKENS as u32 - 1) - place.rank) / cubes + 1;
        barrier_expect_some(slot.full + 0, (firsts + own * fours) * comptime!(16 * cubes));
    }
    let mine = place.base + slot.at * 4 + place.rank * letter * 16;
    for turn in 0..comptime!(part.div_ceil(32)) {
        let four = turn * 32 + UNIT_POS % 32;
        if four < part {
            let quad = of_warps(side, four, once);
            if four < firsts {
                #[unroll]
                for to in 0..cubes {
                    hand(mine + four * 16, quad, slot.full + 0, to.runtime(), once);
                }
            } else {
                let (token, piece) = ((four - firsts) / fours, (four - firsts) % fours);
                let to = token % cubes;
                let behind = firsts + token / cubes * fours + piece;
                hand(mine + behind * 16, quad, slot.full + 0, to, once);
            }
        }
    }
    if comptime!(cubes == 1) {
        sync_plane();
        if UNIT_POS % 32 == 0 {
            barrier_arrive(slot.full + 0);
        }
    }
}

/// Stores a four in the memory of cube `to` of the cluster, whose barrier `full` counts its bytes; a cube that is alone has
/// nobody to send to.
#[cube]
fn hand(at: u32, quad: Vector<f32, Const<4>>, full: u32, to: u32, #[comptime] once: Once) {
    if comptime!(once.cubes == 1) {
        store_16_shared(at, Vector::reinterpret(quad));
    } else {
        send_quad(cluster_address(at, to), quad, cluster_address(full, to));
    }
}

/// The sum of all cubes of the four that are at `from` in the first one's part of the workspace.
#[cube]
fn left(from: u64, #[comptime] once: Once) -> Vector<f32, Const<4>> {
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

/// Adds up what all cubes have sent or left: what weights are made of for this warp, the rest for those who read x·φᵀ.
#[cube]
fn collect(
    of: &Weighting,
    mix: &mut [f32],
    owned: u32,
    number: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (n, rows, cubes) = comptime!((once.streams as u32, once.rows as u32, once.cubes as u32));
    let firsts = comptime!(once.firsts() as u32 / 4);
    // Fours of a token.
    let fours = comptime!(once.rest() as u32 / 4);
    let all = comptime!(firsts + once.own_tokens() as u32 * fours);
    let first_token = place.token(number, sizes);
    for turn in 0..comptime!(all.div_ceil(32)) {
        let four = turn * 32 + UNIT_POS % 32;
        let behind = four - min(four, firsts);
        let (row, piece) = (place.rank + behind / fours * cubes, behind % fours);
        let in_row = row < comptime!(TOKENS as u32) && first_token + row < sizes.tokens;
        if four < firsts || (four < all && in_row) {
            let sum = if comptime!(once.clustered()) {
                let slot = place.slot(number, once);
                sent(place.base + slot.at * 4 + four * 16, once)
            } else {
                let at = select(four < firsts, four, firsts + row * fours + piece);
                let workspace = of.parts + u64::cast_from(place.workspace(number, once)) * 4;
                left(workspace + u64::cast_from(at) * 16, once)
            };
            if four < firsts {
                store_16_shared(place.base + (owned + four * 4) * 4, Vector::reinterpret(sum));
            } else {
                let j = n + piece * 4;
                let to = (first_token + row) as usize * comptime!(rows as usize) + j as usize;
                // Then the rest is whole fours, and rows begin with one.
                if comptime!(n % 4 == 0) {
                    let mix = global_address::<f32>(mix.as_ptr());
                    store_quad(mix + u64::cast_from(to) * 4, &sum);
                } else {
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
}

/// The sum of all cubes of the cluster of the four that are at `from` in the first one's letter.
#[cube]
fn sent(from: u32, #[comptime] once: Once) -> Vector<f32, Const<4>> {
    let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for cube in 0..once.cubes {
        let words = load_16_shared(from + comptime!((4 * cube * once.letter()) as u32));
        sum += Vector::reinterpret(words);
    }
    sum
}

/// Says that this warp waits for no more; the last one of the group makes the counters ready for the next launch.
#[cube]
pub(super) fn leave_group(counters: &mut [Atomic<u32>], group: u32, #[comptime] once: Once) {
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
