//! The kernel: a cube has one of the sums, and takes every so many chunks.

use super::{CHUNK, OP};
use crate::launch::{self, Rows};
use crate::reduce::{self, RowUnits, Sums};
use crate::swiglu::kernel::{flatten, place};
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;

/// Units of a cube and what they do, fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    row: RowUnits,
    /// Vectors of a chunk.
    vectors: usize,
    /// Whether x is rows at a distance.
    strided: bool,
}

impl Plan {
    fn new(client: &Client, size: usize, strided: bool) -> Self {
        // Without planes each level of a tree is a barrier, which software drivers pay for.
        let most = if launch::plane_size(client) > 1 { UNITS } else { UNITS / 4 };
        let units = most.min(client.properties().hardware.max_units_per_cube);
        Self { row: RowUnits::new(client, units, 1), vectors: CHUNK / size, strided }
    }

    /// Vectors of a chunk for each unit.
    fn own(&self) -> usize {
        self.vectors.div_ceil(self.row.units as usize)
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_squares_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    sums: &[f32],
    out: &mut [f32],
    vectors: usize,
    width: usize,
    stride: usize,
    count: usize,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    let unit = UNIT_POS_X as usize;
    let own = comptime!(plan.own());
    let mut squares = Vector::<f32, N>::new(0.0f32);
    let chunks = vectors.div_ceil(plan.vectors);
    for chunk in range_stepped(CUBE_POS, chunks, count) {
        let first = chunk * plan.vectors;
        let end = min(first + plan.vectors, vectors);
        let mut held = Array::<Vector<E, N>>::new(own);
        #[unroll]
        for k in 0..own {
            // Units past the end load the last vector again.
            let i = min(first + unit + comptime!(k * plan.row.units as usize), vectors - 1);
            held[k] = x[place(i, width, stride, plan.strided)];
        }
        #[unroll]
        for k in 0..own {
            if first + unit + comptime!(k * plan.row.units as usize) < end {
                let value = Vector::<f32, N>::cast_from(held[k]);
                squares += value * value;
            }
        }
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.row.shared()));
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = reduce::vector::<Sums<1>, N>(squares);
    reduce::rows::<Sums<1>>(&mut sum, &mut shared, plan.row);
    if unit == 0 && CUBE_POS < count {
        out[CUBE_POS] = sums[CUBE_POS] + sum[0];
    }
}

pub(super) fn sum_squares(x: CubeTensor, sums: CubeTensor) -> CubeTensor {
    let sums = into_contiguous(sums);
    let (client, dtype) = (x.client.clone(), x.dtype);
    let [elements, count] = [&x, &sums].map(|tensor| tensor.meta.num_elements());
    let reuse = launch::reusable(&sums);
    let out = match reuse {
        true => sums.clone(),
        false => launch::output(&sums, OP, "y", sums.meta.shape().clone(), sums.dtype),
    };
    let mut rows = [Rows::new(x)];
    let strided = flatten(&mut rows);
    let [x] = rows;
    let size = launch::vector_size(&client, dtype, &[&x]);
    let plan = Plan::new(&client, size, strided);
    let chunks = elements.div_ceil(CHUNK);
    // Sums that nothing comes to stay as they are.
    let cubes = if reuse { chunks.min(count) } else { count };
    let address = launch::address_type(&[&x.tensor, &sums]);
    let ways = [("several chunks a sum", chunks > count), ("in place", reuse)];
    launch::plans::note("sums of squares", &(&plan, size, address), &ways);
    // SAFETY: vectors are clamped to their number, sums are checked against theirs; one that is in place is read and
    // written by one unit.
    unsafe {
        sum_squares_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            plan.row.cube_dim(),
            address,
            size,
            x.tensor.clone().into_buffer_arg(),
            sums.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            elements / size,
            x.width / size,
            x.stride / size,
            count,
            plan,
            dtype_to_elem_type(dtype),
        );
    }
    out
}
