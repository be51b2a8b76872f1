//! Which keys a query sees, and which queries a key: neither limit ever decreases.

use super::plan::Plan;
use super::work::Sizes;
use crate::attention::problem::Problem;
use crate::tile::cuda::fragment::origin;
use cubecl::prelude::*;

/// What limits them, beside the ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Limits {
    pub(super) causal: bool,
    pub(super) window: bool,
    pub(super) documents: bool,
}

impl Limits {
    pub(super) fn of(problem: &Problem) -> Self {
        let mask = problem.mask;
        Self { causal: mask.causal, window: mask.window.is_some(), documents: mask.documents }
    }
}

#[cube]
fn less(a: u32, b: u32) -> u32 {
    a - min(a, b)
}

/// The first key that a query may see.
#[cube]
fn first_key(query: u32, sizes: &Sizes, documents: &[u32], #[comptime] limits: Limits) -> u32 {
    let mut first = 0u32.runtime();
    if comptime!(limits.window) {
        first = less(query + sizes.keys + 1, sizes.queries + sizes.window);
    }
    if comptime!(limits.documents) {
        first = max(first, documents[query as usize]);
    }
    first
}

/// One past the last key that it sees.
#[cube]
fn end_of_keys(query: u32, sizes: &Sizes, documents: &[u32], #[comptime] limits: Limits) -> u32 {
    let mut end = sizes.keys;
    if comptime!(limits.causal) {
        end = min(end, less(query + sizes.keys + 1, sizes.queries));
    }
    if comptime!(limits.documents) {
        end = min(end, documents[(sizes.documents + query) as usize]);
    }
    end
}

/// The first query that may see a key.
#[cube]
fn first_query(key: u32, sizes: &Sizes, documents: &[u32], #[comptime] limits: Limits) -> u32 {
    let mut first = 0u32.runtime();
    if comptime!(limits.causal) {
        first = less(key + sizes.queries, sizes.keys);
    }
    if comptime!(limits.documents) {
        // Queries and keys of a document are the same rows.
        first = max(first, documents[key as usize]);
    }
    first
}

/// One past the last query that sees it, [`u32::MAX`] or so if that is all there are.
#[cube]
fn end_of_queries(key: u32, sizes: &Sizes, documents: &[u32], #[comptime] limits: Limits) -> u32 {
    let mut end = 0x7fff_ffffu32.runtime();
    if comptime!(limits.window) {
        end = less(key + sizes.queries + sizes.window, sizes.keys);
    }
    if comptime!(limits.documents) {
        end = min(end, documents[(sizes.documents + key) as usize]);
    }
    end
}

/// What the rows of the scores are; columns are the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Side {
    Queries,
    Keys,
}

/// How many rows there are.
#[cube]
fn rows_of(sizes: &Sizes, #[comptime] side: Side) -> u32 {
    if comptime!(side == Side::Queries) { sizes.queries } else { sizes.keys }
}

/// The first column that a row sees.
#[cube]
fn first_column(
    row: u32,
    sizes: &Sizes,
    documents: &[u32],
    #[comptime] side: Side,
    #[comptime] limits: Limits,
) -> u32 {
    if comptime!(side == Side::Queries) {
        first_key(row, sizes, documents, limits)
    } else {
        first_query(row, sizes, documents, limits)
    }
}

/// One past the last, or more where it sees all that follow.
#[cube]
fn end_column(
    row: u32,
    sizes: &Sizes,
    documents: &[u32],
    #[comptime] side: Side,
    #[comptime] limits: Limits,
) -> u32 {
    if comptime!(side == Side::Queries) {
        end_of_keys(row, sizes, documents, limits)
    } else {
        end_of_queries(row, sizes, documents, limits)
    }
}

/// The rows of a cube and of its warps, and the blocks of columns that pass by.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Span {
    /// The first row of the cube.
    pub(super) first: u32,
    /// The first row of this warp, of all and of the cube's.
    pub(super) own: u32,
    pub(super) own_in_cube: u32,
    /// The first block of which any row of the cube sees a column, and how many there are.
    pub(super) begin: u32,
    pub(super) count: u32,
    /// The columns that all rows of this warp see.
    clear_from: u32,
    clear_to: u32,
}

