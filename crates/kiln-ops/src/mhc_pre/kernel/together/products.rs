//! What the warps that multiply make of a stage: dφ and dx of 64 columns of a stream each.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::back::{Boxes, eight_of};
use super::kernel::{Place, Sizes};
use super::plan::{BOX, TOKENS, Together};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// Eights of columns of dx that a warp makes at a time, half of its.
const BLOCKS: usize = BOX / 16;

/// φ of this lane: of each eight columns and each eight rows, two rows of its column, as the sum of two bf16.
#[cube]
pub(super) fn hold_phi(
    phi: &[f32],
    stream: u32,
    first: u32,
    sizes: &Sizes,
    #[comptime] together: Together,
) -> Array<Vector<u32, Const<2>>> {
    let (rows, eights) = comptime!((together.rows as u32, together.eights()));
    let lane = UNIT_POS % 32;
    let width = sizes.width as usize;
    let mut held = Array::<Vector<u32, Const<2>>>::new(comptime!(BOX / 8 * eights));
    #[unroll]
    for block in 0..comptime!(BOX / 8) {
        let column = first + comptime!(8 * block as u32) + lane / 4;
        #[unroll]
        for e in 0..eights {
            let mut pair = Array::<f32>::new(2usize);
            #[unroll]
            for k in 0..2usize {
                let row = lane % 4 * 2 + comptime!((8 * e + k) as u32);
                let there = row < rows && column < sizes.width;
                let from = row as usize * width * comptime!(together.streams)
                    + stream as usize * width
                    + column as usize;
                pair[k] = select(there, phi[select(there, from, 0usize)], 0.0);
            }
            let (high, low) = two_bf16(pair[0], pair[1]);
            let mut both = Vector::<u32, Const<2>>::new(0u32);
            both.insert(0usize, high);
            both.insert(1usize, low);
            held[comptime!(block * eights + e)] = both;
        }
    }
    held
}

/// The fragments of a stage's dm: as it stands for dx, a token a row, transposed for dφ. Of the first parts come two eights
/// after the other, then of the second ones; and last, if their number is odd, the eights that are left, of both.
#[cube]
fn fragments_of_dm(
    dm: u32,
    #[comptime] transposed: bool,
    #[comptime] together: Together,
) -> Array<Vector<u32, Const<4>>> {
    let eights = comptime!(together.eights());
    let lane = UNIT_POS % 32;
    // A lane names a row of one of four matrices: the upper tokens or the lower, of the one eight or the other.
    let token = lane % 16 * comptime!(16 * eights as u32);
    let mut fragments = Array::<Vector<u32, Const<4>>>::new(eights);
    #[unroll]
    for i in 0..eights {
        let pairs = comptime!(eights / 2);
        let at = if comptime!(i < 2 * pairs) {
            let (part, pair) = comptime!((i / pairs, i % pairs));
            comptime!((4 * part * together.part() + 32 * pair) as u32) + lane / 16 * 16
        } else {
            comptime!(32 * pairs as u32) + lane / 16 * comptime!(4 * together.part() as u32)
        };
        fragments[i] = load_matrices(dm + token + at, transposed);
    }
    fragments
}

/// Where an eight of a part is among them: which fragment, and whether it is the second half.
fn place_of_eight(part: usize, eight: usize, eights: usize) -> (usize, usize) {
    let pairs = eights / 2;
    if eight < 2 * pairs { (part * pairs + eight / 2, eight % 2) } else { (2 * pairs, part) }
}

