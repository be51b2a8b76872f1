//! Where the parts of a tile become one, in the kernel that made them.
//!
//! The cubes of a tile leave the sums of their parts as units have them, 16 bytes side by side, and each adds up all
//! parts for its share of these. There is no counter and no fence: memory is [vacant](VACANT) until a number comes, and
//! whoever has found it makes it vacant again. (67 MB of keys and values on an H200, 64 heads: 24.5 µs with a kernel for
//! the sums alone, which begins once the last cube has ended; 23.8 with counters, of which reading took three whether a
//! cube waited or not; 22.6 so.) What has been left stays in the cache, as keys and values leave it first; written back it would
//! take 2 µs.
//!
//! Waiting wants all cubes of a launch on the device at a time. A multiprocessor takes one, so there are no more than
//! multiprocessors; and a device begins all cubes of a launch before those of the next of this process. CUDA does not
//! promise that: a kernel of another library, of higher priority, which waits for one of ours would wait for ever.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::block::Warpgroup;
use super::places::{Places, QueryTile};
use super::plan::Forward;
use super::softmax::{LEAST, RowPair};
use crate::attention::simt::block::Heads;
use crate::exponential::exp2;
use crate::launch::kept::VACANT;
use crate::tile::cuda::fragment::{offset, origin};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// Parts on their way at a time.
const TOGETHER: usize = 16;

/// What is found in the place of [`VACANT`], if a number has all its bits.
const OTHER_NAN: u32 = 0x7FFF_FFFF;

/// Four numbers, as words. Of the sums two of each row of a unit; of the statistics each row's shift and sum of weights.
type Quad = Vector<u32, Const<4>>;

/// Bytes of a quad for each unit.
const UNITS_BYTES: usize = 128 * 16;

