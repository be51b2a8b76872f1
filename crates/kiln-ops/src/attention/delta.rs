//! D = rowsum(dO · O), which every backward needs of each row.

use super::problem::{HeadsView, Sizes, vector_size};
use crate::launch;
use crate::reduce::{self, RowUnits, Sums};
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;

/// Distances of batches, heads and rows, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Strides {
    batch: usize,
    head: usize,
    row: usize,
}

#[cube]
impl Strides {
    fn at(&self, batch: usize, head: usize, row: usize) -> usize {
        batch * self.batch + head * self.head + row * self.row
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn delta_kernel<E: Float, N: Size>(
    dy: &[Vector<E, N>],
    o: &[Vector<E, N>],
    delta: &mut [f32],
    dy_strides: Strides,
    o_strides: Strides,
    rows: usize,
    heads: usize,
    queries: usize,
    vectors: usize,
    #[comptime] units: RowUnits,
    #[define(E)] _dtype: ElemType,
) {
    let at = CUBE_POS * comptime!(units.rows as usize) + UNIT_POS_Y as usize;
    // Rows past the end compute the last one again and write nothing: all units meet the barriers.
    let row = min(at, rows - 1);
    let (stack, query) = (row / queries, row % queries);
    let (batch, head) = (stack / heads, stack % heads);
    let dy_row = dy_strides.at(batch, head, query);
    let o_row = o_strides.at(batch, head, query);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(units.shared()));
    let mut sums = Vector::<f32, N>::new(0.0f32);
    for i in range_stepped(UNIT_POS_X as usize, vectors, comptime!(units.units as usize)) {
        sums +=
            Vector::<f32, N>::cast_from(dy[dy_row + i]) * Vector::<f32, N>::cast_from(o[o_row + i]);
    }
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = reduce::vector::<Sums<1>, N>(sums);
    reduce::rows::<Sums<1>>(&mut sum, &mut shared, units);
    if at < rows && UNIT_POS_X == 0 {
        delta[row] = sum[0];
    }
}

/// D, `[B, H, T]` in f32.
pub(super) fn delta(dy: &HeadsView, o: &HeadsView, sizes: &Sizes, delta: &CubeTensor) {
    let client = &delta.client;
    let size = vector_size(&[dy, o], sizes.width, 16);
    let vectors = sizes.width / size;
    let plane = launch::plane_size(client);
    let most = if plane > 1 { plane } else { 32 };
    let units = (vectors.next_power_of_two() as u32).min(most);
    let cube = UNITS.min(client.properties().hardware.max_units_per_cube);
    let units = RowUnits::new(client, units, cube / units);
    let rows = sizes.batches * sizes.heads * sizes.queries;
    let address = launch::address_type(&[&dy.tensor, &o.tensor]);
    let strides = |view: &HeadsView| {
        let all = [view.batch_stride, view.head_stride, view.row_stride];
        let [batch, head, row] = all.map(|stride| stride / size);
        StridesLaunch::new(batch, head, row)
    };
    launch::plans::note("attention delta", &(&units, size, address), &[]);
    // SAFETY: rows are checked against their number, and a row has so many vectors.
    unsafe {
        delta_kernel::launch_unchecked(
            client,
            launch::grid(client, rows.div_ceil(units.rows as usize)),
            units.cube_dim(),
            address,
            size,
            dy.tensor.clone().into_buffer_arg(),
            o.tensor.clone().into_buffer_arg(),
            delta.clone().into_buffer_arg(),
            strides(dy),
            strides(o),
            rows,
            sizes.heads,
            sizes.queries,
            vectors,
            units,
            dtype_to_elem_type(dy.tensor.dtype),
        );
    }
}
