//! f32 operands as sums of two bf16: hi + lo, three products in one.
//!
//! With hi = bf16(x) and lo = bf16(x - hi), a·b is hi·hi + hi·lo + lo·hi up to 3·2⁻¹⁸ of itself. Along K
//! the left operand becomes hi, hi, lo and the right one hi, lo, hi: one product of bf16 with three
//! times as much K, all of it added up in the same f32 sums.

use crate::launch;
use crate::tile::view::{MatrixView, Order};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
fn split_kernel<E: Float, N: Size>(
    x: &[Vector<f32, N>],
    out: &mut [Vector<E, N>],
    total: usize,
    lines: usize,
    along: usize,
    x_batch: usize,
    x_line: usize,
    out_batch: usize,
    out_line: usize,
    part: usize,
    #[comptime] right: bool,
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < total {
        let (row, i) = (ABSOLUTE_POS / along, ABSOLUTE_POS % along);
        let (batch, line) = (row / lines, row % lines);
        let value = x[batch * x_batch + line * x_line + i];
        let high = Vector::<E, N>::cast_from(value);
        let low = Vector::<E, N>::cast_from(value - Vector::<f32, N>::cast_from(high));
        let at = batch * out_batch + line * out_line + i;
        out[at] = high;
        if comptime!(right) {
            out[at + part] = low;
            out[at + 2 * part] = high;
        } else {
            out[at + part] = high;
            out[at + 2 * part] = low;
        }
    }
}

/// The operand with K three times as long, as the left or the right one.
pub(super) fn split(view: &MatrixView, op: &'static str, right: bool) -> MatrixView {
    const UNITS: usize = 256;
    let x = &view.tensor;
    let client = &x.client;
    let along_k = (view.order == Order::RowMajor) != right;
    let (lines, along) = (view.lines(), view.along());
    let [times_lines, times_along] = if along_k { [1, 3] } else { [3, 1] };
    let shape = Shape::new([view.batches, lines * times_lines, along * times_along]);
    let out = launch::output_aligned(x, op, "bf16x3", shape, DType::BF16);
    let [batch, line] = [out.meta.strides()[0], out.meta.strides()[1]];
    let part = if along_k { along } else { lines * line };
    let size = view.vector_size(client, 16);
    let total = view.batches * lines * along / size;
    launch::plans::note(
        "f32 as bf16",
        &(size, right, view.order),
        &[("a batch", view.batches > 1)],
    );
    // SAFETY: positions are checked against the number of vectors, which all three parts have.
    unsafe {
        split_kernel::launch_unchecked(
            client,
            launch::grid(client, total.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            launch::address_type(&[x, &out]),
            size,
            x.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            total,
            lines,
            along / size,
            view.batch_step() / size,
            if lines > 1 { view.ld / size } else { 0 },
            batch / size,
            line / size,
            part / size,
            right,
            dtype_to_elem_type(DType::BF16),
        );
    }
    let (rows, cols) = match view.order {
        Order::RowMajor => (lines * times_lines, along * times_along),
        Order::ColMajor => (along * times_along, lines * times_lines),
    };
    let (batches, order) = (view.batches, view.order);
    MatrixView { tensor: out, batches, rows, cols, batch_stride: batch, ld: line, order }
}
