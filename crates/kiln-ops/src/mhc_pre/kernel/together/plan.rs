//! Which warp takes what.

/// Columns of a box of TMA: 128 bytes. A warp has one.
pub(super) const BOX: usize = 64;
/// Tokens that are taken together.
pub(super) const TOKENS: usize = 16;
/// Warps of a cube that multiply, at most.
const WARPS: usize = 8;
/// Streams up to which φ and dφ fit into registers.
const STREAMS: usize = 5;
const STAGES: usize = 8;
/// Bytes of shared memory for alignment and what the driver takes.
const BESIDE: usize = 2048;

/// What a kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Together {
    pub(super) streams: usize,
    /// Of φ.
    pub(super) rows: usize,
    /// Boxes of each stream that a cube has.
    pub(super) boxes: usize,
    /// Whether dx has something from elsewhere.
    pub(super) also: bool,
    pub(super) stages: usize,
}

impl Together {
    /// Of n streams of so many columns.
    pub(super) fn new(streams: usize, width: usize, also: bool, memory: usize) -> Option<Self> {
        if streams > STREAMS {
            return None;
        }
        let boxes = (WARPS / streams).min(width.div_ceil(BOX));
        let plan = Self { streams, rows: streams * (streams + 2), boxes, also, stages: 0 };
        let stages = memory.checked_sub(BESIDE)? / (plan.stage_bytes() + 4 * plan.words() + 16);
        (stages >= 2).then_some(Self { stages: stages.min(STAGES), ..plan })
    }

    pub(super) fn warps(&self) -> usize {
        self.streams * self.boxes
    }

    /// Rows of φ in eights.
    pub(super) fn eights(&self) -> usize {
        self.rows.div_ceil(8)
    }

    /// The same in sixteens.
    pub(super) fn sixteens(&self) -> usize {
        self.eights().div_ceil(2)
    }

    /// Bytes of a box.
    pub(super) fn box_bytes(&self) -> usize {
        TOKENS * BOX * 2
    }

    /// Bytes of a stage: x, dh_in, and what dx has from elsewhere.
    pub(super) fn stage_bytes(&self) -> usize {
        (self.also_at() + if self.also { self.warps() } else { 0 }) * self.box_bytes()
    }

    /// In boxes: where that is.
    pub(super) fn also_at(&self) -> usize {
        self.warps() + self.boxes
    }

    /// Words of the first parts of dm of the tokens of a stage, as of the second ones: two rows to a word.
    pub(super) fn part(&self) -> usize {
        TOKENS * 4 * self.eights()
    }

    /// Words of a stage beside the boxes: dm, the factor of x, and those of dh_in.
    pub(super) fn words(&self) -> usize {
        (2 * self.part() + TOKENS * (1 + self.streams)).next_multiple_of(4)
    }

    /// In words: where those are.
    pub(super) fn words_at(&self) -> usize {
        self.stages * self.stage_bytes() / 4
    }

    /// In bytes: where the barriers are.
    pub(super) fn barriers_at(&self) -> usize {
        4 * (self.words_at() + self.stages * self.words())
    }

    /// All words of shared memory.
    pub(super) fn shared(&self) -> usize {
        self.barriers_at() / 4 + 4 * self.stages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fit_into_shared_memory() {
        for streams in 1..=5 {
            for (width, also) in
                [8, 64, 72, 768, 7168].into_iter().flat_map(|w| [(w, false), (w, true)])
            {
                let plan = Together::new(streams, width, also, 227 << 10).expect("it fits");
                assert!(4 * plan.shared() <= (227 << 10) - 1024, "{plan:?}");
                assert!(plan.warps() <= WARPS && plan.stages >= 4, "{plan:?}");
            }
        }
        assert_eq!(Together::new(6, 64, false, 227 << 10), None);
    }
}
