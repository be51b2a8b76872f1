//! RMSNorm in plain Burn operations.

use burn::tensor::{DType, Tensor};

/// [`rms_norm`](super::rms_norm) without its checks.
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    let dtype = x.dtype();
    let (x, weight) = (x.cast(DType::F32), weight.cast(DType::F32));
    let mean_square = x.clone().square().mean_dim(D - 1);
    let scale = mean_square.add_scalar(eps).sqrt().recip();
    (x * scale * weight.unsqueeze()).cast(dtype)
}
