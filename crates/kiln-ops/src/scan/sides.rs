//! What stands before and behind each unit, as items make it of what stands at the ends.
//!
//! Items may be large and what they act on small: a matrix and a vector. So the units of a plane reduce their items in
//! a tree and keep the sibling that they meet at each level; then what stands at the ends goes down the tree, past the
//! sibling that lies on its way.

use crate::reduce::{Combine, RowUnits, assign, choose, read, write};
use cubecl::prelude::*;

/// Items that act on a state: on that of what stands before them, and of what stands behind.
#[cube]
pub trait Acts: Combine {
    /// f32 of a state.
    const STATE: usize;

    /// Before the first item.
    fn start() -> Array<f32>;

    /// Behind the last.
    fn end() -> Array<f32>;

    /// Behind this item, of what is before it.
    fn from_left(state: &Array<f32>, item: &Array<f32>) -> Array<f32>;

    /// Before this item, of what is behind it.
    fn from_right(state: &Array<f32>, item: &Array<f32>) -> Array<f32>;
}

/// States around a unit, or around a block.
#[derive(CubeType)]
pub struct Sides {
    /// Before it.
    pub left: Array<f32>,
    /// Behind it.
    pub right: Array<f32>,
}

#[cube]
fn take(state: &mut Array<f32>, value: &Array<f32>, #[comptime] size: usize) {
    #[unroll]
    for k in 0..size {
        state[k] = value[k];
    }
}

/// A state in memory, whose registers are `part` f32 apart.
#[cube]
pub(super) fn read_state<C: Acts>(memory: &[f32], at: usize, part: usize) -> Array<f32> {
    let mut state = Array::<f32>::new(comptime!(C::STATE));
    #[unroll]
    for k in 0..comptime!(C::STATE) {
        state[k] = memory[k * part + at];
    }
    state
}

/// Writes one, as [`read_state`] reads it.
#[cube]
pub(super) fn write_state<C: Acts>(memory: &mut [f32], at: usize, part: usize, state: &Array<f32>) {
    #[unroll]
    for k in 0..comptime!(C::STATE) {
        memory[k * part + at] = state[k];
    }
}

/// The item of the unit whose lane differs in the bits of `step`.
#[cube]
fn sibling<C: Combine>(item: &Array<f32>, #[comptime] step: u32) -> Array<f32> {
    let mut other = Array::<f32>::new(comptime!(C::REGISTERS));
    #[unroll]
    for k in 0..comptime!(C::REGISTERS) {
        other[k] = plane_shuffle_xor(item[k], step);
    }
    other
}

/// The combination of a plane's items, in all of its units; into `met` go the siblings of each level.
#[cube]
fn climb<C: Combine>(
    item: &Array<f32>,
    met: &mut Array<f32>,
    #[comptime] lanes: u32,
) -> Array<f32> {
    let mut all = C::identity();
    assign::<C>(&mut all, item);
    #[unroll]
    for level in 0..comptime!(lanes.ilog2()) {
        let step = comptime!(1u32 << level);
        let other = sibling::<C>(&all, step);
        #[unroll]
        for k in 0..comptime!(C::REGISTERS) {
            met[comptime!(level as usize * C::REGISTERS + k)] = other[k];
        }
        let first = UNIT_POS_PLANE & step == 0;
        let earlier = choose::<C>(first, &all, &other);
        let later = choose::<C>(first, &other, &all);
        let both = C::combine(&earlier, &later);
        assign::<C>(&mut all, &both);
    }
    all
}

/// The combination of the items of a row, in its first unit. All of the cube calls this, with shared `memory` of
/// [`REGISTERS`](Combine::REGISTERS) times [`shared`](super::shared) that nobody else uses.
#[cube]
pub(super) fn total<C: Combine>(
    item: &Array<f32>,
    memory: &mut [f32],
    #[comptime] row: RowUnits,
) -> Array<f32> {
    let mut all = C::identity();
    assign::<C>(&mut all, item);
    if comptime!(row.plane == 1 || row.in_plane()) {
        crate::reduce::rows::<C>(&mut all, memory, row);
    } else {
        let part = comptime!(row.shared());
        let planes = comptime!(row.units / row.plane);
        let first = (UNIT_POS_Y * planes) as usize;
        // Units that shuffle have to be together again, whatever ways they took to their items.
        sync_cube();
        crate::reduce::plane::<C>(&mut all, comptime!(row.plane));
        if UNIT_POS_PLANE == 0 {
            let at = first + (UNIT_POS_X / comptime!(row.plane)) as usize;
            write::<C>(memory, at, part, &all);
        }
        sync_cube();
        if UNIT_POS_X == 0 {
            #[unroll]
            for i in 1..planes {
                let next = read::<C>(&*memory, first + i as usize, part);
                let both = C::combine(&all, &next);
                assign::<C>(&mut all, &both);
            }
        }
    }
    all
}

