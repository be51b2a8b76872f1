//! The loss in chunks of rows, with the gradients in the same pass.
//!
//! The logits of a chunk are made, turned into their own gradient, and used up for dx and dW before
//! the next chunk is begun: 3 products for each chunk, and no logits are made again in the backward,
//! which only scales.

use super::CHUNK_BYTES;
use crate::cross_entropy::{CrossEntropyOptions, gradient, kernel};
use crate::launch;
use crate::tile::{Family, Product, view};
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};
use burn::tensor::{DType, FloatDType, Shape, Slice};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

/// What the loss is taken of.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Forward<B: Backend> {
    /// Operator, for the audit.
    pub op: &'static str,
    /// The input.
    pub x: FloatTensor<B>,
    /// The weight, `[D, V]`.
    pub weight: FloatTensor<B>,
    /// It is `[V, D]`, and so is dW.
    pub table: bool,
    /// The targets, i32 or i64.
    pub targets: IntTensor<B>,
    /// One over the number of targets that count.
    pub scale: FloatTensor<B>,
    /// Options.
    pub options: CrossEntropyOptions,
    /// The kernels that products run on.
    pub family: Option<Family>,
}

/// The loss, and dx and dW for a cotangent of 1, those that are wanted; dW in f32.
pub(super) fn run(
    request: Forward<CubeBackend>,
    [of_x, of_weight]: [bool; 2],
) -> (CubeTensor, Option<CubeTensor>, Option<CubeTensor>) {
    let Forward { op, x, weight, table, targets, scale, options, family } = request;
    let weight = if table { view::transposed(weight) } else { weight };
    let x = burn_cubecl::kernel::into_contiguous(x);
    let (rows, dtype) = (x.meta.shape()[0], x.dtype);
    let classes = weight.meta.shape()[1];
    let bytes = launch::limits::now().chunk_bytes.unwrap_or(CHUNK_BYTES);
    let step = super::rows_of(bytes, rows, classes, dtype);
    let ways =
        [("several chunks", step < rows), ("a chunk of fewer rows", !rows.is_multiple_of(step))];
    launch::plans::note("linear_cross_entropy", &[of_x, of_weight], &ways);
    let product = |a, b, dtype| Product { family, ..Product::new(op, a, b, dtype) };
    let dx = of_x.then(|| launch::output(&x, op, "grad.x", x.meta.shape().clone(), dtype));
    let (mut sum, mut dw) = (None, None::<CubeTensor>);
    for start in (0..rows).step_by(step) {
        let length = step.min(rows - start);
        let slice = Slice::from(start..start + length);
        let part = view::narrow(&x, start, length);
        let targets = CubeBackend::int_slice(targets.clone(), &[slice]);
        let logits = product(part.clone(), weight.clone(), dtype).run();
        let of = kernel::Forward { op, logits: logits.clone(), targets: targets.clone(), options };
        let (mean, lse, one_over) = kernel::forward(of);
        // The sum over the chunk, in units of the mean over all.
        let share = CubeBackend::float_div(scale.clone(), one_over);
        let share = CubeBackend::float_mul(mean, share);
        sum = Some(match sum {
            Some(sum) => CubeBackend::float_add(sum, share),
            None => share,
        });
        if !(of_x || of_weight) {
            continue;
        }
        let dloss = CubeBackend::float_ones(Shape::new([1]), &x.device, FloatDType::F32);
        let scale = scale.clone();
        let of = gradient::Backward { op, dloss, logits, targets, lse, scale, options };
        let dlogits = gradient::backward(of);
        if let Some(dx) = &dx {
            let to_x = product(dlogits.clone(), view::transposed(weight.clone()), dtype);
            Product { out: Some(view::narrow(dx, start, length)), ..to_x }.run();
        }
        if of_weight {
            let to_w = match table {
                true => product(view::transposed(dlogits), part, DType::F32),
                false => product(view::transposed(part), dlogits, DType::F32),
            };
            dw = Some(match dw {
                Some(dw) => to_w.accumulate(dw, 1.0).run(),
                None => to_w.run(),
            });
        }
    }
    (sum.expect("there is a row"), dx, dw)
}
