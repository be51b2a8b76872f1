//! The kernel: a cube has one of the sums, and takes every so many chunks of each tensor.

use super::{CHUNK, OP};
use crate::autodiff::{List, MOST};
use crate::launch::{self, Kind, Rows};
use crate::reduce::{self, RowUnits, Sums};
use crate::swiglu::kernel::{flatten, place};
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::CubeBackend;
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
    /// Places for tensors: a power of two, so that few kernels are compiled.
    count: usize,
    /// Whether they are rows at a distance.
    strided: bool,
}

impl Plan {
    fn new(client: &Client, size: usize, count: usize, strided: bool) -> Self {
        // Without planes each level of a tree is a barrier, which software drivers pay for.
        let most = if launch::plane_size(client) > 1 { UNITS } else { UNITS / 4 };
        let units = most.min(client.properties().hardware.max_units_per_cube);
        Self { row: RowUnits::new(client, units, 1), vectors: CHUNK / size, count, strided }
    }

    /// Vectors of a chunk for each unit.
    fn own(&self) -> usize {
        self.vectors.div_ceil(self.row.units as usize)
    }
}

/// A tensor. Sizes are in vectors: elements, those of a row, and the distance of rows.
#[derive(CubeType, CubeLaunch)]
struct Squared<E: Float, N: Size> {
    x: Box<[Vector<E, N>]>,
    vectors: usize,
    width: usize,
    stride: usize,
    /// The sum of its first chunk.
    first: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn sum_squares_kernel<E: Float, N: Size>(
    of: &Sequence<Squared<E, N>>,
    sums: &[f32],
    out: &mut [f32],
    count: usize,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    let unit = UNIT_POS_X as usize;
    let own = comptime!(plan.own());
    let mut squares = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for t in 0..plan.count {
        let of = &of[t];
        let chunks = of.vectors.div_ceil(plan.vectors);
        // The cubes past the last sum have none of their own.
        let sum = min(CUBE_POS, count - 1);
        let start = select(sum < of.first, sum + count, sum) - of.first;
        for chunk in range_stepped(start, chunks, count) {
            let first = chunk * plan.vectors;
            let end = min(first + plan.vectors, of.vectors);
            let mut held = Array::<Vector<E, N>>::new(own);
            #[unroll]
            for k in 0..own {
                // Units past the end load the last vector again.
                let i = min(first + unit + comptime!(k * plan.row.units as usize), of.vectors - 1);
                held[k] = of.x[place(i, of.width, of.stride, plan.strided)];
            }
            #[unroll]
            for k in 0..own {
                if first + unit + comptime!(k * plan.row.units as usize) < end {
                    let value = Vector::<f32, N>::cast_from(held[k]);
                    squares += value * value;
                }
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

/// A tensor on the host.
struct Addend {
    x: Rows,
    kind: Kind,
    /// Chunks of the batch before it.
    first: usize,
}

impl Addend {
    fn new(x: CubeTensor, first: usize) -> Self {
        let (client, dtype) = (x.client.clone(), x.dtype);
        let mut rows = [Rows::new(x)];
        let strided = flatten(&mut rows);
        let [x] = rows;
        let size = launch::vector_size(&client, dtype, &[&x]);
        let address = launch::address_type(&[&x.tensor]);
        Self { x, kind: Kind { dtype, size, strided, address }, first }
    }

    fn elements(&self) -> usize {
        self.x.tensor.meta.num_elements()
    }

    fn argument<E: Float, N: Size>(&self, vectors: usize, count: usize) -> SquaredLaunch<E, N> {
        let size = self.kind.size;
        SquaredLaunch::new(
            self.x.tensor.clone().into_buffer_arg(),
            vectors,
            self.x.width / size,
            self.x.stride / size,
            self.first % count,
        )
    }
}

/// Buffers beside those of the tensors.
const SUMS: u32 = 2;

/// A launch for as many tensors as are of one [`Kind`].
pub(super) fn sum_squares(
    xs: List<CubeBackend>,
    sums: CubeTensor,
    firsts: Vec<usize>,
) -> CubeTensor {
    let mut sums = into_contiguous(sums);
    let xs = xs.into_vec().into_iter().zip(firsts);
    let all: Vec<Addend> = xs.map(|(x, first)| Addend::new(x, first)).collect();
    let bound = sums.client.properties().hardware.max_bindings.saturating_sub(SUMS);
    for some in launch::alike(all, |of| of.kind, MOST.min(bound as usize)) {
        sums = add(&some, sums);
    }
    sums
}

/// One launch.
fn add(all: &[Addend], mut sums: CubeTensor) -> CubeTensor {
    let Kind { dtype, size, strided, address } = all[0].kind;
    let client = sums.client.clone();
    let count = sums.meta.num_elements();
    let reuse = launch::in_place(&mut sums, OP, "y");
    let out = match reuse {
        true => sums.clone(),
        false => launch::output(&sums, OP, "y", sums.meta.shape().clone(), sums.dtype),
    };
    let places = all.len().next_power_of_two();
    let plan = Plan::new(&client, size, places, strided);
    let chunks = |of: &Addend| of.elements().div_ceil(CHUNK);
    // Sums that nothing comes to stay as they are.
    let furthest = all.iter().map(|of| of.first % count + chunks(of)).max();
    let cubes = if reuse { furthest.unwrap_or(count).min(count) } else { count };
    let several = all.iter().any(|of| chunks(of) > count);
    let ways = [
        ("several chunks a sum", several),
        ("in place", reuse),
        ("several tensors", all.len() > 1),
    ];
    launch::plans::note("sums of squares", &(&plan, size, address), &ways);
    let address = address.max(launch::address_type(&[&sums]));
    let mut of = SequenceArg::new();
    all.iter().for_each(|one| of.push(one.argument(one.elements() / size, count)));
    (all.len()..places).for_each(|_| of.push(all[0].argument(0, count)));
    // SAFETY: vectors are clamped to their number, sums are checked against theirs; one that is in place is read and
    // written by one unit.
    unsafe {
        sum_squares_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            plan.row.cube_dim(),
            address,
            size,
            of,
            sums.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            count,
            plan,
            dtype_to_elem_type(dtype),
        );
    }
    out
}
