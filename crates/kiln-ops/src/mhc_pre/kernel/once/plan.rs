//! Which cube takes what.

use crate::device::{Cluster, clusters};
use crate::tile::cuda::pipeline::barrier_bytes;
use cubecl::Device;
use std::cmp::Reverse;

/// Columns of a box of TMA: 128 bytes.
pub(super) const BOX: usize = 64;
/// Tokens that are taken together: the rows of an instruction.
pub(super) const TOKENS: usize = 16;
/// Warps that multiply, and that weight.
pub(super) const WARPS: usize = 8;
pub(super) const MULTIPLY: usize = 32 * WARPS;
pub(super) const OWNERS: usize = 4;
pub(super) const UNITS: usize = MULTIPLY + 32 * OWNERS;
/// Of 168 registers of a unit that multiplies those that hold φ, and of one that weights those that hold x.
const REGISTERS: usize = 120;
const HELD: usize = 96;
/// Boxes of each stream of a cube that mixes, if its cluster has all columns: with four boxes of four streams not all that
/// a unit has at a time fits into registers.
const MIXED: usize = 2;
/// Bytes of x that are taken together.
const BYTES: usize = 48 << 10;
/// Tokens in flight, in sixteens.
const STAGES: usize = 8;
const FEW_STAGES: usize = OWNERS;
/// Bytes of shared memory for alignment and what the driver takes.
const BESIDE: usize = 2048;
/// Cubes that are a cluster on any device that has clusters.
const CLUSTER: usize = 8;
/// Counters of all groups.
pub(super) const COUNTERS: usize = 2048;

/// What a kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Once {
    pub(super) streams: usize,
    /// Of φ.
    pub(super) rows: usize,
    /// Whether h_res goes through Sinkhorn.
    pub(super) sinkhorn: bool,
    /// Whether the streams are mixed first, with the output of a layer.
    pub(super) mixes: bool,
    /// Boxes of each stream that a cube takes.
    pub(super) boxes: usize,
    /// Cubes that share tokens, each with a part of the columns.
    pub(super) cubes: usize,
    pub(super) stages: usize,
    /// Places for what warps have of tokens that are taken together, one or two.
    pub(super) sides: usize,
    /// Of a cluster, else none: places for what all of its cubes have of tokens that are taken together. No fewer than
    /// sides: so who waits for a place has always seen that it was read the time before.
    pub(super) slots: usize,
}

impl Once {
    /// Of n streams of so many columns.
    pub(super) fn new(
        streams: usize,
        width: usize,
        sinkhorn: bool,
        mixes: bool,
        multiprocessors: usize,
        memory: usize,
    ) -> Option<Self> {
        let rows = streams * (streams + 2);
        let plan = |boxes, cubes| {
            let (stages, sides, slots) = (0, 2, 0);
            Self { streams, rows, sinkhorn, mixes, boxes, cubes, stages, sides, slots }
        };
        let all = width.div_ceil(BOX);
        let fits = |boxes: &usize| {
            let plan = plan(*boxes, 1);
            plan.steps() * plan.eights() * 4 <= REGISTERS && plan.stage_bytes() <= BYTES
        };
        // A device of two multiprocessors, which the gate takes its own for, has no neighbours.
        let neighbours = CLUSTER.min(multiprocessors / 2).max(1);
        let mut most = (1..=all).take_while(fits).last()?;
        if mixes && all.div_ceil(MIXED) <= neighbours {
            most = most.min(MIXED);
        }
        let boxes = all.div_ceil(all.div_ceil(most));
        let cubes = all.div_ceil(boxes);
        let plan = plan(boxes, cubes);
        let clustered = cubes <= neighbours;
        let slots = if clustered { vec![4, 3, 2] } else { vec![0] };
        let ways =
            [2, 1].into_iter().flat_map(|sides| slots.iter().map(move |&slots| (sides, slots)));
        let with_stages = |(sides, slots)| {
            let plan = Self { sides, slots, ..plan };
            let barriers = barrier_bytes(OWNERS) + barrier_bytes(slots);
            let room = memory.checked_sub(BESIDE + 4 * plan.words_beside() + barriers)?;
            let stage = plan.stage_bytes() + plan.weight_bytes() + barrier_bytes(1);
            let stages = (room / stage).min(STAGES);
            let plan = Self { stages, ..plan };
            (plan.phi_stages() <= stages).then_some(plan)
        };
        // A stage more is worth most, then a second side, for which nobody waits.
        let best = ways.filter_map(with_stages).min_by_key(|plan| Reverse(plan.stages))?;
        (best.stages >= FEW_STAGES && cubes <= multiprocessors).then_some(best)
    }

    /// Whether the cubes of a group are a cluster, and send their sums into each other's memory.
    pub(super) fn clustered(&self) -> bool {
        self.slots > 0
    }