/// The states around each unit of a row that has `ends` around it. All of the cube calls this, with shared `memory` of
/// [`REGISTERS`](Combine::REGISTERS) times [`shared`](super::shared) that nobody else uses before the next `sync_cube`.
#[cube]
pub fn sides<C: Acts>(
    item: &Array<f32>,
    ends: &Sides,
    memory: &mut [f32],
    #[comptime] row: RowUnits,
) -> Sides {
    let size = comptime!(C::STATE);
    let part = comptime!(row.shared());
    let mut left = Array::<f32>::new(size);
    let mut right = Array::<f32>::new(size);
    take(&mut left, &ends.left, size);
    take(&mut right, &ends.right, size);
    if comptime!(row.plane > 1) {
        let lanes = comptime!(row.lanes());
        let levels = comptime!(lanes.ilog2());
        let mut met = Array::<f32>::new(comptime!((levels as usize * C::REGISTERS).max(1)));
        // Units that shuffle have to be together again, whatever ways they took to their items.
        sync_cube();
        let all = climb::<C>(item, &mut met, lanes);
        if comptime!(!row.in_plane()) {
            let planes = comptime!(row.units / row.plane);
            let first = (UNIT_POS_Y * planes) as usize;
            let mine = UNIT_POS_X / comptime!(row.plane);
            if UNIT_POS_PLANE == 0 {
                write::<C>(memory, first + mine as usize, part, &all);
            }
            sync_cube();
            #[unroll]
            for i in 0..planes {
                // The same for all units of a plane.
                if i < mine {
                    let next = read::<C>(&*memory, first + i as usize, part);
                    let state = C::from_left(&left, &next);
                    take(&mut left, &state, size);
                }
            }
            #[unroll]
            for k in 0..planes {
                let i = comptime!(planes - 1 - k);
                if i > mine {
                    let next = read::<C>(&*memory, first + comptime!(i as usize), part);
                    let state = C::from_right(&right, &next);
                    take(&mut right, &state, size);
                }
            }
        }
        #[unroll]
        for k in 0..levels {
            let level = comptime!(levels - 1 - k);
            let mut other = Array::<f32>::new(comptime!(C::REGISTERS));
            #[unroll]
            for r in 0..comptime!(C::REGISTERS) {
                other[r] = met[comptime!(level as usize * C::REGISTERS + r)];
            }
            if UNIT_POS_PLANE & comptime!(1u32 << level) != 0 {
                let state = C::from_left(&left, &other);
                take(&mut left, &state, size);
            } else {
                let state = C::from_right(&right, &other);
                take(&mut right, &state, size);
            }
        }
    } else {
        // The combinations of growing beginnings, then of growing ends; each level reads one half of the memory and
        // writes the other.
        let unit = UNIT_POS_X as usize;
        let before = beginning::<C>(item, memory, row, false);
        if unit > 0 {
            let state = C::from_left(&left, &before);
            take(&mut left, &state, size);
        }
        sync_cube();
        let after = beginning::<C>(item, memory, row, true);
        if unit < comptime!(row.units as usize - 1) {
            let state = C::from_right(&right, &after);
            take(&mut right, &state, size);
        }
        sync_cube();
    }
    Sides { left, right }
}

/// Without planes: the combination of the units before this one, or in `reverse` of those behind it; none for the first.
#[cube]
fn beginning<C: Combine>(
    item: &Array<f32>,
    memory: &mut [f32],
    #[comptime] row: RowUnits,
    #[comptime] reverse: bool,
) -> Array<f32> {
    let part = comptime!(row.shared());
    let levels = comptime!(row.units.ilog2());
    let half = comptime!(C::REGISTERS * part);
    let first = (UNIT_POS_Y * comptime!(row.units)) as usize;
    let mut unit = UNIT_POS_X as usize;
    if comptime!(reverse) {
        unit = comptime!(row.units as usize - 1) - unit;
    }
    let mut here = C::identity();
    assign::<C>(&mut here, item);
    write::<C>(memory, first + unit, part, &here);
    sync_cube();
    #[unroll]
    for level in 0..levels {
        let step = comptime!(1usize << level);
        let from = comptime!((level % 2) as usize * half);
        let to = comptime!(half - from);
        if unit >= step {
            let met = read::<C>(&*memory, from + first + unit - step, part);
            if comptime!(reverse) {
                let both = C::combine(&here, &met);
                assign::<C>(&mut here, &both);
            } else {
                let both = C::combine(&met, &here);
                assign::<C>(&mut here, &both);
            }
        }
        write::<C>(memory, to + first + unit, part, &here);
        sync_cube();
    }
    let end = comptime!((levels % 2) as usize * half);
    let mut before = C::identity();
    if unit > 0 {
        let met = read::<C>(&*memory, end + first + unit - 1, part);
        assign::<C>(&mut before, &met);
    }
    before
}
