//! What a product on wgmma is specialised on.

use crate::tile::cuda::producer::Stages;
use crate::tile::cuda::ptx::{Float16, Wgmma};
use crate::tile::cuda::schedule::{DEPTH, ROWS, Scheduler};
use crate::tile::cuda::second::Dual;
use crate::tile::cuda::store::Stored;
use crate::tile::finish::Linear;
use crate::tile::view::Order;

/// Two warpgroups that multiply and a warp that loads: within 168 registers a unit, 96 for two cubes.
pub(crate) const UNITS: u32 = 288;
/// Bytes of a chunk of 64 rows on the way out.
pub(crate) const STORE_BYTES: u32 = 8192;
/// Shared memory that a cube may have.
const SHARED: usize = 227 * 1024;

/// The tile; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaTile {
    /// Columns: 64 to 256 in steps of 64.
    pub(crate) n: usize,
    /// Stages of the ring, as many as fit.
    pub(crate) stages: usize,
    /// Chunks on the way out of each warpgroup.
    pub(crate) staged: usize,
    /// Cubes on a multiprocessor.
    pub(crate) cubes: usize,
    /// Cubes of a cluster, 1 or 2, which share a tile, and make no other: each adds up a part of K.
    pub(crate) cluster: usize,
}

impl WgmmaTile {
    /// One cube on a multiprocessor.
    pub(crate) const fn new(n: usize) -> Self {
        Self::shared_by(1, n, 2)
    }

    /// Two cubes on a multiprocessor: one stores while the other multiplies.
    pub(crate) const fn two(n: usize) -> Self {
        Self::shared_by(2, n, 1)
    }

    /// One cube on a multiprocessor, and two of them share a tile.
    pub(crate) const fn clustered(n: usize) -> Self {
        Self { cluster: 2, ..Self::new(n) }
    }

    const fn shared_by(cubes: usize, n: usize, staged: usize) -> Self {
        let stage = (ROWS + n) * DEPTH * 2;
        // The device keeps 1 KiB of each cube to itself; barriers and alignment take less than 512.
        let out = 2 * staged * STORE_BYTES as usize;
        let room = (SHARED + 1024) / cubes - 1024 - 512 - out;
        let stages = room / stage;
        Self { n, stages: if stages < 6 { stages } else { 6 }, staged, cubes, cluster: 1 }
    }
}

/// What happens where sums leave the registers, beside what an [`Epilogue`](crate::tile::epilogue) does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaStore {
    pub(crate) linear: Linear,
    /// C comes through the ring, instead of element by element.
    pub(crate) loaded: bool,
    pub(crate) stored: Stored,
    /// Plus what the result's memory holds, f32.
    pub(crate) accumulate: bool,
    /// Columns of the sums become rows.
    pub(crate) transposed: bool,
}

/// What a product is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaProduct {
    pub(crate) tile: WgmmaTile,
    pub(crate) float: Float16,
    pub(crate) a: Order,
    pub(crate) b: Order,
    pub(crate) store: WgmmaStore,
    pub(crate) scheduler: Scheduler,
    pub(crate) dual: Dual,
}

impl WgmmaProduct {
    /// What is loaded.
    pub(crate) fn stages(&self) -> Stages {
        let WgmmaTile { n, stages, .. } = self.tile;
        let Self { a, b, scheduler, dual, .. } = *self;
        Stages { a, b, n, count: stages, scheduler, dual, add: self.store.loaded }
    }

    /// Columns of the result that a tile makes.
    pub(crate) fn columns(&self) -> usize {
        self.dual.columns(self.tile.n)
    }

    /// Chunks that these columns have.
    pub(crate) fn chunks_across(&self) -> usize {
        self.columns() / self.store.stored.columns()
    }

    /// Chunks that a warpgroup stores.
    pub(crate) fn chunks(&self) -> usize {
        let across = self.chunks_across();
        match self.dual {
            Dual::Joined { keep: true } => 3 * across,
            // All of a tile as it is, then transposed.
            _ if self.scheduler.symmetric => 2 * across,
            _ => across,
        }
    }

    pub(crate) fn op(&self) -> Wgmma {
        Wgmma {
            float: self.float,
            n: self.tile.n,
            a_transposed: self.a == Order::ColMajor,
            b_transposed: self.b == Order::RowMajor,
        }
    }
}