#[cube]
impl Span {
    /// Of tile `tile`.
    pub(super) fn new(
        tile: u32,
        sizes: &Sizes,
        documents: &[u32],
        #[comptime] side: Side,
        #[comptime] plan: Plan,
        #[comptime] limits: Limits,
    ) -> Span {
        let (cube_rows, warp_rows, block) =
            comptime!((plan.tile.rows(), plan.tile.warp_rows(), plan.tile.block));
        let rows = rows_of(sizes, side);
        let first = tile * cube_rows;
        let last = min(first + cube_rows, rows) - 1;
        let begin = first_column(first, sizes, documents, side, limits) / block;
        let columns = sizes.queries + sizes.keys - rows;
        let end = min(end_column(last, sizes, documents, side, limits), columns);
        let end = (end + comptime!(block - 1)) / block;
        let warp = plane_broadcast(UNIT_POS / 32, 0u32);
        let own_in_cube = warp % comptime!(plan.tile.owners()) * warp_rows;
        let own = first + own_in_cube;
        let own_last = min(own + warp_rows, rows) - 1;
        Span {
            first,
            own,
            own_in_cube,
            begin,
            count: end - min(begin, end),
            clear_from: first_column(own_last, sizes, documents, side, limits),
            clear_to: end_column(min(own, rows - 1), sizes, documents, side, limits),
        }
    }

    /// Whether all rows of this warp see the whole block from column `column` on.
    pub(super) fn clear(&self, column: u32, #[comptime] block: u32) -> bool {
        column >= self.clear_from && column + block <= self.clear_to
    }

    /// What the rows of a lane take in the block from column `column` on.
    pub(super) fn reach(
        &self,
        column: u32,
        sizes: &Sizes,
        documents: &[u32],
        #[comptime] side: Side,
        #[comptime] fragments: usize,
        #[comptime] limits: Limits,
    ) -> Reach {
        let (row, col) = origin(UNIT_POS % 32);
        Reach::new(self.own + row, column + col, sizes, documents, fragments, side, limits)
    }
}

/// For each row of a lane, which columns it takes, counted from the lane's first one in a block.
#[derive(CubeType)]
pub(super) struct Reach {
    from: Array<i32>,
    to: Array<i32>,
}

#[cube]
impl Reach {
    /// Every column of every block, where nobody asks.
    pub(super) fn everything(#[comptime] rows: usize) -> Reach {
        Reach {
            from: Array::<i32>::new(comptime!(2 * rows)),
            to: Array::<i32>::new(comptime!(2 * rows)),
        }
    }

    /// Of the rows from `row` on, in the block where `col` is the lane's first column. Of 16·`rows` rows a lane has
    /// those 8 apart.
    fn new(
        row: u32,
        col: u32,
        sizes: &Sizes,
        documents: &[u32],
        #[comptime] rows: usize,
        #[comptime] side: Side,
        #[comptime] limits: Limits,
    ) -> Reach {
        let mut from = Array::<i32>::new(comptime!(2 * rows));
        let mut to = Array::<i32>::new(comptime!(2 * rows));
        let (last, col) = (rows_of(sizes, side) - 1, i32::cast_from(col));
        #[unroll]
        for i in 0..comptime!(2 * rows) {
            let row = min(row + comptime!(i as u32 * 8), last);
            from[i] = i32::cast_from(first_column(row, sizes, documents, side, limits)) - col;
            to[i] = i32::cast_from(end_column(row, sizes, documents, side, limits)) - col;
        }
        Reach { from, to }
    }

    /// Whether row `row` of the lane takes the column that is `at` columns on.
    pub(super) fn takes(&self, #[comptime] row: usize, #[comptime] at: i32) -> bool {
        self.from[row] <= at && at < self.to[row]
    }
}
