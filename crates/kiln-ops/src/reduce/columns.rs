//! The second stage of a sum over rows: partial sums of cubes added in order, column by column.

use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Columns of a cube.
const COLUMNS: u32 = 32;

#[cube(launch_unchecked, address_type = "dynamic")]
fn column_sum_kernel<W: Float>(
    partial: &[f32],
    out: &mut [W],
    rows: usize,
    width: usize,
    #[comptime] groups: u32,
    #[define(W)] _dtype: ElemType,
) {
    let column = CUBE_POS * comptime!(COLUMNS as usize) + UNIT_POS_X as usize;
    let mut shared = Shared::<[f32]>::new_slice(comptime!((COLUMNS * groups) as usize));
    let mut sum = 0.0f32;
    if column < width {
        for row in range_stepped(UNIT_POS_Y as usize, rows, comptime!(groups as usize)) {
            sum += partial[row * width + column];
        }
    }
    shared[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS_Y == 0 && column < width {
        let mut total = shared[UNIT_POS_X as usize];
        #[unroll]
        for group in 1..groups {
            total += shared[(group * COLUMNS) as usize + UNIT_POS_X as usize];
        }
        out[column] = W::cast_from(total);
    }
}

/// Adds the `rows` rows of `partial` (f32, contiguous) into `out`.
pub(crate) fn column_sum(partial: CubeTensor, rows: usize, out: &CubeTensor) {
    let client = &out.client;
    let width = out.meta.shape().num_elements();
    let groups = (client.properties().hardware.max_units_per_cube / COLUMNS).min(16);
    // SAFETY: columns are checked against the width, rows against their number.
    unsafe {
        column_sum_kernel::launch_unchecked(
            client,
            launch::grid(client, width.div_ceil(COLUMNS as usize)),
            CubeDim::new_2d(COLUMNS, groups),
            launch::address_type(&[&partial, out]),
            partial.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            rows,
            width,
            groups,
            dtype_to_elem_type(out.dtype),
        );
    }
}
