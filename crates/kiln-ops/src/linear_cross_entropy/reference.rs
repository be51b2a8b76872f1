//! Linear cross-entropy in plain Burn operations, in chunks of rows.

use crate::cross_entropy::{CrossEntropyOptions, reference::sum_and_count};
use crate::matmul::reference::exact as matmul;
use burn::tensor::{DType, Int, Tensor};

/// Rows whose logits stand in memory at once.
pub(crate) const CHUNK: usize = 1024;

/// [`linear_cross_entropy`](super::linear_cross_entropy) without its checks.
pub fn linear_cross_entropy(
    x: Tensor<2>,
    weight: Tensor<2>,
    targets: Tensor<1, Int>,
    options: &CrossEntropyOptions,
) -> Tensor<1> {
    let (rows, dtype) = (x.dims()[0], x.dtype());
    // So that the gradients of the chunks are added up in f32.
    let weight = weight.cast(DType::F32);
    let chunk = |start: usize| {
        let length = CHUNK.min(rows - start);
        let logits = matmul(x.clone().narrow(0, start, length), weight.clone().cast(dtype));
        sum_and_count(logits, targets.clone().narrow(0, start, length), options)
    };
    let (sum, count) = (0..rows)
        .step_by(CHUNK)
        .map(chunk)
        .reduce(|(sum, count), (s, c)| (sum + s, count + c))
        .expect("at least one row");
    sum / count.clamp_min(1.0)
}