    /// How many groups run at a time.
    pub(super) fn groups(&self, device: &Device, multiprocessors: usize) -> usize {
        let most = multiprocessors / self.cubes;
        if !self.clustered() {
            return most;
        }
        let cluster = Cluster { cubes: self.cubes, units: UNITS, shared: 4 * self.words() };
        let told = match device {
            Device::Cuda(device) => clusters(device.index, cluster),
            _ => None,
        };
        // A cluster that waits for another runs alone at the end: rather too few where nothing is known.
        told.unwrap_or(most * 3 / 4).min(most)
    }

    /// Tokens of sixteen whose sums but the first ones this cube adds up.
    pub(super) fn own_tokens(&self) -> usize {
        TOKENS.div_ceil(self.cubes)
    }

    /// Turns of a warp that weights whose tokens fill its lanes.
    pub(super) fn turns(&self) -> usize {
        32 / self.own_tokens()
    }

    /// Whether, of so many sixteens of tokens, some pass while a warp has others in hand.
    pub(super) fn passes(&self, sixteens: usize) -> bool {
        sixteens > OWNERS * self.turns()
    }

    /// f32 that a cube of the cluster sends to another one of tokens that are taken together.
    pub(super) fn letter(&self) -> usize {
        self.firsts() + self.own_tokens() * self.rest()
    }

    /// f32 of a slot.
    pub(super) fn slot(&self) -> usize {
        self.cubes * self.letter()
    }

    /// Of a token: what weights are made of, and the rest of x·φᵀ, in whole fours.
    pub(super) fn heads(&self) -> usize {
        self.streams.next_multiple_of(4)
    }

    pub(super) fn rest(&self) -> usize {
        (self.rows - self.streams).next_multiple_of(4)
    }

    /// Columns of what is multiplied, in eights: first the rest, then what weights are made of. Both are whole fours, which two and
    /// six streams have an eight more for.
    pub(super) fn eights(&self) -> usize {
        (self.rest() + self.heads()).div_ceil(8)
    }

    /// Steps of 16 of K that a cube has, and that each of its warps has.
    pub(super) fn all_steps(&self) -> usize {
        self.streams * self.boxes * BOX / 16
    }

    pub(super) fn steps(&self) -> usize {
        match self.mixes {
            true => self.streams * self.slices(),
            false => self.all_steps().div_ceil(WARPS),
        }
    }

    /// Sixteen columns that a warp mixes, of all streams.
    pub(super) fn slices(&self) -> usize {
        (self.boxes * BOX / 16).div_ceil(WARPS)
    }

    /// Boxes of each stream that a unit weights at a time.
    pub(super) fn together(&self) -> usize {
        (HELD / (4 * self.streams)).clamp(1, self.boxes)
    }

    /// Bytes of a box.
    pub(super) fn box_bytes(&self) -> usize {
        TOKENS * BOX * 2
    }

    /// Bytes of x that are taken together, and, if it is mixed, of the layer's output behind it.
    pub(super) fn stage_bytes(&self) -> usize {
        (self.streams + usize::from(self.mixes)) * self.boxes * self.box_bytes()
    }

    /// Bytes of what a stage is mixed with: h_post of all tokens, and behind it h_res.
    pub(super) fn weight_bytes(&self) -> usize {
        if self.mixes { 4 * TOKENS * self.streams * (self.streams + 1) } else { 0 }
    }

    /// Arrivals that fill a stage: one for all boxes, and, if they are mixed, one each for h_post and h_res.
    pub(super) fn loads(&self) -> usize {
        if self.mixes { 3 } else { 1 }
    }

    /// Pieces of φ of this cube: of each row, of each stream.
    pub(super) fn pieces(&self) -> usize {
        self.rows * self.streams
    }

    /// Bytes from a piece to the next in shared memory: of four rows the same columns are in different banks.
    pub(super) fn piece_bytes(&self) -> usize {
        4 * self.boxes * BOX + 32
    }

    /// Stages in whose place φ comes first, the last ones.
    fn phi_stages(&self) -> usize {
        (self.pieces() * self.piece_bytes()).div_ceil(self.stage_bytes())
    }

    /// Stages before these.
    pub(super) fn early(&self) -> usize {
        self.stages - self.phi_stages()
    }

    /// f32 from a token to the next of what a warp has of x·φᵀ. Eights of four tokens are in different banks.
    pub(super) fn line(&self) -> usize {
        8 * (self.eights() | 1)
    }

    /// f32 that a warp has of tokens that are taken together, at the end the sums of squares.
    pub(super) fn of_warp(&self) -> usize {
        TOKENS * (self.line() + 1)
    }

    /// f32 that all warps have of tokens that are taken together.
    pub(super) fn side(&self) -> usize {
        WARPS * self.of_warp()
    }

