//! Which tile a cube makes when, and over which blocks of K.

use super::{Triangle, Triangles};
use cubecl::prelude::*;

/// Rows of a tile.
pub(super) const ROWS: usize = 128;
/// Depth of a block of K: 128 bytes of halves.
pub(super) const DEPTH: usize = 64;

/// How cubes walk over the tiles; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Walk {
    /// Rows of tiles that are made together, so that they share columns of B in the cache.
    pub(crate) group: u32,
    /// Cubes that share a tile, each with a part of K.
    pub(crate) cluster: u32,
    pub(crate) triangles: Triangles,
    /// The tiles on and below the diagonal of a result that is symmetric.
    pub(crate) symmetric: bool,
}

impl Walk {
    /// Whether the host makes the order.
    pub(super) fn ordered(&self) -> bool {
        self.triangles.masked() || self.symmetric
    }
}

/// Sizes of a product, in blocks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Blocks {
    /// Blocks of K of a part.
    pub(crate) depth: u32,
    /// Rows and columns of tiles.
    pub(crate) tiles_m: u32,
    pub(crate) tiles_n: u32,
    /// Parts of K that are stored; where the host makes the order there are none, and this is the number
    /// of products of the stack.
    pub(crate) splits: u32,
    /// Turns: tiles of all parts of all products, times the cubes of a cluster. Where the host makes the
    /// order, some of them are not taken.
    pub(crate) total: u32,
    /// 1 if A has a matrix for each product, 0 if they share one.
    pub(crate) a_step: u32,
    /// Likewise B.
    pub(crate) b_step: u32,
    /// Blocks of K of one product; those of the second of a pair follow.
    pub(crate) single: u32,
}

/// Where a tile is: row and column of tiles, blocks of K, matrices of A, B and the result.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub(super) row: u32,
    pub(super) col: u32,
    /// The first block of K.
    pub(super) block: u32,
    /// The number of blocks.
    pub(super) depth: u32,
    pub(super) a: u32,
    pub(super) b: u32,
    pub(super) out: u32,
}

/// The tile of this cube in a round, times the cubes of a cluster, plus which one of those this is.
#[cube]
pub(super) fn turn(order: &[u32], round: u32, #[comptime] walk: Walk) -> u32 {
    let at = round * CUBE_COUNT_X + CUBE_POS_X;
    if comptime!(walk.ordered()) {
        order[(at / walk.cluster) as usize] * walk.cluster + at % walk.cluster
    } else {
        at
    }
}

#[cube]
pub(super) fn place(turn: u32, blocks: &Blocks, #[comptime] walk: Walk) -> Place {
    let (tile, part) = (turn / walk.cluster, turn % walk.cluster);
    if comptime!(walk.triangles.masked()) {
        triangle(tile, blocks, walk.triangles)
    } else if comptime!(walk.symmetric) {
        half(tile, part, blocks)
    } else {
        rectangle(tile, part, blocks, walk)
    }
}

/// Tiles go in bands of `group` rows, column by column.
#[cube]
fn rectangle(tile: u32, part: u32, blocks: &Blocks, #[comptime] walk: Walk) -> Place {
    let matrix = blocks.tiles_m * blocks.tiles_n;
    let (stack, at) = (tile / matrix, tile % matrix);
    let width = walk.group * blocks.tiles_n;
    let first = at / width * walk.group;
    let rows = min(blocks.tiles_m - first, walk.group);
    let (batch, split) = (stack / blocks.splits, stack % blocks.splits);
    Place {
        row: first + at % width % rows,
        col: at % width / rows,
        block: (split * walk.cluster + part) * blocks.depth,
        depth: blocks.depth,
        a: batch * blocks.a_step,
        b: batch * blocks.b_step,
        out: stack,
    }
}

/// Tiles of a symmetric result, numbered as the order has them.
#[cube]
fn half(tile: u32, part: u32, blocks: &Blocks) -> Place {
    let (at, batch) = (tile / blocks.splits, tile % blocks.splits);
    Place {
        row: at / blocks.tiles_n,
        col: at % blocks.tiles_n,
        block: part * blocks.depth,
        depth: blocks.depth,
        a: batch * blocks.a_step,
        b: batch * blocks.b_step,
        out: batch,
    }
}

/// Square tiles, numbered as the order has them; those above the diagonal have no blocks of K and are
/// only filled with zeros.
#[cube]
fn triangle(tile: u32, blocks: &Blocks, #[comptime] triangles: Triangles) -> Place {
    let size = blocks.tiles_m;
    let batches = blocks.splits;
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
    Place {
        row,
        col,
        block: first,
        depth: end - first,
        a: batch * blocks.a_step,
        b: batch * blocks.b_step,
        out: batch,
    }
}
