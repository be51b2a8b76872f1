//! What the forward kernel is specialised on, and its tiles.

use crate::attention::problem::Problem;
use crate::tile::cuda::pipeline::barrier_bytes;
use crate::tile::cuda::ptx::{Float16, Wgmma, WgmmaChain};

/// Rows of a tile where keys are divided: heads that read the same ones at most.
pub(crate) const PART_ROWS: u32 = 64;

/// The keys that a query sees: which limits there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Limited {
    pub(crate) causal: bool,
    pub(crate) window: bool,
    pub(crate) documents: bool,
    /// Keys are divided: those that a row sees are of one part, and there is no other limit.
    pub(crate) parts: bool,
}

impl Limited {
    /// Those of keys that are divided.
    pub(crate) const PARTS: Self =
        Self { causal: false, window: false, documents: false, parts: true };

    pub(crate) fn of(problem: &Problem) -> Self {
        let mask = problem.mask;
        Self {
            causal: mask.causal,
            window: mask.window.is_some(),
            documents: mask.documents,
            parts: false,
        }
    }

    /// Whether the first keys may be out of sight.
    pub(crate) fn below(&self) -> bool {
        self.window || self.documents
    }
}

/// Tiles of queries and blocks of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ForwardTile {
    /// Warpgroups that multiply, of 64 queries each.
    pub(crate) groups: usize,
    /// Keys of a block, a multiple of 16.
    pub(crate) keys: usize,
    /// Stages of the rings of K and of V.
    pub(crate) stages: usize,
    /// Results have shared memory of their own on the way out; else that of the queries.
    pub(crate) staged: bool,
    /// Warpgroups multiply in turns, so that the softmax of one is under the products of the others.
    pub(crate) turns: bool,
}

impl ForwardTile {
    /// Those of a head's width: what fits into 227 KiB and into the registers, where a unit holds the scores of
    /// one block and the weights of the one before beside the sums of its rows.
    pub(crate) const fn of(width: usize, softcap: bool) -> Self {
        match width.div_ceil(64) {
            // With three groups a unit has 160 registers, of which a soft-cap needs some.
            1 => {
                let keys = if softcap { 112 } else { 128 };
                Self { groups: 3, keys, stages: 3, staged: true, turns: true }
            }
            2 => Self { groups: 2, keys: 128, stages: 2, staged: true, turns: true },
            3 => Self { groups: 2, keys: 96, stages: 2, staged: false, turns: false },
            _ => Self { groups: 2, keys: 80, stages: 2, staged: false, turns: false },
        }
    }

    /// Those where keys are divided: as many bytes on their way as fit beside the queries.
    pub(crate) const fn of_parts(width: usize) -> Self {
        let (keys, stages) = match width.div_ceil(64) {
            1 => (128, 6),
            2 => (128, 3),
            3 => (64, 4),
            _ => (64, 3),
        };
        Self { groups: 1, keys, stages, staged: false, turns: false }
    }
}

/// What the kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Forward {
    pub(crate) float: Float16,
    pub(crate) width: usize,
    pub(crate) tile: ForwardTile,
    pub(crate) limited: Limited,
    pub(crate) softcap: bool,
    /// Whether the log-sum-exp is written.
    pub(crate) lse: bool,
}

impl Forward {
    pub(crate) fn rows(&self) -> u32 {
        64 * self.tile.groups as u32
    }

    pub(crate) fn keys(&self) -> u32 {
        self.tile.keys as u32
    }

    /// Units of a cube: the warpgroups that multiply, and one that loads.
    pub(crate) fn units(&self) -> u32 {
        128 * (self.tile.groups as u32 + 1)
    }

    /// Registers of a unit that multiplies and of one that loads: together not more than the 65536 of a
    /// multiprocessor.
    pub(crate) fn registers(&self) -> [u32; 2] {
        if self.tile.groups == 3 { [160, 32] } else { [232, 40] }
    }

    /// Chunks of 64 elements of a head's width, the last one filled up with zeros.
    pub(crate) fn chunks(&self) -> u32 {
        self.width.div_ceil(64) as u32
    }

    /// Bytes of a tile of queries.
    pub(crate) fn q_bytes(&self) -> u32 {
        self.chunks() * self.rows() * 128
    }

    /// Bytes of a block of keys, or of its values.
    pub(crate) fn kv_bytes(&self) -> u32 {
        self.chunks() * self.keys() * 128
    }

    /// Where K, V, the results and the barriers begin in shared memory, and where the number of the tile is.
    pub(crate) fn k_at(&self) -> u32 {
        self.q_bytes()
    }

    pub(crate) fn v_at(&self) -> u32 {
        self.k_at() + self.tile.stages as u32 * self.kv_bytes()
    }

    pub(crate) fn out_at(&self) -> u32 {
        if self.tile.staged { self.v_at() + self.tile.stages as u32 * self.kv_bytes() } else { 0 }
    }

    pub(crate) fn barriers_at(&self) -> u32 {
        let operands = self.v_at() + self.tile.stages as u32 * self.kv_bytes();
        operands + if self.tile.staged { self.q_bytes() } else { 0 }
    }

    pub(crate) fn number_at(&self) -> u32 {
        self.barriers_at() + (barrier_bytes(1) + 2 * barrier_bytes(self.tile.stages)) as u32
    }

    /// Bytes of shared memory.
    pub(crate) fn bytes(&self) -> usize {
        self.number_at() as usize + 16
    }

    /// Queries · keysᵀ, over the width.
    pub(crate) fn scores(&self) -> WgmmaChain {
        let op = Wgmma {
            float: self.float,
            n: self.tile.keys,
            a_transposed: false,
            b_transposed: false,
        };
        let steps = self.width.div_ceil(16);
        WgmmaChain { op, steps, a_block: self.rows() * 8, b_block: self.keys() * 8 }
    }

    /// Weights · values, over the keys of a block.
    pub(crate) fn values(&self) -> WgmmaChain {
        let op =
            Wgmma { float: self.float, n: self.width, a_transposed: false, b_transposed: true };
        WgmmaChain { op, steps: self.tile.keys / 16, a_block: 0, b_block: 0 }
    }

    /// Registers of 32 bits with the weights of a unit, and elements of the vector that holds them.
    pub(crate) fn weights(&self) -> usize {
        self.tile.keys / 4
    }

    pub(crate) fn weights_held(&self) -> usize {
        self.weights().next_power_of_two()
    }
}
