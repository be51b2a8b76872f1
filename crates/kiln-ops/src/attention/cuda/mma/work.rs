//! Which tile of which head a cube makes, and where heads are.

use super::rows::{Head, Place};
use crate::attention::problem::{HeadsView, Problem};
use crate::tile::cuda::ptx::global_address;
use cubecl::prelude::*;

/// Bytes of keys and values, or of what else cubes of one head share, that stay in the second-level cache.
const CACHED: usize = 24 << 20;

/// Where heads are, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Heads {
    first: usize,
    batch: usize,
    pub(super) head: usize,
    row: usize,
}

impl HeadsLaunch {
    pub(super) fn of(view: &HeadsView) -> Self {
        let HeadsView { first, batch_stride, head_stride, row_stride, .. } = *view;
        Self::new(first * head_stride, batch_stride, head_stride, row_stride)
    }
}

#[cube]
impl Heads {
    /// The first element of a head.
    fn element(&self, batch: u32, head: u32) -> usize {
        self.first + batch as usize * self.batch + head as usize * self.head
    }

    /// A head's rows from `first` up to `end`, from a chunk of columns on.
    pub(super) fn place(&self, batch: u32, head: u32, first: u32, end: u32, chunk: u32) -> Place {
        Place { base: self.element(batch, head), row: self.row, first, end, chunk }
    }
}

/// A head of `end` rows.
#[cube]
pub(super) fn head_of<E: Float>(
    tensor: &[E],
    heads: &Heads,
    batch: u32,
    head: u32,
    end: u32,
) -> Head {
    let first = u64::cast_from(heads.element(batch, head)) * 2;
    let address = global_address::<E>(tensor.as_ptr()) + first;
    Head { address, row_bytes: u64::cast_from(heads.row) * 2, end }
}

/// What is attended to, and the tiles that cubes make: of queries, or of keys.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) queries: u32,
    pub(super) keys: u32,
    pub(super) heads: u32,
    /// Query heads that read one KV head.
    pub(super) group: u32,
    pub(super) window: u32,
    /// Elements from one row of the documents to the next.
    pub(super) documents: u32,
    tiles: u32,
    /// Heads, of all batches, whose tiles are made.
    owners: u32,
    /// Of them, heads that are made at the same time.
    section: u32,
}

/// The grid of a kernel: sizes, and how many cubes.
pub(super) struct Grid {
    pub(super) sizes: SizesLaunch,
    pub(super) cubes: usize,
}

impl Grid {
    /// Of tiles of `rows` queries.
    pub(super) fn of_queries(problem: &Problem, rows: u32) -> Self {
        let s = &problem.sizes;
        let shared = 4 * s.keys * s.width * s.kv_heads / s.heads;
        Self::new(problem, s.queries.div_ceil(rows as usize), s.batches * s.heads, shared)
    }

    /// Of tiles of `rows` keys.
    pub(super) fn of_keys(problem: &Problem, rows: u32) -> Self {
        let s = &problem.sizes;
        let shared = 4 * s.queries * s.width * s.heads / s.kv_heads;
        Self::new(problem, s.keys.div_ceil(rows as usize), s.batches * s.kv_heads, shared)
    }

    /// `shared` are the bytes that all tiles of an owner read.
    fn new(problem: &Problem, tiles: usize, owners: usize, shared: usize) -> Self {
        let s = &problem.sizes;
        let section = (CACHED / shared.max(1)).clamp(1, owners.max(1));
        let documents = problem.documents.as_ref().map_or(0, |d| d.meta.strides()[0]);
        let sizes = SizesLaunch::new(
            s.queries as u32,
            s.keys as u32,
            s.heads as u32,
            (s.heads / s.kv_heads) as u32,
            // A wider one sees no more.
            problem.mask.window.unwrap_or(0).min(s.keys) as u32,
            documents as u32,
            tiles as u32,
            owners as u32,
            section as u32,
        );
        Self { sizes, cubes: tiles * owners }
    }
}

/// A tile of a head, which counts those of the batches before too.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    pub(super) tile: u32,
    pub(super) owner: u32,
}

#[cube]
impl Sizes {
    /// Whether there is work for a cube.
    pub(super) fn has(&self, at: u32) -> bool {
        at < self.tiles * self.owners
    }

    /// Tiles of the heads of a section in turn, so that those that read the same are made at the same time; the
    /// longest first, which are the last ones of causal queries.
    pub(super) fn work(&self, at: u32, #[comptime] last_first: bool) -> Work {
        let section = at / (self.section * self.tiles);
        let first = section * self.section;
        let at = at - first * self.tiles;
        let heads = min(self.section, self.owners - first);
        let tile = at / heads;
        Work {
            tile: if comptime!(last_first) { self.tiles - 1 - tile } else { tile },
            owner: first + at % heads,
        }
    }
}
