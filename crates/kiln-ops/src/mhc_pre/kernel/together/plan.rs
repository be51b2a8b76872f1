//! Which warp takes what.

use crate::tile::cuda::pipeline::barrier_bytes;

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

/// Counters of all groups.
pub(super) const COUNTERS: usize = 4096;

/// What is done besides making dx of x and dh_in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Beside {
    Nothing,
    /// Something from elsewhere is added.
    Also,
    /// The layer before takes dx back in the same pass, with or without something added.
    Before {
        also: bool,
    },
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
    /// Stages of the ring of x and dh_in, and of that of the rest, which is loaded later.
    pub(super) stages_of_x: usize,
    pub(super) stages: usize,
}

impl Together {
    /// Of n streams of so many columns.
    pub(super) fn new(streams: usize, width: usize, beside: Beside, memory: usize) -> Option<Self> {
        if streams > STREAMS {
            return None;
        }
        let boxes = (WARPS / streams).min(width.div_ceil(BOX));
        let rows = streams * (streams + 2);
        let with = |stages, ahead| Self {
            streams,
            rows,
            boxes,
            beside,
            stages_of_x: stages + ahead,
            stages,
        };
        let fits = |plan: &Self| 4 * plan.shared() + BESIDE <= memory;
        (2..=STAGES).rev().flat_map(|stages| [2, 1].map(|ahead| with(stages, ahead))).find(fits)
    }

    /// Whether dx has something from elsewhere.
    pub(super) fn also(&self) -> bool {
        matches!(self.beside, Beside::Also | Beside::Before { also: true })
    }

    /// Whether the layer before takes it back.
    pub(super) fn takes_back(&self) -> bool {
        matches!(self.beside, Beside::Before { .. })
    }

    /// Whether there is a rest that is loaded.
    pub(super) fn has_rest(&self) -> bool {
        self.beside != Beside::Nothing
    }

    /// Warps that multiply.
    pub(super) fn warps(&self) -> usize {
        self.streams * self.boxes
    }

    /// Warps that make the numbers of tokens: as many as leave enough registers to the others.
    pub(super) fn makers(&self) -> usize {
        if self.streams < STREAMS { 2 } else { 1 }
    }

    /// Those, one that loads, and one that leaves a cube's part of ⟨dh_in, x⟩.
    pub(super) fn units(&self) -> usize {
        32 * (self.warps() + 2 + self.makers())
    }

    /// Where in the workspace parts of tokens may be. Before a place is taken again all cubes have read it: who leaves a part has
    /// the x of its tokens in a stage from which the x of those as many before as there are stages is gone, so all cubes had left
    /// their part of those, and each of them had for the same reason read all parts of those as far before.
    pub(super) fn places(&self) -> usize {
        2 * self.stages_of_x
    }

    /// Counters of a group: one a place, and one for cubes that are done.
    pub(super) fn counters(&self) -> usize {
        self.places() + 1
    }

    /// Rows of φ in eights.
    pub(super) fn eights(&self) -> usize {
        self.rows.div_ceil(8)
    }

    /// Bytes of a box.
    pub(super) fn box_bytes(&self) -> usize {
        TOKENS * BOX * 2
    }

    /// Boxes of a stage of x and dh_in.
    pub(super) fn boxes_of_x(&self) -> usize {
        self.dh_in_at() + self.boxes
    }

    pub(super) fn x_bytes(&self) -> usize {
        self.boxes_of_x() * self.box_bytes()
    }

    /// Boxes of a stage of the rest: what dx has from elsewhere, or the place for what takes its place, and the streams and
    /// the output of the layer before.
    pub(super) fn boxes_of_rest(&self) -> usize {
        self.f_at() + if self.takes_back() { self.boxes } else { 0 }
    }

    pub(super) fn rest_bytes(&self) -> usize {
        self.boxes_of_rest() * self.box_bytes()
    }

    /// Those of them that are loaded, the last ones.
    pub(super) fn first_of_rest(&self) -> usize {
        if self.also() { 0 } else { self.before_at() }
    }

    /// In boxes, of a stage of x: where dh_in is.
    pub(super) fn dh_in_at(&self) -> usize {
        self.warps()
    }

    /// In boxes, of a stage of the rest: where the streams of the layer before are, behind what dx has from elsewhere.
    pub(super) fn before_at(&self) -> usize {
        if self.has_rest() { self.warps() } else { 0 }
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

    /// ⟨dh_in, x⟩ of the tokens that are taken together, and what a cube leaves of it.
    pub(super) fn dots(&self) -> usize {
        TOKENS * self.streams
    }

    /// In bytes: where the rest is.
    pub(super) fn rest_at(&self) -> usize {
        self.stages_of_x * self.x_bytes()
    }

    /// In words: where the words of stages are, and behind them places for the dots of all cubes, one for each that makes numbers.
    pub(super) fn words_at(&self) -> usize {
        (self.rest_at() + self.stages * self.rest_bytes()) / 4
    }

    pub(super) fn dots_at(&self) -> usize {
        self.words_at() + self.stages * self.words()
    }

    /// Bytes of what a box leaves of dh_res and dh_post of the tokens of a stage, f32.
    pub(super) fn left_bytes(&self) -> usize {
        if self.takes_back() { 4 * TOKENS * self.streams * (self.streams + 1) } else { 0 }
    }

    /// In bytes: where that of the first box is.
    pub(super) fn left_at(&self) -> usize {
        4 * (self.dots_at() + (self.makers() * self.dots()).next_multiple_of(4))
    }

    /// In bytes: where the barriers are, of x and of the rest.
    pub(super) fn barriers_of_x_at(&self) -> usize {
        self.left_at() + self.boxes * self.left_bytes()
    }

    pub(super) fn barriers_at(&self) -> usize {
        self.barriers_of_x_at() + barrier_bytes(self.stages_of_x)
    }

    /// All words of shared memory.
    pub(super) fn shared(&self) -> usize {
        (self.barriers_at() + barrier_bytes(self.stages)) / 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fit_into_shared_memory() {
        for streams in 1..=5 {
            let before = [true, false].map(|also| Beside::Before { also });
            for beside in [Beside::Nothing, Beside::Also].into_iter().chain(before) {
                for width in [8, 64, 72, 768, 7168] {
                    let plan = Together::new(streams, width, beside, 227 << 10).unwrap();
                    assert!(4 * plan.shared() <= (227 << 10) - 1024, "{plan:?}");
                    assert!(plan.boxes_of_x().max(plan.boxes_of_rest()) <= 32, "{plan:?}");
                    assert!(plan.warps() <= WARPS, "{plan:?}");
                    // As many cubes as multiprocessors, and some more.
                    let groups = 160 / width.div_ceil(plan.boxes * BOX);
                    assert!(groups * plan.counters() <= COUNTERS, "{plan:?}");
                }
            }
        }
        assert_eq!(Together::new(6, 64, Beside::Nothing, 227 << 10), None);
    }

    #[test]
    fn numbers_are_made_while_tokens_before_are_multiplied_and_those_after_come() {
        let stages = |streams| {
            let plan =
                Together::new(streams, 7168, Beside::Before { also: true }, 227 << 10).unwrap();
            [plan.stages_of_x, plan.stages]
        };
        assert_eq!([1, 2, 3, 4, 5].map(stages), [[3, 2], [4, 3], [6, 4], [5, 3], [7, 5]]);
    }
}
