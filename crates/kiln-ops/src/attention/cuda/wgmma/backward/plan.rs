//! What the backward kernel is specialised on, and its tiles.

use crate::attention::cuda::wgmma::plan::Limited;
use crate::tile::cuda::pipeline::barrier_bytes;
use crate::tile::cuda::ptx::{Float16, NamedSums, Wgmma, WgmmaChain};

/// Keys of a tile: 64 for each of the two warpgroups that multiply.
pub(crate) const KEYS: u32 = 128;

/// Stages of the rings of Q and of dO.
pub(crate) const STAGES: u32 = 2;

/// Bytes of the sums of dQ of a block of queries, of one warpgroup, and of both.
pub(crate) const PART: u32 = 64 * 64 * 4;
pub(crate) const SUMS: u32 = 2 * PART;

/// Counters before those of turns: one, of tiles that have been taken.
pub(crate) const TICKETS: u32 = 1;

/// What the kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Gradient {
    pub(crate) float: Float16,
    pub(crate) width: usize,
    pub(crate) limited: Limited,
    pub(crate) softcap: bool,
}

impl Gradient {
    /// Units of a cube: the warpgroups that multiply, and one that loads and stores.
    pub(crate) fn units(&self) -> u32 {
        128 * 3
    }

    /// Registers of a unit that multiplies and of one that does not.
    pub(crate) fn registers(&self) -> [u32; 2] {
        if self.chunks() == 1 { [224, 56] } else { [232, 40] }
    }

    /// Chunks of 64 elements of a head's width, the last one filled up with zeros.
    pub(crate) fn chunks(&self) -> u32 {
        self.width.div_ceil(64) as u32
    }

    /// Queries of a block, so many that both warpgroups have 64 rows and columns of dQ.
    pub(crate) fn queries(&self) -> u32 {
        128 / self.chunks()
    }

    /// Bytes of a tile's keys, or of their values.
    pub(crate) fn kv_bytes(&self) -> u32 {
        self.chunks() * KEYS * 128
    }

    /// Bytes of a block of queries, or of their dO.
    pub(crate) fn q_bytes(&self) -> u32 {
        self.chunks() * self.queries() * 128
    }

    /// Bytes of dS of a block.
    fn ds_bytes(&self) -> u32 {
        self.queries() * KEYS * 2
    }

    /// Where things begin in shared memory; K is first.
    pub(crate) fn v_at(&self) -> u32 {
        self.kv_bytes()
    }

    pub(crate) fn q_at(&self) -> u32 {
        2 * self.kv_bytes()
    }

    pub(crate) fn dy_at(&self) -> u32 {
        self.q_at() + STAGES * self.q_bytes()
    }

    pub(crate) fn ds_at(&self) -> u32 {
        self.dy_at() + STAGES * self.q_bytes()
    }

    /// The way out of dQ, and of dV.
    pub(crate) fn out_at(&self) -> u32 {
        self.ds_at() + self.ds_bytes()
    }

    /// The sums of dQ of the other tiles of keys, and the way out of dK.
    pub(crate) fn others_at(&self) -> u32 {
        self.out_at() + SUMS
    }

    /// Numbers of the rows of each stage.
    pub(crate) fn rows_at(&self) -> u32 {
        self.others_at() + SUMS
    }

    /// Bytes of an array of numbers of the rows of a block.
    pub(crate) fn row_bytes(&self) -> u32 {
        self.queries() * 4
    }

    /// Bytes of what is known of the rows of a block: log-sum-exp, delta, first key, the one after the last; and
    /// behind them what is known of the block.
    pub(crate) fn stage_bytes(&self) -> u32 {
        4 * self.row_bytes() + 16
    }

    pub(crate) fn barriers_at(&self) -> u32 {
        self.rows_at() + STAGES * self.stage_bytes()
    }

    /// Where a tile's number and its blocks are, in two stages.
    pub(crate) fn tile_at(&self) -> u32 {
        let rings = 3 * barrier_bytes(STAGES as usize) + 4 * barrier_bytes(1);
        self.barriers_at() + rings as u32
    }

    /// Bytes of shared memory.
    pub(crate) fn bytes(&self) -> usize {
        self.tile_at() as usize + 32
    }

    /// Halves of 64 queries of a block, or all of them.
    pub(crate) fn halves(&self) -> usize {
        self.queries() as usize / 64
    }

    /// Keys · queriesᵀ, over the width.
    pub(crate) fn scores(&self) -> WgmmaChain {
        let n = self.queries() as usize;
        let op = Wgmma { float: self.float, n, a_transposed: false, b_transposed: false };
        let steps = self.width.div_ceil(16);
        WgmmaChain { op, steps, a_block: KEYS * 8, b_block: self.queries() * 8 }
    }

    /// Values · dOᵀ, over the width: of 64 queries.
    pub(crate) fn of_weights(&self) -> WgmmaChain {
        let scores = self.scores();
        WgmmaChain { op: Wgmma { n: 64, ..scores.op }, ..scores }
    }

    /// What makes sums of keys. Of two chunks at least 104 columns, the last ones zeros: where no product has more
    /// than 96, ptxas leaves the registers as they were and waits for each product.
    fn of_keys(&self) -> Wgmma {
        let n = if self.chunks() == 1 { self.width } else { self.width.max(104) };
        Wgmma { float: self.float, n, a_transposed: false, b_transposed: true }
    }

    /// Weightsᵀ · dO, over 64 queries.
    pub(crate) fn of_values(&self) -> WgmmaChain {
        WgmmaChain { op: self.of_keys(), steps: 4, a_block: 0, b_block: 0 }
    }

    /// dSᵀ · Q, over the queries of a block.
    pub(crate) fn of_slopes(&self) -> WgmmaChain {
        let steps = self.queries() as usize / 16;
        WgmmaChain { op: self.of_keys(), steps, a_block: KEYS * 8, b_block: 0 }
    }

    /// dS · K, over the keys of a tile: 64 rows and columns.
    pub(crate) fn of_queries(&self) -> WgmmaChain {
        let op = Wgmma { float: self.float, n: 64, a_transposed: true, b_transposed: true };
        WgmmaChain { op, steps: KEYS as usize / 16, a_block: 0, b_block: 0 }
    }

    /// dK and dV of a unit.
    pub(crate) fn dk(&self) -> NamedSums {
        NamedSums { name: "dk", count: self.of_keys().sums() }
    }

    pub(crate) fn dv(&self) -> NamedSums {
        NamedSums { name: "dv", count: self.of_keys().sums() }
    }

    /// Elements of the vector that holds one of them.
    pub(crate) fn held(&self) -> usize {
        self.of_keys().held()
    }
}
