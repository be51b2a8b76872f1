//! The warps that multiply: they hold their part of φ in registers while tokens pass, and leave each warp's sums in a side.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::kernel::{Place, Sizes};
use super::plan::{BOX, MULTIPLY, OWNERS, Once, TOKENS, WARPS};
use crate::tile::cuda::pipeline::{PipelineState, Ring};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// Loads this cube's part of φ to the place of the later stages, piece by piece; for the warps that weight. Each group begins
/// with another piece: all read the same ones, and the cache has each in one place.
#[cube]
pub(super) fn fetch_phi(
    phi: u64,
    owner: u32,
    arrived: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (pieces, warps) = comptime!((once.pieces() as u32, OWNERS as u32));
    let first = place.rank * comptime!((once.boxes * BOX) as u32);
    let bytes = min(sizes.width - first, comptime!((once.boxes * BOX) as u32)) * 4;
    for turn in 0..comptime!(pieces.div_ceil(32 * warps)) {
        let at = (turn * 32 + UNIT_POS % 32) * warps + owner;
        if at < pieces {
            let piece = (at + place.group * comptime!(warps + 1)) % pieces;
            // Rows follow each other: of four of them the same columns are in different banks.
            let (row, stream) =
                (piece % comptime!(once.rows as u32), piece / comptime!(once.rows as u32));
            let line = row * comptime!(once.streams as u32) + stream;
            let from = u64::cast_from(line) * u64::cast_from(sizes.width) + u64::cast_from(first);
            bulk_load_arriving(phi_at(place, piece, once), phi + from * 4, bytes + 0, arrived);
        }
    }
}

/// Where in shared memory a piece of φ is.
#[cube]
fn phi_at(place: &Place, piece: u32, #[comptime] once: Once) -> u32 {
    let before = comptime!((once.early() * once.stage_bytes()) as u32);
    place.base + before + piece * comptime!(once.piece_bytes() as u32)
}

/// The part of φ of this lane: of each step of its warp, for each eight rows, two words of the first parts and two of the
/// second ones, as an instruction takes them.
#[cube]
fn hold_phi(
    warp: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) -> Array<Vector<u32, Const<4>>> {
    let (steps, eights) = comptime!((once.steps(), once.eights()));
    let (streams, boxes) = comptime!((once.streams as u32, once.boxes as u32));
    let lane = UNIT_POS % 32;
    let mut held = Array::<Vector<u32, Const<4>>>::new(comptime!(steps * eights));
    #[unroll]
    for m in 0..steps {
        // Four steps are a box.
        let number = step(warp, m, once) / 4;
        let (within, stream) = (number / streams, number % streams);
        let column = within * comptime!(BOX as u32) + warp % 4 * 16 + lane % 4 * 2;
        // Steps beyond the last have nothing.
        let of_step = within < boxes;
        let mut pairs = Array::<Vector<f32, Const<2>>>::new(comptime!(2 * eights));
        #[unroll]
        for i in 0..comptime!(2 * eights) {
            let (row, of_row) = row_of(lane / 4 + comptime!(8 * (i as u32 / 2)), once);
            let column = column + comptime!(8 * (i as u32 % 2));
            let there = of_step
                && of_row
                && place.rank * comptime!((once.boxes * BOX) as u32) + column < sizes.width;
            let from = phi_at(place, stream * comptime!(once.rows as u32) + row, once) + column * 4;
            let pair = load_pair(select(there, from, place.base));
            pairs[i] = select(there, pair, Vector::new(0.0f32));
        }
        #[unroll]
        for e in 0..eights {
            let mut four = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for half in 0..2usize {
                let pair = pairs[comptime!(2 * e + half)];
                let (high, low) = two_bf16(pair.extract(0usize), pair.extract(1usize));
                four.insert(half, high);
                four.insert(comptime!(2 + half), low);
            }
            held[comptime!(m * eights + e)] = four;
        }
    }
    held
}

/// The row of φ that is column `at` of what is multiplied, and whether there is one.
#[cube]
fn row_of(at: u32, #[comptime] once: Once) -> (u32, bool) {
    let (n, rest) = comptime!((once.streams as u32, once.rest() as u32));
    let is_rest = at < rest;
    let row = select(is_rest, at + n, at - rest);
    let there = select(is_rest, row < comptime!(once.rows as u32), row < n);
    (select(there, row, 0u32), there)
}

