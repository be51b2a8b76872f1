//! The other cheat: it writes every element, and nothing into them.

use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

#[cube(launch_unchecked)]
fn zeros_kernel<E: Float>(y: &mut [E], elements: usize, #[define(E)] _dtype: ElemType) {
    if ABSOLUTE_POS < elements {
        y[ABSOLUTE_POS] = E::cast_from(0.0f32);
    }
}

/// Zeros everywhere.
pub(super) fn launch(y: &CubeTensor) {
    let n = y.meta.shape()[0];
    let (client, dtype) = (y.client.clone(), y.dtype);
    // SAFETY: the index is checked.
    unsafe {
        zeros_kernel::launch_unchecked(
            &client,
            // A row of cubes for each row: within every device's limits.
            CubeCount::Static(n.div_ceil(256) as u32, n as u32, 1),
            CubeDim::new_1d(256),
            y.clone().into_buffer_arg(),
            n * n,
            dtype_to_elem_type(dtype),
        );
    }
}
