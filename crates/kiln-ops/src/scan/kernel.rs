//! The kernels: the totals of blocks, the scan of a block behind what stands before it, and both at once
//! where cubes can wait for each other.

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

/// The block of each row of a cube.
#[cube]
fn block(cut: &Cut, #[comptime] plan: Plan) -> Block {
    block_at(CUBE_POS * comptime!(plan.row.rows as usize) + UNIT_POS_Y as usize, cut, plan)
}

#[cube]
fn block_at(at: usize, cut: &Cut, #[comptime] plan: Plan) -> Block {
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

/// A unit's items of a tile.
#[derive(CubeType)]
struct Held {
    items: Array<f32>,
    /// What they combine to.
    total: Array<f32>,
}

/// Loads a unit's items from number `first` of a sequence on.
#[cube]
fn load<S: Scan>(
    buffers: &S::Buffers,
    block: &Block,
    first: usize,
    length: usize,
    #[comptime] plan: Plan,
) -> Held {
    let registers = comptime!(<S::Combine as Combine>::REGISTERS);
    let mut items = Array::<f32>::new(comptime!(plan.items * registers));
    let mut total = item::<S>(buffers, block, first, length, plan);
    #[unroll]
    for k in 0..registers {
        items[k] = total[k];
    }
    #[unroll]
    for e in 1..comptime!(plan.items) {
        let next = item::<S>(buffers, block, first + e, length, plan);
        #[unroll]
        for k in 0..registers {
            items[comptime!(e * registers + k)] = next[k];
        }
        let both = S::Combine::combine(&total, &next);
        assign::<S::Combine>(&mut total, &both);
    }
    Held { items, total }
}

/// Stores the prefixes of these items, behind `before`.
#[cube]
fn store<S: Scan>(
    buffers: &mut S::Buffers,
    block: &Block,
    first: usize,
    length: usize,
    held: &Held,
    before: &Array<f32>,
    #[comptime] plan: Plan,
) {
    let registers = comptime!(<S::Combine as Combine>::REGISTERS);
    let mut prefix = S::Combine::identity();
    assign::<S::Combine>(&mut prefix, before);
    #[unroll]
    for e in 0..comptime!(plan.items) {
        let mut next = S::Combine::identity();
        #[unroll]
        for k in 0..registers {
            next[k] = held.items[comptime!(e * registers + k)];
        }
        let both = S::Combine::combine(&prefix, &next);
        if block.own && first + e < block.end {
            let at = position(first + e, length, plan.reverse);
            if comptime!(plan.exclusive) {
                S::store(buffers, block.sequence, at, &prefix);
            } else {
                S::store(buffers, block.sequence, at, &both);
            }
        }
        assign::<S::Combine>(&mut prefix, &both);
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
        let held = load::<S>(&*buffers, &block, first, cut.length, plan);
        let base = tile % 2 * part;
        let memory = &mut shared[base..base + part];
        let prefix = units::rows::<S::Combine>(&held.total, memory, plan.row, false);
        let before = S::Combine::combine(&carry, &prefix.before);
        store::<S>(buffers, &block, first, cut.length, &held, &before, plan);
        let both = S::Combine::combine(&carry, &prefix.all);
        assign::<S::Combine>(&mut carry, &both);
    }
}

/// The scan of blocks of one tile, each behind the totals of all blocks before it in its sequence.
///
/// Cubes take blocks by a ticket, so that whoever is waited for has begun. `state` is the ticket and a
/// flag for each block, all zeros; `totals` holds the bits of the blocks' items. A block waits for
/// totals alone, never for prefixes, and combines them in their order: that costs loads, but what
/// is combined with what does not depend on who came first.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn look_back_kernel<S: Scan>(
    buffers: &mut S::Buffers,
    totals: &mut [Atomic<u32>],
    state: &mut [Atomic<u32>],
    cut: &Cut,
    #[comptime] plan: Plan,
) {
    let registers = comptime!(<S::Combine as Combine>::REGISTERS);
    let units = comptime!(plan.row.units as usize);
    let part = comptime!(registers * units::shared(&plan.row));
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * part));
    let mut ticket = Shared::<u32>::new();
    if UNIT_POS == 0 {
        *ticket = state[0].fetch_add(1u32);
    }
    sync_cube();
    let block = block_at(*ticket as usize, cut, plan);
    let first = block.start + UNIT_POS_X as usize * plan.items;
    let held = load::<S>(&*buffers, &block, first, cut.length, plan);
    let prefix = units::rows::<S::Combine>(&held.total, &mut shared[0..part], plan.row, false);

    if UNIT_POS == 0 && block.own {
        #[unroll]
        for k in 0..registers {
            totals[k * cut.parts + block.part].store(u32::reinterpret(prefix.all[k]));
        }
    }
    // Device scope: the total is there before its flag.
    sync_storage();
    if UNIT_POS == 0 && block.own {
        state[block.part + 1].store(1u32);
    }

    // The blocks before this one, in equal shares that follow each other.
    let start = block.sequence * cut.blocks;
    let number = select(block.own, block.part - start, 0usize);
    let share = (number + comptime!(units - 1)) / units;
    let from = min(UNIT_POS_X as usize * share, number);
    let to = min(from + share, number);
    for i in from..to {
        loop {
            if state[start + i + 1].load() != 0 {
                break;
            }
        }
    }
    sync_storage();
    let mut carry = S::Combine::identity();
    for i in from..to {
        let mut next = S::Combine::identity();
        #[unroll]
        for k in 0..registers {
            next[k] = f32::reinterpret(totals[k * cut.parts + start + i].load());
        }
        let both = S::Combine::combine(&carry, &next);
        assign::<S::Combine>(&mut carry, &both);
    }
    // Units that shuffle have to be together again: their shares differ.
    sync_cube();
    reduce::rows::<S::Combine>(&mut carry, &mut shared[part..2 * part], plan.row);
    let before = S::Combine::combine(&carry, &prefix.before);
    store::<S>(buffers, &block, first, cut.length, &held, &before, plan);
}
