//! The kernels: rows are gathered in one launch; the gradient takes two, the order of the tokens and the sums of rows, or,
//! where memory has no order between cubes, a third one for long rows.

mod order;
mod pieces;
mod rows;
mod sums;

use super::backend::Backward;
use crate::embedding::OP;
use crate::launch::{self, Rows};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;
/// Vectors of a unit, whose tokens and then whose numbers are under way together.
const CHUNKS: usize = 4;

/// The number of a row that a token names, and whether there is one: else some number.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Named {
    row: usize,
    is: bool,
}

#[cube]
fn named<I: Int>(token: I, rows: usize) -> Named {
    let is = token >= I::new(0) && token < I::cast_from(rows);
    Named { row: select(is, usize::cast_from(token), 0usize), is }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gather_kernel<E: Float, F: Float, I: Int, N: Size>(
    weight: &[Vector<E, N>],
    tokens: &[I],
    y: &mut [Vector<F, N>],
    vectors: usize,
    width: usize,
    stride: usize,
    rows: usize,
    nan: f32,
    #[comptime] units: u32,
    #[define(E, F, I)] _dtypes: [ElemType; 3],
) {
    let first = CUBE_POS * comptime!(units as usize * CHUNKS) + UNIT_POS_X as usize;
    let mut held = Array::<Vector<E, N>>::new(comptime!(CHUNKS));
    let mut is = Array::<bool>::new(comptime!(CHUNKS));
    #[unroll]
    for c in 0..CHUNKS {
        // Units past the end load the last vector again.
        let i = min(first + comptime!(c * units as usize), vectors - 1);
        let at = i / width;
        let token = named::<I>(tokens[at], rows);
        is[c] = token.is;
        held[c] = weight[token.row * stride + (i - at * width)];
    }
    #[unroll]
    for c in 0..CHUNKS {
        let i = first + comptime!(c * units as usize);
        if i < vectors {
            let mut value = Vector::<F, N>::cast_from(held[c]);
            if !is[c] {
                value = Vector::new(F::cast_from(nan));
            }
            y[i] = value;
        }
    }
}

/// The vector in which numbers of both element types are read and written.
fn vector_size(client: &Client, dtypes: [DType; 2], rows: &Rows) -> usize {
    let of = |dtype| launch::vector_size(client, dtype, &[rows]);
    of(dtypes[0]).min(of(dtypes[1]))
}

pub(super) fn forward(weight: CubeTensor, tokens: CubeTensor, dtype: DType) -> CubeTensor {
    let client = weight.client.clone();
    let (weight, tokens) = (Rows::new(weight), into_contiguous(tokens));
    let count = tokens.meta.num_elements();
    let shape = Shape::new([count, weight.width]);
    let y = launch::output(&weight.tensor, OP, "y", shape, dtype);
    let dtypes = [weight.tensor.dtype, dtype, tokens.dtype];
    let size = vector_size(&client, [dtypes[0], dtypes[1]], &weight);
    let units = UNITS.min(client.properties().hardware.max_units_per_cube);
    let vectors = count * weight.width / size;
    let address = launch::address_type(&[&weight.tensor, &tokens, &y]);
    launch::plans::note("rows of a table", &(size, units, address), &[]);
    // SAFETY: vectors are clamped to their number, tokens to rows.
    unsafe {
        gather_kernel::launch_unchecked(
            &client,
            launch::grid(&client, vectors.div_ceil(units as usize * CHUNKS)),
            CubeDim::new_1d(units),
            address,
            size,
            weight.tensor.clone().into_buffer_arg(),
            tokens.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            vectors,
            weight.width / size,
            weight.stride / size,
            weight.rows,
            // As an argument: WGSL has no such constant.
            f32::NAN,
            units,
            dtypes.map(dtype_to_elem_type),
        );
    }
    y
}

pub(super) fn backward(of: Backward<CubeBackend>) -> CubeTensor {
    let Backward { op, dy, tokens, rows, dtype, onto } = of;
    let tokens = into_contiguous(tokens);
    let onto = onto.option().map(into_contiguous);
    sums::sums(op, Rows::new(dy), &tokens, (rows, dtype), onto)
}
