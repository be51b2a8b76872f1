//! Split-K: cubes make f32 sums of parts of K, a second kernel adds them in order.

use super::finish::{Finish, FinishLaunch, Linear};
use super::problem::Problem;
use crate::launch;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Number of parts for `jobs` tiles of `blocks` blocks of K: enough to fill the device twice, but at
/// least 8 blocks each.
pub(super) fn number(client: &Client, jobs: usize, blocks: usize) -> usize {
    let wanted = 2 * launch::multiprocessors(client) / jobs.max(1);
    wanted.min(blocks / 8).clamp(1, 64)
}

/// Room for the parts' sums: rows of `n` elements at a distance of `pitch`, the parts of one product
/// behind each other.
pub(super) fn workspace(
    like: &CubeTensor,
    op: &'static str,
    rows: usize,
    n: usize,
    pitch: usize,
) -> CubeTensor {
    launch::output_pitched(like, op, "parts", Shape::new([rows, n]), DType::F32, pitch)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_up_kernel<C: Float, O: Float, V: Size>(
    parts: &[Vector<f32, V>],
    add: &[C],
    scales: &[f32],
    out: &mut [Vector<O, V>],
    splits: usize,
    m: usize,
    n: usize,
    total: usize,
    pitch: usize,
    out_pitch: usize,
    finish: Finish,
    #[comptime] linear: Linear,
    #[define(C, O)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < total {
        let (line, col) = (ABSOLUTE_POS / n, ABSOLUTE_POS % n);
        let (batch, row) = (line / m, line % m);
        let matrix = m * pitch;
        let base = batch * splits * matrix + row * pitch + col;
        let mut sum = parts[base];
        for split in 1..splits {
            sum += parts[base + split * matrix];
        }
        let alpha = finish.alpha(scales, batch, linear);
        let beta = finish.beta(scales, batch, linear);
        #[unroll]
        for i in 0..V::value() {
            let col = col * V::value() + i;
            let x = sum.extract(i);
            sum.insert(i, finish.element::<C>(x, alpha, beta, add, batch, row, col, linear));
        }
        out[line * out_pitch + col] = Vector::cast_from(sum);
    }
}

/// out = alpha · sum of the parts + beta · C.
pub(super) fn add_up(parts: &CubeTensor, splits: usize, problem: &Problem, out: &CubeTensor) {
    const UNITS: usize = 256;
    let client = &out.client;
    let pitch = parts.meta.strides()[0];
    let out_pitch = out.meta.strides()[out.meta.strides().len() - 2];
    let aligned = out.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    let fits = aligned && [problem.n, pitch, out_pitch].iter().all(|size| size.is_multiple_of(4));
    let size = if fits { 4 } else { 1 };
    let n = problem.n / size;
    let total = problem.batches * problem.m * n;
    let add_dtype = problem.add.as_ref().map_or(DType::F32, |(add, _)| add.tensor.dtype);
    let units = UNITS.min(client.properties().hardware.max_units_per_cube as usize);
    let (linear, address) = (Linear::of(problem, false), launch::address_type(&[parts, out]));
    let dtypes = [add_dtype, out.dtype].map(dtype_to_elem_type);
    launch::plans::note("sum of parts", &(linear, size, address, dtypes), &[]);
    // SAFETY: positions are checked against the number of elements.
    unsafe {
        add_up_kernel::launch_unchecked(
            client,
            launch::grid(client, total.div_ceil(units)),
            CubeDim::new_1d(units as u32),
            address,
            size,
            parts.clone().into_buffer_arg(),
            match &problem.add {
                Some((add, _)) => add.tensor.clone().into_buffer_arg(),
                None => BufferArg::alias(0, 1),
            },
            match &problem.alpha.scales {
                Some(scales) => scales.clone().into_buffer_arg(),
                None => BufferArg::alias(0, 1),
            },
            out.clone().into_buffer_arg(),
            splits,
            problem.m,
            n,
            total,
            pitch / size,
            out_pitch / size,
            FinishLaunch::of(problem),
            linear,
            dtypes,
        );
    }
}
