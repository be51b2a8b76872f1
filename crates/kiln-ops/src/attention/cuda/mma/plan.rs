//! How much of queries and keys a cube holds.

use super::product::Product;
use super::rows::Rows;
use crate::tile::cuda::ptx::Float16;

/// Bytes of a cube's shared memory that the driver takes.
const DRIVER: usize = 1024;

/// What a cube stays with, and what passes by: queries and keys, or keys and queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    /// Sixteens of rows of a warp.
    pub(super) fragments: usize,
    pub(super) warps: u32,
    /// Warps that have the same rows, and parts of the columns of what they add up.
    pub(super) sharing: u32,
    /// Rows of a block of what passes by.
    pub(super) block: u32,
    /// Blocks in shared memory: with one, those of K and V are loaded in turns.
    pub(super) stages: u32,
}

const fn tile(fragments: usize, warps: u32, sharing: u32, block: u32, stages: u32) -> Tile {
    Tile { fragments, warps, sharing, block, stages }
}

impl Tile {
    /// Rows that a cube stays with.
    pub(super) fn rows(&self) -> u32 {
        self.warp_rows() * self.owners()
    }

    /// Warps, of those that share rows one.
    pub(super) fn owners(&self) -> u32 {
        self.warps / self.sharing
    }

    /// Of them, rows of a warp.
    pub(super) fn warp_rows(&self) -> u32 {
        16 * self.fragments as u32
    }

    pub(super) fn units(&self) -> u32 {
        32 * self.warps
    }
}

/// Which kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    Forward,
    /// The gradient of queries.
    Queries,
    /// Those of keys and values.
    Keys,
}

impl Pass {
    /// The tiles by which it may run for heads of `padded` elements, the fastest first, with the number of cubes
    /// that a multiprocessor is to have: registers allow no more.
    fn tiles(self, padded: usize) -> &'static [(Tile, usize)] {
        match (self, padded) {
            (Self::Forward, ..=128) => {
                const {
                    &[
                        (tile(2, 4, 1, 64, 2), 2),
                        (tile(2, 4, 1, 64, 1), 2),
                        (tile(2, 4, 1, 32, 1), 1),
                    ]
                }
            }
            (Self::Forward, _) => {
                const {
                    &[
                        (tile(1, 8, 1, 64, 2), 1),
                        (tile(1, 8, 1, 64, 1), 1),
                        (tile(1, 4, 1, 32, 1), 1),
                    ]
                }
            }
            (Self::Queries, ..=64) => {
                const { &[(tile(2, 4, 1, 64, 2), 2), (tile(2, 4, 1, 32, 2), 1)] }
            }
            (Self::Queries, ..=128) => {
                const {
                    &[
                        (tile(2, 4, 1, 32, 2), 2),
                        (tile(1, 8, 1, 64, 2), 1),
                        (tile(1, 4, 1, 32, 2), 1),
                    ]
                }
            }
            (Self::Queries, _) => {
                const {
                    &[
                        (tile(1, 8, 1, 32, 2), 1),
                        (tile(1, 4, 1, 32, 2), 1),
                        (tile(1, 4, 1, 16, 1), 1),
                    ]
                }
            }
            (Self::Keys, ..=64) => {
                const { &[(tile(2, 4, 1, 32, 2), 2), (tile(2, 4, 1, 32, 2), 1)] }
            }
            (Self::Keys, ..=128) => {
                const {
                    &[
                        (tile(1, 4, 1, 64, 2), 2),
                        (tile(1, 8, 1, 64, 2), 1),
                        (tile(1, 4, 1, 32, 2), 1),
                    ]
                }
            }
            (Self::Keys, _) => {
                const {
                    &[
                        (tile(1, 8, 2, 64, 2), 1),
                        (tile(1, 8, 2, 32, 2), 1),
                        (tile(1, 8, 2, 16, 1), 1),
                    ]
                }
            }
        }
    }
}

/// What a kernel is specialised on, but for the mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub(super) pass: Pass,
    pub(super) tile: Tile,
    pub(super) rows: Rows,
    pub(super) float: Float16,
}

impl Plan {
    /// For so many bytes of shared memory; none where they hold no tile.
    pub(super) fn new(pass: Pass, width: usize, memory: usize, float: Float16) -> Option<Self> {
        // Warps that share rows take multiples of 16 columns each.
        let padded = width.next_multiple_of(if width > 128 { 32 } else { 16 });
        let plan = |tile: Tile| {
            let rows = Rows { width: width as u32, padded: padded as u32, units: tile.units() };
            Self { pass, tile, rows, float }
        };
        let fits = |plan: Self, cubes: usize| cubes * (plan.bytes() + DRIVER) <= memory + DRIVER;
        let tiles = pass.tiles(padded).iter().map(|(tile, cubes)| (plan(*tile), *cubes));
        tiles.into_iter().find(|(plan, cubes)| fits(*plan, *cubes)).map(|(plan, _)| plan)
    }

    /// Operands that a cube stays with: queries, and in the backward their gradients; or keys and values.
    fn stays(&self) -> u32 {
        if self.pass == Pass::Forward { 1 } else { 2 }
    }

    /// Bytes of one operand of them.
    pub(super) fn stay_bytes(&self) -> u32 {
        self.tile.rows() * self.rows.pitch()
    }

    /// Bytes of a block of one operand that passes by.
    pub(super) fn block_bytes(&self) -> u32 {
        self.tile.block * self.rows.pitch()
    }

    /// Bytes of a stage: a block of both operands, and where queries pass, their two numbers.
    pub(super) fn stage_bytes(&self) -> u32 {
        2 * self.block_bytes() + if self.pass == Pass::Keys { 8 * self.tile.block } else { 0 }
    }

    /// Where the stages begin.
    pub(super) fn ring(&self) -> u32 {
        self.stays() * self.stay_bytes()
    }

    /// Bytes of shared memory.
    pub(super) fn bytes(&self) -> usize {
        (self.ring() + self.tile.stages * self.stage_bytes()) as usize
    }

    /// A warp's scores of a block.
    pub(super) fn scores(&self) -> Product {
        Product {
            rows: self.tile.fragments,
            cols: self.tile.block as usize / 16,
            depth: self.rows.padded as usize / 16,
            pitch: self.rows.pitch(),
            float: self.float,
        }
    }

    /// A warp's part of what is added up over blocks.
    pub(super) fn totals(&self) -> Product {
        let cols = (self.rows.padded / self.tile.sharing) as usize / 16;
        Product { cols, depth: self.tile.block as usize / 16, ..self.scores() }
    }
}
