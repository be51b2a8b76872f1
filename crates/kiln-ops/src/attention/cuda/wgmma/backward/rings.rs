//! What the warps of a cube know of each other: rings, barriers, and which tile is next.

use super::plan::{Gradient, STAGES};
use crate::tile::cuda::pipeline::{PipelineState, Ring, barrier_bytes};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// Barriers of the hardware: one for each warpgroup from 1 on, one for both, and one for each from here on that says
/// that the other one has read dS.
pub(super) const BOTH: u32 = 3;
pub(super) const READ: u32 = 4;

/// The rings of a cube.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Rings {
    /// Q of a block and the numbers of its rows.
    pub(super) q: Ring,
    pub(super) dy: Ring,
    pub(super) k: Ring,
    pub(super) v: Ring,
    /// Which tile it is.
    pub(super) tile: Ring,
    /// dQ of a block on its way out; after the last block of a tile its dK and dV.
    pub(super) out: Ring,
    /// dQ of the other tiles.
    pub(super) others: Ring,
}

#[cube]
impl Rings {
    pub(super) fn new(barriers: u32) -> Self {
        let one = comptime!(barrier_bytes(1) as u32);
        let ring = comptime!(barrier_bytes(STAGES as usize) as u32);
        let k = barriers + 3 * ring;
        Rings {
            q: Ring::new(barriers, STAGES, 2u32, 2u32),
            dy: Ring::new(barriers + ring, STAGES, 1u32, 2u32),
            // Read by all eight warps that multiply, one that loads numbers and one that stores.
            tile: Ring::new(barriers + 2 * ring, STAGES, 1u32, 10u32),
            k: Ring::new(k, 1u32, 1u32, 2u32),
            v: Ring::new(k + one, 1u32, 1u32, 2u32),
            out: Ring::new(k + 2 * one, 1u32, 8u32, 1u32),
            others: Ring::new(k + 3 * one, 1u32, 1u32, 8u32),
        }
    }
}

/// What a warp knows of the tile that is next, and where it is in the ring that says so.
#[derive(CubeType)]
pub(super) struct Tiles {
    at: PipelineState,
    pub(super) number: u32,
    pub(super) begin: u32,
    pub(super) end: u32,
}

#[cube]
impl Tiles {
    /// The first one.
    pub(super) fn start(
        shared: &Shared<[u32]>,
        rings: &Rings,
        #[comptime] gradient: Gradient,
    ) -> Self {
        let mut tiles = Tiles { at: PipelineState::start(), number: 0u32, begin: 0u32, end: 0u32 };
        tiles.next(shared, rings, gradient);
        tiles
    }

    /// Waits for the next one; for all units of a warp.
    pub(super) fn next(
        &mut self,
        shared: &Shared<[u32]>,
        rings: &Rings,
        #[comptime] gradient: Gradient,
    ) {
        rings.tile.wait(self.at.stage, self.at.phase);
        let word = (self.at.stage * 4 + comptime!(gradient.tile_at() / 4)) as usize;
        self.number = shared[word];
        self.begin = shared[word + 1];
        self.end = shared[word + 2];
        sync_plane();
        let lane = UNIT_POS % 32;
        if lane == 0u32 {
            rings.tile.release(self.at.stage);
        }
        self.at.advance(STAGES);
    }
}

/// Says that this warp has filled its part of what is stored.
#[cube]
pub(super) fn hand_over(rings: &Rings) {
    async_proxy_fence();
    sync_plane();
    let lane = UNIT_POS % 32;
    if lane == 0u32 {
        rings.out.arrive(0u32);
    }
}
