//! What a warp does with a stage: fragments, products, masks.
//!
//! Eight warps, two along M and four along N, multiply 64 rows and a quarter of the columns each.

use crate::tile::cuda::fragment::origin;
use crate::tile::cuda::mask::{crossed, mask_block};
use crate::tile::cuda::ptx::*;
use crate::tile::cuda::schedule::{DEPTH, PART, ROWS, Scheduler};
use crate::tile::finish::Linear;
use crate::tile::view::Order;
use cubecl::prelude::*;

/// Units that multiply: two warps along M, four along N.
pub(super) const UNITS: u32 = 256;
/// Steps of a block of K.
pub(super) const STEPS: u32 = DEPTH as u32 / 16;

/// What a product is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaProduct {
    /// Columns of a tile: 128 or 256.
    pub(super) n: usize,
    /// Of the ring.
    pub(super) stages: usize,
    pub(super) float: Float16,
    pub(super) a: Order,
    pub(super) b: Order,
    pub(super) linear: Linear,
    pub(super) scheduler: Scheduler,
}

impl MmaProduct {
    /// Fragments of a warp of B: 16 columns each.
    pub(super) fn fragments_n(&self) -> usize {
        self.n / 64
    }

    /// Bytes of a stage's rows of A.
    pub(super) fn a_bytes(&self) -> u32 {
        (ROWS * DEPTH * 2) as u32
    }

    /// Bytes of its columns of B.
    pub(super) fn b_bytes(&self) -> u32 {
        (self.n * DEPTH * 2) as u32
    }
}

/// Which rows of 8×8 matrices a lane names, along M or N first for A, along K first for B.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Lanes {
    a_row: u32,
    a_chunk: u32,
    a_from: u32,
    b_row: u32,
    b_chunk: u32,
    b_from: u32,
    /// The warp's first column in its part.
    b_first: u32,
    low: u32,
    /// Its first row and column of the tile, and of this lane's sums.
    pub(super) row: u32,
    pub(super) col: u32,
}

/// Those of this unit, of stages of which each has its A at `a_base` and its B at `b_base`.
#[cube]
pub(super) fn lanes(a_base: u32, b_base: u32, #[comptime] product: MmaProduct) -> Lanes {
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let lane = UNIT_POS % 32;
    let (warp_m, warp_n) = (warp / 4, warp % 4);
    let (low, quarter) = (lane % 8, lane / 8);
    let (a_along_k, b_along_k) =
        comptime!((product.a == Order::RowMajor, product.b == Order::ColMajor));
    let a_row = if comptime!(a_along_k) { lane % 16 } else { quarter / 2 * 8 + low };
    let a_chunk = if comptime!(a_along_k) { lane / 16 } else { quarter % 2 };
    let b_row = if comptime!(b_along_k) { quarter / 2 * 8 + low } else { quarter % 2 * 8 + low };
    let b_chunk = if comptime!(b_along_k) { quarter % 2 } else { quarter / 2 };
    let columns = warp_n * comptime!((product.n / 4) as u32);
    let (row, col) = origin(lane);
    Lanes {
        a_row,
        a_chunk,
        a_from: a_base + warp_m * PART,
        b_row,
        b_chunk,
        b_from: b_base + columns / 64 * PART,
        b_first: columns % 64,
        low,
        row: warp_m * 64 + row,
        col: columns + col,
    }
}

