//! What becomes of the pieces of rows that are cut.
//!
//! Where memory has an order between cubes, the cube that comes last of those of a row adds up what all of them have made,
//! while others write rows that nobody names. So that none has too much to add, it is the last one of a [lot](LOT) of
//! pieces first, and then of the lots. Who comes last decides nothing but who adds: what is added, and in which order, is
//! fixed. Elsewhere another launch does it.

use super::rows::{Range, add_groups, add_rows, finish_row, write_row, zeros};
use super::sums::{PIECE, Plan, Sizes, row_at};
use cubecl::prelude::*;

/// Pieces that follow each other.
pub(super) const LOT: usize = 32;

/// Of so many pieces in so many parts, for the first and the second time that cubes come.
pub(super) fn counters(pieces: usize, parts: usize) -> usize {
    2 * (2 * pieces) * parts
}

/// Where the sum of a row's piece stands: the row is the last one of the piece, or the first.
#[cube]
fn slot(of: Range, piece: usize) -> usize {
    2 * piece + select(of.from > piece * PIECE, 1usize, 0usize)
}

/// A cube that comes: its piece, its part of the columns and its unit's first one.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Arrival {
    pub(super) piece: usize,
    pub(super) part: usize,
    pub(super) first: usize,
}

/// Counts this cube; whether all that are `expected` have come, who see then what the others wrote.
#[cube]
fn is_last(
    counters: &mut [Atomic<u32>],
    at: usize,
    expected: usize,
    told: &mut Shared<[u32]>,
) -> bool {
    sync_cube();
    if UNIT_POS == 0 {
        gpu_asm!("fence.acq_rel.gpu;");
        told[0] = counters[at].fetch_add(1u32);
        gpu_asm!("fence.acq_rel.gpu;");
    }
    sync_cube();
    told[0] as usize + 1 == expected
}

/// Sums of pieces, or of lots: one, and so many more, each `step` behind the one before.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Slots {
    first: usize,
    next: usize,
    more: usize,
    step: usize,
}

/// Adds them, every `groups`th of those that follow from that of `group` on.
#[cube]
fn add_slots<N: Size>(
    partials: &[Vector<f32, N>],
    order: &[u32],
    slots: Slots,
    group: usize,
    groups: usize,
    first: usize,
    width: usize,
    #[comptime] plan: Plan,
) -> Array<Vector<f32, N>> {
    let mut sum = zeros::<N>(comptime!(plan.vectors));
    if group == 0 {
        let only = Range { from: slots.first, to: slots.first + 1 };
        add_rows::<f32, N>(
            &mut sum, partials, order, only, 1usize, width, first, width, false, plan,
        );
    }
    let others =
        Range { from: slots.next + group * slots.step, to: slots.next + slots.more * slots.step };
    let step = groups * slots.step;
    add_rows::<f32, N>(&mut sum, partials, order, others, step, width, first, width, false, plan);
    sum
}

/// After the sum of a row's piece is written: the last cube of the piece's lot adds up those of the lot, and the last one of
/// the lots the whole row.
#[cube]
pub(super) fn arrive<F: Float, N: Size>(
    row: usize,
    of: Range,
    at: Arrival,
    order: &[u32],
    partials: &mut [Vector<f32, N>],
    counters: &mut [Atomic<u32>],
    onto: &[Vector<F, N>],
    sums: &mut [Vector<F, N>],
    shared: &mut Shared<[Vector<f32, N>]>,
    told: &mut Shared<[u32]>,
    sizes: &Sizes,
    #[comptime] plan: Plan,
) {
    let groups = comptime!(plan.groups as usize);
    let group = UNIT_POS_Y as usize;
    let (begin, end) = (of.from / PIECE, (of.to - 1) / PIECE);
    let (lots, lot) = (end / LOT - begin / LOT, at.piece / LOT);
    let from = max(begin, lot * LOT);
    let to = min(end, lot * LOT + comptime!(LOT - 1));
    let own = slot(of, from);
    if is_last(counters, own * sizes.parts + at.part, to - from + 1, told) {
        let pieces = Slots { first: own, next: 2 * (from + 1), more: to - from, step: 2usize };
        let mut sum =
            add_slots::<N>(&*partials, order, pieces, group, groups, at.first, sizes.width, plan);
        add_groups::<N>(&mut sum, shared, plan);
        if lots == 0 {
            if group == 0 {
                finish_row::<F, N>(sums, onto, row, &sum, at.first, sizes.width, plan);
            }
        } else {
            if group == 0 {
                write_row::<N>(partials, own, &sum, at.first, sizes.width, plan);
            }
            let first = slot(of, begin);
            let counter = 2 * sizes.pieces + first * sizes.parts + at.part;
            if is_last(counters, counter, lots + 1, told) {
                let next = 2 * (begin / LOT + 1) * LOT;
                let all = Slots { first, next, more: lots, step: comptime!(2 * LOT) };
                let mut sum = add_slots::<N>(
                    &*partials,
                    order,
                    all,
                    group,
                    groups,
                    at.first,
                    sizes.width,
                    plan,
                );
                add_groups::<N>(&mut sum, shared, plan);
                if group == 0 {
                    finish_row::<F, N>(sums, onto, row, &sum, at.first, sizes.width, plan);
                }
            }
        }
    }
}

/// The rows that are cut, each by a group of the piece that it begins in.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn long_rows_kernel<F: Float, I: Int, N: Size>(
    tokens: &[I],
    order: &[u32],
    starts: &[u32],
    partials: &[Vector<f32, N>],
    onto: &[Vector<F, N>],
    sums: &mut [Vector<F, N>],
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(F, I)] _dtypes: [ElemType; 2],
) {
    let at = CUBE_POS * comptime!(plan.groups as usize) + UNIT_POS_Y as usize;
    let piece = at / sizes.parts;
    let first = (at - piece * sizes.parts) * comptime!(plan.span()) + UNIT_POS_X as usize;
    let all = starts[sizes.rows] as usize;
    let from = piece * PIECE;
    if from < all {
        // One that begins here ends behind this piece.
        let row = row_at::<I>(tokens, order, min(from + PIECE, all) - 1, sizes.rows);
        let of = Range { from: starts[row] as usize, to: starts[row + 1] as usize };
        if of.from >= from && of.to - of.from > PIECE {
            let more = (of.to - 1) / PIECE - piece;
            let pieces =
                Slots { first: slot(of, piece), next: 2 * (piece + 1), more, step: 2usize };
            let sum =
                add_slots::<N>(partials, order, pieces, 0usize, 1usize, first, sizes.width, plan);
            finish_row::<F, N>(sums, onto, row, &sum, first, sizes.width, plan);
        }
    }
}
