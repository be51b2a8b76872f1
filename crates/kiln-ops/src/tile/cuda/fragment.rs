//! The accumulators of tensor cores: which unit holds which sum, and what is done with them in registers.
//!
//! mma.sync and wgmma spread sums alike. A warp holds 16 rows; element i of a unit is [`offset`] rows and columns
//! from the unit's [`origin`]: 4j + e is in row lane / 4 + 8·(e / 2) and column 8j + 2·(lane % 4) + e % 2. So a
//! unit has elements of two rows, and the four units of a quad have a row together. Of a warpgroup warp w has
//! rows 16w to 16w + 15.

use super::ptx::Float16;
use crate::reduce::{Shuffle, shuffle};
use crate::tile::finish::Finish;
use cubecl::prelude::*;

/// Rows and columns from a unit's origin to its element `i`.
pub(crate) const fn offset(i: usize) -> (u32, u32) {
    ((i % 4 / 2 * 8) as u32, (i / 4 * 8 + i % 2) as u32)
}

/// Row and column of the first element of a unit, in the fragment of its warps.
#[cube]
pub(crate) fn origin(unit: u32) -> (u32, u32) {
    (unit / 32 * 16 + unit % 32 / 4, unit % 4 * 2)
}

/// sums + beta · C, of the elements inside `m` × `n`. `row` and `col` are those of the unit's origin.
#[cube]
pub(crate) fn add_matrix<C: Float, N: Size>(
    sums: Vector<f32, N>,
    c: &[C],
    finish: &Finish,
    beta: f32,
    batch: u32,
    row: u32,
    col: u32,
    m: u32,
    n: u32,
    #[comptime] count: usize,
) -> Vector<f32, N> {
    let mut added = Array::<Vector<f32, N>>::new(1usize);
    added[0] = sums;
    let base = batch as usize * finish.batch;
    #[unroll]
    for i in 0..count {
        let row = row + comptime!(offset(i).0);
        let col = col + comptime!(offset(i).1);
        if row < m && col < n {
            let more = c[base + row as usize * finish.row + col as usize * finish.col];
            let mut changed = added[0];
            changed.insert(i, changed.extract(i) + beta * f32::cast_from(more));
            added[0] = changed;
        }
    }
    added[0]
}

/// The sums with those above the diagonal replaced by zeros. Without a branch, which would double the
/// registers of the sums, and with one comparison for each distance from the diagonal.
#[cube]
pub(crate) fn zero_above<N: Size>(sums: Vector<f32, N>, row: u32, col: u32) -> Vector<f32, N> {
    // How far to the right of its first sum a unit may go in that sum's row.
    let reach = i32::cast_from(row) - i32::cast_from(col);
    let mut masked = sums;
    #[unroll]
    for i in 0..N::value() {
        let right = comptime!(offset(i).1 as i32 - offset(i).0 as i32);
        masked.insert(i, select(right > reach, 0.0f32, sums.extract(i)));
    }
    masked
}

/// The largest of the numbers of a quad.
#[cube]
pub(crate) fn quad_max(x: f32) -> f32 {
    let largest = max(x, shuffle(x, 1u32, Shuffle::Xor, true));
    max(largest, shuffle(largest, 2u32, Shuffle::Xor, true))
}

/// The sum of the numbers of a quad, in a fixed order.
#[cube]
pub(crate) fn quad_sum(x: f32) -> f32 {
    let sum = x + shuffle(x, 1u32, Shuffle::Xor, true);
    sum + shuffle(sum, 2u32, Shuffle::Xor, true)
}

/// The largest of each of the two rows of a unit, over the quad that shares them. There are `count` sums: the
/// vector is padded to a power of two, with zeros that are no scores.
#[cube]
pub(crate) fn row_max<N: Size>(
    sums: Vector<f32, N>,
    #[comptime] count: usize,
) -> Vector<f32, Const<2>> {
    let mut rows = Vector::<f32, Const<2>>::empty();
    #[unroll]
    for r in 0..2usize {
        let mut largest = sums.extract(comptime!(2 * r));
        #[unroll]
        for i in 0..count {
            if comptime!(i % 4 / 2 == r) {
                largest = max(largest, sums.extract(i));
            }
        }
        rows.insert(r, quad_max(largest));
    }
    rows
}

/// The sums of the two rows of a unit over the quad that shares them, from what each unit added up of its own; in a fixed
/// order.
#[cube]
pub(crate) fn row_sum(parts: Vector<f32, Const<2>>) -> Vector<f32, Const<2>> {
    let mut rows = Vector::<f32, Const<2>>::empty();
    #[unroll]
    for r in 0..2usize {
        rows.insert(r, quad_sum(parts.extract(r)));
    }
    rows
}

/// Each row times its factor.
#[cube]
pub(crate) fn scale_rows<N: Size>(
    sums: Vector<f32, N>,
    factors: Vector<f32, Const<2>>,
) -> Vector<f32, N> {
    let mut scaled = sums;
    #[unroll]
    for i in 0..N::value() {
        scaled.insert(i, sums.extract(i) * factors.extract(comptime!(i % 4 / 2)));
    }
    scaled
}

/// The first `2 · pairs` sums rounded, in pairs, as the left operand of a product over their columns: the layouts of
/// accumulators and of operands in registers are one.
#[cube]
pub(crate) fn operand<N: Size, P: Size>(
    sums: Vector<f32, N>,
    #[comptime] pairs: usize,
    #[comptime] float: Float16,
) -> Vector<u32, P> {
    let held = P::value();
    let rounded: Vector<u32, P>;
    gpu_asm!(
        "// {o} {i}", "{body}",
        o = out(_) rounded, i = in(_) sums, body = const round(float, held, pairs)
    );
    rounded
}

/// Rounds pairs of neighbouring elements of the inputs, which follow `held` outputs.
fn round(float: Float16, held: usize, pairs: usize) -> String {
    let pair = |i: usize| {
        let [high, low] = [held + 2 * i + 1, held + 2 * i];
        format!("cvt.rn.{}x2.f32 %{i}, %{high}, %{low};\n", float.name())
    };
    (0..pairs).map(pair).collect()
}