/// Masks a block of K whose A stands at byte `a_at` and whose B at `b_at`, if a diagonal crosses it; for
/// all units that multiply.
#[cube]
pub(super) fn mask_stage(
    shared: &mut Shared<[u32]>,
    a_at: u32,
    b_at: u32,
    block: u32,
    row0: u32,
    col0: u32,
    #[comptime] tma: bool,
    #[comptime] product: MmaProduct,
) {
    if comptime!(product.scheduler.triangles.masked()) {
        let k0 = block * comptime!(DEPTH as u32);
        let (a_keeps, b_keeps) = comptime!((
            product.scheduler.triangles.a_keeps(),
            product.scheduler.triangles.b_keeps()
        ));
        let b_crossed = crossed(k0, col0, comptime!(product.n as u32), b_keeps);
        if crossed(k0, row0, comptime!(ROWS as u32), a_keeps) || b_crossed {
            let along_k = comptime!((product.a == Order::RowMajor, product.b == Order::ColMajor));
            #[unroll]
            for part in 0..comptime!((ROWS / 64) as u32) {
                let at = a_at + comptime!(part * PART);
                let e0 = row0 + comptime!(part * 64);
                mask_block(shared, at, e0, k0, UNIT_POS, UNITS, along_k.0, a_keeps);
            }
            #[unroll]
            for part in 0..comptime!((product.n / 64) as u32) {
                let at = b_at + comptime!(part * PART);
                let e0 = col0 + comptime!(part * 64);
                mask_block(shared, at, e0, k0, UNIT_POS, UNITS, along_k.1, b_keeps);
            }
            if comptime!(tma) {
                // Before TMA fills the stage again.
                async_proxy_fence();
            }
            sync_units(1u32, UNITS);
        }
    }
}

/// Loads the fragments of A of a step of 16 of K, 64 rows, from a stage that is this many bytes after the first;
/// of an odd step into the second half of the array.
#[cube]
pub(super) fn load_left(
    left: &mut Array<Vector<u32, Const<4>>>,
    lanes: &Lanes,
    stage_offset: u32,
    #[comptime] step: u32,
    #[comptime] product: MmaProduct,
) {
    let along_k = comptime!(product.a == Order::RowMajor);
    #[unroll]
    for i in 0..4u32 {
        let (row, chunk) = if comptime!(along_k) {
            (lanes.a_row + comptime!(i * 16), lanes.a_chunk + comptime!(step * 2))
        } else {
            (lanes.a_row + comptime!(step * 16), lanes.a_chunk + comptime!(i * 2))
        };
        let from = lanes.a_from + stage_offset + row * 128 + ((chunk ^ lanes.low) << 4);
        left[comptime!((step % 2 * 4 + i) as usize)] = load_matrices(from, comptime!(!along_k));
    }
}

/// Those of B, a quarter of the columns.
#[cube]
pub(super) fn load_right(
    right: &mut Array<Vector<u32, Const<4>>>,
    lanes: &Lanes,
    stage_offset: u32,
    #[comptime] step: u32,
    #[comptime] product: MmaProduct,
) {
    let count = comptime!(product.fragments_n() as u32);
    let along_k = comptime!(product.b == Order::ColMajor);
    #[unroll]
    for j in 0..count {
        let (row, chunk) = if comptime!(along_k) {
            let row = lanes.b_first + lanes.b_row + comptime!(j * 16);
            (row, lanes.b_chunk + comptime!(step * 2))
        } else {
            let chunk = lanes.b_first / 8 + lanes.b_chunk + comptime!(j * 2);
            (lanes.b_row + comptime!(step * 16), chunk)
        };
        let from = lanes.b_from + stage_offset + row * 128 + ((chunk ^ lanes.low) << 4);
        right[comptime!((step % 2 * count + j) as usize)] =
            load_matrices(from, comptime!(!along_k));
    }
}

/// Adds the products of a step's fragments to the sums.
#[cube]
pub(super) fn multiply_step(
    sums: &mut Array<Vector<f32, Const<4>>>,
    left: &Array<Vector<u32, Const<4>>>,
    right: &Array<Vector<u32, Const<4>>>,
    #[comptime] step: u32,
    #[comptime] product: MmaProduct,
) {
    let count = comptime!(product.fragments_n());
    let (l, r) = comptime!(((step % 2 * 4) as usize, (step as usize % 2) * count));
    #[unroll]
    for j in 0..count {
        #[unroll]
        for i in 0..4usize {
            let at = comptime!((i * count + j) * 2);
            let (a, b) = (left[comptime!(l + i)], right[comptime!(r + j)]);
            let (b0, b1) = (b.extract(0usize), b.extract(1usize));
            sums[at] = mma_16x8x16(a, b0, b1, sums[at], product.float);
            let (b2, b3) = (b.extract(2usize), b.extract(3usize));
            sums[at + 1] = mma_16x8x16(a, b2, b3, sums[at + 1], product.float);
        }
    }
}