/// The number of step `m` of a warp among those of all: four are a box, and a box has its streams one after another. A warp
/// that mixes has all streams of its columns.
#[cube]
fn step(warp: u32, #[comptime] m: usize, #[comptime] once: Once) -> u32 {
    let (slice, stream) = comptime!(((m / once.streams) as u32, (m % once.streams) as u32));
    if comptime!(once.mixes) {
        let within = warp / 4 + comptime!(slice * WARPS as u32 / 4);
        (within * comptime!(once.streams as u32) + stream) * 4 + warp % 4
    } else {
        warp + comptime!((m * WARPS) as u32)
    }
}

/// Whether there is such a step, whatever the warp.
fn certain(m: usize, once: Once) -> bool {
    match once.mixes {
        true => (m / once.streams + 1) * WARPS <= once.boxes * BOX / 16,
        false => (m + 1) * WARPS <= once.all_steps(),
    }
}

/// Where those who multiply have taken φ, and the warp that loads may put tokens in its place.
#[cube]
pub(super) fn phi_is_held() {
    meet_units(2u32, comptime!(MULTIPLY as u32 + 32));
}

/// Multiplies all tokens of the group with this cube's part of φ.
#[cube]
pub(super) fn multiply(
    shared: &mut Shared<[f32]>,
    warp: u32,
    ring: &Ring,
    sides: &Ring,
    phi_arrived: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (steps, eights) = comptime!((once.steps(), once.eights()));
    let float = comptime!(Float16::Bf16);
    barrier_wait(phi_arrived, 0u32);
    let held = hold_phi(warp, place, sizes, once);
    phi_is_held();
    let lane = UNIT_POS % 32;
    // Of a box this lane names the row of a token, and of the step's 32 bytes the first or the second half.
    let chunk = (warp % 4 * 2 + lane / 16) ^ (lane % 8);
    let at = lane % 16 * 128 + (chunk << 4);
    let mut state = PipelineState::start();
    for number in 0..place.count {
        ring.wait(state.stage, state.phase);
        let stage = place.base + state.stage * comptime!(once.stage_bytes() as u32) + at;
        let weights = place.base
            + comptime!(once.weights_at() as u32)
            + state.stage * comptime!(once.weight_bytes() as u32);
        let mut mixed = Array::<Vector<u32, Const<4>>>::new(once.streams);
        let mut sums = Array::<Vector<f32, Const<4>>>::new(eights);
        #[unroll]
        for e in 0..eights {
            sums[e] = Vector::new(0.0f32);
        }
        // Tokens times tokens, of eight each: the squares are on the diagonal. An addition for each would take longer.
        let mut grams = Array::<Vector<f32, Const<4>>>::new(2usize);
        grams[0] = Vector::new(0.0f32);
        grams[1] = Vector::new(0.0f32);
        #[unroll]
        for m in 0..steps {
            let step = step(warp, m, once);
            let there = comptime!(certain(m, once)) || step < comptime!(once.all_steps() as u32);
            let mut a = Array::<Vector<u32, Const<4>>>::new(1usize);
            if comptime!(once.mixes) {
                let stream = comptime!(m % once.streams);
                if comptime!(stream == 0) {
                    // All of them before the first is stored: no number of theirs is waited for after.
                    mix_streams(&mut mixed, stage, step / 4, weights, there, once);
                }
                a[0] = mixed[stream];
                if there {
                    let of_box = step / 4 * comptime!(once.box_bytes() as u32);
                    store_matrices(stage + of_box, a[0]);
                }
            } else {
                // Beyond the last step φ is zero; x is that of the first box, as what is behind the stage may be no number.
                let step = select(there, step, 0u32);
                a[0] = load_matrices(stage + step / 4 * comptime!(once.box_bytes() as u32), false);
            }
            #[unroll]
            for half in 0..2usize {
                let (first, second) = (a[0].extract(half), a[0].extract(comptime!(2 + half)));
                let first = select(there, first, 0u32);
                let second = select(there, second, 0u32);
                grams[half] = mma_16x8x16(a[0], first, second, grams[half], float);
            }
            #[unroll]
            for part in 0..2usize {
                #[unroll]
                for e in 0..eights {
                    let b = held[comptime!(m * eights + e)];
                    let (b0, b1) = comptime!((2 * part, 2 * part + 1));
                    sums[e] = mma_16x8x16(a[0], b.extract(b0), b.extract(b1), sums[e], float);
                }
            }
        }
        if comptime!(once.mixes) {
            // Here it waits for what was stored while tensor cores multiply.
            async_proxy_fence();
        }
        let side = number % comptime!(once.sides as u32);
        sides.vacant(side, number / comptime!(once.sides as u32));
        let side_at = comptime!(once.sides_at() as u32)
            + side * comptime!(once.side() as u32)
            + warp * comptime!(once.of_warp() as u32);
        #[unroll]
        for half in 0..2usize {
            let (even, odd) = comptime!((2 * half, 2 * half + 1));
            let row = lane / 4 + comptime!(8 * half as u32);
            let to =
                place.base + (side_at + row * comptime!(once.line() as u32) + lane % 4 * 2) * 4;
            #[unroll]
            for e in 0..eights {
                let at = to + comptime!(32 * e as u32);
                store_two_shared(at, sums[e].extract(even), sums[e].extract(odd));
            }
            // Row and column are the same in one of four lanes.
            if lane % 4 == lane / 8 {
                let gram = grams[half];
                let square = select(lane / 4 % 2 == 0, gram.extract(even), gram.extract(odd));
                shared[(side_at + comptime!((TOKENS * once.line()) as u32) + row) as usize] =
                    square;
            }
        }
        sync_plane();
        if lane == 0 {
            sides.arrive(number % comptime!(OWNERS as u32));
        }
        state.advance(comptime!(once.stages as u32));
    }
}

