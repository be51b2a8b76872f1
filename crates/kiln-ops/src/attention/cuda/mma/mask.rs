//! Which keys a query sees, and which queries a key: neither limit ever decreases.

use super::work::Sizes;
use cubecl::prelude::*;

/// What limits them, beside the ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Limits {
    pub(super) causal: bool,
    pub(super) window: bool,
    pub(super) documents: bool,
}

#[cube]
fn less(a: u32, b: u32) -> u32 {
    a - min(a, b)
}

/// The first key that a query may see.
#[cube]
pub(super) fn first_key(
    query: u32,
    sizes: &Sizes,
    documents: &[u32],
    #[comptime] limits: Limits,
) -> u32 {
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
pub(super) fn end_of_keys(
    query: u32,
    sizes: &Sizes,
    documents: &[u32],
    #[comptime] limits: Limits,
) -> u32 {
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
pub(super) fn first_query(
    key: u32,
    sizes: &Sizes,
    documents: &[u32],
    #[comptime] limits: Limits,
) -> u32 {
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
pub(super) fn end_of_queries(
    key: u32,
    sizes: &Sizes,
    documents: &[u32],
    #[comptime] limits: Limits,
) -> u32 {
    let mut end = 0x7fff_ffffu32.runtime();
    if comptime!(limits.window) {
        end = less(key + sizes.queries + sizes.window, sizes.keys);
    }
    if comptime!(limits.documents) {
        end = min(end, documents[(sizes.documents + key) as usize]);
    }
    end
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

    /// Whether row `row` of the lane takes the column that is `at` columns on.
    pub(super) fn takes(&self, #[comptime] row: usize, #[comptime] at: i32) -> bool {
        self.from[row] <= at && at < self.to[row]
    }
}

/// Of queries, from query `row` on, in a block of keys; `col` is the lane's first. Of 16·`rows` rows a lane has those
/// 8 apart.
#[cube]
pub(super) fn reach_of_queries(
    row: u32,
    col: u32,
    sizes: &Sizes,
    documents: &[u32],
    #[comptime] rows: usize,
    #[comptime] limits: Limits,
) -> Reach {
    let mut from = Array::<i32>::new(comptime!(2 * rows));
    let mut to = Array::<i32>::new(comptime!(2 * rows));
    #[unroll]
    for i in 0..comptime!(2 * rows) {
        let query = min(row + comptime!(i as u32 * 8), sizes.queries - 1);
        from[i] = i32::cast_from(first_key(query, sizes, documents, limits)) - i32::cast_from(col);
        to[i] = i32::cast_from(end_of_keys(query, sizes, documents, limits)) - i32::cast_from(col);
    }
    Reach { from, to }
}

/// Of keys, from key `row` on, in a block of queries.
#[cube]
pub(super) fn reach_of_keys(
    row: u32,
    col: u32,
    sizes: &Sizes,
    documents: &[u32],
    #[comptime] rows: usize,
    #[comptime] limits: Limits,
) -> Reach {
    let mut from = Array::<i32>::new(comptime!(2 * rows));
    let mut to = Array::<i32>::new(comptime!(2 * rows));
    #[unroll]
    for i in 0..comptime!(2 * rows) {
        let key = min(row + comptime!(i as u32 * 8), sizes.keys - 1);
        from[i] = i32::cast_from(first_query(key, sizes, documents, limits)) - i32::cast_from(col);
        to[i] = i32::cast_from(end_of_queries(key, sizes, documents, limits)) - i32::cast_from(col);
    }
    Reach { from, to }
}
