//! Rings of stages in shared memory, guarded by barriers: TMA fills a stage while others are read.
//!
//! An operand's ring has as many stages as it needs: two operands that are loaded and used up together share
//! one, an operand that stays has a ring of one stage of its own. Stages are full after all their bytes have
//! come, and empty after all readers have released them.

use super::ptx::*;
use cubecl::prelude::*;

/// The barriers of a ring: of stage i, `full + 8i` and `empty + 8i` in shared memory.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Ring {
    full: u32,
    empty: u32,
}

/// Bytes of the barriers of a ring.
pub(crate) const fn barrier_bytes(stages: usize) -> usize {
    16 * stages
}

/// A position in a ring, and the parity of the times round it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PipelineState {
    pub(crate) stage: u32,
    pub(crate) phase: u32,
}

#[cube]
impl PipelineState {
    /// Before the first stage.
    pub(crate) fn start() -> Self {
        PipelineState { stage: 0u32, phase: 0u32 }
    }

    /// On to the next stage.
    pub(crate) fn advance(&mut self, #[comptime] stages: u32) {
        self.stage += 1;
        if self.stage == stages {
            self.stage = 0u32;
            self.phase ^= 1;
        }
    }
}

#[cube]
impl Ring {
    /// A ring whose barriers stand from address `barriers` on; a stage is filled by so many loads and
    /// released by so many readers. One unit initialises the barriers; [`rings_ready`] comes after.
    pub(crate) fn new(
        barriers: u32,
        #[comptime] stages: u32,
        #[comptime] loads: u32,
        #[comptime] readers: u32,
    ) -> Self {
        let full = barriers;
        let empty = full + comptime!(8 * stages);
        if UNIT_POS == 0 {
            #[unroll]
            for s in 0..stages {
                barrier_init(full + s * 8, loads);
                barrier_init(empty + s * 8, readers);
            }
        }
        Ring { full, empty }
    }

    /// Waits until a stage may be filled, and lets it wait for this many bytes; returns the barrier that
    /// the loads complete on. For the unit that loads.
    pub(crate) fn acquire(&self, stage: u32, phase: u32, #[comptime] bytes: u32) -> u32 {
        self.vacant(stage, phase);
        self.expect(stage, bytes)
    }

    /// The first half of [`acquire`](Self::acquire): waits until a stage may be filled.
    pub(crate) fn vacant(&self, stage: u32, phase: u32) {
        barrier_wait(self.empty + stage * 8, (phase & 1) ^ 1);
    }

    /// The second half. What the unit wrote to shared memory before is seen by those that wait.
    pub(crate) fn expect(&self, stage: u32, #[comptime] bytes: u32) -> u32 {
        let bar = self.full + stage * 8;
        barrier_expect(bar, bytes);
        bar
    }

    /// The barrier that loads of a stage complete on, for units that load beside the one that [expects](Self::expect) them.
    pub(crate) fn filling(&self, stage: u32) -> u32 {
        self.full + stage * 8
    }

    /// Says that a stage is full of what the unit wrote itself; in the place of [`expect`](Self::expect).
    pub(crate) fn arrive(&self, stage: u32) {
        barrier_arrive(self.full + stage * 8);
    }

    /// Waits until a stage has been filled. The units of a warp need not go on together: what is read from the stage
    /// each reads itself, for a shuffle finds only those that are there.
    pub(crate) fn wait(&self, stage: u32, phase: u32) {
        barrier_wait(self.full + stage * 8, phase & 1);
    }

    /// Says that a stage has been read; for one unit of each reader.
    pub(crate) fn release(&self, stage: u32) {
        barrier_arrive(self.empty + stage * 8);
    }
}

/// Makes the barriers of all rings of the cube visible to TMA and to all units; for all of them.
#[cube]
pub(crate) fn rings_ready() {
    if UNIT_POS == 0 {
        barrier_init_fence();
    }
    sync_cube();
}
