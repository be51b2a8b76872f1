//! What dh_in gives the weight of each stream: ⟨dh_in, x[i]⟩.

use super::Dims;
use crate::launch::{self, Rows};
use crate::reduce::{self, Combine, RowPlan, RowUnits, Sums};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Vectors of a stream that a unit takes before there are more units.
const CHUNKS: usize = 2;
/// Units of a cube, of one token or of several.
const UNITS: u32 = 128;

#[cube(launch_unchecked, address_type = "dynamic")]
fn dots_kernel<C: Combine, E: Float, N: Size>(
    x: &[Vector<E, N>],
    dh_in: &[Vector<E, N>],
    out: &mut [f32],
    tokens: usize,
    vectors: usize,
    #[comptime] row: RowUnits,
    #[define(E)] _dtype: ElemType,
) {
    let n = comptime!(C::REGISTERS);
    let at = CUBE_POS * comptime!(row.rows as usize) + UNIT_POS_Y as usize;
    let (token, own) = (min(at, tokens - 1), at < tokens);
    let mut sums = C::identity();
    for at in range_stepped(UNIT_POS_X as usize, vectors, comptime!(row.units as usize)) {
        let dy = Vector::<f32, N>::cast_from(dh_in[token * vectors + at]);
        #[unroll]
        for i in 0..n {
            let x = Vector::<f32, N>::cast_from(x[(token * n + i) * vectors + at]);
            sums[i] += reduce::vector::<Sums<1>, N>(x * dy);
        }
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(C::REGISTERS * row.shared()));
    // Units that shuffle have to be together again: their numbers of columns differ.
    sync_cube();
    reduce::rows::<C>(&mut sums, &mut shared, row);
    if own && UNIT_POS_X == 0 {
        #[unroll]
        for i in 0..n {
            out[token * n + i] = sums[i];
        }
    }
}

/// `[T, n]`.
pub(super) fn launch(op: &'static str, x: &CubeTensor, dh_in: &CubeTensor, d: Dims) -> CubeTensor {
    let launch = match d.streams {
        1 => run::<Sums<1>>,
        2 => run::<Sums<2>>,
        3 => run::<Sums<3>>,
        4 => run::<Sums<4>>,
        5 => run::<Sums<5>>,
        6 => run::<Sums<6>>,
        7 => run::<Sums<7>>,
        8 => run::<Sums<8>>,
        _ => unreachable!("the number of streams has been checked"),
    };
    launch(op, x, dh_in, d)
}

fn run<C: Combine>(op: &'static str, x: &CubeTensor, dh_in: &CubeTensor, d: Dims) -> CubeTensor {
    let client = &x.client;
    let out = launch::output(x, op, "dots", Shape::new([d.tokens, d.streams]), DType::F32);
    let reshape = |of: &CubeTensor, rows: usize| {
        Rows::new(burn_cubecl::ops::reshape(of.clone(), Shape::new([rows, d.width])))
    };
    let (x, dh_in) = (reshape(x, d.tokens * d.streams), reshape(dh_in, d.tokens));
    let size = launch::vector_size(client, x.tensor.dtype, &[&x, &dh_in]);
    let vectors = d.width / size;
    let row = RowPlan::new(client, vectors, CHUNKS, CHUNKS, |_| UNITS).row;
    let address = launch::address_type(&[&x.tensor, &dh_in.tensor, &out]);
    launch::plans::note("mhc_pre dots", &(row, d.streams, size, address), &[]);
    let (cubes, dtype) = (d.tokens.div_ceil(row.rows as usize), x.tensor.dtype);
    // SAFETY: tokens and columns are within the tensors: x has `streams` rows for one of dh_in.
    unsafe {
        dots_kernel::launch_unchecked::<C>(
            client,
            launch::grid(client, cubes),
            row.cube_dim(),
            address,
            size,
            x.tensor.into_buffer_arg(),
            dh_in.tensor.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            d.tokens,
            vectors,
            row,
            dtype_to_elem_type(dtype),
        );
    }
    out
}
