//! The unit that loads: it keeps a ring of stages of both operands full through TMA.

use super::Pair;
use super::operand::Order;
use super::ptx::*;
use super::schedule::{Blocks, DEPTH, ROWS, Walk, place, turn};
use cubecl::prelude::*;

/// What is loaded; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Feed {
    pub(super) a: Order,
    pub(super) b: Order,
    /// Columns of B in a stage.
    pub(super) n: usize,
    pub(super) stages: usize,
    pub(super) walk: Walk,
    pub(super) pair: Pair,
}

impl Feed {
    /// Bytes of a stage's rows of A.
    pub(super) fn a_bytes(&self) -> u32 {
        (ROWS * DEPTH * 2) as u32
    }

    /// Bytes of its columns of B.
    pub(super) fn b_bytes(&self) -> u32 {
        (self.n * DEPTH * 2) as u32
    }

    /// Bytes of the ring and its barriers.
    pub(super) fn bytes(&self) -> usize {
        self.stages * (self.a_bytes() + self.b_bytes() + 16) as usize
    }
}

/// Where the ring's stages of A and of B begin in shared memory, and the barriers that say that a stage
/// is full and that it has been read.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Ring {
    pub(super) a: u32,
    pub(super) b: u32,
    pub(super) full: u32,
    pub(super) empty: u32,
}

/// The ring in shared memory from `base` on, B behind A, with barriers at `barriers` that wait for so
/// many loads and readers; for all units of the cube.
#[cube]
pub(super) fn ring(
    base: u32,
    barriers: u32,
    #[comptime] loads: u32,
    #[comptime] readers: u32,
    #[comptime] feed: Feed,
) -> Ring {
    let stages = comptime!(feed.stages as u32);
    let full = barriers;
    let empty = full + comptime!(8 * stages);
    if UNIT_POS == 0 {
        #[unroll]
        for s in 0..stages {
            barrier_init(full + s * 8, loads);
            barrier_init(empty + s * 8, readers);
        }
        barrier_init_fence();
    }
    sync_cube();
    Ring { a: base, b: base + comptime!(stages * feed.a_bytes()), full, empty }
}

/// The operands as TMA reads them; the second B of a pair, or B again.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Maps {
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) b_second: u64,
}

/// Loads all blocks of all tiles of this cube; for one unit.
#[cube]
pub(super) fn load_all(
    maps: &Maps,
    ring: &Ring,
    order: &[u32],
    blocks: &Blocks,
    #[comptime] feed: Feed,
) {
    let (a_bytes, b_bytes) = comptime!((feed.a_bytes(), feed.b_bytes()));
    let columns = comptime!(feed.pair.columns(feed.n) as u32);
    let mut round = 0u32;
    let mut at = turn(order, round, feed.walk);
    let mut stage = 0u32;
    let mut phase = 0u32;
    while at < blocks.total {
        let following = turn(order, round + 1, feed.walk);
        let place = place(at, blocks, feed.walk);
        for k in 0..place.depth {
            barrier_wait(ring.empty + stage * 8, phase ^ 1);
            let bar = ring.full + stage * 8;
            barrier_expect(bar, comptime!(a_bytes + b_bytes));
            let block = place.block + k;
            let second = comptime!(feed.pair == Pair::Sum) && block >= blocks.single;
            let which = select(second, 1u32, 0u32);
            let x = (block - which * blocks.single) * comptime!(DEPTH as u32);
            let y = place.row * comptime!(ROWS as u32);
            let dst = ring.a + stage * a_bytes;
            let z = place.a + which;
            if comptime!(feed.a == Order::Rows) {
                tma_load(dst, maps.a, bar, x, y, z);
            } else {
                #[unroll]
                for i in 0..comptime!((ROWS / 64) as u32) {
                    tma_load(dst + i * 8192, maps.a, bar, y + i * 64, x, z);
                }
            }
            let y = place.col * columns;
            let z = place.b;
            let dst = ring.b + stage * b_bytes;
            let map = select(second, maps.b_second, maps.b);
            // The columns of the tile, in one part or in two of either matrix.
            #[unroll]
            for part in 0..comptime!(feed.n as u32 / columns) {
                let map = if comptime!(part == 0) { map } else { maps.b_second };
                let dst = dst + comptime!(part * columns * 128);
                if comptime!(feed.b == Order::Columns) {
                    tma_load(dst, map, bar, x, y, z);
                } else {
                    #[unroll]
                    for i in 0..comptime!(columns / 64) {
                        tma_load(dst + i * 8192, map, bar, y + i * 64, x, z);
                    }
                }
            }
            stage += 1;
            if stage == comptime!(feed.stages as u32) {
                stage = 0u32;
                phase ^= 1;
            }
        }
        round += 1;
        at = following;
    }
}
