//! Where the parts of a tile become one, in the kernel that made them.
//!
//! The cubes of a tile leave the sums of their parts as the units have them, 16 bytes side by side, and meet at a
//! counter; then each adds up all parts for its share of what units have. A kernel for that alone would wait until the
//! last cube has ended, begin, and end.
//!
//! Waiting wants all cubes of a launch on the device at a time. A multiprocessor takes one, so there are no more than
//! multiprocessors, and the cubes of a launch are dispatched before those of the next.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::block::Warpgroup;
use super::places::{Places, QueryTile};
use super::plan::Forward;
use super::softmax::{LEAST, RowPair};
use crate::attention::simt::block::Heads;
use crate::exponential::exp2;
use crate::tile::cuda::fragment::{offset, origin};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// Tiles at most.
pub(super) const MOST_TILES: usize = 128;
/// What stands before the counters of tiles: those of [`produce`](super::forward::produce).
const FIRST: usize = 2;
/// Counters: of each tile cubes that have left their part, and those that have found all.
pub(super) const COUNTERS: usize = FIRST + 2 * MOST_TILES;

/// Parts on their way at a time.
const TOGETHER: usize = 16;

type Quad = Vector<f32, Const<4>>;

/// Bytes of the sums of a part: of each unit four elements at a time, two of each of its rows.
pub(super) fn sum_bytes(forward: &Forward) -> usize {
    forward.width / 8 * 128 * 16
}

/// Bytes of its statistics: of each quad of units the shifts and sums of weights of their two rows.
pub(super) const STATISTIC_BYTES: usize = 32 * 16;

/// What cubes leave in memory, addresses, of as many rows of a tile.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Left {
    pub(super) sums: u64,
    pub(super) statistics: u64,
    pub(super) rows: u32,
}

/// The part of a unit's cube.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Part {
    /// What the first part of the tile leaves.
    first: Left,
    /// Parts of a tile, and tiles.
    parts: u32,
    tiles: u32,
    number: u32,
    unit: u32,
    batch: u32,
    head: u32,
    /// The number of the tile.
    tile: u32,
}

#[cube]
impl Part {
    pub(super) fn new(
        left: &Left,
        me: &Warpgroup,
        tile: &QueryTile,
        places: &Places,
        #[comptime] forward: Forward,
    ) -> Part {
        let number = u64::cast_from(tile.number);
        let first = Left {
            sums: left.sums + number * comptime!(sum_bytes(&forward) as u64),
            statistics: left.statistics + number * comptime!(STATISTIC_BYTES as u64),
            rows: left.rows,
        };
        Part {
            first,
            parts: places.tiles,
            tiles: places.all_heads,
            number: tile.first / comptime!(forward.rows()),
            unit: me.unit,
            batch: tile.batch,
            head: tile.head,
            tile: tile.number,
        }
    }

    /// Units that have rows: those of whole warps.
    fn units(&self) -> u32 {
        self.first.rows.div_ceil(16u32) * 32
    }

    /// Leaves the sums of a unit, not yet divided, and the statistics of its rows.
    pub(super) fn leave<O: Size>(
        &self,
        out: Vector<f32, O>,
        shifts: RowPair,
        totals: RowPair,
        #[comptime] forward: Forward,
    ) {
        if self.unit < self.units() {
            let slot = u64::cast_from(self.number * self.tiles);
            let to = self.first.sums + slot * comptime!(sum_bytes(&forward) as u64);
            let to = to + u64::cast_from(self.unit) * 16;
            #[unroll]
            for i in 0..comptime!(forward.width / 8) {
                let mut quad = Quad::empty();
                #[unroll]
                for e in 0..4usize {
                    quad.insert(e, out.extract(comptime!(4 * i + e)));
                }
                store_quad(to + comptime!(i as u64 * 128 * 16), quad);
            }
            if self.unit % 4 == 0 {
                let to = self.first.statistics + slot * comptime!(STATISTIC_BYTES as u64);
                let mut quad = Quad::empty();
                #[unroll]
                for r in 0..2usize {
                    quad.insert(comptime!(2 * r), shifts.extract(r));
                    quad.insert(comptime!(2 * r + 1), totals.extract(r));
                }
                store_quad(to + u64::cast_from(self.unit) * 4, quad);
            }
        }
    }

