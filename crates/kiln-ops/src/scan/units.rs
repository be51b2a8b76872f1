//! The scan over the units of a plane, of a row and of a cube.
//!
//! It goes from the first unit to the last, or in reverse: `earlier` in [`Combine::combine`] is then what stands
//! behind. For both at once there is [`around`](fn@super::around).

use crate::reduce::{Combine, RowUnits, Shuffle, assign, choose, read, shuffle, write};
use cubecl::prelude::*;

/// What a unit gets of a scan over units.
#[derive(CubeType)]
pub struct Prefix {
    /// The units before this one; in reverse those behind it.
    pub before: Array<f32>,
    /// All units of the row.
    pub all: Array<f32>,
}

/// f32 of shared memory that [`rows()`] needs for each register of an item.
pub fn shared(row: &RowUnits) -> usize {
    if row.plane > 1 { row.shared() } else { 2 * row.shared() }
}

/// Replaces `item` by the combination of the units of a plane up to and with this one, in `reverse` of this one
/// and those behind it, among those of the row.
#[cube]
fn plane<C: Combine>(item: &mut Array<f32>, #[comptime] row: RowUnits, #[comptime] reverse: bool) {
    let lanes = comptime!(row.lanes());
    let place = place(UNIT_POS_X % lanes, lanes, reverse);
    #[unroll]
    for level in 0..comptime!(lanes.ilog2()) {
        let step = comptime!(1u32 << level);
        let earlier = earlier::<C>(&*item, step, row, reverse);
        let both = C::combine(&earlier, &*item);
        let next = choose::<C>(place >= step, &both, &*item);
        assign::<C>(item, &next);
    }
}

/// The place in the order of the scan of the unit that is `at` among `count`.
#[cube]
fn place(at: u32, #[comptime] count: u32, #[comptime] reverse: bool) -> u32 {
    if comptime!(reverse) { comptime!(count - 1) - at } else { at }
}

/// The item of the unit `step` places earlier; no more than some item where there is none.
#[cube]
fn earlier<C: Combine>(
    item: &Array<f32>,
    #[comptime] step: u32,
    #[comptime] row: RowUnits,
    #[comptime] reverse: bool,
) -> Array<f32> {
    let whose = comptime!(if reverse { Shuffle::Down } else { Shuffle::Up });
    let mut other = Array::<f32>::new(comptime!(C::REGISTERS));
    #[unroll]
    for k in 0..comptime!(C::REGISTERS) {
        other[k] = shuffle(item[k], step, whose, comptime!(row.whole_planes()));
    }
    other
}

/// Combines the items of the units of a row, in their order or in `reverse`.
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
    #[comptime] reverse: bool,
) -> Prefix {
    let part = comptime!(row.shared());
    let identity = C::identity();
    let mut before = C::identity();
    let mut all = C::identity();
    if comptime!(row.plane > 1) {
        let lanes = comptime!(row.lanes());
        let mut here = C::identity();
        assign::<C>(&mut here, item);
        plane::<C>(&mut here, row, reverse);
        let lane = UNIT_POS_X % lanes;
        let place_in_plane = place(lane, lanes, reverse);
        let met = earlier::<C>(&here, 1u32, row, reverse);
        let in_plane = choose::<C>(place_in_plane > 0, &met, &identity);
        assign::<C>(&mut before, &in_plane);
        if comptime!(row.in_plane()) {
            let last = UNIT_POS_PLANE - lane + place(comptime!(lanes - 1), lanes, reverse);
            #[unroll]
            for k in 0..comptime!(C::REGISTERS) {
                all[k] = shuffle(here[k], last, Shuffle::Lane, comptime!(row.whole_planes()));
            }
        } else {
            let planes = comptime!(row.units / row.plane);
            let first = (UNIT_POS_Y * planes) as usize;
            let mine = place(UNIT_POS_X / comptime!(row.plane), planes, reverse);
            if place_in_plane == comptime!(lanes - 1) {
                write::<C>(memory, first + mine as usize, part, &here);
            }
            sync_cube();
            let mut ahead = C::identity();
            #[unroll]
            for i in 0..planes {
                let next = read::<C>(&*memory, first + i as usize, part);
                let sum = C::combine(&all, &next);
                let kept = choose::<C>(i < mine, &sum, &ahead);
                assign::<C>(&mut ahead, &kept);
                assign::<C>(&mut all, &sum);
            }
            let both = C::combine(&ahead, &in_plane);
            assign::<C>(&mut before, &both);
        }
    } else {
        let ahead = beginning::<C>(item, memory, row, reverse);
        assign::<C>(&mut before, &ahead);
        let last = comptime!(row.units as usize - 1);
        let end = comptime!((row.units.ilog2() % 2) as usize * C::REGISTERS * part);
        let first = (UNIT_POS_Y * comptime!(row.units)) as usize;
        let sum = read::<C>(&*memory, end + first + last, part);
        assign::<C>(&mut all, &sum);
    }
    Prefix { before, all }
}

/// Without planes: the combination of the units before this one, or in `reverse` of those behind it; none for the
/// first. Each level reads one half of the memory and writes the other: one barrier a level.
#[cube]
pub(super) fn beginning<C: Combine>(
    item: &Array<f32>,
    memory: &mut [f32],
    #[comptime] row: RowUnits,
    #[comptime] reverse: bool,
) -> Array<f32> {
    let part = comptime!(row.shared());
    let levels = comptime!(row.units.ilog2());
    let half = comptime!(C::REGISTERS * part);
    let first = (UNIT_POS_Y * comptime!(row.units)) as usize;
    let unit = place(UNIT_POS_X, comptime!(row.units), reverse) as usize;
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
            let both = C::combine(&met, &here);
            assign::<C>(&mut here, &both);
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
