//! What stands before and behind each unit, as items make it of what stands at the ends.
//!
//! Items may be large and what they act on small: a matrix and a vector. So the units of a plane reduce their items in
//! a tree and keep the sibling that they meet at each level; then what stands at the ends goes down the tree, past the
//! sibling that lies on its way.

use super::units;
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

    /// Behind this item, of what is before it; in `reverse` before it, of what is behind it.
    fn act(state: &Array<f32>, item: &Array<f32>, reverse: bool) -> Array<f32>;
}

/// States around a unit, or around a block.
#[derive(CubeType)]
pub struct Sides {
    /// Before it.
    pub left: Array<f32>,
    /// Behind it.
    pub right: Array<f32>,
}

/// f32 of shared memory that [`sides()`] needs.
pub fn shared<C: Acts>(row: &RowUnits) -> usize {
    let of_states = if row.plane > 1 { 2 * C::STATE * row.shared() } else { 0 };
    C::REGISTERS * units::shared(row) + of_states
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

/// The combination of the items of a plane, in the first of each `lanes` units.
#[cube]
fn fold<C: Combine>(item: &mut Array<f32>, #[comptime] lanes: u32) {
    #[unroll]
    for level in 0..comptime!(lanes.ilog2()) {
        let mut later = Array::<f32>::new(comptime!(C::REGISTERS));
        #[unroll]
        for k in 0..comptime!(C::REGISTERS) {
            later[k] = plane_shuffle_down(item[k], comptime!(1u32 << level));
        }
        let both = C::combine(&*item, &later);
        assign::<C>(item, &both);
    }
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
        fold::<C>(&mut all, comptime!(row.plane));
        if UNIT_POS_PLANE == 0 {
            let at = first + (UNIT_POS_X / comptime!(row.plane)) as usize;
            write::<C>(memory, at, part, &all);
        }
        sync_cube();
        if UNIT_POS_X < comptime!(row.plane) {
            let of_planes = of_planes::<C>(&*memory, row);
            assign::<C>(&mut all, &of_planes);
            fold::<C>(&mut all, comptime!(planes.min(row.plane)));
        }
    }
    all
}

/// A lane's share of the totals of a row's planes.
#[cube]
fn of_planes<C: Combine>(totals: &[f32], #[comptime] row: RowUnits) -> Array<f32> {
    let part = comptime!(row.shared());
    let planes = comptime!(row.units / row.plane);
    let lanes = comptime!(planes.min(row.plane));
    let share = comptime!((planes / lanes) as usize);
    let first = (UNIT_POS_Y * planes + UNIT_POS_PLANE % lanes * comptime!(planes / lanes)) as usize;
    let mut all = read::<C>(totals, first, part);
    #[unroll]
    for i in 1..share {
        let next = read::<C>(totals, first + i, part);
        let both = C::combine(&all, &next);
        assign::<C>(&mut all, &both);
    }
    all
}

/// `then` where the condition holds, else `or_else`.
#[cube]
fn choose_state<C: Acts>(condition: bool, then: &Array<f32>, or_else: &Array<f32>) -> Array<f32> {
    let mut state = Array::<f32>::new(comptime!(C::STATE));
    #[unroll]
    for k in 0..comptime!(C::STATE) {
        state[k] = select(condition, then[k], or_else[k]);
    }
    state
}

/// What stands around the items of a plane becomes what stands around the unit's own, past the siblings that [`climb`]
/// met.
#[cube]
fn descend<C: Acts>(around: &mut Sides, met: &Array<f32>, #[comptime] lanes: u32) {
    let size = comptime!(C::STATE);
    let levels = comptime!(lanes.ilog2());
    #[unroll]
    for k in 0..levels {
        let level = comptime!(levels - 1 - k);
        let mut other = C::identity();
        #[unroll]
        for r in 0..comptime!(C::REGISTERS) {
            other[r] = met[comptime!(level as usize * C::REGISTERS + r)];
        }
        // The sibling stands on one side: units take the same way, whichever it is.
        let behind = UNIT_POS_PLANE & comptime!(1u32 << level) == 0;
        let state = choose_state::<C>(behind, &around.right, &around.left);
        let past = C::act(&state, &other, behind);
        let left = choose_state::<C>(behind, &around.left, &past);
        let right = choose_state::<C>(behind, &past, &around.right);
        take(&mut around.left, &left, size);
        take(&mut around.right, &right, size);
    }
}

