//! The kernels: the totals of blocks, and the scan of a block behind what stands before it.

use super::units;
use super::{Plan, Scan};
use crate::reduce::{self, Combine, assign, choose, read, write};
use cubecl::prelude::*;

/// How sequences are cut.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Cut {
    /// Elements of a sequence.
    length: usize,
    /// Blocks of a sequence.
    blocks: usize,
    /// Blocks of all sequences.
    parts: usize,
    /// Tiles of a block.
    tiles: usize,
}

/// A block of a sequence, of one row of units.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Block {
    /// Its number among those of all sequences.
    part: usize,
    /// Whether it is this row's; else rows past the end do the last one again and write nothing.
    own: bool,
    sequence: usize,
    start: usize,
    end: usize,
}

#[cube]
fn block(cut: &Cut, #[comptime] plan: Plan) -> Block {
    let at = CUBE_POS * comptime!(plan.row.rows as usize) + UNIT_POS_Y as usize;
    let part = min(at, cut.parts - 1);
    let sequence = part / cut.blocks;
    let span = cut.tiles * comptime!(plan.tile());
    let start = (part - sequence * cut.blocks) * span;
    Block { part, own: at < cut.parts, sequence, start, end: min(start + span, cut.length) }
}

/// Where the element is that a scan meets as number `i`.
#[cube]
fn position(i: usize, length: usize, #[comptime] reverse: bool) -> usize {
    if comptime!(reverse) { length - 1 - i } else { i }
}

/// Item `i` of a block, or the identity past its end. Loads always: a load under a condition would
/// cost registers.
#[cube]
fn item<S: Scan>(
    buffers: &S::Buffers,
    block: &Block,
    i: usize,
    length: usize,
    #[comptime] plan: Plan,
) -> Array<f32> {
    let at = position(min(i, length - 1), length, plan.reverse);
    let loaded = S::load(buffers, block.sequence, at);
    let identity = S::Combine::identity();
    choose::<S::Combine>(i < block.end, &loaded, &identity)
}

/// The combination of each block.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn totals_kernel<S: Scan>(
    buffers: &S::Buffers,
    totals: &mut [f32],
    cut: &Cut,
    #[comptime] plan: Plan,
) {
    let registers = comptime!(<S::Combine as Combine>::REGISTERS);
    let part = comptime!(registers * plan.row.shared());
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * part));
    let block = block(cut, plan);
    let mut all = S::Combine::identity();
    for tile in 0..cut.tiles {
        let first = block.start + tile * comptime!(plan.tile()) + UNIT_POS_X as usize * plan.items;
        let mut total = item::<S>(buffers, &block, first, cut.length, plan);
        #[unroll]
        for e in 1..comptime!(plan.items) {
            let next = item::<S>(buffers, &block, first + e, cut.length, plan);
            let both = S::Combine::combine(&total, &next);
            assign::<S::Combine>(&mut total, &both);
        }
        // Tiles alternate between two parts of shared memory.
        let base = tile % 2 * part;
        reduce::rows::<S::Combine>(&mut total, &mut shared[base..base + part], plan.row);
        let both = S::Combine::combine(&all, &total);
        assign::<S::Combine>(&mut all, &both);
    }
    if UNIT_POS_X == 0 && block.own {
        write::<S::Combine>(totals, block.part, cut.parts, &all);
    }
}

/// The scan of each block, behind item `part` of `carries`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn scan_kernel<S: Scan>(
    buffers: &mut S::Buffers,
    carries: &[f32],
    cut: &Cut,
    #[comptime] plan: Plan,
) {
    let registers = comptime!(<S::Combine as Combine>::REGISTERS);
    let part = comptime!(registers * units::shared(&plan.row));
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * part));
    let block = block(cut, plan);
    let mut carry = S::Combine::identity();
    if comptime!(plan.carried) {
        let before = read::<S::Combine>(carries, block.part, cut.parts);
        assign::<S::Combine>(&mut carry, &before);
    }
    for tile in 0..cut.tiles {
        let first = block.start + tile * comptime!(plan.tile()) + UNIT_POS_X as usize * plan.items;
        let mut held = Array::<f32>::new(comptime!(plan.items * registers));
        let mut total = S::Combine::identity();
        #[unroll]
        for e in 0..comptime!(plan.items) {
            let next = item::<S>(&*buffers, &block, first + e, cut.length, plan);
            #[unroll]
            for k in 0..registers {
                held[comptime!(e * registers + k)] = next[k];
            }
            if comptime!(e == 0) {
                assign::<S::Combine>(&mut total, &next);
            } else {
                let both = S::Combine::combine(&total, &next);
                assign::<S::Combine>(&mut total, &both);
            }
        }
        let base = tile % 2 * part;
        let prefix = units::rows::<S::Combine>(&total, &mut shared[base..base + part], plan.row);
        let mut prefix_here = S::Combine::combine(&carry, &prefix.before);
        #[unroll]
        for e in 0..comptime!(plan.items) {
            let mut next = S::Combine::identity();
            #[unroll]
            for k in 0..registers {
                next[k] = held[comptime!(e * registers + k)];
            }
            let both = S::Combine::combine(&prefix_here, &next);
            if block.own && first + e < block.end {
                let at = position(first + e, cut.length, plan.reverse);
                if comptime!(plan.exclusive) {
                    S::store(buffers, block.sequence, at, &prefix_here);
                } else {
                    S::store(buffers, block.sequence, at, &both);
                }
            }
            assign::<S::Combine>(&mut prefix_here, &both);
        }
        let both = S::Combine::combine(&carry, &prefix.all);
        assign::<S::Combine>(&mut carry, &both);
    }
}
