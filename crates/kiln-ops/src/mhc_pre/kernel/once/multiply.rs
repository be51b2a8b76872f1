//! The warps that multiply: they hold their part of φ in registers while tokens pass, and leave the sums of the cube.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::kernel::{Place, Sizes};
use super::plan::{BOX, MULTIPLY, Once, TOKENS, WARPS};
use crate::reduce::{Shuffle, shuffle};
use crate::tile::cuda::pipeline::{PipelineState, Ring};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// φ at a row and a column of a stream, 0 outside.
#[cube]
fn phi_at(
    phi: &[f32],
    row: u32,
    stream: u32,
    column: u32,
    sizes: &Sizes,
    #[comptime] once: Once,
) -> f32 {
    let there = row < comptime!(once.rows as u32) && column < sizes.width;
    let width = sizes.width as usize;
    let at = row as usize * width * comptime!(once.streams) + stream as usize * width;
    select(there, phi[select(there, at + column as usize, 0usize)], 0.0)
}

/// The part of φ of this lane: of each step of its warp, for each eight rows, two words of the first parts and two of the
/// second ones, as an instruction takes them.
#[cube]
fn hold_phi(
    phi: &[f32],
    warp: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) -> Array<Vector<u32, Const<4>>> {
    let (steps, eights, boxes) = comptime!((once.steps(), once.eights(), once.boxes as u32));
    let lane = UNIT_POS % 32;
    let mut held = Array::<Vector<u32, Const<4>>>::new(comptime!(steps * eights));
    #[unroll]
    for m in 0..steps {
        // Four steps are a box.
        let step = warp + comptime!((m * WARPS) as u32);
        let number = step / 4;
        let (stream, within) = (number / boxes, number % boxes);
        let column =
            (place.rank * boxes + within) * comptime!(BOX as u32) + step % 4 * 16 + lane % 4 * 2;
        // Steps beyond the last have nothing.
        let column = select(stream < comptime!(once.streams as u32), column, sizes.width);
        #[unroll]
        for e in 0..eights {
            let row = lane / 4 + comptime!(8 * e as u32);
            let mut four = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for half in 0..2usize {
                let at = column + comptime!(8 * half as u32);
                let first = phi_at(phi, row, stream, at, sizes, once);
                let second = phi_at(phi, row, stream, at + 1, sizes, once);
                let (high, low) = two_bf16(first, second);
                four.insert(half, high);
                four.insert(comptime!(2 + half), low);
            }
            held[comptime!(m * eights + e)] = four;
        }
    }
    held
}

/// Multiplies all tokens of the group with this cube's part of φ.
#[cube]
pub(super) fn multiply(
    phi: &[f32],
    shared: &mut Shared<[f32]>,
    parts: &mut [f32],
    warp: u32,
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (steps, eights) = comptime!((once.steps(), once.eights()));
    let columns = comptime!(once.columns() as u32);
    let float = comptime!(Float16::Bf16);
    let held = hold_phi(phi, warp, place, sizes, once);
    let lane = UNIT_POS % 32;
    // Of a box this lane names the row of a token, and of the step's 32 bytes the first or the second half.
    let chunk = (warp % 4 * 2 + lane / 16) ^ (lane % 8);
    let at = lane % 16 * 128 + (chunk << 4);
    let mut state = PipelineState::start();
    for number in 0..place.count {
        ring.wait(state.stage, state.phase);
        let stage = place.base + state.stage * comptime!(once.stage_bytes() as u32) + at;
        let mut sums = Array::<Vector<f32, Const<4>>>::new(eights);
        #[unroll]
        for e in 0..eights {
            sums[e] = Vector::new(0.0f32);
        }
        let mut squares = Array::<f32>::new(2usize);
        squares[0] = f32::new(0.0);
        squares[1] = f32::new(0.0);
        #[unroll]
        for m in 0..steps {
            let step = warp + comptime!((m * WARPS) as u32);
            let certain = comptime!((m + 1) * WARPS <= once.all_steps());
            let there = certain || step < comptime!(once.all_steps() as u32);
            // Beyond the last step φ is zero; x is that of the first box, as what is behind the stage may be no number.
            let step = select(there, step, 0u32);
            let mut a = Array::<Vector<u32, Const<4>>>::new(1usize);
            a[0] = load_matrices(stage + step / 4 * comptime!(once.box_bytes() as u32), false);
            #[unroll]
            for word in 0..4usize {
                let (low, high) = bf16_pair(a[0].extract(word));
                let both = low * low + high * high;
                squares[comptime!(word % 2)] += select(there, both, 0.0);
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
        #[unroll]
        for half in 0..2usize {
            #[unroll]
            for by in [1u32, 2u32] {
                let other = shuffle(squares[half], by.runtime(), Shuffle::Xor, true);
                squares[half] += other;
            }
        }
        // What is there of the tokens two times before has been read: of those before, all have gone on.
        let side = comptime!(once.sides_at() as u32) + number % 2 * comptime!(once.side() as u32);
        let to = side + warp * comptime!(TOKENS as u32 * columns) + lane / 4 * columns;
        #[unroll]
        for half in 0..2usize {
            let row = to + comptime!(8 * half as u32 * columns);
            #[unroll]
            for e in 0..eights {
                let column = row + lane % 4 * 2 + comptime!(8 * e as u32);
                shared[column as usize] = sums[e].extract(comptime!(2 * half));
                shared[column as usize + 1] = sums[e].extract(comptime!(2 * half + 1));
            }
            if lane % 4 == 0 {
                shared[(row + comptime!(8 * eights as u32)) as usize] = squares[half];
            }
        }
        sync_units(1u32, comptime!(MULTIPLY as u32));
        let part = comptime!(once.part() as u32);
        let workspace = place.workspace(number, once) + (place.rank * part) as usize;
        #[unroll]
        for i in 0..comptime!(once.part().div_ceil(MULTIPLY)) {
            let at = UNIT_POS + comptime!((i * MULTIPLY) as u32);
            if at < part {
                let from = side + place_of(at, once);
                let mut sum = f32::new(0.0);
                #[unroll]
                for warp in 0..WARPS {
                    let of_warp = comptime!((warp * TOKENS) as u32 * columns);
                    sum += shared[(from + of_warp) as usize];
                }
                parts[workspace + at as usize] = sum;
            }
        }
        sync_plane();
        if lane == 0 {
            ring.release(state.stage);
        }
        state.advance(comptime!(once.stages as u32));
    }
}

/// Where a warp has what is left at `at`.
#[cube]
fn place_of(at: u32, #[comptime] once: Once) -> u32 {
    let (n, columns) = comptime!((once.streams as u32, once.columns() as u32));
    let (firsts, rest) = comptime!((once.firsts() as u32, once.rest() as u32));
    if at < firsts {
        let j = at % comptime!(n + 1);
        at / comptime!(n + 1) * columns + select(j < n, j, comptime!(columns - 1))
    } else {
        let (token, j) = ((at - firsts) / rest, (at - firsts) % rest);
        // What fills up a four is not read.
        token * columns + min(j + n, comptime!(columns - 1))
    }
}
