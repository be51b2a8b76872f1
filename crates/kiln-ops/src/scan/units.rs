//! The scan over the units of a plane, of a row and of a cube.

use crate::reduce::{Combine, RowUnits, assign, choose, read, write};
use cubecl::prelude::*;

/// What a unit gets of a scan over units.
#[derive(CubeType)]
pub struct Prefix {
    /// The units before this one.
    pub before: Array<f32>,
    /// All units of the row.
    pub all: Array<f32>,
}

/// What stands around a unit.
#[derive(CubeType)]
pub struct Sides {
    /// The units before it.
    pub before: Array<f32>,
    /// The units behind it.
    pub after: Array<f32>,
}

/// f32 of shared memory that [`rows()`] needs for each register of an item.
pub fn shared(row: &RowUnits) -> usize {
    if row.plane > 1 { row.shared() } else { 2 * row.shared() }
}

/// Replaces `item` by the combination of the units of a plane up to and with this one, among `lanes`
/// neighbours, a power of two.
#[cube]
pub fn plane<C: Combine>(item: &mut Array<f32>, #[comptime] lanes: u32) {
    plane_to::<C>(item, lanes, false);
}

/// As [`plane`], or of the units from this one on.
#[cube]
fn plane_to<C: Combine>(item: &mut Array<f32>, #[comptime] lanes: u32, #[comptime] reverse: bool) {
    let lane = mirrored(UNIT_POS_PLANE % lanes, lanes, reverse);
    #[unroll]
    for level in 0..comptime!(lanes.ilog2()) {
        let step = comptime!(1u32 << level);
        let met = neighbour::<C>(&*item, step, reverse);
        let both = met_first::<C>(&met, &*item, reverse);
        let next = choose::<C>(lane >= step, &both, &*item);
        assign::<C>(item, &next);
    }
}

/// Place `i` of `n` as a scan meets it.
#[cube]
fn mirrored(i: u32, #[comptime] n: u32, #[comptime] reverse: bool) -> u32 {
    if comptime!(reverse) { comptime!(n - 1) - i } else { i }
}

/// What a scan has met before an item, and that item: in the order of the sequence.
#[cube]
fn met_first<C: Combine>(
    met: &Array<f32>,
    item: &Array<f32>,
    #[comptime] reverse: bool,
) -> Array<f32> {
    if comptime!(reverse) { C::combine(item, met) } else { C::combine(met, item) }
}

/// The item of the unit that a scan meets `step` units earlier; no more than some item where there is none.
#[cube]
fn neighbour<C: Combine>(
    item: &Array<f32>,
    #[comptime] step: u32,
    #[comptime] reverse: bool,
) -> Array<f32> {
    let mut other = Array::<f32>::new(comptime!(C::REGISTERS));
    #[unroll]
    for k in 0..comptime!(C::REGISTERS) {
        if comptime!(reverse) {
            other[k] = plane_shuffle_down(item[k], step);
        } else {
            other[k] = plane_shuffle_up(item[k], step);
        }
    }
    other
}

/// Combines the items of the units of a row, in their order.
///
/// The cube is `units` × `rows`, all of it calls this. `memory` is shared, of
/// [`REGISTERS`](Combine::REGISTERS) times [`shared`] values that nobody else uses before the next
/// `sync_cube`; a caller that scans again without one in between passes another part. A cube is
/// scanned as its only row.
#[cube]
pub fn rows<C: Combine>(
    item: &Array<f32>,
    memory: &mut [f32],
    #[comptime] row: RowUnits,
) -> Prefix {
    rows_to::<C>(item, memory, row, false)
}

/// As [`rows()`], to both sides; `memory` is twice as long.
#[cube]
pub fn sides<C: Combine>(
    item: &Array<f32>,
    memory: &mut [f32],
    #[comptime] row: RowUnits,
) -> Sides {
    let part = comptime!(C::REGISTERS * shared(&row));
    let ahead = rows_to::<C>(item, &mut memory[0..part], row, false);
    let behind = rows_to::<C>(item, &mut memory[part..2 * part], row, true);
    Sides { before: ahead.before, after: behind.before }
}