    /// f32 that a cube leaves of tokens that are taken together: first what the weights are made of, y and the sum of the
    /// squares, then the rest of x·φᵀ, in fours.
    pub(super) fn part(&self) -> usize {
        self.firsts() + TOKENS * self.rest()
    }

    pub(super) fn firsts(&self) -> usize {
        TOKENS * (self.heads() + 1)
    }

    /// Where in the workspace tokens may be: before a place is taken again, all cubes of the group have read it, for none
    /// is further ahead of another than twice what the ring holds.
    pub(super) fn places(&self) -> usize {
        2 * self.stages
    }

    /// Counters of a group that is no cluster: one a place, and one for cubes that are done.
    pub(super) fn counters(&self) -> usize {
        if self.clustered() { 0 } else { self.places() + 1 }
    }

    /// Words of shared memory after the ring: what warps have of sixteen tokens, what those that weight have, slots and
    /// biases.
    fn words_beside(&self) -> usize {
        self.sides * self.side() + OWNERS * self.owned() + self.slots * self.slot() + self.streams
    }

    /// y, the sums of the squares and the weights of tokens that are taken together.
    pub(super) fn owned(&self) -> usize {
        self.firsts() + TOKENS * self.streams
    }

    /// In bytes: where a stage's weights are.
    pub(super) fn weights_at(&self) -> usize {
        self.stages * self.stage_bytes()
    }

    /// In words: where sides are, and behind them the rest; and, in bytes, the barriers.
    pub(super) fn sides_at(&self) -> usize {
        (self.weights_at() + self.stages * self.weight_bytes()) / 4
    }

    pub(super) fn owned_at(&self) -> usize {
        self.sides_at() + self.sides * self.side()
    }

    pub(super) fn slots_at(&self) -> usize {
        self.owned_at() + OWNERS * self.owned()
    }

    pub(super) fn biases_at(&self) -> usize {
        self.slots_at() + self.slots * self.slot()
    }

    pub(super) fn barriers_at(&self) -> usize {
        4 * (self.biases_at() + self.streams).next_multiple_of(2)
    }

    /// The barrier of φ.
    pub(super) fn phi_barrier_at(&self) -> usize {
        self.barriers_at() + barrier_bytes(self.stages)
    }

    /// The barriers of slots: full, and behind these empty.
    pub(super) fn slot_barriers_at(&self) -> usize {
        self.phi_barrier_at() + 8
    }

    pub(super) fn side_barriers_at(&self) -> usize {
        self.slot_barriers_at() + barrier_bytes(self.slots)
    }

    /// All words of shared memory.
    pub(super) fn words(&self) -> usize {
        (self.side_barriers_at() + barrier_bytes(OWNERS)) / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: usize = 227 << 10;

    #[test]
    fn all_columns_have_a_cube_and_a_ring_fits() {
        let kinds = (1..=6).map(|n| (n, false)).chain((1..=5).map(|n| (n, true)));
        for (streams, mixes) in kinds {
            for width in [8, 64, 72, 256, 768, 2560, 4096, 7168] {
                let plan = Once::new(streams, width, true, mixes, 132, MEMORY);
                let plan = plan.unwrap_or_else(|| panic!("{streams} of {width}, {mixes}"));
                assert!(plan.boxes * plan.cubes * BOX >= width, "{plan:?}");
                assert!((plan.cubes - 1) * plan.boxes * BOX < width, "{plan:?}");
                assert!(4 * plan.words() <= MEMORY - 1024, "{plan:?}");
                assert!(plan.stages >= FEW_STAGES, "{plan:?}");
                assert!(plan.stage_bytes().is_multiple_of(1024), "{plan:?}");
                // What is read and written by sixteen bytes.
                let places = [plan.sides_at(), plan.owned_at(), plan.slots_at()];
                let sizes = [plan.side(), plan.of_warp(), plan.owned(), plan.letter()];
                assert!(places.iter().chain(&sizes).all(|of| of % 4 == 0), "{plan:?}");
                let phi = plan.pieces() * plan.piece_bytes();
                assert!(phi <= (plan.stages - plan.early()) * plan.stage_bytes(), "{plan:?}");
                let groups = 132 / plan.cubes;
                assert!(groups * plan.counters() <= COUNTERS, "{plan:?}");
            }
        }
        let clustered = |width, multiprocessors| {
            Once::new(4, width, true, false, multiprocessors, MEMORY).map(|plan| plan.clustered())
        };
        assert_eq!(
            [256, 2560, 2600].map(|width| clustered(width, 132)),
            [Some(true), Some(true), Some(false)]
        );
        assert_eq!([256, 392].map(|width| clustered(width, 2)), [Some(true), Some(false)]);
        assert_eq!(Once::new(7, 64, true, false, 132, MEMORY), None);
        assert_eq!(Once::new(6, 64, true, true, 132, MEMORY), None);
        assert_eq!(Once::new(4, 1 << 20, true, false, 132, MEMORY), None);
    }
}
