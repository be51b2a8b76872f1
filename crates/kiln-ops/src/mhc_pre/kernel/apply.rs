//! The norm of a token and its layer's input: a pass over x, of which a unit holds its columns of all streams.

use super::token::{Given, sigmoid};
use crate::exponential::has_ptx;
use crate::launch::{self, Rows};
use crate::reduce::{self, Combine, RowPlan, RowUnits, Sums};
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Vectors of a stream that a unit holds, before there are more units and after.
const CHUNKS: usize = 2;
const MOST: usize = 4;
/// Units of a cube, of one token or of several.
const UNITS: u32 = 128;

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    row: RowUnits,
    streams: usize,
    /// Vectors of a stream that a unit holds; 0: x is read twice.
    held: usize,
    ptx: bool,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Sizes {
    tokens: usize,
    /// Vectors of a stream.
    vectors: usize,
    /// From a row of x·φᵀ to the next.
    mix: usize,
    width: f32,
    norm_eps: f32,
    hc_eps: f32,
}

/// The sum of the squares of a vector.
#[cube]
fn squares<N: Size>(x: Vector<f32, N>) -> f32 {
    reduce::vector::<Sums<1>, N>(x * x)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn apply_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    mix: &[f32],
    alpha: &[f32],
    bias: &[f32],
    h_in: &mut [Vector<E, N>],
    norm: &mut [f32],
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    let n = comptime!(plan.streams);
    let units = comptime!(plan.row.units as usize);
    let held = comptime!(plan.held);
    let at = CUBE_POS * comptime!(plan.row.rows as usize) + UNIT_POS_Y as usize;
    // Those past the end do the last one again and write nothing: all units meet the barriers.
    let (token, own) = (min(at, sizes.tokens - 1), at < sizes.tokens);
    let first = token * n * sizes.vectors;
    let unit = UNIT_POS_X as usize;

    let mut vectors = Array::<Vector<E, N>>::new(comptime!((n * held).max(1)));
    let mut sum = Sums::<1>::identity();
    if comptime!(held > 0) {
        #[unroll]
        for chunk in 0..held {
            let at = min(unit + chunk * units, sizes.vectors - 1);
            #[unroll]
            for i in 0..n {
                vectors[comptime!(chunk * n + i)] = x[first + i * sizes.vectors + at];
            }
        }
        #[unroll]
        for chunk in 0..held {
            if unit + chunk * units < sizes.vectors {
                #[unroll]
                for i in 0..n {
                    sum[0] += squares::<N>(Vector::cast_from(vectors[comptime!(chunk * n + i)]));
                }
            }
        }
    } else {
        for at in range_stepped(unit, sizes.vectors, units) {
            #[unroll]
            for i in 0..n {
                sum[0] += squares::<N>(Vector::cast_from(x[first + i * sizes.vectors + at]));
            }
        }
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.row.shared()));
    sync_cube();
    reduce::rows::<Sums<1>>(&mut sum, &mut shared, plan.row);
    let r = f32::new(1.0) / f32::sqrt(sum[0] / sizes.width + sizes.norm_eps);
    if own && unit == 0 {
        norm[token] = r;
    }

    let mut weights = Array::<f32>::new(n);
    #[unroll]
    for i in 0..n {
        let y = mix[token * sizes.mix + i] * r;
        weights[i] = sigmoid(alpha[0] * y + bias[i], plan.ptx) + sizes.hc_eps;
    }
    if comptime!(held > 0) {
        #[unroll]
        for chunk in 0..held {
            let at = unit + chunk * units;
            let mut sum = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for i in 0..n {
                sum +=
                    Vector::new(weights[i]) * Vector::cast_from(vectors[comptime!(chunk * n + i)]);
            }
            if own && at < sizes.vectors {
                h_in[token * sizes.vectors + at] = Vector::cast_from(sum);
            }
        }
    } else {
        for at in range_stepped(unit, sizes.vectors, units) {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for i in 0..n {
                sum +=
                    Vector::new(weights[i]) * Vector::cast_from(x[first + i * sizes.vectors + at]);
            }
            if own {
                h_in[token * sizes.vectors + at] = Vector::cast_from(sum);
            }
        }
    }
}

/// h_in and the norms, from x as `[T, n·D]`.
pub(super) fn launch(x: CubeTensor, given: &Given<'_>, h_in: &CubeTensor) {
    let (d, options, client) = (given.d, given.options, x.client.clone());
    let address = launch::address_type(&[&x, h_in, given.mix]);
    // Streams, not tokens, are what vectors must divide.
    let streams =
        burn_cubecl::ops::reshape(x, burn::tensor::Shape::new([d.tokens * d.streams, d.width]));
    let (x, mix) = (Rows::new(streams), Rows::new(given.mix.clone()));
    let size = launch::vector_size(&client, x.tensor.dtype, &[&x]);
    let vectors = d.width / size;
    let rows = RowPlan::new(&client, vectors, CHUNKS, MOST, |_| UNITS);
    let plan = Plan {
        row: rows.row,
        streams: d.streams,
        held: if rows.resident { rows.chunks } else { 0 },
        ptx: has_ptx(&client),
    };
    launch::plans::note("mhc_pre apply", &(&plan, size, address), &[]);
    let cubes = d.tokens.div_ceil(plan.row.rows as usize);
    let sizes = SizesLaunch::new(
        d.tokens,
        vectors,
        mix.stride,
        (d.streams * d.width) as f32,
        options.norm_eps as f32,
        options.hc_eps as f32,
    );
    // SAFETY: tokens and columns are within the tensors: x has `streams` rows for one of h_in.
    unsafe {
        apply_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            plan.row.cube_dim(),
            address,
            size,
            x.tensor.into_buffer_arg(),
            mix.tensor.into_buffer_arg(),
            given.alpha.clone().into_buffer_arg(),
            given.bias.clone().into_buffer_arg(),
            h_in.clone().into_buffer_arg(),
            given.norm.clone().into_buffer_arg(),
            sizes,
            plan,
            dtype_to_elem_type(h_in.dtype),
        );
    }
}
