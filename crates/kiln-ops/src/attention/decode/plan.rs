//! How a cube goes through keys and values.

use super::super::problem::Sizes;
use super::job::{DivisionLaunch, Found};
use crate::launch::{self, limits::reckoned};
use cubecl::prelude::*;

/// Queries of a cube at most where units shuffle: with 8 elements of each in a unit 64 registers hold them and
/// as many their results.
const MOST_ROWS: usize = 8;

/// Units of a cube where they shuffle; a whole plane at least.
const UNITS: usize = 128;

/// What a kernel is specialised on; comptime. Nothing of it follows from the number of keys.
///
/// A key is read by the `lanes` units of a group, a vector or a few each; the groups of a cube take keys side by
/// side, and each has several under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    /// Units of a key.
    pub(super) lanes: usize,
    /// Keys side by side.
    pub(super) groups: usize,
    /// Vectors of a key for each unit.
    pub(super) chunks: usize,
    /// Whether there are as many.
    pub(super) even: bool,
    /// Queries of a cube.
    pub(super) rows: usize,
    /// Keys of a group under way at a time.
    pub(super) flight: usize,
    /// Elements of the vectors of a key, those that are not there included.
    pub(super) width: usize,
    /// Units of a plane that can shuffle; 1 stands for none.
    pub(super) plane: usize,
    /// All queries of a head see the same keys: there is one.
    pub(super) single: bool,
    /// A cube sees all keys: its results are those of the call.
    pub(super) direct: bool,
}

/// How the work is divided; numbers of the launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Work {
    /// Parts of the queries that read the same keys.
    pub(super) sets: usize,
    /// Parts of the keys.
    pub(super) parts: usize,
    /// Keys of a part.
    pub(super) length: usize,
    /// Whether the kernel writes the results of the call: there are as many sets as keep the device busy, and a part is
    /// all keys; or its cubes make the parts one.
    pub(super) direct: bool,
}

impl Work {
    /// Of sets of `rows` queries, over `keys` keys that somebody sees, by cubes that have `round` keys under way.
    /// `parts` says for a number of cubes into how many parts their keys are to be divided; none: a cube is to see
    /// all, whatever their number.
    pub(super) fn new(
        sizes: &Sizes,
        keys: usize,
        rows: usize,
        round: usize,
        parts: impl FnOnce(usize) -> Option<usize>,
    ) -> Self {
        let sets = sizes.together().div_ceil(rows);
        let parts = parts(sets * sizes.kv_heads * reckoned(sizes.batches));
        let most = keys.div_ceil(LEAST_ROUNDS * round);
        let length = keys.div_ceil(parts.unwrap_or(1).min(most)).next_multiple_of(round);
        Self { sets, parts: keys.div_ceil(length), length, direct: parts.is_none() }
    }

    pub(super) fn cubes(&self, sizes: &Sizes) -> usize {
        self.sets * self.parts * sizes.kv_heads * sizes.batches
    }

    pub(super) fn division(&self, sizes: &Sizes) -> DivisionLaunch {
        let part_stride = sizes.batches * sizes.heads * sizes.queries * sizes.width;
        DivisionLaunch::new(self.sets, self.parts, self.length, part_stride)
    }

    /// The ways through a kernel that are not in what it is specialised on.
    pub(super) fn ways(&self, sizes: &Sizes) -> [(&'static str, bool); 3] {
        [
            ("several parts", self.parts > 1),
            ("heads that share keys", sizes.heads > sizes.kv_heads),
            ("several sets of queries", self.sets > 1),
        ]
    }
}

impl Plan {
    /// For `keys` keys that somebody sees, in vectors of `size` elements.
    pub(super) fn new(client: &Client, sizes: &Sizes, keys: usize, size: usize) -> (Self, Work) {
        let hardware = &client.properties().hardware;
        let plane = launch::plane_size(client) as usize;
        let (vectors, together) = (sizes.width / size, sizes.together());
        // Without planes sums go through shared memory, and drivers compile what is unrolled for long.
        let (units, most_lanes, most_rows) =
            if plane > 1 { (UNITS.max(plane), plane, MOST_ROWS) } else { (64, 16, 2) };
        let lanes = vectors.next_power_of_two().min(most_lanes);
        let chunks = vectors.div_ceil(lanes);
        let mut plan = Self {
            lanes,
            groups: units / lanes,
            chunks,
            even: vectors == lanes * chunks,
            rows: together,
            flight: 1,
            width: lanes * chunks * size,
            plane,
            single: sizes.queries == 1,
            direct: false,
        };
        let share = |most: usize| together.div_ceil(together.div_ceil(most));
        let fits = |rows: &usize| {
            let plan = Self { rows: share(*rows), ..plan }.in_flight();
            *rows == 1 || plan.shared() <= hardware.max_shared_memory_size
        };
        plan.rows = share((1..=most_rows).rev().find(fits).unwrap_or(1));
        let mut plan = plan.in_flight();
        let wanted = CUBES_OF_A_MULTIPROCESSOR * launch::multiprocessors(client);
        let parts = |cubes: usize| (cubes < wanted).then(|| wanted.div_ceil(cubes));
        let work = Work::new(sizes, keys, plan.rows, plan.round(), parts);
        plan.direct = work.direct;
        (plan, work)
    }

