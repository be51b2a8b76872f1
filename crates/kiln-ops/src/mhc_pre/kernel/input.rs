//! dx: a unit keeps its columns of φ and goes over the tokens of a cube.

use super::Dims;
use crate::launch::{self, Rows};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Units of a cube, a vector of columns each.
const UNITS: u32 = 128;
/// Tokens of a cube.
const TOKENS: usize = 32;
/// Streams up to which a unit has two columns; of more φ takes too many registers.
const FEW: usize = 4;

/// What there is of each token.
pub(super) struct Gradients<'a> {
    /// The gradient of x·φᵀ.
    pub(super) dm: &'a CubeTensor,
    /// The factor of x.
    pub(super) along: &'a CubeTensor,
    /// That of dh_in, for each stream.
    pub(super) weights: &'a CubeTensor,
    /// What dx has from elsewhere, as `[T, n·D]`.
    pub(super) also: Option<&'a CubeTensor>,
}

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    streams: usize,
    rows: usize,
    /// There is a dh_in.
    direct: bool,
    /// dx has something from elsewhere.
    also: bool,
}

#[derive(CubeType, CubeLaunch)]
struct Inputs<E: Float, N: Size> {
    x: Box<[Vector<E, N>]>,
    phi: Box<[Vector<f32, N>]>,
    dh_in: Box<[Vector<E, N>]>,
    also: Box<[Vector<E, N>]>,
    dm: Box<[f32]>,
    along: Box<[f32]>,
    weights: Box<[f32]>,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Sizes {
    tokens: usize,
    /// Vectors of a stream.
    vectors: usize,
    /// Cubes beside each other.
    across: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn input_kernel<E: Float, N: Size>(
    inputs: &Inputs<E, N>,
    dx: &mut [Vector<E, N>],
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    let (n, rows) = comptime!((plan.streams, plan.rows));
    let width = sizes.vectors * n;
    let column = CUBE_POS % sizes.across * comptime!(UNITS as usize) + UNIT_POS_X as usize;
    let first = CUBE_POS / sizes.across * comptime!(TOKENS);
    if column < width {
        let stream = column / sizes.vectors;
        let within = column % sizes.vectors;
        let mut phi = Array::<Vector<f32, N>>::new(rows);
        #[unroll]
        for j in 0..rows {
            phi[j] = inputs.phi[j * width + column];
        }
        for token in first..min(first + comptime!(TOKENS), sizes.tokens) {
            let x = Vector::<f32, N>::cast_from(inputs.x[token * width + column]);
            let mut sum = Vector::new(inputs.along[token]) * x;
            if comptime!(plan.direct) {
                let dy = Vector::<f32, N>::cast_from(inputs.dh_in[token * sizes.vectors + within]);
                sum += Vector::new(inputs.weights[token * n + stream]) * dy;
            }
            #[unroll]
            for j in 0..rows {
                sum += Vector::new(inputs.dm[token * rows + j]) * phi[j];
            }
            // Last: where it is large the others are not rounded to it one by one.
            if comptime!(plan.also) {
                sum += Vector::<f32, N>::cast_from(inputs.also[token * width + column]);
            }
            dx[token * width + column] = Vector::cast_from(sum);
        }
    }
}

/// From x as `[T, n·D]` and φ.
pub(super) fn launch(
    x: &CubeTensor,
    phi: &CubeTensor,
    dh_in: Option<&CubeTensor>,
    gradients: Gradients<'_>,
    d: Dims,
    dx: &CubeTensor,
) {
    let client = &x.client;
    let shaped = |of: &CubeTensor, rows: usize| {
        Rows::new(burn_cubecl::ops::reshape(of.clone(), Shape::new([rows, d.width])))
    };
    let x = shaped(x, d.tokens * d.streams);
    let dy = dh_in.map(|dh_in| shaped(dh_in, d.tokens));
    let also = gradients.also.map(|also| shaped(also, d.tokens * d.streams));
    let phi = Rows::new(phi.clone());
    let read: Vec<&Rows> = [&x, &phi].into_iter().chain(&dy).chain(&also).collect();
    let fits = launch::vector_size(client, dx.dtype, &read);
    let size = fits.min(if d.streams <= FEW { 2 } else { 1 });
    let vectors = d.width / size;
    let (direct, also_there) = (dy.is_some(), also.is_some());
    let plan = Plan { streams: d.streams, rows: d.rows, direct, also: also_there };
    let address = launch::address_type(&[&x.tensor, &phi.tensor, dx, gradients.dm]);
    launch::plans::note("mhc_pre input", &(plan, size, address), &[]);
    let across = (vectors * d.streams).div_ceil(UNITS as usize);
    let [dy, also] =
        [dy, also].map(|of| of.map_or_else(|| launch::unused(dx, dx.dtype), |of| of.tensor));
    // SAFETY: columns and tokens are checked against their numbers.
    unsafe {
        input_kernel::launch_unchecked(
            client,
            launch::grid(client, across * d.tokens.div_ceil(TOKENS)),
            CubeDim::new_1d(UNITS),
            address,
            size,
            InputsLaunch::new(
                x.tensor.into_buffer_arg(),
                phi.tensor.into_buffer_arg(),
                dy.into_buffer_arg(),
                also.into_buffer_arg(),
                gradients.dm.clone().into_buffer_arg(),
                gradients.along.clone().into_buffer_arg(),
                gradients.weights.clone().into_buffer_arg(),
            ),
            dx.clone().into_buffer_arg(),
            SizesLaunch::new(d.tokens, vectors, across),
            plan,
            dtype_to_elem_type(dx.dtype),
        );
    }
}
