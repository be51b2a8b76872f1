//! What a warp does with a stage: fragments, products, masks; and with its sums at the end.
//!
//! Eight warps, two along M and four along N, multiply 64 rows and a quarter of the columns each.

use crate::tile::mask::{crossed, mask_block};
use crate::tile::operand::Order;
use crate::tile::ptx::*;
use crate::tile::schedule::{DEPTH, Place, ROWS, Walk};
use crate::tile::{Addend, Epilogue};
use cubecl::prelude::*;

/// Units that multiply: two warps along M, four along N.
pub(super) const UNITS: u32 = 256;
/// Steps of a block of K.
pub(super) const STEPS: u32 = DEPTH as u32 / 16;
/// Bytes of 64 positions along M or N by a block of K.
pub(super) const PART: u32 = 8192;

/// What a product is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaProduct {
    /// Columns of a tile: 128 or 256.
    pub(super) n: usize,
    /// Of the ring.
    pub(super) stages: usize,
    pub(super) half: Half,
    pub(super) a: Order,
    pub(super) b: Order,
    pub(super) epilogue: Epilogue,
    pub(super) walk: Walk,
}

impl MmaProduct {
    /// Pairs of 8 columns of a warp.
    pub(super) fn pairs(&self) -> usize {
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
    row: u32,
    col: u32,
}

/// Those of this unit, of stages of which each has its A at `a_base` and its B at `b_base`.
#[cube]
pub(super) fn lanes(a_base: u32, b_base: u32, #[comptime] product: MmaProduct) -> Lanes {
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let lane = UNIT_POS % 32;
    let (warp_m, warp_n) = (warp / 4, warp % 4);
    let (low, quarter) = (lane % 8, lane / 8);
    let (a_along_k, b_along_k) = comptime!((product.a == Order::Rows, product.b == Order::Columns));
    let a_row = if comptime!(a_along_k) { lane % 16 } else { quarter / 2 * 8 + low };
    let a_chunk = if comptime!(a_along_k) { lane / 16 } else { quarter % 2 };
    let b_row = if comptime!(b_along_k) { quarter / 2 * 8 + low } else { quarter % 2 * 8 + low };
    let b_chunk = if comptime!(b_along_k) { quarter % 2 } else { quarter / 2 };
    let columns = warp_n * comptime!((product.n / 4) as u32);
    Lanes {
        a_row,
        a_chunk,
        a_from: a_base + warp_m * PART,
        b_row,
        b_chunk,
        b_from: b_base + columns / 64 * PART,
        b_first: columns % 64,
        low,
        row: warp_m * 64 + lane / 4,
        col: columns + lane % 4 * 2,
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
    if comptime!(product.walk.triangles.masked()) {
        let k0 = block * comptime!(DEPTH as u32);
        let (a_keeps, b_keeps) =
            comptime!((product.walk.triangles.a_keeps(), product.walk.triangles.b_keeps()));
        let b_crossed = crossed(k0, col0, comptime!(product.n as u32), b_keeps);
        if crossed(k0, row0, comptime!(ROWS as u32), a_keeps) || b_crossed {
            let along_k = comptime!((product.a == Order::Rows, product.b == Order::Columns));
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

/// Loads the fragments of a step of 16 of K of a stage that is this many bytes after the first: 64 rows
/// of A and a quarter of the columns of B; of an odd step into the second half of the arrays.
#[cube]
pub(super) fn load_step(
    left: &mut Array<Vector<u32, Const<4>>>,
    right: &mut Array<Vector<u32, Const<4>>>,
    lanes: &Lanes,
    a_offset: u32,
    b_offset: u32,
    #[comptime] step: u32,
    #[comptime] product: MmaProduct,
) {
    let pairs = comptime!((product.n / 64) as u32);
    let (a_along_k, b_along_k) = comptime!((product.a == Order::Rows, product.b == Order::Columns));
    #[unroll]
    for i in 0..4u32 {
        let (row, chunk) = if comptime!(a_along_k) {
            (lanes.a_row + comptime!(i * 16), lanes.a_chunk + comptime!(step * 2))
        } else {
            (lanes.a_row + comptime!(step * 16), lanes.a_chunk + comptime!(i * 2))
        };
        let from = lanes.a_from + a_offset + row * 128 + ((chunk ^ lanes.low) << 4);
        left[comptime!((step % 2 * 4 + i) as usize)] = load_matrices(from, comptime!(!a_along_k));
    }
    #[unroll]
    for j in 0..pairs {
        let (row, chunk) = if comptime!(b_along_k) {
            let row = lanes.b_first + lanes.b_row + comptime!(j * 16);
            (row, lanes.b_chunk + comptime!(step * 2))
        } else {
            let chunk = lanes.b_first / 8 + lanes.b_chunk + comptime!(j * 2);
            (lanes.b_row + comptime!(step * 16), chunk)
        };
        let from = lanes.b_from + b_offset + row * 128 + ((chunk ^ lanes.low) << 4);
        right[comptime!((step % 2 * pairs + j) as usize)] =
            load_matrices(from, comptime!(!b_along_k));
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
    let pairs = comptime!(product.pairs());
    let (l, r) = comptime!(((step % 2 * 4) as usize, (step as usize % 2) * pairs));
    #[unroll]
    for j in 0..pairs {
        #[unroll]
        for i in 0..4usize {
            let at = comptime!((i * pairs + j) * 2);
            let (a, b) = (left[comptime!(l + i)], right[comptime!(r + j)]);
            let (b0, b1) = (b.extract(0usize), b.extract(1usize));
            sums[at] = mma_16x8x16(a, b0, b1, sums[at], product.half);
            let (b2, b3) = (b.extract(2usize), b.extract(3usize));
            sums[at + 1] = mma_16x8x16(a, b2, b3, sums[at + 1], product.half);
        }
    }
}

/// Stores the sums of a tile, two neighbours at once; rows are an even number of elements apart.
#[cube]
pub(super) fn store<C: Float, O: Float, Two: Size>(
    sums: &Array<Vector<f32, Const<4>>>,
    out: &mut [Vector<O, Two>],
    add: &[C],
    addend: &Addend,
    lanes: &Lanes,
    place: &Place,
    m: u32,
    n: u32,
    pitch: usize,
    alpha: f32,
    #[comptime] product: MmaProduct,
) {
    let pairs = comptime!(product.pairs());
    let row0 = place.row * comptime!(ROWS as u32) + lanes.row;
    let col0 = place.col * comptime!(product.n as u32) + lanes.col;
    let matrix = place.out as usize * (m as usize * pitch);
    let more = place.out as usize * addend.batch;
    #[unroll]
    for i in 0..4usize {
        #[unroll]
        for j in 0..comptime!(2 * pairs) {
            #[unroll]
            for half in 0..2usize {
                let row = row0 + comptime!((i * 16 + half * 8) as u32);
                let col = col0 + comptime!((j * 8) as u32);
                if row < m && col < n {
                    let mut two = Vector::<f32, Two>::empty();
                    #[unroll]
                    for e in 0..2usize {
                        let sum = sums[comptime!(i * 2 * pairs + j)];
                        let mut x = sum.extract(comptime!(half * 2 + e));
                        let col = col + comptime!(e as u32);
                        if comptime!(product.epilogue.scaled) {
                            x *= alpha;
                        }
                        if comptime!(product.epilogue.add) && col < n {
                            let at = more + row as usize * addend.row + col as usize * addend.col;
                            x += addend.beta * f32::cast_from(add[at]);
                        }
                        if comptime!(product.walk.triangles.out_lower) && col > row {
                            x = 0.0f32;
                        }
                        two.insert(e, x);
                    }
                    // Of an odd width the second one is in the row's padding.
                    let at = matrix + row as usize * pitch + col as usize;
                    out[at / 2] = Vector::cast_from(two);
                }
            }
        }
    }
}
