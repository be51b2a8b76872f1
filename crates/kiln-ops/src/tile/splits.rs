//! K in parts: cubes make f32 sums of parts of K, a second kernel adds them in order.

use super::product::Operands;
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Number of parts for `jobs` tiles of `blocks` blocks of K: enough to fill the device `waves` times,
/// but at least 8 blocks each.
pub(super) fn number(client: &Client, jobs: usize, blocks: usize, waves: usize) -> usize {
    let wanted = launch::multiprocessors(client) * waves / jobs.max(1);
    wanted.min(blocks / 8).clamp(1, 64)
}

/// Room for the parts' sums: parts of one product stand together.
pub(super) fn workspace(
    like: &CubeTensor,
    op: &'static str,
    splits: usize,
    elements: usize,
) -> CubeTensor {
    launch::output(like, op, "parts", Shape::new([splits * elements]), DType::F32)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_up_kernel<C: Float, O: Float>(
    parts: &[f32],
    add: &[C],
    out: &mut [O],
    splits: usize,
    matrix: usize,
    total: usize,
    n: usize,
    add_batch: usize,
    add_row: usize,
    add_col: usize,
    alpha: f32,
    beta: f32,
    #[comptime] has_add: bool,
    #[define(C, O)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < total {
        let (batch, at) = (ABSOLUTE_POS / matrix, ABSOLUTE_POS % matrix);
        let base = batch * splits * matrix + at;
        let mut sum = parts[base];
        for split in 1..splits {
            sum += parts[base + split * matrix];
        }
        sum *= alpha;
        if comptime!(has_add) {
            let at = batch * add_batch + at / n * add_row + at % n * add_col;
            sum += beta * f32::cast_from(add[at]);
        }
        out[ABSOLUTE_POS] = O::cast_from(sum);
    }
}

/// out = alpha · sum of the parts + beta · C.
pub(super) fn add_up(
    parts: &CubeTensor,
    splits: usize,
    matrix: usize,
    o: &Operands,
    alpha: f64,
    out: &CubeTensor,
) {
    const UNITS: usize = 256;
    let client = &out.client;
    let total = matrix * o.batches;
    let (add_batch, (add_row, add_col), beta) = match &o.add {
        Some((add, beta)) => (if add.batches > 1 { add.batch } else { 0 }, add.strides(), *beta),
        None => (0, (0, 0), 0.0),
    };
    let add_dtype = o.add.as_ref().map_or(DType::F32, |(add, _)| add.tensor.dtype);
    let units = UNITS.min(client.properties().hardware.max_units_per_cube as usize);
    // SAFETY: positions are checked against the number of elements.
    unsafe {
        add_up_kernel::launch_unchecked(
            client,
            launch::grid(client, total.div_ceil(units)),
            CubeDim::new_1d(units as u32),
            launch::address_type(&[parts, out]),
            parts.clone().into_buffer_arg(),
            match &o.add {
                Some((add, _)) => add.tensor.clone().into_buffer_arg(),
                None => BufferArg::alias(0, 1),
            },
            out.clone().into_buffer_arg(),
            splits,
            matrix,
            total,
            o.n,
            add_batch,
            add_row,
            add_col,
            alpha as f32,
            beta as f32,
            o.add.is_some(),
            [add_dtype, out.dtype].map(dtype_to_elem_type),
        );
    }
}
