//! Which tile a cube makes when, and over which blocks of K.

use super::{Triangle, Triangles};
use cubecl::prelude::*;

/// Rows of a tile.
pub(super) const ROWS: usize = 128;
/// Depth of a block of K: 128 bytes of halves.
pub(super) const DEPTH: usize = 64;

/// Sizes of a product, in blocks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Blocks {
    /// Blocks of K of a part.
    pub(crate) depth: u32,
    /// Rows and columns of tiles.
    pub(crate) tiles_m: u32,
    pub(crate) tiles_n: u32,
    /// Parts of K; of triangles, which have none, the products of the stack.
    pub(crate) splits: u32,
    /// Tiles of all parts of all products.
    pub(crate) total: u32,
    /// 1 if A has a matrix for each product, 0 if they share one.
    pub(crate) a_step: u32,
    /// Likewise B.
    pub(crate) b_step: u32,
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

/// The tile of this cube in a round. Triangles come with the longest sums first: who began with the
/// longest gets the shortest of every later round.
#[cube]
pub(super) fn turn(round: u32, #[comptime] triangles: Triangles) -> u32 {
    if comptime!(triangles.masked()) && round > 0 {
        (round + 1) * CUBE_COUNT_X - 1 - CUBE_POS_X
    } else {
        round * CUBE_COUNT_X + CUBE_POS_X
    }
}

#[cube]
pub(super) fn place(
    tile: u32,
    blocks: &Blocks,
    #[comptime] group: u32,
    #[comptime] triangles: Triangles,
) -> Place {
    if comptime!(triangles.masked()) {
        triangle(tile, blocks, triangles)
    } else {
        rectangle(tile, blocks, group)
    }
}

/// Tiles go in bands of `group` rows, column by column.
#[cube]
fn rectangle(tile: u32, blocks: &Blocks, #[comptime] group: u32) -> Place {
    let matrix = blocks.tiles_m * blocks.tiles_n;
    let (stack, at) = (tile / matrix, tile % matrix);
    let width = group * blocks.tiles_n;
    let first = at / width * group;
    let rows = min(blocks.tiles_m - first, group);
    let (batch, split) = (stack / blocks.splits, stack % blocks.splits);
    Place {
        row: first + at % width % rows,
        col: at % width / rows,
        block: split * blocks.depth,
        depth: blocks.depth,
        a: batch * blocks.a_step,
        b: batch * blocks.b_step,
        out: stack,
    }
}

/// The row and the place in it of number `at` of a triangle, whose row g has g + 1 places.
#[cube]
fn row_of_triangle(at: u32) -> (u32, u32) {
    // The root is right to one.
    let mut g = u32::cast_from((f32::sqrt(8.0 * f32::cast_from(at) + 1.0) - 1.0) * 0.5);
    if g * (g + 1) / 2 > at {
        g -= 1;
    }
    if (g + 1) * (g + 2) / 2 <= at {
        g += 1;
    }
    (g, at - g * (g + 1) / 2)
}

/// Rows of a band.
const BAND: u32 = 8;

/// Number `at` of a triangle of `size` rows, row `g` if counted by rows, counted instead in bands of
/// rows, column by column.
#[cube]
fn band(at: u32, g: u32, size: u32) -> (u32, u32) {
    let first = g / BAND * BAND;
    let height = min(size - first, BAND);
    let inside = at - first * (first + 1) / 2;
    let full = (first + 1) * height;
    let mut row = first + inside % height;
    let mut col = inside / height;
    if inside >= full {
        // Beyond the columns that all rows have: a triangle that ends in one place, from its end.
        let (q, p) = row_of_triangle(height * (height - 1) / 2 - 1 - (inside - full));
        col = first + height - 1 - q;
        row = col + q - p;
    }
    (row, col)
}

/// Square tiles: those on and below the diagonal by decreasing length of their sums, all products of
/// a stack together; then those above it, which are only filled with zeros.
#[cube]
fn triangle(tile: u32, blocks: &Blocks, #[comptime] triangles: Triangles) -> Place {
    let size = blocks.tiles_m;
    let batches = blocks.splits;
    let (rank, batch) = (tile / batches, tile % batches);
    let lower = size * (size + 1) / 2;
    let below = rank < lower;
    let at = if below { rank } else { rank - lower };
    let (mut g, mut i) = row_of_triangle(at);
    // Sums of lower · lower have row - col + 1 blocks, of lower · upper col + 1, of upper · lower
    // those from row on.
    let mut row = g;
    let mut col = i;
    if comptime!(triangles.a == Triangle::Lower && triangles.b == Triangle::Lower) {
        // Tiles of one length lie on a diagonal and share nothing: bands of diagonals instead.
        if below {
            let banded = band(at, g, size);
            g = banded.0;
            i = banded.1;
        }
        row = i + size - 1 - g;
        col = i;
    }
    if comptime!(triangles.a == Triangle::Lower && triangles.b == Triangle::Upper) {
        row = i + size - 1 - g;
        col = size - 1 - g;
    }
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
    if !below {
        row = i;
        col = g + 1;
        first = 0u32;
        end = 0u32;
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