/// Adds what a stage has of dφ: xᵀ·dm, sixteen columns at a time.
#[cube]
pub(super) fn add_dphi(
    sums: &mut Array<Vector<f32, Const<4>>>,
    of_x: u32,
    dm: u32,
    #[comptime] together: Together,
) {
    let eights = comptime!(together.eights());
    let lane = UNIT_POS % 32;
    let dm = fragments_of_dm(dm, true, together);
    // A lane names a row of eight columns: of the upper tokens the one eight, then the other, then of the lower ones.
    let rows = of_x + eight_of(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    #[unroll]
    for pair in 0..comptime!(BOX / 16) {
        // A variable itself would be handed over by its address.
        let mut x = Array::<Vector<u32, Const<4>>>::new(1usize);
        x[0] = load_matrices(rows ^ comptime!(32 * pair as u32), true);
        #[unroll]
        for part in 0..2usize {
            #[unroll]
            for eight in 0..eights {
                let at = comptime!(pair * eights + eight);
                let (i, half) = comptime!(place_of_eight(part, eight, eights));
                let (b0, b1) = comptime!((2 * half, 2 * half + 1));
                let (b0, b1) = (dm[i].extract(b0), dm[i].extract(b1));
                sums[at] = mma_16x8x16(x[0], b0, b1, sums[at], Float16::Bf16);
            }
        }
    }
}

/// What x, dh_in and what there is from elsewhere have of half the columns of dx: of each eight, as products leave their sums.
#[cube]
pub(super) fn direct_of_half(
    of: &Boxes,
    shared: &Shared<[u32]>,
    factors: usize,
    #[comptime] half: usize,
    #[comptime] together: Together,
) -> Array<Vector<f32, Const<4>>> {
    let lane = UNIT_POS % 32;
    let of_x = of.x(of.stream, together);
    let of_dy = of.dh_in(together);
    let of_also = of.also(of.stream, together);
    // Of the two rows of this lane.
    let mut along = Array::<f32>::new(2usize);
    let mut weights = Array::<f32>::new(2usize);
    #[unroll]
    for below in 0..2usize {
        let token = lane as usize / 4 + comptime!(8 * below);
        along[below] = f32::reinterpret(shared[factors + token]);
        let at = comptime!(TOKENS) + token * comptime!(together.streams) + of.stream as usize;
        weights[below] = f32::reinterpret(shared[factors + at]);
    }
    let mut out = Array::<Vector<f32, Const<4>>>::new(BLOCKS);
    let row = row_of_half(half);
    #[unroll]
    for pair in 0..comptime!(BLOCKS / 2) {
        let at = row ^ comptime!(32 * pair as u32);
        let x = load_matrices(of_x + at, false);
        let dy = load_matrices(of_dy + at, false);
        let (first, second) = comptime!((2 * pair, 2 * pair + 1));
        if comptime!(together.also()) {
            let also = load_matrices(of_also + at, false);
            out[first] = direct(x, dy, also, &along, &weights, 0usize, together);
            out[second] = direct(x, dy, also, &along, &weights, 1usize, together);
        } else {
            out[first] = direct(x, dy, x, &along, &weights, 0usize, together);
            out[second] = direct(x, dy, x, &along, &weights, 1usize, together);
        }
    }
    out
}

/// What x, dh_in and what there is from elsewhere have of a block of dx.
#[cube]
fn direct(
    x: Vector<u32, Const<4>>,
    dy: Vector<u32, Const<4>>,
    also: Vector<u32, Const<4>>,
    along: &Array<f32>,
    weights: &Array<f32>,
    #[comptime] half: usize,
    #[comptime] together: Together,
) -> Vector<f32, Const<4>> {
    let mut out = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for below in 0..2usize {
        let (c0, c1) = comptime!((2 * below, 2 * below + 1));
        let word = comptime!(2 * half + below);
        let (x0, x1) = bf16_pair(x.extract(word));
        let (y0, y1) = bf16_pair(dy.extract(word));
        let (mut s0, mut s1) = (weights[below] * y0, weights[below] * y1);
        if comptime!(together.also()) {
            let (also0, also1) = bf16_pair(also.extract(word));
            s0 += also0;
            s1 += also1;
        }
        s0 += along[below] * x0;
        s1 += along[below] * x1;
        out.insert(c0, s0);
        out.insert(c1, s1);
    }
    out
}

/// Adds dm·φ of half the columns. The product of the two second parts is left out: it is as little as what two bf16 leave out
/// of a number.
#[cube]
pub(super) fn add_through(
    out: &mut Array<Vector<f32, Const<4>>>,
    dm: u32,
    held: &Array<Vector<u32, Const<2>>>,
    #[comptime] half: usize,
    #[comptime] together: Together,
) {
    let eights = comptime!(together.eights());
    let pairs = comptime!(eights / 2);
    let float = comptime!(Float16::Bf16);
    let left = fragments_of_dm(dm, false, together);
    // Products of one block wait for each other: those of all blocks are beside each other.
    #[unroll]
    for part in 0..2usize {
        #[unroll]
        for i in 0..comptime!((2 - part) * pairs) {
            #[unroll]
            for block in 0..BLOCKS {
                let at = comptime!((half * BLOCKS + block) * eights + i % pairs * 2);
                let (b0, b1) = (held[at].extract(part), held[comptime!(at + 1)].extract(part));
                out[block] = mma_16x8x16(left[i], b0, b1, out[block], float);
            }
        }
        if comptime!(eights % 2 == 1) {
            let rest = left[comptime!(2 * pairs)];
            #[unroll]
            for block in 0..BLOCKS {
                let at = comptime!((half * BLOCKS + block + 1) * eights - 1);
                let b = held[at].extract(part);
                if comptime!(part == 0) {
                    out[block] = mma_16x8x16(rest, b, b, out[block], float);
                } else {
                    let (first, second) = (rest.extract(0usize), rest.extract(1usize));
                    out[block] = mma_16x8x8(first, second, b, out[block], float);
                }
            }
        }
    }
}

/// The row of a box that a lane names for the first two eights of half its columns: of the one the upper tokens, then the
/// lower, then of the other. Further ones differ in bits of their own.
#[cube]
fn row_of_half(#[comptime] half: usize) -> u32 {
    let lane = UNIT_POS % 32;
    eight_of(lane % 16, lane / 16) ^ comptime!((16 * BLOCKS * half) as u32)
}

/// Stores half the columns of dx in the place of x.
#[cube]
pub(super) fn put_dx(of_x: u32, dx: &Array<Vector<f32, Const<4>>>, #[comptime] half: usize) {
    let row = row_of_half(half);
    #[unroll]
    for pair in 0..comptime!(BLOCKS / 2) {
        let mut quad = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..4usize {
            let block = comptime!(2 * pair + i / 2);
            let (c0, c1) = comptime!((2 * (i % 2), 2 * (i % 2) + 1));
            let (first, second) = (dx[block].extract(c0), dx[block].extract(c1));
            quad.insert(i, round_pair(first, second, Float16::Bf16));
        }
        store_matrices(of_x + (row ^ comptime!(32 * pair as u32)), quad);
    }
}

/// Writes the sums of dφ of a warp: 64 columns from `first` on.
#[cube]
pub(super) fn leave_dphi(
    sums: &Array<Vector<f32, Const<4>>>,
    dphi: &mut [f32],
    first: u32,
    stream: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let eights = comptime!(together.eights());
    let columns = sizes.width as usize * comptime!(together.streams);
    let from = place.group as usize * comptime!(together.rows) * columns;
    #[unroll]
    for i in 0..comptime!(BOX / 8 * eights) {
        // Of each sum the upper columns and the lower.
        let (pair, below, eight) = comptime!((i / 2 / eights, i % 2, i / 2 % eights));
        let column = first + comptime!((16 * pair + 8 * below) as u32) + lane / 4;
        let sum = sums[comptime!(pair * eights + eight)];
        #[unroll]
        for k in 0..2usize {
            let j = comptime!((8 * eight + k) as u32) + lane % 4 * 2;
            if j < comptime!(together.rows as u32) && column < sizes.width {
                let at = from + j as usize * columns + (stream * sizes.width + column) as usize;
                dphi[at] = sum.extract(comptime!(2 * below + k));
            }
        }
    }
}
