//! How the units of a cube share rows, and the reduction of a row over its units.

use super::combine::{Combine, assign, choose, read, write};
use super::exchange::{Shuffle, shuffle};
use crate::device::Hardware;
use crate::launch;
use cubecl::prelude::*;

/// The units of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowUnits {
    /// Units of one row: a power of two up to the size of a plane, then whole planes; without planes
    /// always a power of two.
    pub units: u32,
    /// Rows of one cube.
    pub rows: u32,
    /// Units of a plane that can shuffle; 1 stands for none.
    pub plane: u32,
    /// The device takes PTX instructions.
    ptx: bool,
}

impl RowUnits {
    /// Rows of so many units on the client's device.
    pub fn new(client: &Client, units: u32, rows: u32) -> Self {
        let plane = launch::plane_size(client);
        Self { units, rows, plane, ptx: Hardware::of(client).ptx }
    }

    /// Whether planes are [`whole`](super::shuffle), as PTX has to be told.
    pub(crate) fn whole_planes(&self) -> bool {
        self.ptx && (self.units * self.rows).is_multiple_of(self.plane)
    }

    /// f32 of shared memory for each register of a reduction's item.
    pub fn shared(&self) -> usize {
        let partials = if self.plane > 1 { self.units.div_ceil(self.plane) } else { self.units };
        (partials * self.rows) as usize
    }

    /// Whether a row lies inside one plane, so that its reduction needs no shared memory.
    pub fn in_plane(&self) -> bool {
        self.plane > 1 && self.units <= self.plane
    }

    /// Units of a row that can shuffle with each other.
    pub(crate) fn lanes(&self) -> u32 {
        self.units.min(self.plane)
    }

    /// The cube.
    pub fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.units, self.rows)
    }
}

/// Replaces `item` by the combination over each `lanes` neighbouring units of a plane, a power of two;
/// all of them get it. If `whole`, all units of the plane call this on a device that takes PTX.
#[cube]
pub(crate) fn plane<C: Combine>(
    item: &mut Array<f32>,
    #[comptime] lanes: u32,
    #[comptime] whole: bool,
) {
    #[unroll]
    for level in 0..comptime!(lanes.ilog2()) {
        let step = comptime!(1u32 << level);
        let mut other = Array::<f32>::new(comptime!(C::REGISTERS));
        #[unroll]
        for k in 0..comptime!(C::REGISTERS) {
            other[k] = shuffle(item[k], step, Shuffle::Xor, whole);
        }
        if comptime!(C::COMMUTATIVE) {
            let both = C::combine(&*item, &other);
            assign::<C>(item, &both);
        } else {
            let first = UNIT_POS_PLANE & step == 0;
            let earlier = choose::<C>(first, &*item, &other);
            let later = choose::<C>(first, &other, &*item);
            let both = C::combine(&earlier, &later);
            assign::<C>(item, &both);
        }
    }
}

/// Replaces `item` by the combination over the units of the row, in their order; all of them get it.
///
/// The cube is `units` × `rows`, all of it calls this. `shared` holds
/// [`REGISTERS`](Combine::REGISTERS) times [`RowUnits::shared`] values that nobody else uses before the
/// next `sync_cube`; a caller that reduces again without one in between passes another part. A cube
/// is reduced as its only row.
#[cube]
pub fn rows<C: Combine>(item: &mut Array<f32>, shared: &mut [f32], #[comptime] row: RowUnits) {
    let part = comptime!(row.shared());
    if comptime!(row.plane > 1) {
        plane::<C>(item, comptime!(row.lanes()), comptime!(row.whole_planes()));
        if comptime!(!row.in_plane()) {
            let planes = comptime!((row.units / row.plane) as usize);
            let first = UNIT_POS_Y as usize * planes;
            let lane = UNIT_POS_X % comptime!(row.plane);
            if lane == 0 {
                let at = first + (UNIT_POS_X / comptime!(row.plane)) as usize;
                write::<C>(shared, at, part, &*item);
            }
            sync_cube();
            let mut all = read::<C>(&*shared, first, part);
            #[unroll]
            for i in 1..planes {
                let next = read::<C>(&*shared, first + i, part);
                let both = C::combine(&all, &next);
                assign::<C>(&mut all, &both);
            }
            assign::<C>(item, &all);
        }
    } else {
        let levels = comptime!(row.units.ilog2());
        let first = (UNIT_POS_Y * comptime!(row.units)) as usize;
        let unit = UNIT_POS_X as usize;
        // The tree folds the upper half onto the lower one. With the bits of the places reversed these
        // are neighbours, which keeps the order.
        let mut place = unit;
        if comptime!(!C::COMMUTATIVE && levels > 0) {
            place = (u32::reverse_bits(UNIT_POS_X) >> comptime!(32 - levels)) as usize;
        }
        write::<C>(shared, first + place, part, &*item);
        sync_cube();
        #[unroll]
        for level in 0..levels {
            let step = comptime!((row.units >> (level + 1)) as usize);
            if unit < step {
                let earlier = read::<C>(&*shared, first + unit, part);
                let later = read::<C>(&*shared, first + unit + step, part);
                let both = C::combine(&earlier, &later);
                write::<C>(shared, first + unit, part, &both);
            }
            sync_cube();
        }
        let all = read::<C>(&*shared, first, part);
        assign::<C>(item, &all);
    }
}
