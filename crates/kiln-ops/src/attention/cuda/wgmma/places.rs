//! Which tile is whose, and which keys its queries see.

use super::plan::{Limited, PART_ROWS};
use crate::attention::problem::Problem;
use cubecl::prelude::*;

/// What stands in the place of a tile's number after the last one.
pub(super) const NONE: u32 = u32::MAX;

/// The sizes of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Places {
    /// Tiles of all heads, and of one.
    pub(crate) total: u32,
    pub(crate) tiles: u32,
    /// Heads that are made side by side: few enough that their keys and values stay in the cache.
    pub(crate) section: u32,
    /// Heads of all batches, of one, and those that share keys.
    pub(crate) all_heads: u32,
    pub(crate) heads: u32,
    pub(crate) group: u32,
    pub(crate) queries: u32,
    pub(crate) keys: u32,
    pub(crate) window: u32,
    /// Keys of a part, where keys are divided; a multiple of those of a block.
    pub(crate) part_keys: u32,
    /// The first heads in the tensors.
    pub(crate) q_first: u32,
    pub(crate) k_first: u32,
    pub(crate) v_first: u32,
    pub(crate) o_first: u32,
    /// From products to exponents of 2; with a soft-cap, to twice the argument of tanh.
    pub(crate) scale: f32,
    /// The soft-cap as an exponent of 2.
    pub(crate) cap: f32,
}

/// The window; beyond all keys it has no effect.
pub(super) fn window(problem: &Problem) -> u32 {
    problem.mask.window.unwrap_or(0).min(1 << 30) as u32
}

/// [`Places::scale`] and [`Places::cap`].
pub(super) fn factors(problem: &Problem) -> (f32, f32) {
    let log2_e = std::f32::consts::LOG2_E;
    match problem.softcap {
        Some(cap) => (2.0 * problem.scale / cap * log2_e, cap * log2_e),
        None => (problem.scale * log2_e, 0.0),
    }
}

/// A tile of queries: its first one, and where its heads are.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct QueryTile {
    pub(crate) first: u32,
    pub(crate) batch: u32,
    pub(crate) head: u32,
    pub(crate) kv_head: u32,
    /// The head's number among those of all batches.
    pub(crate) number: u32,
}

/// Tile `number` of `rows` queries: section by section, the last queries first, which see the most keys.
#[cube]
pub(crate) fn query_tile(number: u32, places: &Places, #[comptime] rows: u32) -> QueryTile {
    let size = places.section * places.tiles;
    let (section, at) = (number / size, number % size);
    let first = section * places.section;
    let width = min(places.section, places.all_heads - first);
    let head = first + at % width;
    QueryTile {
        first: (places.tiles - 1 - at / width) * rows,
        batch: head / places.heads,
        head: head % places.heads,
        kv_head: head % places.heads / places.group,
        number: head,
    }
}

/// The first key that query `t` sees, and the one after the last. Where it sees none the second is not larger.
/// Where keys are divided, a part is a tile of rows, which see its keys.
#[cube]
pub(crate) fn limits(
    t: u32,
    documents: &[u32],
    places: &Places,
    #[comptime] limited: Limited,
) -> (u32, u32) {
    if comptime!(limited.parts) {
        let low = t / PART_ROWS * places.part_keys;
        (low, min(low + places.part_keys, places.keys))
    } else {
        limits_of_query(t, documents, places, limited)
    }
}

/// Likewise, where all keys are in one part.
#[cube]
fn limits_of_query(
    t: u32,
    documents: &[u32],
    places: &Places,
    #[comptime] limited: Limited,
) -> (u32, u32) {
    // One past its last key under the causal mask.
    let reach = i32::cast_from(t + 1 + places.keys) - i32::cast_from(places.queries);
    let high = if comptime!(limited.causal) {
        min(places.keys, u32::cast_from(max(reach, 0i32)))
    } else {
        places.keys
    };
    let low = if comptime!(limited.window) {
        u32::cast_from(max(reach - i32::cast_from(places.window), 0i32))
    } else {
        0u32.runtime()
    };
    if comptime!(limited.documents) {
        let row = min(t, places.queries - 1);
        let start = documents[row as usize];
        let end = documents[(row + places.queries) as usize];
        (max(low, start), min(high, end))
    } else {
        (low, high)
    }
}

/// Blocks of keys from `begin` to before `end`, of which those from `whole` to before `crossed` are seen whole.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Blocks {
    pub(crate) begin: u32,
    pub(crate) whole: u32,
    pub(crate) crossed: u32,
    pub(crate) end: u32,
}

/// Blocks of `size` keys that the queries from `first` to `last` see.
#[cube]
pub(crate) fn blocks(
    first: u32,
    last: u32,
    documents: &[u32],
    places: &Places,
    #[comptime] size: u32,
    #[comptime] limited: Limited,
) -> Blocks {
    // Neither limit ever decreases from one query to the next.
    let (low, first_high) = limits(first, documents, places, limited);
    let (last_low, high) = limits(last, documents, places, limited);
    let begin = low / size;
    Blocks {
        begin,
        whole: (last_low + comptime!(size - 1)) / size,
        crossed: first_high / size,
        end: max((high + comptime!(size - 1)) / size, begin),
    }
}
