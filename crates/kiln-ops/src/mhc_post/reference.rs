//! The streams after a layer, in plain Burn operations.

use burn::tensor::{DType, Tensor};

/// [`mhc_post`](super::mhc_post) without its checks.
pub fn mhc_post(x: Tensor<4>, f: Tensor<3>, h_post: Tensor<3>, h_res: Tensor<4>) -> Tensor<4> {
    let dtype = x.dtype();
    let n = x.dims()[2];
    let (x, f) = (x.cast(DType::F32), f.cast(DType::F32));
    // Not a product of matrices, which Burn takes in TF32 on CUDA.
    let layer = h_post.unsqueeze_dim::<4>(3) * f.unsqueeze_dim::<4>(2);
    let mixed = (0..n)
        .fold(layer, |sum, i| sum + h_res.clone().narrow(3, i, 1) * x.clone().narrow(2, i, 1));
    mixed.cast(dtype)
}