/// Bytes of what cubes leave of a part: the quads of their units one after the other, and beside each the statistics,
/// which four units have together, so that nobody else reads them.
pub(super) fn part_bytes(forward: &Forward) -> usize {
    forward.width / 8 * (UNITS_BYTES + UNITS_BYTES / 4)
}

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
    /// Where the tile's first part is left, and bytes to the next.
    first: u64,
    step: u64,
    index: u32,
    parts: u32,
    rows: u32,
    unit: u32,
    batch: u32,
    head: u32,
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
        let bytes = comptime!(part_bytes(&forward) as u64);
        Part {
            first: left.sums + u64::cast_from(tile.number) * bytes,
            step: u64::cast_from(places.all_heads) * bytes,
            index: tile.first / comptime!(forward.rows()),
            parts: places.tiles,
            rows: left.rows,
            unit: me.unit,
            batch: tile.batch,
            head: tile.head,
        }
    }

    /// Units that have rows: those of whole warps.
    fn units(&self) -> u32 {
        self.rows.div_ceil(16u32) * 32
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
            let part = self.first + u64::cast_from(self.index) * self.step;
            let to = part + u64::cast_from(self.unit) * 16;
            let statistics = part + statistics_at(self.unit, forward);
            #[unroll]
            for i in 0..comptime!(forward.width / 8) {
                let mut quad = Vector::<f32, Const<4>>::empty();
                #[unroll]
                for e in 0..4usize {
                    quad.insert(e, out.extract(comptime!(4 * i + e)));
                }
                store_words_now(to + comptime!((i * UNITS_BYTES) as u64), words(quad));
                // The four units of a row take turns.
                if self.unit % 4 == comptime!(i as u32 % 4) {
                    let mut quad = Vector::<f32, Const<4>>::empty();
                    #[unroll]
                    for r in 0..2usize {
                        quad.insert(comptime!(2 * r), shifts.extract(r));
                        quad.insert(comptime!(2 * r + 1), totals.extract(r));
                    }
                    let to = statistics + comptime!((i * UNITS_BYTES / 4) as u64);
                    store_words_now(to, words(quad));
                }
            }
        }
    }

    /// Writes o for this cube's share of the tile, once all parts of it have been left; for all units of the warpgroup.
    pub(super) fn meet<E: Float>(&self, o: &mut Heads<E, Const<2>>, #[comptime] forward: Forward) {
        let units = self.units();
        let all = units * comptime!((forward.width / 8) as u32);
        // Of whole warps.
        let share = all.div_ceil(self.parts).div_ceil(32u32) * 32;
        let first = self.index * share;
        let to = o.head(self.batch as usize, self.head as usize * self.rows as usize);
        for at in range_stepped(first + self.unit, min(first + share, all), 128u32) {
            let (i, unit) = (at / units, at % units);
            let quad = self.add_up(i, unit, forward);
            let (row, col) = origin(unit);
            #[unroll]
            for r in 0..2usize {
                let row = row + comptime!(offset(2 * r).0);
                if row < self.rows {
                    let mut pair = Vector::<f32, Const<2>>::empty();
                    pair.insert(0usize, quad.extract(comptime!(2 * r)));
                    pair.insert(1usize, quad.extract(comptime!(2 * r + 1)));
                    let column = (i * 8 + col) as usize / 2;
                    o.elements[to + row as usize * o.head_stride + column] =
                        Vector::cast_from(pair);
                }
            }
        }
    }

    /// Quad `i` of a unit, of all parts; for whole warps.
    fn add_up(&self, i: u32, unit: u32, #[comptime] forward: Forward) -> Vector<f32, Const<4>> {
        let sums = self.first + u64::cast_from(i * 128 + unit) * 16;
        let statistics = self.first + statistics_at(unit, forward) + u64::cast_from(i * 32) * 16;
        let mut most = Array::<f32>::new(2usize);
        let mut total = Array::<f32>::new(2usize);
        #[unroll]
        for r in 0..2usize {
            most[r] = f32::new(LEAST);
            total[r] = f32::new(0.0);
        }
        let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
        for first in range_stepped(0u32, self.parts, comptime!(TOGETHER as u32)) {
            let mut quads = Array::<Quad>::new(TOGETHER);
            let mut of_rows = Array::<Quad>::new(TOGETHER);
            self.take(&mut quads, &mut of_rows, sums, statistics, first, unit);
            #[unroll]
            for r in 0..2usize {
                let mut next = most[r];
                #[unroll]
                for p in 0..TOGETHER {
                    next = max(next, as_f32(of_rows[p], comptime!(2 * r)));
                }
                let own = exp2(most[r] - next);
                most[r] = next;
                let mut all = total[r] * own;
                let mut x = sum.extract(comptime!(2 * r)) * own;
                let mut y = sum.extract(comptime!(2 * r + 1)) * own;
                #[unroll]
                for p in 0..TOGETHER {
                    // Nothing of what is past the last part, were it infinite.
                    if first + comptime!(p as u32) < self.parts {
                        let weight = exp2(as_f32(of_rows[p], comptime!(2 * r)) - next);
                        all += as_f32(of_rows[p], comptime!(2 * r + 1)) * weight;
                        x += as_f32(quads[p], comptime!(2 * r)) * weight;
                        y += as_f32(quads[p], comptime!(2 * r + 1)) * weight;
                    }
                }
                total[r] = all;
                sum.insert(comptime!(2 * r), x);
                sum.insert(comptime!(2 * r + 1), y);
            }
        }
        #[unroll]
        for r in 0..2usize {
            let inverse = select(total[r] == 0.0, f32::new(0.0), 1.0 / total[r]);
            sum.insert(comptime!(2 * r), sum.extract(comptime!(2 * r)) * inverse);
            sum.insert(comptime!(2 * r + 1), sum.extract(comptime!(2 * r + 1)) * inverse);
        }
        sum
    }

    /// Takes a quad of the parts from `first` on, the sums and the statistics beside them, as soon as all are there, and
    /// leaves their places vacant. Past the last part that one again.
    fn take(
        &self,
        quads: &mut Array<Quad>,
        of_rows: &mut Array<Quad>,
        sums: u64,
        statistics: u64,
        first: u32,
        unit: u32,
    ) {
        let mut vacant = true.runtime();
        while vacant {
            #[unroll]
            for p in 0..TOGETHER {
                let step = self.step_to(first + comptime!(p as u32));
                of_rows[p] = load_words_now(statistics + step);
                quads[p] = load_words_now(sums + step);
            }
            vacant = false;
            #[unroll]
            for p in 0..TOGETHER {
                #[unroll]
                for e in 0..4usize {
                    vacant =
                        vacant || of_rows[p].extract(e) == VACANT || quads[p].extract(e) == VACANT;
                }
            }
        }
        // All four units of a row have found its statistics.
        sync_plane();
        #[unroll]
        for p in 0..TOGETHER {
            let step = self.step_to(first + comptime!(p as u32));
            store_words_now(sums + step, Quad::new(VACANT));
            if unit % 4 == comptime!(p as u32 % 4) {
                store_words_now(statistics + step, Quad::new(VACANT));
            }
        }
    }

    /// Bytes from the first part to another.
    fn step_to(&self, part: u32) -> u64 {
        u64::cast_from(min(part, self.parts - 1)) * self.step
    }
}

/// Bytes from a part to the statistics of a unit's rows.
#[cube]
fn statistics_at(unit: u32, #[comptime] forward: Forward) -> u64 {
    comptime!((forward.width / 8 * UNITS_BYTES) as u64) + u64::cast_from(unit / 4) * 16
}

/// Numbers as words, none of which is vacant.
#[cube]
fn words(numbers: Vector<f32, Const<4>>) -> Quad {
    let mut words = Quad::empty();
    #[unroll]
    for e in 0..4usize {
        let word = u32::reinterpret(numbers.extract(e));
        words.insert(e, select(word == VACANT, u32::new(OTHER_NAN as i64), word));
    }
    words
}

#[cube]
fn as_f32(words: Quad, #[comptime] at: usize) -> f32 {
    f32::reinterpret(words.extract(at))
}