    /// With as many keys under way as registers allow.
    fn in_flight(self) -> Self {
        let keys = match (self.plane, self.rows) {
            (1, _) => 2,
            (_, 1 | 2) => 8,
            _ => 4,
        };
        Self { flight: (keys / self.chunks).max(1), ..self }
    }

    /// Units of a cube.
    pub(super) fn units(&self) -> usize {
        self.lanes * self.groups
    }

    /// Keys that a cube has under way.
    fn round(&self) -> usize {
        self.groups * self.flight
    }

    /// What is left of a cube's results before they meet in shared memory: one of each plane, or group.
    pub(super) fn found(&self) -> Found {
        let units = self.units();
        let slots = if self.plane > 1 { units / self.plane } else { self.groups };
        Found { slots, rows: self.rows, pitch: self.width, units, direct: self.direct }
    }

    /// f32 of shared memory in which units without planes add up scores.
    pub(super) fn exchange(&self) -> usize {
        if self.plane > 1 { 1 } else { self.units() * self.flight * self.rows }
    }

    /// Bytes of shared memory.
    fn shared(&self) -> usize {
        4 * (self.found().lines() * (self.width + 2) + self.exchange())
    }
}

/// Cubes that keep a multiprocessor busy, with some to spare for those that end first.
const CUBES_OF_A_MULTIPROCESSOR: usize = 8;

/// Rounds of a part at least: shorter ones would wait for memory most of the time.
const LEAST_ROUNDS: usize = 2;

/// Waves of cubes of which it does not matter how full the last is.
#[cfg(any(feature = "cuda", test))]
const MANY_WAVES: usize = 4;

/// [`fastest_parts`]; none, whatever the number of keys, where the cubes fill most of the device as they are, or fill it
/// so many times that the last ones do not matter: then nothing is left to be added up.
#[cfg(any(feature = "cuda", test))]
pub(super) fn parts(cubes: usize, slots: usize, keys: usize, round: usize) -> Option<usize> {
    let few = (slots / 2 + 1..=slots).contains(&cubes);
    (!few && cubes < MANY_WAVES * slots).then(|| fastest_parts(cubes, slots, keys, round))
}

/// Into how many parts the keys of so many cubes are divided, of which there are `slots` at a time: those with which
/// the last cube is done first.
#[cfg(any(feature = "cuda", test))]
pub(super) fn fastest_parts(cubes: usize, slots: usize, keys: usize, round: usize) -> usize {
    // To begin and to end takes a cube as long as some keys.
    let time = |parts: &usize| {
        (cubes * parts).div_ceil(slots) * (keys.div_ceil(*parts) + LEAST_ROUNDS * round)
    };
    (1..=(MANY_WAVES * slots).div_ceil(cubes)).min_by_key(time).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::{fastest_parts, parts};

    #[test]
    fn no_wave_of_cubes_is_nearly_empty() {
        let of = |cubes, keys| parts(cubes, 264, keys, 64);
        // 9 parts of 32 would be 288 cubes, in two waves.
        assert_eq!((of(32, 8192), of(8, 16384), of(64, 4096)), (Some(8), Some(33), Some(4)));
        assert_eq!(
            (of(256, 1 << 14), of(256, 64), of(133, 1 << 20), of(1056, 1)),
            (None, None, None, None)
        );
        for cubes in (1..=132).chain(265..1056) {
            let parts = of(cubes, 1 << 20).unwrap();
            let (all, waves) = (cubes * parts, (cubes * parts).div_ceil(264));
            assert!(all as f64 >= 0.75 * (waves * 264) as f64, "{cubes} cubes, {parts} parts");
        }
    }

    #[test]
    fn keys_are_divided_where_half_the_device_would_wait() {
        let of = |cubes| fastest_parts(cubes, 132, 1 << 14, 64);
        assert_eq!((of(8), of(66), of(132), of(600)), (16, 2, 1, 1));
        for cubes in 1..=132 {
            let (parts, waves) = (of(cubes), (cubes * of(cubes)).div_ceil(132));
            let share = (cubes * parts) as f64 / (132 * waves) as f64;
            assert!(share >= 0.8, "{cubes} cubes, {parts} parts");
        }
    }
}
