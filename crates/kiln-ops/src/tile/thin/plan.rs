//! Tile, ring and parts of K of a thin product on tensor cores.

/// Columns in eights that kernels are made for: each is a kernel of its own.
const EIGHTS: [usize; 7] = [1, 2, 3, 4, 6, 8, 10];
/// Most stages of a ring.
const STAGES: usize = 8;
/// Those of short sums, whose cubes overlap because several fit on a multiprocessor.
const FEW_STAGES: usize = 3;
/// Bytes of shared memory that the driver takes, and alignment.
const BESIDE: usize = 2048;
/// Bytes that a multiprocessor could read while the second pass over parts of K is launched: 2.5 µs.
const LAUNCH: usize = 80 << 10;
/// Blocks of 64 of K that a part has at least.
const LEAST_DEPTH: usize = 8;

/// What the kernel is launched with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Of a tile.
    pub(super) rows: usize,
    pub(super) stages: usize,
    /// Blocks of 64 of K of a part.
    pub(super) depth: usize,
    pub(super) splits: usize,
}

/// The eights that hold so many columns.
pub(super) fn eights(cols: usize) -> usize {
    EIGHTS.into_iter().find(|eights| eights * 8 >= cols).expect("80 columns at most")
}

/// The plan that keeps multiprocessors reading for the shortest time: tiles times blocks of the one that
/// has most, in bytes, where what comes out of the cache counts half.
pub(super) fn plan(
    [rows, cols, k, batches]: [usize; 4],
    thin_bytes: usize,
    multiprocessors: usize,
    memory: usize,
) -> Plan {
    let blocks = k.div_ceil(64);
    let mut best: Option<(usize, Plan)> = None;
    for tile in [256, 128, 64] {
        let stage = tile * 128 + thin_bytes;
        let stages = ((memory - BESIDE) / stage).min(STAGES);
        // The sums of all warps are handed over at once.
        let handed = 256 / tile * eights(cols) * 8 * (tile + 1) * 4;
        if stages < FEW_STAGES || handed > memory - BESIDE {
            continue;
        }
        let tiles = rows.div_ceil(tile) * batches;
        let most = (2 * multiprocessors).div_ceil(tiles).min(blocks / LEAST_DEPTH).max(1);
        for wanted in 1..=most {
            let depth = blocks.div_ceil(wanted);
            let splits = blocks.div_ceil(depth);
            let waves = (tiles * splits).div_ceil(multiprocessors);
            let read = eights(cols) * 8 * 128;
            // Each tile begins with an empty ring.
            let mut cost = waves * (depth + 2) * (tile * 128 + read / 2);
            if splits > 1 {
                let parts = splits * batches * rows * cols * 4;
                cost += LAUNCH + parts / multiprocessors;
            }
            let stages = if depth < STAGES { FEW_STAGES } else { stages };
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, Plan { rows: tile, stages, depth, splits }));
            }
        }
    }
    best.expect("a tile of 64 rows fits").1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::thin::mma::thin_bytes;

    #[test]
    fn parts_cover_k_and_rings_fit() {
        for memory in [227 << 10, 163 << 10, 99 << 10] {
            for cols in [1, 8, 9, 24, 64, 80] {
                for along_k in [false, true] {
                    let thin = thin_bytes(eights(cols), along_k);
                    for (rows, k, batches) in
                        [(8192, 8192, 1), (16_384, 8192, 1), (80, 1 << 20, 1), (300, 65, 7)]
                    {
                        let p = plan([rows, cols, k, batches], thin, 132, memory);
                        let blocks = k.div_ceil(64);
                        assert!((p.splits - 1) * p.depth < blocks && p.splits * p.depth >= blocks);
                        assert!(p.stages * (p.rows * 128 + thin) <= memory - BESIDE, "{p:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_multiprocessor_of_an_h200_has_something_to_read() {
        for (rows, cols, k) in
            [(8192, 1, 8192), (8192, 64, 8192), (16_384, 80, 8192), (8192, 24, 16_384)]
        {
            let p = plan([rows, cols, k, 1], thin_bytes(eights(cols), true), 132, 227 << 10);
            let jobs = rows.div_ceil(p.rows) * p.splits;
            let idle = jobs.div_ceil(132) * 132 - jobs;
            assert!(idle * 10 <= jobs, "{rows}×{k}, {cols} columns: {p:?}");
        }
    }
}
