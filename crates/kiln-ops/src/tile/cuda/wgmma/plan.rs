//! Which tile a product gets, and in how many parts of K.

use super::product::WgmmaTile;
use crate::launch::limits::reckoned;
use crate::tile::cuda::schedule::{DEPTH, ROWS, order};
use crate::tile::cuda::second::Dual;
use crate::tile::problem::Problem;

/// The settings of a launch.
pub(super) struct Plan {
    pub(super) tile: WgmmaTile,
    /// Blocks of K that a cube adds up.
    pub(super) depth: usize,
    /// Parts of K that are stored and added up by a second kernel.
    pub(super) splits: usize,
}

/// Columns of a tile, and the time of a stage relative to that of 256 columns.
const TILES: [(usize, f64); 4] = [(256, 1.0), (192, 0.78), (128, 0.54), (64, 0.3)];
/// The least, where A is read for a single column of tiles: at the rate of memory.
const READ: f64 = 0.8;
/// Time of a stage of 256 columns where all multiprocessors are busy, in seconds.
const STAGE: f64 = 0.65e-6;
/// The part of it that is left when few are: the clock rises.
const ALONE: f64 = 0.6;
/// What a tile costs beside its stages, in stages.
const TILE: f64 = 2.0;
/// A second launch, and bytes a second of the sum of parts.
const LAUNCH: f64 = 2.5e-6;
const BYTES: f64 = 4e12;
/// What two cubes of a cluster take to add up their sums, and how much slower their stages are than those of
/// cubes on their own. (Clusters of three and four were in no shape the fastest.)
const EXCHANGE: f64 = 1.5e-6;
const CLUSTERED: f64 = 1.065;

impl Plan {
    /// With `wanted` parts or as many fewer as do with the same number of blocks each.
    fn new(tile: WgmmaTile, wanted: usize, blocks: usize) -> Self {
        let depth = blocks.div_ceil(wanted * tile.cluster);
        Self { tile, depth, splits: blocks.div_ceil(depth * tile.cluster) }
    }
}

/// The cheapest by a model of waves: tiles of a wave run side by side, one on each multiprocessor. The
/// constants are from the 30 products of docs/matmul.md on an H200, where it is right to 5 % from 30 µs on.
pub(super) fn plan(problem: &Problem, dual: Dual, multiprocessors: usize) -> Plan {
    let p = problem;
    let [m, n, k, batches] = [p.m, p.n, p.k, p.batches].map(reckoned);
    let blocks_of = |k: usize| k.div_ceil(DEPTH) * if dual == Dual::Sum { 2 } else { 1 };
    let (blocks, own_blocks) = (blocks_of(k), blocks_of(p.k));
    if p.triangles.masked() {
        // Square tiles: wider ones would compute more above the diagonal than they gain. Two cubes on
        // a multiprocessor hide the stores of these short sums (16·1024² in bf16 on an H200: 32.3 µs
        // with one, 29.8 with two), but where A is upper the kernel takes 157 registers, and one fits.
        let tile = WgmmaTile::two(ROWS);
        return Plan::new(tile, 1, own_blocks);
    }
    let mut best: Option<(f64, WgmmaTile, usize)> = None;
    let mut offer = |cost: f64, tile: WgmmaTile, parts: usize| {
        if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
            best = Some((cost, tile, parts));
        }
    };
    // Of joined products a tile holds the same columns of both products, in whole chunks, and all of K.
    for (wide, stage) in TILES.into_iter().filter(|(n, _)| !dual.joins() || n.is_multiple_of(128)) {
        let columns = dual.columns(wide);
        let all = n <= columns;
        let too_wide = n + 64 <= columns;
        let too_narrow = wide < ROWS && !all;
        if too_wide || too_narrow {
            continue;
        }
        let stage = if all { f64::max(stage, READ) } else { stage };
        let places = match p.symmetric {
            true => order::symmetric_tiles(m, columns),
            false => m.div_ceil(ROWS) * n.div_ceil(columns),
        };
        let tiles = places * batches;
        let waves = |parts: usize| (tiles * parts).div_ceil(multiprocessors);
        let time = |parts: usize| {
            let waves = waves(parts);
            let busy = (tiles * parts) as f64 / (waves * multiprocessors) as f64;
            let clock = if waves == 1 { ALONE + (1.0 - ALONE) * busy } else { 1.0 };
            waves as f64 * (blocks.div_ceil(parts) as f64 + TILE) * stage * STAGE * clock
        };
        offer(time(1), WgmmaTile::new(wide), 1);
        if dual.joins() || blocks < 8 {
            continue;
        }
        let exchange = waves(2) as f64 * EXCHANGE;
        offer(time(2) * CLUSTERED + exchange, WgmmaTile::clustered(wide), 1);
        // A symmetric result is finished by those that multiply.
        for splits in 2..=if p.symmetric || p.transposed { 1 } else { 16.min(blocks / 4) } {
            let bytes = (8 * splits + 2) * m * n * batches;
            let sum = LAUNCH + bytes as f64 / BYTES;
            offer(time(splits) + sum, WgmmaTile::new(wide), splits);
        }
    }
    let (_, tile, parts) = best.expect("there are tiles to choose from");
    Plan::new(tile, parts, own_blocks)
}
