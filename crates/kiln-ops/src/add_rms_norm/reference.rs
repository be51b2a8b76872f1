//! The sum and its RMSNorm in plain Burn operations.

use crate::rms_norm::reference::rms_norm;
use burn::tensor::Tensor;

/// [`add_rms_norm`](super::add_rms_norm) without its checks.
pub fn add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<D>) {
    let sum = x + residual;
    (sum.clone(), rms_norm(sum, weight, eps))
}
