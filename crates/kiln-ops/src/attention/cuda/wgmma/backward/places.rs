//! Which tile is whose, which blocks of queries see it, and in which order dQ is added up.
//!
//! The tiles of keys that a block of queries sees add to its dQ from the last to the first. Tiles are handed out in
//! the same order, so that a tile only ever waits for tiles that others began with before.

// A product is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::plan::{Gradient, KEYS};
use crate::attention::cuda::wgmma::places::{Places, limits};
use cubecl::prelude::*;

/// The sizes of a launch beside [`Places`], whose heads are those of keys here, and whose results are dO.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct GradientPlaces {
    /// Blocks of queries of a head.
    pub(crate) blocks: u32,
    /// Query heads of which sums of dQ are kept at a time.
    pub(crate) slots: u32,
    /// The first heads in the tensors.
    pub(crate) dq_first: u32,
    pub(crate) dk_first: u32,
    pub(crate) dv_first: u32,
    /// The factor of dQ and dK.
    pub(crate) scale: f32,
}

/// A tile of keys: its number in the head, and where its head is.
#[derive(CubeType, Clone, Copy)]
pub(super) struct KeyTile {
    pub(super) index: u32,
    pub(super) batch: u32,
    pub(super) head: u32,
}

/// Tile `number`: section by section, the last keys first.
#[cube]
pub(super) fn key_tile(number: u32, places: &Places) -> KeyTile {
    let size = places.section * places.tiles;
    let (section, at) = (number / size, number % size);
    let first = section * places.section;
    let width = min(places.section, places.all_heads - first);
    let head = first + at % width;
    KeyTile {
        index: places.tiles - 1 - at / width,
        batch: head / places.heads,
        head: head % places.heads,
    }
}

/// The first and the last tile of keys that block `block` of queries goes through: those that it sees, or one.
/// Neither ever decreases from one block to the next.
#[cube]
pub(super) fn tiles_of(
    block: u32,
    documents: &[u32],
    places: &Places,
    #[comptime] gradient: Gradient,
) -> (u32, u32) {
    let first = block * gradient.queries();
    let last = min(first + gradient.queries(), places.queries) - 1;
    let (low, _high) = limits(first, documents, places, gradient.limited);
    let (_low, high) = limits(last, documents, places, gradient.limited);
    let begin = min(low / KEYS, places.tiles - 1);
    let end = max((high + comptime!(KEYS - 1)) / KEYS, begin + 1);
    (begin, end - 1)
}

/// The blocks of queries that go through tile `index`: from the first of the results to before the second.
#[cube]
pub(super) fn blocks_of(
    index: u32,
    documents: &[u32],
    places: &Places,
    more: &GradientPlaces,
    #[comptime] gradient: Gradient,
) -> (u32, u32) {
    let mut begin = 0u32.runtime();
    let mut end = more.blocks * 1u32;
    // The first block whose last tile is not before this one.
    while begin < end {
        let middle = (begin + end) / 2;
        let (_first, last) = tiles_of(middle, documents, places, gradient);
        if last < index {
            begin = middle + 1;
        } else {
            end = middle * 1u32;
        }
    }
    let first_block = begin * 1u32;
    // The first one whose first tile is after it.
    end = more.blocks * 1u32;
    while begin < end {
        let middle = (begin + end) / 2;
        let (first, _last) = tiles_of(middle, documents, places, gradient);
        if first <= index {
            begin = middle + 1;
        } else {
            end = middle * 1u32;
        }
    }
    (first_block, begin)
}