/// What stands around a unit, in a block that has `ahead` before it and `behind` behind it.
#[cube]
pub(super) fn within<C: Combine>(sides: &Sides, ahead: &Array<f32>, behind: &Array<f32>) -> Sides {
    Sides { before: C::combine(ahead, &sides.before), after: C::combine(&sides.after, behind) }
}

/// As [`rows()`]; in `reverse` what is `before` a unit stands behind it.
#[cube]
fn rows_to<C: Combine>(
    item: &Array<f32>,
    memory: &mut [f32],
    #[comptime] row: RowUnits,
    #[comptime] reverse: bool,
) -> Prefix {
    let part = comptime!(row.shared());
    let identity = C::identity();
    let mut here = C::identity();
    assign::<C>(&mut here, item);
    let mut before = C::identity();
    let mut all = C::identity();
    if comptime!(row.plane > 1) {
        let lanes = comptime!(row.lanes());
        plane_to::<C>(&mut here, lanes, reverse);
        let lane = UNIT_POS_PLANE % lanes;
        let met = neighbour::<C>(&here, 1u32, reverse);
        let place = mirrored(lane, lanes, reverse);
        let in_plane = choose::<C>(place > 0, &met, &identity);
        assign::<C>(&mut before, &in_plane);
        if comptime!(row.in_plane()) {
            let last = UNIT_POS_PLANE - lane + mirrored(comptime!(lanes - 1), lanes, reverse);
            #[unroll]
            for k in 0..comptime!(C::REGISTERS) {
                all[k] = plane_shuffle(here[k], last);
            }
        } else {
            let planes = comptime!(row.units / row.plane);
            let first = (UNIT_POS_Y * planes) as usize;
            let mine = mirrored(UNIT_POS_X / comptime!(row.plane), planes, reverse);
            if place == comptime!(lanes - 1) {
                write::<C>(memory, first + mine as usize, part, &here);
            }
            sync_cube();
            let mut ahead = C::identity();
            #[unroll]
            for i in 0..planes {
                let next = read::<C>(&*memory, first + i as usize, part);
                let sum = met_first::<C>(&all, &next, reverse);
                let kept = choose::<C>(i < mine, &sum, &ahead);
                assign::<C>(&mut ahead, &kept);
                assign::<C>(&mut all, &sum);
            }
            let both = met_first::<C>(&ahead, &in_plane, reverse);
            assign::<C>(&mut before, &both);
        }
    } else {
        // Each level reads one half of the memory and writes the other: one barrier a level.
        let levels = comptime!(row.units.ilog2());
        let first = (UNIT_POS_Y * comptime!(row.units)) as usize;
        let unit = mirrored(UNIT_POS_X, comptime!(row.units), reverse) as usize;
        let half = comptime!(C::REGISTERS * part);
        write::<C>(memory, first + unit, part, &here);
        sync_cube();
        #[unroll]
        for level in 0..levels {
            let step = comptime!(1usize << level);
            let from = comptime!((level % 2) as usize * half);
            let to = comptime!(half - from);
            if unit >= step {
                let met = read::<C>(&*memory, from + first + unit - step, part);
                let both = met_first::<C>(&met, &here, reverse);
                assign::<C>(&mut here, &both);
            }
            write::<C>(memory, to + first + unit, part, &here);
            sync_cube();
        }
        let end = comptime!((levels % 2) as usize * half);
        if unit > 0 {
            let met = read::<C>(&*memory, end + first + unit - 1, part);
            assign::<C>(&mut before, &met);
        }
        let last = read::<C>(&*memory, end + first + comptime!(row.units as usize - 1), part);
        assign::<C>(&mut all, &last);
    }
    Prefix { before, all }
}
