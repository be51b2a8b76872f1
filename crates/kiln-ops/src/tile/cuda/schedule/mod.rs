//! The tile scheduler: which tile a cube makes when, and over which blocks of K.

pub(super) mod order;

use crate::tile::problem::{Problem, Triangle, Triangles};
use cubecl::prelude::*;

/// Rows of a tile.
pub(super) const ROWS: usize = 128;
/// Depth of a block of K: 128 bytes of 16-bit elements.
pub(crate) const DEPTH: usize = 64;
/// Bytes of 64 positions along M or N by a block of K.
pub(crate) const PART: u32 = 8192;

/// How cubes go through the tiles; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Scheduler {
    /// Rows of tiles that are made together, so that they share columns of B in the cache.
    pub(crate) group: u32,
    /// Cubes that share a tile, each with a part of K.
    pub(crate) cluster: u32,
    pub(crate) triangles: Triangles,
    /// The tiles on and below the diagonal of a result that is symmetric.
    pub(crate) symmetric: bool,
}

impl Scheduler {
    /// Whether the host makes the order.
    pub(super) fn ordered(&self) -> bool {
        self.triangles.masked() || self.symmetric
    }
}

/// Tiles of a batch of products, and their blocks of K.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct TileGrid {
    /// Blocks of K of a part.
    pub(crate) depth: u32,
    /// Rows and columns of tiles.
    pub(crate) tiles_m: u32,
    pub(crate) tiles_n: u32,
    /// Parts of K that are stored; where the host makes the order there are none, and this is the number
    /// of products of the batch.
    pub(crate) splits: u32,
    /// Pieces of work: tiles of all parts of all products, times the cubes of a cluster. Where the host
    /// makes the order, some of them are not taken.
    pub(crate) total: u32,
    /// 1 if A has a matrix for each product, 0 if they share one.
    pub(crate) a_step: u32,
    /// Likewise B.
    pub(crate) b_step: u32,
    /// Blocks of K of one product; those of the second of a sum of two follow.
    pub(crate) single: u32,
    /// Rows and columns of the product.
    pub(crate) m: u32,
    pub(crate) n: u32,
}

impl TileGridLaunch {
    /// Of so many rows and columns of tiles, over parts of K of `depth` blocks.
    pub(super) fn of(
        problem: &Problem,
        [tiles_m, tiles_n]: [usize; 2],
        depth: usize,
        splits: usize,
        scheduler: Scheduler,
    ) -> Self {
        let stacks = if scheduler.ordered() { problem.batches } else { splits };
        Self::new(
            depth as u32,
            tiles_m as u32,
            tiles_n as u32,
            stacks as u32,
            (tiles_m * tiles_n * splits * problem.batches) as u32 * scheduler.cluster,
            u32::from(problem.a.batches > 1),
            u32::from(problem.b.batches > 1),
            problem.k.div_ceil(DEPTH) as u32,
            problem.m as u32,
            problem.n as u32,
        )
    }
}

/// A piece of work: row and column of a tile, blocks of K, matrices of A, B and the result.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct WorkTile {
    pub(crate) row: u32,
    pub(crate) col: u32,
    /// The first block of K.
    pub(crate) block: u32,
    /// The number of blocks.
    pub(crate) depth: u32,
    pub(crate) a: u32,
    pub(crate) b: u32,
    pub(crate) out: u32,
}

/// The number of this cube's piece of work in a round: that of the tile, times the cubes of a cluster, plus
/// which one of those this is.
#[cube]
pub(super) fn work_index(order: &[u32], round: u32, #[comptime] scheduler: Scheduler) -> u32 {
    let at = round * CUBE_COUNT_X + CUBE_POS_X;
    if comptime!(scheduler.ordered()) {
        order[(at / scheduler.cluster) as usize] * scheduler.cluster + at % scheduler.cluster
    } else {
        at
    }
}

/// The piece of work of this number.
#[cube]
pub(super) fn work_tile(index: u32, grid: &TileGrid, #[comptime] scheduler: Scheduler) -> WorkTile {
    let (tile, part) = (index / scheduler.cluster, index % scheduler.cluster);
    if comptime!(scheduler.triangles.masked()) {
        triangular_tile(tile, grid, scheduler.triangles)
    } else if comptime!(scheduler.symmetric) {
        symmetric_tile(tile, part, grid)
    } else {
        rectangular_tile(tile, part, grid, scheduler)
    }
}

/// Tiles go in bands of `group` rows, column by column.
#[cube]
fn rectangular_tile(
    tile: u32,
    part: u32,
    grid: &TileGrid,
    #[comptime] scheduler: Scheduler,
) -> WorkTile {
    let matrix = grid.tiles_m * grid.tiles_n;
    let (stack, at) = (tile / matrix, tile % matrix);
    let width = scheduler.group * grid.tiles_n;
    let first = at / width * scheduler.group;
    let rows = min(grid.tiles_m - first, scheduler.group);
    let (batch, split) = (stack / grid.splits, stack % grid.splits);
    WorkTile {
        row: first + at % width % rows,
        col: at % width / rows,
        block: (split * scheduler.cluster + part) * grid.depth,
        depth: grid.depth,
        a: batch * grid.a_step,
        b: batch * grid.b_step,
        out: stack,
    }
}

/// Tiles of a symmetric result, numbered as the order has them.
#[cube]
fn symmetric_tile(tile: u32, part: u32, grid: &TileGrid) -> WorkTile {
    let (at, batch) = (tile / grid.splits, tile % grid.splits);
    WorkTile {
        row: at / grid.tiles_n,
        col: at % grid.tiles_n,
        block: part * grid.depth,
        depth: grid.depth,
        a: batch * grid.a_step,
        b: batch * grid.b_step,
        out: batch,
    }
}

/// Square tiles, numbered as the order has them; those above the diagonal have no blocks of K and are
/// only filled with zeros.
#[cube]
fn triangular_tile(tile: u32, grid: &TileGrid, #[comptime] triangles: Triangles) -> WorkTile {
    let size = grid.tiles_m;
    let batches = grid.splits;
    let (at, batch) = (tile / batches, tile % batches);
    let (row, col) = (at / size, at % size);
    let per = comptime!((ROWS / DEPTH) as u32);
    let mut first = 0u32;
    let mut end = size * per;
    if comptime!(triangles.a == Triangle::Lower) {
        end = min(end, (row + 1) * per);
    }
    if comptime!(triangles.b == Triangle::Upper) {
        end = min(end, (col + 1) * per);
    }
    if comptime!(triangles.a == Triangle::Upper) {
        first = max(first, row * per);
    }
    if comptime!(triangles.b == Triangle::Lower) {
        first = max(first, col * per);
    }
    if col > row {
        end = first;
    }
    WorkTile {
        row,
        col,
        block: first,
        depth: end - first,
        a: batch * grid.a_step,
        b: batch * grid.b_step,
        out: batch,
    }
}