/// The fragments of all streams after the layer, of a warp's columns: the box of the first stream is number `first` among those of
/// all streams. Zero where there are no such columns.
#[cube]
fn mix_streams(
    mixed: &mut Array<Vector<u32, Const<4>>>,
    stage: u32,
    first: u32,
    weights: u32,
    there: bool,
    #[comptime] once: Once,
) {
    let (n, bytes) = comptime!((once.streams, once.box_bytes() as u32));
    // Of the streams before, and of the layer's output.
    let mut before = Array::<Vector<u32, Const<4>>>::new(comptime!(n + 1));
    if there {
        #[unroll]
        for i in 0..n {
            before[i] = load_matrices(stage + first * bytes + comptime!(i as u32 * bytes), false);
        }
        let within = first / comptime!(n as u32);
        let behind = comptime!((n * once.boxes) as u32 * bytes);
        before[n] = load_matrices(stage + behind + within * bytes, false);
    }
    #[unroll]
    for stream in 0..n {
        let of_stream = mix_stream(&before, weights, stream, once);
        mixed[stream] = select(there, of_stream, Vector::new(0u32));
    }
    // All lanes have read what is written over.
    sync_plane();
}

/// The fragment of a stream after the layer, rounded as it is stored: h_post·f, and h_res·x added in the order of streams.
#[cube]
fn mix_stream(
    before: &Array<Vector<u32, Const<4>>>,
    weights: u32,
    #[comptime] stream: usize,
    #[comptime] once: Once,
) -> Vector<u32, Const<4>> {
    let n = comptime!(once.streams);
    let row = UNIT_POS % 32 / 4;
    let mut mixed = Vector::<u32, Const<4>>::new(0u32);
    #[unroll]
    for below in 0..2usize {
        let token = row + comptime!(8 * below as u32);
        let post = weights + token * comptime!(4 * n as u32) + comptime!(4 * stream as u32);
        let res = weights + comptime!((4 * TOKENS * n + 4 * stream * n) as u32);
        let res = numbers(res + token * comptime!((4 * n * n) as u32), n);
        let post = f32::reinterpret(load_word(post + 0));
        #[unroll]
        for beside in 0..2usize {
            let word = comptime!(2 * beside + below);
            let (f0, f1) = bf16_pair(before[n].extract(word));
            let mut sums = Array::<f32>::new(2usize);
            sums[0] = post * f0;
            sums[1] = post * f1;
            #[unroll]
            for i in 0..n {
                let (x0, x1) = bf16_pair(before[i].extract(word));
                sums[0] += res[i] * x0;
                sums[1] += res[i] * x1;
            }
            mixed.insert(word, round_pair(sums[0], sums[1], Float16::Bf16));
        }
    }
    mixed
}

/// So many neighbouring f32 of shared memory; of whole fours from a multiple of 16 bytes.
#[cube]
pub(super) fn numbers(from: u32, #[comptime] count: usize) -> Array<f32> {
    let mut found = Array::<f32>::new(count);
    if comptime!(count % 4 == 0) {
        #[unroll]
        for four in 0..comptime!(count / 4) {
            let words = load_16_shared(from + comptime!(16 * four as u32));
            #[unroll]
            for e in 0..4usize {
                found[comptime!(4 * four + e)] = f32::reinterpret(words.extract(e));
            }
        }
    } else {
        #[unroll]
        for i in 0..count {
            found[i] = f32::reinterpret(load_word(from + comptime!(4 * i as u32)));
        }
    }
    found
}
