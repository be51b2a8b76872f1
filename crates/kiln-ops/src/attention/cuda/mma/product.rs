//! The two products that attention is made of, by a warp, and what is between them in registers.
//!
//! Sums are fragments of 16 rows and 8 columns: those of 16 rows `i` stand at `i · 2 · cols ..`, `cols` counting 16
//! columns. What is in shared memory are rows of heads, [`Rows`](super::rows::Rows). Fragments of right operands are
//! loaded one ahead of the instructions that multiply them.

use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// A warp's share of a product, in sixteens, and the bytes from one row in shared memory to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Product {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) depth: usize,
    pub(super) pitch: u32,
    pub(super) float: Float16,
}

impl Product {
    pub(super) fn sums(&self) -> usize {
        2 * self.rows * self.cols
    }
}

/// Sums of nothing.
#[cube]
pub(super) fn zeros(#[comptime] product: Product) -> Array<Vector<f32, Const<4>>> {
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(product.sums()));
    #[unroll]
    for i in 0..comptime!(product.sums()) {
        sums[i] = Vector::new(0.0f32);
    }
    sums
}

/// One number for each row of a lane.
#[cube]
pub(super) fn for_rows(number: f32, #[comptime] product: Product) -> Array<f32> {
    let mut numbers = Array::<f32>::new(comptime!(2 * product.rows));
    #[unroll]
    for i in 0..comptime!(2 * product.rows) {
        numbers[i] = number;
    }
    numbers
}

/// Which rows of 8×8 matrices a lane names, in bytes from the first: of a left operand, or of a right one whose rows
/// are those of the sum; and of a right one whose rows are the columns.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Lanes {
    pub(super) along: u32,
    pub(super) across: u32,
}

#[cube]
pub(super) fn lanes(#[comptime] pitch: u32) -> Lanes {
    let lane = UNIT_POS % 32;
    Lanes {
        along: lane % 16 * pitch + lane / 16 * 16,
        across: (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 16,
    }
}

/// Rows of the left operand times rows of the right one: Q·Kᵀ. `left` and `right` are addresses of this lane,
/// [along](Lanes) and [across](Lanes).
#[cube]
pub(super) fn multiply_rows(
    sums: &mut Array<Vector<f32, Const<4>>>,
    left: u32,
    right: u32,
    #[comptime] product: Product,
) {
    let (rows, cols, depth) = comptime!((product.rows, product.cols, product.depth));
    let pitch = comptime!(product.pitch);
    // Left ones of 32 rows would take too many registers.
    let ahead = comptime!(rows == 1);
    #[unroll]
    for i in 0..comptime!(product.sums()) {
        sums[i] = Vector::new(0.0f32);
    }
    let mut a = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * rows));
    let mut b = Array::<Vector<u32, Const<4>>>::new(2usize);
    #[unroll]
    for i in 0..rows {
        a[i] = load_matrices(left + comptime!(i as u32 * 16 * pitch), false);
    }
    b[0] = load_matrices(right, false);
    #[unroll]
    for step in 0..depth {
        if comptime!(!ahead && step > 0) {
            #[unroll]
            for i in 0..rows {
                let from = left + comptime!(i as u32 * 16 * pitch + step as u32 * 32);
                a[comptime!(step % 2 * rows + i)] = load_matrices(from, false);
            }
        }
        #[unroll]
        for j in 0..cols {
            let at = comptime!(step * cols + j);
            if comptime!(at + 1 < depth * cols) {
                let (step, j) =
                    comptime!(((at as u32 + 1) / cols as u32, (at as u32 + 1) % cols as u32));
                let from = right + comptime!(j * 16 * pitch + step * 32);
                b[comptime!((at + 1) % 2)] = load_matrices(from, false);
            }
            if comptime!(ahead && j + 1 == cols && step + 1 < depth) {
                let from = left + comptime!((step as u32 + 1) * 32);
                a[comptime!((step + 1) % 2)] = load_matrices(from, false);
            }
            let right = b[comptime!(at % 2)];
            #[unroll]
            for i in 0..rows {
                let left = a[comptime!(step % 2 * rows + i)];
                let to = comptime!(2 * (i * cols + j));
                sums[to] = multiply(left, right, sums[to], 0usize, product.float);
                sums[to + 1] = multiply(left, right, sums[to + 1], 1usize, product.float);
            }
        }
    }
}

/// Adds `weights`, rounded sums of a product before, times rows of the right operand: P·V. `right` is an address of
/// this lane [along](Lanes).
#[cube]
pub(super) fn multiply_columns(
    sums: &mut Array<Vector<f32, Const<4>>>,
    weights: &Array<Vector<u32, Const<4>>>,
    right: u32,
    #[comptime] product: Product,
) {
    let (rows, cols, depth) = comptime!((product.rows, product.cols, product.depth));
    let pitch = comptime!(product.pitch);
    let mut b = Array::<Vector<u32, Const<4>>>::new(2usize);
    b[0] = load_matrices(right, true);
    #[unroll]
    for step in 0..depth {
        #[unroll]
        for j in 0..cols {
            let at = comptime!(step * cols + j);
            if comptime!(at + 1 < depth * cols) {
                let (step, j) =
                    comptime!(((at as u32 + 1) / cols as u32, (at as u32 + 1) % cols as u32));
                let from = right + comptime!(step * 16 * pitch + j * 32);
                b[comptime!((at + 1) % 2)] = load_matrices(from, true);
            }
            let right = b[comptime!(at % 2)];
            #[unroll]
            for i in 0..rows {
                let left = weights[comptime!(i * depth + step)];
                let to = comptime!(2 * (i * cols + j));
                sums[to] = multiply(left, right, sums[to], 0usize, product.float);
                sums[to + 1] = multiply(left, right, sums[to + 1], 1usize, product.float);
            }
        }
    }
}

/// sum + left·right, of half `half` of the 16 columns of `right`.
#[cube]
fn multiply(
    left: Vector<u32, Const<4>>,
    right: Vector<u32, Const<4>>,
    sum: Vector<f32, Const<4>>,
    #[comptime] half: usize,
    #[comptime] float: Float16,
) -> Vector<f32, Const<4>> {
    let (low, high) = (right.extract(comptime!(2 * half)), right.extract(comptime!(2 * half + 1)));
    mma_16x8x16(left, low, high, sum, float)
}

/// The sums of a product, rounded, as the left operand of another over its columns.
#[cube]
pub(super) fn round_sums(
    sums: &Array<Vector<f32, Const<4>>>,
    weights: &mut Array<Vector<u32, Const<4>>>,
    #[comptime] product: Product,
) {
    #[unroll]
    for i in 0..comptime!(product.rows * product.cols) {
        let (left, right) = (sums[comptime!(2 * i)], sums[comptime!(2 * i + 1)]);
        let mut rounded = Vector::<u32, Const<4>>::empty();
        rounded
            .insert(0usize, round_pair(left.extract(0usize), left.extract(1usize), product.float));
        rounded
            .insert(1usize, round_pair(left.extract(2usize), left.extract(3usize), product.float));
        rounded.insert(
            2usize,
            round_pair(right.extract(0usize), right.extract(1usize), product.float),
        );
        rounded.insert(
            3usize,
            round_pair(right.extract(2usize), right.extract(3usize), product.float),
        );
        weights[i] = rounded;
    }
}
