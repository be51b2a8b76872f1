//! Which cube takes what.

/// Columns of a box of TMA: 128 bytes.
pub(super) const BOX: usize = 64;
/// Tokens that are taken together: the rows of an instruction.
pub(super) const TOKENS: usize = 16;
/// Warps that multiply, and that weight.
pub(super) const WARPS: usize = 8;
pub(super) const MULTIPLY: usize = 32 * WARPS;
pub(super) const OWNERS: usize = 4;
/// Registers of a unit that hold φ.
const REGISTERS: usize = 120;
/// Bytes of x that are taken together.
const BYTES: usize = 48 << 10;
/// Tokens in flight, in sixteens. There are no fewer stages than warps that take turns: so the one before in a stage has
/// always been waited for.
const STAGES: usize = 8;
const FEW_STAGES: usize = OWNERS;
/// Bytes of shared memory for alignment and what the driver takes.
const BESIDE: usize = 2048;
/// Counters of all groups.
pub(super) const COUNTERS: usize = 2048;

/// What a kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Once {
    pub(super) streams: usize,
    /// Of φ.
    pub(super) rows: usize,
    /// Boxes of each stream that a cube takes.
    pub(super) boxes: usize,
    /// Cubes that share tokens, each with a part of the columns.
    pub(super) cubes: usize,
    pub(super) stages: usize,
}

impl Once {
    /// Of n streams of so many columns.
    pub(super) fn new(
        streams: usize,
        width: usize,
        multiprocessors: usize,
        memory: usize,
    ) -> Option<Self> {
        let rows = streams * (streams + 2);
        let plan = |boxes, cubes| Self { streams, rows, boxes, cubes, stages: 0 };
        let all = width.div_ceil(BOX);
        let fits = |boxes: &usize| {
            let plan = plan(*boxes, 1);
            plan.steps() * plan.eights() * 4 <= REGISTERS && plan.stage_bytes() <= BYTES
        };
        let most = (1..=all).take_while(fits).last()?;
        let boxes = all.div_ceil(all.div_ceil(most));
        let cubes = all.div_ceil(boxes);
        let plan = plan(boxes, cubes);
        let room = memory.checked_sub(BESIDE + 4 * plan.words_beside())?;
        let stages = (room / (plan.stage_bytes() + 16)).min(STAGES);
        (stages >= FEW_STAGES && cubes <= multiprocessors).then_some(Self { stages, ..plan })
    }

    /// Rows of φ in eights.
    pub(super) fn eights(&self) -> usize {
        self.rows.div_ceil(8)
    }

    /// Steps of 16 of K that a cube has, and that each of its warps has.
    pub(super) fn all_steps(&self) -> usize {
        self.streams * self.boxes * BOX / 16
    }

    pub(super) fn steps(&self) -> usize {
        self.all_steps().div_ceil(WARPS)
    }

    /// Bytes of a box.
    pub(super) fn box_bytes(&self) -> usize {
        TOKENS * BOX * 2
    }

    /// Bytes of x that are taken together.
    pub(super) fn stage_bytes(&self) -> usize {
        self.streams * self.boxes * self.box_bytes()
    }

    /// What a warp has of a token: of x·φᵀ, and the sum of its squares behind it. An odd number, for the banks.
    pub(super) fn columns(&self) -> usize {
        8 * self.eights() + 1
    }

    /// f32 that all warps have of tokens that are taken together.
    pub(super) fn side(&self) -> usize {
        WARPS * TOKENS * self.columns()
    }

    /// f32 that a cube leaves of tokens that are taken together: first what the weights are made of, y and the sum of the
    /// squares, then the rest of x·φᵀ, in fours.
    pub(super) fn part(&self) -> usize {
        self.firsts() + TOKENS * self.rest()
    }

    pub(super) fn firsts(&self) -> usize {
        TOKENS * (self.streams + 1)
    }

    /// Of a token.
    pub(super) fn rest(&self) -> usize {
        (self.rows - self.streams).next_multiple_of(4)
    }

    /// Where in the workspace tokens may be: before a place is taken again, all cubes of the group have read it, for none
    /// is further ahead of another than twice what the ring holds.
    pub(super) fn places(&self) -> usize {
        2 * self.stages
    }

    /// Counters of a group: one a place, and one for cubes that are done. A cube on its own waits for nobody.
    pub(super) fn counters(&self) -> usize {
        if self.cubes > 1 { self.places() + 1 } else { 0 }
    }

    /// Words of shared memory after the ring: what warps have of two times sixteen tokens, what those that weight have,
    /// and biases.
    fn words_beside(&self) -> usize {
        2 * self.side() + OWNERS * self.owned() + self.streams
    }

    /// y, the sums of the squares and the weights of tokens that are taken together.
    pub(super) fn owned(&self) -> usize {
        self.firsts() + TOKENS * self.streams
    }

    /// In words: where these are, and, in bytes, the barriers.
    pub(super) fn sides_at(&self) -> usize {
        self.stages * self.stage_bytes() / 4
    }

    pub(super) fn owned_at(&self) -> usize {
        self.sides_at() + 2 * self.side()
    }

    pub(super) fn biases_at(&self) -> usize {
        self.owned_at() + OWNERS * self.owned()
    }

    pub(super) fn barriers_at(&self) -> usize {
        4 * (self.biases_at() + self.streams).next_multiple_of(2)
    }

    /// All words of shared memory.
    pub(super) fn words(&self) -> usize {
        (self.barriers_at() + 16 * self.stages) / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: usize = 227 << 10;

    #[test]
    fn all_columns_have_a_cube_and_a_ring_fits() {
        for streams in 1..=6 {
            for width in [8, 64, 72, 256, 768, 2560, 4096, 7168] {
                let plan = Once::new(streams, width, 132, MEMORY);
                let plan = plan.unwrap_or_else(|| panic!("{streams} of {width}"));
                assert!(plan.boxes * plan.cubes * BOX >= width, "{plan:?}");
                assert!((plan.cubes - 1) * plan.boxes * BOX < width, "{plan:?}");
                assert!(4 * plan.words() <= MEMORY - 1024, "{plan:?}");
                assert!(plan.stages >= OWNERS, "{plan:?}");
                let groups = 132 / plan.cubes;
                assert!(groups * plan.counters() <= COUNTERS, "{plan:?}");
            }
        }
        assert_eq!(Once::new(7, 64, 132, MEMORY), None);
        assert_eq!(Once::new(4, 1 << 20, 132, MEMORY), None);
    }
}
