//! The producer: one unit that keeps a ring of stages of both operands full through TMA.

use super::pipeline::{PipelineState, Ring, barrier_bytes};
use super::ptx::*;
use super::schedule::{DEPTH, PART, ROWS, Scheduler, TileGrid, WorkTile, work_index, work_tile};
use crate::tile::cuda::second::Dual;
use crate::tile::view::Order;
use cubecl::prelude::*;

/// What is loaded; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stages {
    pub(super) a: Order,
    pub(super) b: Order,
    /// Columns of B in a stage.
    pub(super) n: usize,
    pub(super) count: usize,
    pub(super) scheduler: Scheduler,
    pub(super) dual: Dual,
    /// C is loaded too, behind the blocks of K: 64 rows in the place of B of a stage.
    pub(super) add: bool,
}

impl Stages {
    /// Bytes of a stage's rows of A.
    pub(super) fn a_bytes(&self) -> u32 {
        (ROWS * DEPTH * 2) as u32
    }

    /// Bytes of its columns of B.
    pub(super) fn b_bytes(&self) -> u32 {
        (self.n * DEPTH * 2) as u32
    }

    /// Bytes of all stages and their barriers.
    pub(super) fn bytes(&self) -> usize {
        self.count * (self.a_bytes() + self.b_bytes()) as usize + barrier_bytes(self.count)
    }
}

/// Where the stages of A and of B begin in shared memory, B behind A, and their ring.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Buffers {
    pub(super) a: u32,
    pub(super) b: u32,
    pub(super) ring: Ring,
}

/// The operands as TMA reads them, and what else a product has: the second B of a dual GEMM, or C; else B again.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Maps {
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) more: u64,
}

/// Loads 64 positions along M or N, from `e` on, of a block of K, from `k` on.
#[cube]
pub(super) fn load_part(
    dst: u32,
    map: u64,
    bar: u32,
    e: u32,
    k: u32,
    matrix: u32,
    #[comptime] along_k: bool,
) {
    if comptime!(along_k) {
        tma_load(dst, map, bar, k, e, matrix);
    } else {
        tma_load(dst, map, bar, e, k, matrix);
    }
}

/// Loads `extent` positions: at once where K is contiguous, else 64 by 64.
#[cube]
fn load_operand(
    dst: u32,
    map: u64,
    bar: u32,
    e: u32,
    k: u32,
    matrix: u32,
    #[comptime] extent: u32,
    #[comptime] along_k: bool,
) {
    #[unroll]
    for i in 0..comptime!(if along_k { 1u32 } else { extent / 64 }) {
        load_part(dst + i * PART, map, bar, e + i * 64, k, matrix, along_k);
    }
}

/// Loads a block of K of a tile into a stage.
#[cube]
fn load_block(
    maps: &Maps,
    buffers: &Buffers,
    at: &PipelineState,
    tile: &WorkTile,
    block: u32,
    grid: &TileGrid,
    #[comptime] stages: Stages,
) {
    let (a_bytes, b_bytes) = comptime!((stages.a_bytes(), stages.b_bytes()));
    let columns = comptime!(stages.dual.columns(stages.n) as u32);
    let bar = buffers.ring.acquire(at.stage, at.phase, comptime!(a_bytes + b_bytes));
    let second = comptime!(stages.dual == Dual::Sum) && block >= grid.single;
    let which = select(second, 1u32, 0u32);
    let k = (block - which * grid.single) * comptime!(DEPTH as u32);
    let a_along_k = comptime!(stages.a == Order::RowMajor);
    let row = tile.row * comptime!(ROWS as u32);
    let dst = buffers.a + at.stage * a_bytes;
    let rows = comptime!(ROWS as u32);
    load_operand(dst, maps.a, bar, row, k, tile.a + which, rows, a_along_k);

    let b_along_k = comptime!(stages.b == Order::ColMajor);
    let dst = buffers.b + at.stage * b_bytes;
    let map = select(second, maps.more, maps.b);
    // The columns of the tile, in one part or in two of either matrix.
    #[unroll]
    for part in 0..comptime!(stages.n as u32 / columns) {
        let map = if comptime!(part == 0) { map } else { maps.more };
        let dst = dst + comptime!(part * columns * 128);
        load_operand(dst, map, bar, tile.col * columns, k, tile.b, columns, b_along_k);
    }
}

/// Loads 64 rows of C of a tile, of all its columns, into a stage.
#[cube]
fn load_add(
    maps: &Maps,
    buffers: &Buffers,
    at: &PipelineState,
    tile: &WorkTile,
    row: u32,
    #[comptime] stages: Stages,
) {
    let columns = comptime!(stages.n as u32);
    let bytes = comptime!(stages.b_bytes());
    let bar = buffers.ring.acquire(at.stage, at.phase, bytes);
    let dst = buffers.b + at.stage * bytes;
    #[unroll]
    for i in 0..comptime!(columns / 64) {
        tma_load(dst + i * PART, maps.more, bar, tile.col * columns + i * 64, row, tile.out);
    }
}

/// Loads all blocks of all tiles of this cube; for one unit.
#[cube]
pub(super) fn produce(
    maps: &Maps,
    buffers: &Buffers,
    order: &[u32],
    grid: &TileGrid,
    #[comptime] stages: Stages,
) {
    let mut state = PipelineState::start();
    let mut round = 0u32;
    let mut at = work_index(order, round, stages.scheduler);
    while at < grid.total {
        let following = work_index(order, round + 1, stages.scheduler);
        let tile = work_tile(at, grid, stages.scheduler);
        for k in 0..tile.depth {
            load_block(maps, buffers, &state, &tile, tile.block + k, grid, stages);
            state.advance(comptime!(stages.count as u32));
        }
        if comptime!(stages.add) {
            #[unroll]
            for half in 0..2u32 {
                let row = tile.row * comptime!(ROWS as u32) + half * 64;
                load_add(maps, buffers, &state, &tile, row, stages);
                state.advance(comptime!(stages.count as u32));
            }
        }
        round += 1;
        at = following;
    }
}
