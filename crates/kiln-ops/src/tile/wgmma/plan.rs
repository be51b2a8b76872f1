//! Which tile a product gets, and in how many parts of K.

use super::kernel::WgmmaTile;
use crate::tile::Triangle;
use crate::tile::product::Operands;
use crate::tile::schedule::{DEPTH, ROWS};

/// The settings of a launch.
pub(super) struct Plan {
    pub(super) tile: WgmmaTile,
    /// Parts of K.
    pub(super) splits: usize,
}

/// Columns of a tile, and the time of a stage relative to that of 256 columns.
const TILES: [(usize, f64); 3] = [(256, 1.0), (192, 0.78), (128, 0.58)];
/// Time of a stage of 256 columns, in seconds.
const STAGE: f64 = 0.71e-6;
/// What a tile costs beside its stages, in stages.
const TILE: f64 = 2.0;
/// A second launch, and bytes a second of the sum of parts.
const LAUNCH: f64 = 4e-6;
const BYTES: f64 = 3e12;

/// The cheapest by a model of waves: tiles of a wave run side by side, one on each multiprocessor.
pub(super) fn plan(o: &Operands, multiprocessors: usize) -> Plan {
    if o.triangles.masked() {
        // Square tiles: wider ones would compute more above the diagonal than they gain. Two cubes on
        // a multiprocessor hide the stores of these short sums (16·1024² in bf16 on an H200: 32.3 µs
        // with one, 29.8 with two), but where A is upper the kernel takes 157 registers, and one fits.
        let two = o.triangles.a == Triangle::Lower;
        let tile = if two { WgmmaTile::two(ROWS) } else { WgmmaTile::new(ROWS) };
        return Plan { tile, splits: 1 };
    }
    let blocks = o.blocks_of_k(DEPTH);
    let gate = o.second.as_ref().is_some_and(|second| second.gated.is_some());
    let mut best: Option<(f64, Plan)> = None;
    // Of a gate a tile holds the same columns of both products, in whole chunks, and all of K.
    for (n, stage) in TILES.into_iter().filter(|(n, _)| !gate || n.is_multiple_of(128)) {
        let columns = if gate { n / 2 } else { n };
        let tiles = o.m.div_ceil(ROWS) * o.n.div_ceil(columns) * o.batches;
        let most = if gate { 1 } else { 16usize.min(blocks.div_ceil(4)) };
        for splits in 1..=most {
            let depth = blocks.div_ceil(splits);
            let waves = (tiles * splits).div_ceil(multiprocessors) as f64;
            let mut cost = waves * (depth as f64 * stage + TILE * stage) * STAGE;
            if splits > 1 {
                let bytes = (8 * splits + 2) * o.m * o.n * o.batches;
                cost += LAUNCH + bytes as f64 / BYTES;
            }
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, Plan { tile: WgmmaTile::new(n), splits }));
            }
        }
    }
    best.expect("there are tiles to choose from").1
}
