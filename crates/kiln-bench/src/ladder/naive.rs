//! One unit for each output; and the same kernel in a launch of the wrong shape.

use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Side of a cube.
const SIDE: u32 = 16;

/// Row and column are the unit's y and x: right in a launch of two dimensions, and only there.
#[cube(launch_unchecked)]
fn naive_kernel<E: Float>(a: &[E], b: &[E], y: &mut [E], n: usize, #[define(E)] _dtype: ElemType) {
    let (row, col) = (ABSOLUTE_POS_Y as usize, ABSOLUTE_POS_X as usize);
    if row < n && col < n {
        let mut sum = 0.0f32;
        // Above the diagonal there is no k, and zero is written all the same.
        for k in col..row + 1 {
            sum += f32::cast_from(a[row * n + k]) * f32::cast_from(b[k * n + col]);
        }
        y[row * n + col] = E::cast_from(sum);
    }
}

/// A unit for every element.
pub(super) fn launch(a: CubeTensor, b: CubeTensor, y: &CubeTensor) {
    let cubes = (y.meta.shape()[0] as u32).div_ceil(SIDE);
    run(a, b, y, CubeCount::Static(cubes, cubes, 1), CubeDim::new_2d(SIDE, SIDE));
}

/// The cheat: units enough for every element, but in a line. Every y is 0, so every unit is in
/// row 0, and the rows below it are what was in that memory before.
pub(super) fn launch_as_rows(a: CubeTensor, b: CubeTensor, y: &CubeTensor) {
    let cubes = (y.meta.shape()[0] as u32).div_ceil(SIDE * SIDE).max(1);
    run(a, b, y, CubeCount::Static(cubes, 1, 1), CubeDim::new_1d(SIDE * SIDE));
}

fn run(a: CubeTensor, b: CubeTensor, y: &CubeTensor, count: CubeCount, dim: CubeDim) {
    let n = y.meta.shape()[0];
    let (client, dtype) = (y.client.clone(), y.dtype);
    // SAFETY: row and column are checked, and k lies between them.
    unsafe {
        naive_kernel::launch_unchecked(
            &client,
            count,
            dim,
            a.into_buffer_arg(),
            b.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            n,
            dtype_to_elem_type(dtype),
        );
    }
}