    /// Waits for the other parts of the tile and writes o for this cube's share; for all units of the warpgroup.
    pub(super) fn meet<E: Float>(
        &self,
        o: &mut Heads<E, Const<2>>,
        counters: &mut [Atomic<u32>],
        #[comptime] forward: Forward,
    ) {
        let number = self.tile as usize * 2 + FIRST;
        sync_units(1u32, 128u32);
        if self.unit == 0u32 {
            let all = global_address::<Atomic<u32>>(counters.as_ptr());
            let counter = all + u64::cast_from(number) * 4;
            counter_add(counter + 0);
            counter_wait(counter + 0, self.parts + 0);
        }
        sync_units(1u32, 128u32);
        let units = self.units();
        let all = units * comptime!((forward.width / 8) as u32);
        let share = all.div_ceil(self.parts);
        let first = self.number * share;
        let head = self.head as usize * self.first.rows as usize;
        let to = o.head(self.batch as usize, head);
        for at in range_stepped(first + self.unit, min(first + share, all), 128u32) {
            let (i, unit) = (at / units, at % units);
            let quad = self.add_up(i, unit, forward);
            let (row, col) = origin(unit);
            #[unroll]
            for r in 0..2usize {
                let row = row + comptime!(offset(2 * r).0);
                if row < self.first.rows {
                    let mut pair = Vector::<f32, Const<2>>::empty();
                    pair.insert(0usize, quad.extract(comptime!(2 * r)));
                    pair.insert(1usize, quad.extract(comptime!(2 * r + 1)));
                    let column = (i * 8 + col) as usize / 2;
                    o.elements[to + row as usize * o.head_stride + column] =
                        Vector::cast_from(pair);
                }
            }
        }
        if self.unit == 0u32 {
            let found = counters[number + 1].fetch_add(1u32) + 1;
            // The last one makes them ready for the next launch.
            if found == self.parts {
                counters[number].store(0u32);
                counters[number + 1].store(0u32);
            }
        }
    }

    /// Quad `i` of a unit, of all parts.
    fn add_up(&self, i: u32, unit: u32, #[comptime] forward: Forward) -> Quad {
        let sums = self.first.sums + u64::cast_from(i * 128 + unit) * 16;
        let statistics = self.first.statistics + u64::cast_from(unit / 4) * 16;
        let mut most = Array::<f32>::new(2usize);
        let mut total = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            most[r] = f32::new(LEAST);
            total[r] = f32::new(0.0);
        }
        let mut sum = Quad::new(0.0f32);
        for first in range_stepped(0u32, self.parts, comptime!(TOGETHER as u32)) {
            let mut quads = Array::<Quad>::new(TOGETHER);
            let mut of_rows = Array::<Quad>::new(TOGETHER);
            #[unroll]
            for p in 0..TOGETHER {
                let part = min(first + comptime!(p as u32), self.parts - 1);
                let slot = u64::cast_from(part * self.tiles);
                of_rows[p] = load_quad(statistics + slot * comptime!(STATISTIC_BYTES as u64));
                quads[p] = load_quad(sums + slot * comptime!(sum_bytes(&forward) as u64));
            }
            #[unroll]
            for r in 0..2usize {
                let mut next = most[r];
                #[unroll]
                for p in 0..TOGETHER {
                    next = max(next, of_rows[p].extract(comptime!(2 * r)));
                }
                let own = exp2(most[r] - next);
                most[r] = next;
                let mut all = total[r] * own;
                let mut x = sum.extract(comptime!(2 * r)) * own;
                let mut y = sum.extract(comptime!(2 * r + 1)) * own;
                #[unroll]
                for p in 0..TOGETHER {
                    let weight = exp2(of_rows[p].extract(comptime!(2 * r)) - next);
                    let there = first + comptime!(p as u32) < self.parts;
                    let weight = select(there, weight, f32::new(0.0));
                    all += of_rows[p].extract(comptime!(2 * r + 1)) * weight;
                    x += quads[p].extract(comptime!(2 * r)) * weight;
                    y += quads[p].extract(comptime!(2 * r + 1)) * weight;
                }
                total[r] = all;
                sum.insert(comptime!(2 * r), x);
                sum.insert(comptime!(2 * r + 1), y);
            }
        }
        #[unroll]
        for r in 0..2usize {
            let inverse = 1.0 / total[r];
            sum.insert(comptime!(2 * r), sum.extract(comptime!(2 * r)) * inverse);
            sum.insert(comptime!(2 * r + 1), sum.extract(comptime!(2 * r + 1)) * inverse);
        }
        sum
    }
}
