//! Which cube takes what.

/// Columns of a box of TMA: 128 bytes.
pub(super) const BOX: usize = 64;
/// Tokens that are taken together: the rows of an instruction.
pub(super) const TOKENS: usize = 16;
/// Warps that multiply.
pub(super) const WARPS: usize = 8;
pub(super) const MULTIPLY: usize = 32 * WARPS;
/// Pairs of warps that weight, in turns.
pub(super) const PAIRS: usize = 4;
pub(super) const OWNERS: usize = 2 * PAIRS;
pub(super) const UNITS: usize = MULTIPLY + 32 * OWNERS;
/// Sides: places for what the warps that multiply have of tokens.
pub(super) const SIDES: usize = 2;
/// Tokens of a warp that weights.
pub(super) const HALF: usize = TOKENS / 2;
/// Registers of a unit that hold φ: of 128 that it has.
const OF_PHI: usize = 96;
/// Bytes of x that are taken together.
const BYTES: usize = 48 << 10;
/// Tokens in flight, in sixteens. There are no fewer stages than pairs that take turns: so the one before in a stage has
/// always been waited for.
const STAGES: usize = 8;
const FEW_STAGES: usize = PAIRS;
/// Bytes of shared memory for alignment and what the driver takes.
const BESIDE: usize = 2048;
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
            plan.steps() * plan.eights() * 4 <= OF_PHI && plan.stage_bytes() <= BYTES
        };
        let most = (1..=all).take_while(fits).last()?;
        let boxes = all.div_ceil(all.div_ceil(most));
        let cubes = all.div_ceil(boxes);
        let plan = plan(boxes, cubes);
        let room = memory.checked_sub(BESIDE + 4 * plan.words_beside() + 16 * SIDES)?;
        let stages = (room / (plan.stage_bytes() + 16)).min(STAGES);
        let of_phi = 4 * rows * plan.phi_row();
        let fits = stages >= FEW_STAGES && stages * plan.stage_bytes() >= of_phi;
        (fits && cubes <= multiprocessors).then_some(Self { stages, ..plan })
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

    /// Threes of a token's sums that the weights are made of: y, and the sum of the squares.
    pub(super) fn firsts(&self) -> usize {
        (self.streams + 1).div_ceil(3)
    }

    /// Threes of the rest of x·φᵀ of a token.
    pub(super) fn rest(&self) -> usize {
        (self.rows - self.streams).div_ceil(3)
    }

    /// Threes that a cube leaves of tokens that are taken together: the firsts of all, then the rest.
    pub(super) fn part(&self) -> usize {
        TOKENS * (self.firsts() + self.rest())
    }

    /// Where in the workspace tokens may be: before a place is taken again, all cubes of the group have read it, for none
    /// is further ahead of another than twice what the ring holds.
    pub(super) fn places(&self) -> usize {
        2 * self.stages
    }

    /// Words of the workspace of a group: a three and its number in four words.
    pub(super) fn workspace(&self) -> usize {
        4 * self.places() * self.cubes * self.part()
    }

    /// Words of shared memory after the ring: what warps have of two times sixteen tokens, what those that weight have, and biases.
    fn words_beside(&self) -> usize {
        SIDES * self.side() + OWNERS * self.owned() + self.streams
    }

    /// y, the sums of the squares and the weights of the tokens of a warp that weights.
    pub(super) fn owned(&self) -> usize {
        HALF * (2 * self.streams + 1)
    }

    /// In words: where these are, and, in bytes, the barriers.
    pub(super) fn sides_at(&self) -> usize {
        self.stages * self.stage_bytes() / 4
    }

    pub(super) fn owned_at(&self) -> usize {
        self.sides_at() + SIDES * self.side()
    }

    pub(super) fn biases_at(&self) -> usize {
        self.owned_at() + OWNERS * self.owned()
    }

    pub(super) fn barriers_at(&self) -> usize {
        4 * (self.biases_at() + self.streams).next_multiple_of(2)
    }

    /// f32 from a row of φ to the next where it is first, in the place of the ring: eight more than it has, for the banks.
    pub(super) fn phi_row(&self) -> usize {
        self.streams * self.boxes * BOX + 8
    }

    /// All words of shared memory.
    pub(super) fn words(&self) -> usize {
        (self.barriers_at() + 16 * (self.stages + SIDES)) / 4
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
                assert!(plan.stages >= PAIRS, "{plan:?}");
            }
        }
        assert_eq!(Once::new(7, 64, 132, MEMORY), None);
        assert_eq!(Once::new(4, 1 << 20, 132, MEMORY), None);
    }
}
