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

/// What dx has besides what x and dh_in give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Beside {
    Nothing,
    /// Something from elsewhere.
    Also,
    /// That, and the layer before takes dx back in the same pass.
    Before,
}

/// What a kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Together {
    pub(super) streams: usize,
    /// Of φ.
    pub(super) rows: usize,
    /// Boxes of each stream that a cube has.
    pub(super) boxes: usize,
    pub(super) beside: Beside,
    pub(super) stages: usize,
}

impl Together {
    /// Of n streams of so many columns.
    pub(super) fn new(streams: usize, width: usize, beside: Beside, memory: usize) -> Option<Self> {
        if streams > STREAMS {
            return None;
        }
        let of_all =
            |boxes| Self { streams, rows: streams * (streams + 2), boxes, beside, stages: 0 };
        // A lane loads a box.
        let most = 32 / of_all(1).boxes_of_stage();
        let plan = of_all((WARPS / streams).min(width.div_ceil(BOX)).min(most));
        let stages = memory.checked_sub(BESIDE)? / (plan.stage_bytes() + 4 * plan.words() + 16);
        (stages >= 2).then_some(Self { stages: stages.min(STAGES), ..plan })
    }

    /// Whether dx has something from elsewhere.
    pub(super) fn also(&self) -> bool {
        self.beside != Beside::Nothing
    }

    /// Whether the layer before takes it back.
    pub(super) fn takes_back(&self) -> bool {
        self.beside == Beside::Before
    }

    pub(super) fn warps(&self) -> usize {
        self.streams * self.boxes
    }

    /// Rows of φ in eights.
    pub(super) fn eights(&self) -> usize {
        self.rows.div_ceil(8)
    }

    /// Bytes of a box.
    pub(super) fn box_bytes(&self) -> usize {
        TOKENS * BOX * 2
    }

    /// Bytes of a stage: x, dh_in, what dx has from elsewhere, and the streams and the output of the layer before.
    pub(super) fn stage_bytes(&self) -> usize {
        self.boxes_of_stage() * self.box_bytes()
    }

    pub(super) fn boxes_of_stage(&self) -> usize {
        self.f_at() + if self.takes_back() { self.boxes } else { 0 }
    }

    /// In boxes: where dh_in is.
    pub(super) fn dh_in_at(&self) -> usize {
        self.warps()
    }

    /// The same of what dx has from elsewhere.
    pub(super) fn also_at(&self) -> usize {
        self.dh_in_at() + self.boxes
    }

    /// The same of the streams of the layer before.
    pub(super) fn before_at(&self) -> usize {
        self.also_at() + if self.also() { self.warps() } else { 0 }
    }

    /// The same of its output.
    pub(super) fn f_at(&self) -> usize {
        self.before_at() + if self.takes_back() { self.warps() } else { 0 }
    }

    /// Words of the first parts of dm of the tokens of a stage, as of the second ones: two rows to a word.
    pub(super) fn part(&self) -> usize {
        TOKENS * 4 * self.eights()
    }

    /// Words of a stage beside the boxes: dm, the factor of x, those of dh_in, and h_post and h_res of the layer before.
    pub(super) fn words(&self) -> usize {
        let mixed = if self.takes_back() { self.streams * (self.streams + 1) } else { 0 };
        (2 * self.part() + TOKENS * (1 + self.streams + mixed)).next_multiple_of(4)
    }

    /// In words, of those of a stage: where h_post is, and where h_res.
    pub(super) fn post_at(&self) -> usize {
        2 * self.part() + TOKENS * (1 + self.streams)
    }

    pub(super) fn res_at(&self) -> usize {
        self.post_at() + TOKENS * self.streams
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
            let ways = [(Beside::Nothing, 4), (Beside::Also, 4), (Beside::Before, 3)];
            for (width, (beside, stages)) in
                [8, 64, 72, 768, 7168].into_iter().flat_map(|w| ways.map(|way| (w, way)))
            {
                let plan = Together::new(streams, width, beside, 227 << 10).unwrap();
                assert!(4 * plan.shared() <= (227 << 10) - 1024, "{plan:?}");
                assert!(plan.stage_bytes() <= 32 * plan.box_bytes(), "{plan:?}");
                assert!(plan.warps() <= WARPS && plan.stages >= stages, "{plan:?}");
            }
        }
        assert_eq!(Together::new(6, 64, Beside::Nothing, 227 << 10), None);
    }
}