/// Where the states before each plane and behind it stand in the memory of [`sides()`], after the totals.
fn places<C: Acts>(row: &RowUnits) -> [usize; 3] {
    let totals = C::REGISTERS * row.shared();
    let states = C::STATE * row.shared();
    [totals, totals + states, totals + 2 * states]
}

/// One plane of a row: from the totals of its planes, and what stands around the row, what stands around each of them.
#[cube]
fn between_planes<C: Acts>(ends: &Sides, memory: &mut [f32], #[comptime] row: RowUnits) {
    let part = comptime!(row.shared());
    let planes = comptime!(row.units / row.plane);
    let lanes = comptime!(planes.min(row.plane));
    let share = comptime!((planes / lanes) as usize);
    let size = comptime!(C::STATE);
    let [lefts, rights, end] = comptime!(places::<C>(&row));
    let first = (UNIT_POS_Y * planes + UNIT_POS_PLANE % lanes * comptime!(planes / lanes)) as usize;
    let all = of_planes::<C>(&*memory, row);
    let mut met = Array::<f32>::new(comptime!((lanes.ilog2() as usize * C::REGISTERS).max(1)));
    climb::<C>(&all, &mut met, lanes);
    let mut around = copied::<C>(ends);
    descend::<C>(&mut around, &met, lanes);
    if UNIT_POS_PLANE < lanes {
        #[unroll]
        for i in 0..share {
            write_state::<C>(&mut memory[lefts..rights], first + i, part, &around.left);
            let next = read::<C>(&*memory, first + i, part);
            let state = C::act(&around.left, &next, false);
            take(&mut around.left, &state, size);
        }
        #[unroll]
        for k in 0..share {
            let i = comptime!(share - 1 - k);
            write_state::<C>(&mut memory[rights..end], first + i, part, &around.right);
            let next = read::<C>(&*memory, first + i, part);
            let state = C::act(&around.right, &next, true);
            take(&mut around.right, &state, size);
        }
    }
}

#[cube]
fn copied<C: Acts>(sides: &Sides) -> Sides {
    let size = comptime!(C::STATE);
    let mut left = Array::<f32>::new(size);
    let mut right = Array::<f32>::new(size);
    take(&mut left, &sides.left, size);
    take(&mut right, &sides.right, size);
    Sides { left, right }
}

/// The states around each unit of a row that has `ends` around it. All of the cube calls this, with the shared `memory`
/// of [`shared`] that nobody else uses before the next `sync_cube`.
#[cube]
pub fn sides<C: Acts>(
    item: &Array<f32>,
    ends: &Sides,
    memory: &mut [f32],
    #[comptime] row: RowUnits,
) -> Sides {
    let size = comptime!(C::STATE);
    let part = comptime!(row.shared());
    let mut around = copied::<C>(ends);
    if comptime!(row.plane > 1) {
        let lanes = comptime!(row.lanes());
        let levels = comptime!(lanes.ilog2());
        let mut met = Array::<f32>::new(comptime!((levels as usize * C::REGISTERS).max(1)));
        // Units that shuffle have to be together again, whatever ways they took to their items.
        sync_cube();
        let all = climb::<C>(item, &mut met, lanes);
        if comptime!(!row.in_plane()) {
            let mine = UNIT_POS_X / comptime!(row.plane);
            let at = (UNIT_POS_Y * comptime!(row.units / row.plane) + mine) as usize;
            let [lefts, rights, end] = comptime!(places::<C>(&row));
            if UNIT_POS_PLANE == 0 {
                write::<C>(memory, at, part, &all);
            }
            sync_cube();
            if mine == 0 {
                between_planes::<C>(ends, memory, row);
            }
            sync_cube();
            let left = read_state::<C>(&memory[lefts..rights], at, part);
            let right = read_state::<C>(&memory[rights..end], at, part);
            take(&mut around.left, &left, size);
            take(&mut around.right, &right, size);
        }
        descend::<C>(&mut around, &met, lanes);
    } else {
        let unit = UNIT_POS_X as usize;
        let before = units::beginning::<C>(item, memory, row, false);
        if unit > 0 {
            let state = C::act(&around.left, &before, false);
            take(&mut around.left, &state, size);
        }
        sync_cube();
        let after = units::beginning::<C>(item, memory, row, true);
        if unit < comptime!(row.units as usize - 1) {
            let state = C::act(&around.right, &after, true);
            take(&mut around.right, &state, size);
        }
        sync_cube();
    }
    around
}
