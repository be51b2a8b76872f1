//! What stands before and behind each unit, as items make it of what stands at the ends.
//!
//! Items may be large and what they act on small: a matrix and a vector. So the units of a plane reduce their items in
//! a tree and keep the sibling that they meet at each level; then what stands at the ends goes down the tree, past the
//! sibling that lies on its way. Where a row has several planes, one of them does that for all, with a few neighbouring
//! units for each lane: in a tree the lanes of a sibling do the same work, in its own units a lane does it once.

use super::units;
use crate::reduce::{Combine, RowUnits, Shuffle, assign, choose, read, shuffle, write};
use cubecl::prelude::*;
use std::marker::PhantomData;

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

/// A scan in reverse takes what stands behind as `earlier`: with this it keeps the order of the items.
struct Swapped<C>(PhantomData<C>);

#[cube]
impl<C: Combine> Combine for Swapped<C> {
    const REGISTERS: usize = C::REGISTERS;
    const COMMUTATIVE: bool = C::COMMUTATIVE;

    fn identity() -> Array<f32> {
        C::identity()
    }

    fn combine(earlier: &Array<f32>, later: &Array<f32>) -> Array<f32> {
        C::combine(later, earlier)
    }
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
    match Lot::of(row) {
        Some(lot) => (C::REGISTERS + 2 * C::STATE) * lot.slots,
        None => C::REGISTERS * units::shared(row),
    }
}

/// How the units of rows of several planes lie in shared memory, so that one plane can take them all: neighbouring
/// lanes of it read neighbouring addresses, and so that neighbouring units do not write to the same bank.
#[derive(Clone, Copy)]
struct Lot {
    /// Lanes of a plane.
    lanes: u32,
    /// Neighbouring units that count as one, after a tree of their own.
    group: u32,
    /// Groups of a lane.
    share: u32,
    /// From a lane's group to its next.
    apart: u32,
    /// Places for the groups of a cube.
    slots: usize,
}

/// Groups of a lane, more only if a group would be larger than a plane: they follow each other, and all units wait.
const SHARE: u32 = 4;

impl Lot {
    /// None where rows lie within planes, or there are none.
    fn of(row: &RowUnits) -> Option<Self> {
        if row.plane == 1 || row.in_plane() {
            return None;
        }
        let lanes = row.plane;
        let planes = row.units / lanes;
        let share = planes.min(SHARE).max(planes / lanes);
        let apart = lanes + (lanes / planes).max(1);
        let slots = (row.rows * share * apart) as usize;
        Some(Self { lanes, group: planes / share, share, apart, slots })
    }

