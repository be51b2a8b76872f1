//! Tiles through shared memory, done right.
//!
//! The version that one writes first is wrong: `for k0 in (col..=row).step_by(SIDE)`. A unit's
//! column begins its loop, its row ends it, so the units of a cube go round differently often and
//! start at different k. But a tile in shared memory belongs to all of them: while one unit multiplies
//! block k0, its neighbour has loaded another into the same place, and the units that leave the loop
//! first never reach the barrier that the others wait at. That is undefined; in practice it returns
//! numbers that are wrong by a lot, quickly.
//!
//! Here the bounds are the cube's, the same for all its units. What a unit must not count is zero in
//! the tile, and no unit leaves before the last barrier.

use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Side of a tile.
const SIDE: usize = 16;

#[cube(launch_unchecked)]
fn tiled_kernel<E: Float>(a: &[E], b: &[E], y: &mut [E], n: usize, #[define(E)] _dtype: ElemType) {
    let mut a_tile = Shared::<[f32]>::new_slice(comptime!(SIDE * SIDE));
    let mut b_tile = Shared::<[f32]>::new_slice(comptime!(SIDE * SIDE));
    let (row0, col0) = (CUBE_POS_Y as usize * SIDE, CUBE_POS_X as usize * SIDE);
    let (down, across) = (UNIT_POS_Y as usize, UNIT_POS_X as usize);
    let (row, col) = (row0 + down, col0 + across);

    let mut sum = 0.0f32;
    // Blocks from the tile's first column to its last row: none in a tile above the diagonal.
    for k0 in range_stepped(col0, min(row0 + SIDE, n), SIDE) {
        let (k_a, k_b) = (k0 + across, k0 + down);
        let mut left = 0.0f32;
        if row < n && k_a <= row {
            left = f32::cast_from(a[row * n + k_a]);
        }
        let mut right = 0.0f32;
        if k_b < n && col <= k_b {
            right = f32::cast_from(b[k_b * n + col]);
        }
        a_tile[down * SIDE + across] = left;
        b_tile[down * SIDE + across] = right;
        sync_cube();
        for k in 0..SIDE {
            sum += a_tile[down * SIDE + k] * b_tile[k * SIDE + across];
        }
        // Nobody loads the next block while this one is read.
        sync_cube();
    }
    if row < n && col < n {
        y[row * n + col] = E::cast_from(sum);
    }
}

/// A cube for every tile.
pub(super) fn launch(a: CubeTensor, b: CubeTensor, y: &CubeTensor) {
    let n = y.meta.shape()[0];
    let cubes = n.div_ceil(SIDE) as u32;
    let (client, dtype) = (y.client.clone(), y.dtype);
    // SAFETY: every index is checked against n, through the triangle where that is narrower.
    unsafe {
        tiled_kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes, cubes, 1),
            CubeDim::new_2d(SIDE as u32, SIDE as u32),
            a.into_buffer_arg(),
            b.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            n,
            dtype_to_elem_type(dtype),
        );
    }
}