    /// Where the states before and behind the units begin, after the items, and where they end.
    fn states<C: Acts>(&self) -> [usize; 3] {
        [0, 1, 2].map(|k| (C::REGISTERS + k * C::STATE) * self.slots)
    }
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
fn read_state<C: Acts>(memory: &[f32], at: usize, part: usize) -> Array<f32> {
    let mut state = Array::<f32>::new(comptime!(C::STATE));
    #[unroll]
    for k in 0..comptime!(C::STATE) {
        state[k] = memory[k * part + at];
    }
    state
}

/// Writes one, as [`read_state`] reads it.
#[cube]
fn write_state<C: Acts>(memory: &mut [f32], at: usize, part: usize, state: &Array<f32>) {
    #[unroll]
    for k in 0..comptime!(C::STATE) {
        memory[k * part + at] = state[k];
    }
}

/// The item of the unit whose lane differs in the bits of `step`.
#[cube]
fn sibling<C: Combine>(
    item: &Array<f32>,
    #[comptime] step: u32,
    #[comptime] row: RowUnits,
) -> Array<f32> {
    let mut other = Array::<f32>::new(comptime!(C::REGISTERS));
    #[unroll]
    for k in 0..comptime!(C::REGISTERS) {
        other[k] = shuffle(item[k], step, Shuffle::Xor, comptime!(row.whole_planes()));
    }
    other
}

/// The combination of the items of `lanes` neighbours, in all of them; into `met` go the siblings of each level.
#[cube]
fn climb<C: Combine>(
    item: &Array<f32>,
    met: &mut Array<f32>,
    #[comptime] lanes: u32,
    #[comptime] row: RowUnits,
) -> Array<f32> {
    let mut all = C::identity();
    assign::<C>(&mut all, item);
    #[unroll]
    for level in 0..comptime!(lanes.ilog2()) {
        let step = comptime!(1u32 << level);
        let other = sibling::<C>(&all, step, row);
        #[unroll]
        for k in 0..comptime!(C::REGISTERS) {
            met[comptime!(level as usize * C::REGISTERS + k)] = other[k];
        }
        let first = UNIT_POS_X & step == 0;
        let earlier = choose::<C>(first, &all, &other);
        let later = choose::<C>(first, &other, &all);
        let both = C::combine(&earlier, &later);
        assign::<C>(&mut all, &both);
    }
    all
}

/// Memory for the siblings that `lanes` neighbours meet; never none, which no array can have.
fn siblings<C: Combine>(lanes: u32) -> usize {
    (lanes.ilog2() as usize * C::REGISTERS).max(1)
}

/// f32 of shared memory that [`total`] needs.
pub(super) fn shared_of_total<C: Combine>(row: &RowUnits) -> usize {
    // Never none, which no array can have.
    if row.plane > 1 { 1 } else { C::REGISTERS * row.shared() }
}

/// Totals of a row, as [`total`] makes them.
pub(super) fn totals(row: &RowUnits) -> u32 {
    if row.plane > 1 { row.units.div_ceil(row.plane) } else { 1 }
}

/// The combination of the items of each plane, in its first unit; without planes of all units, in the first. All of the
/// cube calls this, with shared `memory` of [`shared_of_total`] that nobody else uses.
#[cube]
pub(super) fn total<C: Combine>(
    item: &Array<f32>,
    memory: &mut [f32],
    #[comptime] row: RowUnits,
) -> Array<f32> {
    let mut all = C::identity();
    assign::<C>(&mut all, item);
    if comptime!(row.plane == 1) {
        crate::reduce::rows::<C>(&mut all, memory, row);
    } else {
        // Units that shuffle have to be together again, whatever ways they took to their items.
        sync_plane();
        #[unroll]
        for level in 0..comptime!(row.lanes().ilog2()) {
            let mut later = Array::<f32>::new(comptime!(C::REGISTERS));
            #[unroll]
            for k in 0..comptime!(C::REGISTERS) {
                later[k] = shuffle(
                    all[k],
                    comptime!(1u32 << level),
                    Shuffle::Down,
                    comptime!(row.whole_planes()),
                );
            }
            let both = C::combine(&all, &later);
            assign::<C>(&mut all, &both);
        }
    }
    all
}

/// The plane of a row that works for all. Those of one number are on one scheduler of a multiprocessor, so it goes round.
#[cube]
fn chief(#[comptime] row: RowUnits) -> u32 {
    let planes = comptime!(row.units / row.plane);
    let cube = CUBE_POS as u32;
    (cube + cube / planes + UNIT_POS_Y) % planes
}

/// The place of this unit's group.
#[cube]
fn own_slot(#[comptime] lot: Lot) -> usize {
    let Lot { group, share, apart, .. } = comptime!(lot);
    let own = UNIT_POS_X / group;
    (UNIT_POS_Y * comptime!(share * apart) + own % share * apart + own / share) as usize
}

/// The place of group `i` of those that this lane takes.
#[cube]
fn slot_of_share(#[comptime] i: u32, #[comptime] lot: Lot) -> usize {
    let Lot { lanes, share, apart, .. } = comptime!(lot);
    (UNIT_POS_Y * comptime!(share * apart) + UNIT_POS_X % lanes + comptime!(i * apart)) as usize
}

/// The combination of a lane's share.
#[cube]
fn of_share<C: Combine>(items: &[f32], #[comptime] lot: Lot) -> Array<f32> {
    let mut all = read::<C>(items, slot_of_share(0u32, lot), comptime!(lot.slots));
    #[unroll]
    for i in 1..comptime!(lot.share) {
        let next = read::<C>(items, slot_of_share(i, lot), comptime!(lot.slots));
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

/// What stands around the items of `lanes` neighbours becomes what stands around the unit's own, past the siblings that
/// [`climb`] met.
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
        let behind = UNIT_POS_X & comptime!(1u32 << level) == 0;
        let state = choose_state::<C>(behind, &around.right, &around.left);
        let past = C::act(&state, &other, behind);
        let left = choose_state::<C>(behind, &around.left, &past);
        let right = choose_state::<C>(behind, &past, &around.right);
        take(&mut around.left, &left, size);
        take(&mut around.right, &right, size);
    }
}

/// One plane of a row, for all: from the items of its groups, and what stands around the row, what stands around each.
#[cube]
fn around_groups<C: Acts>(
    ends: &Sides,
    memory: &mut [f32],
    #[comptime] row: RowUnits,
    #[comptime] lot: Lot,
) {
    let size = comptime!(C::STATE);
    let slots = comptime!(lot.slots);
    let [lefts, rights, end] = comptime!(lot.states::<C>());
    let share = of_share::<C>(&*memory, lot);
    let mut met = Array::<f32>::new(comptime!(siblings::<C>(row.plane)));
    climb::<C>(&share, &mut met, comptime!(row.plane), row);
    let mut around = copied::<C>(ends);
    descend::<C>(&mut around, &met, comptime!(row.plane));
    #[unroll]
    for i in 0..comptime!(lot.share) {
        let (rightward, leftward) =
            (slot_of_share(i, lot), slot_of_share(comptime!(lot.share - 1 - i), lot));
        let passed = read::<C>(&*memory, rightward, slots);
        let left = C::act(&around.left, &passed, false);
        let passed = read::<C>(&*memory, leftward, slots);
        let right = C::act(&around.right, &passed, true);
        write_state::<C>(&mut memory[lefts..rights], rightward, slots, &around.left);
        write_state::<C>(&mut memory[rights..end], leftward, slots, &around.right);
        take(&mut around.left, &left, size);
        take(&mut around.right, &right, size);
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
    let lot = comptime!(Lot::of(&row));
    let mut around = copied::<C>(ends);
    if comptime!(lot.is_some()) {
        let lot = comptime!(lot.unwrap());
        let slots = comptime!(lot.slots);
        let [lefts, rights, end] = comptime!(lot.states::<C>());
        let mut met = Array::<f32>::new(comptime!(siblings::<C>(lot.group)));
        // Units that shuffle have to be together again, whatever ways they took to their items.
        sync_plane();
        let all = climb::<C>(item, &mut met, comptime!(lot.group), row);
        let lane = UNIT_POS_X % comptime!(lot.group);
        if lane == 0 {
            write::<C>(memory, own_slot(lot), slots, &all);
        }
        sync_cube();
        if UNIT_POS_X / comptime!(row.plane) == chief(row) {
            around_groups::<C>(ends, memory, row, lot);
        }
        sync_cube();
        let left = read_state::<C>(&memory[lefts..rights], own_slot(lot), slots);
        let right = read_state::<C>(&memory[rights..end], own_slot(lot), slots);
        take(&mut around.left, &left, size);
        take(&mut around.right, &right, size);
        descend::<C>(&mut around, &met, comptime!(lot.group));
    } else if comptime!(row.plane > 1) {
        let lanes = comptime!(row.lanes());
        let mut met = Array::<f32>::new(comptime!(siblings::<C>(lanes)));
        sync_plane();
        climb::<C>(item, &mut met, lanes, row);
        descend::<C>(&mut around, &met, lanes);
    } else {
        let unit = UNIT_POS_X as usize;
        let before = units::beginning::<C>(item, memory, row, false);
        if unit > 0 {
            let state = C::act(&around.left, &before, false);
            take(&mut around.left, &state, size);
        }
        sync_cube();
        let after = units::beginning::<Swapped<C>>(item, memory, row, true);
        if unit < comptime!(row.units as usize - 1) {
            let state = C::act(&around.right, &after, true);
            take(&mut around.right, &state, size);
        }
        sync_cube();
    }
    around
}
