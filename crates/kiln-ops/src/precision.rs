//! Products of half-precision tensors with f32 accumulation on every device.

use burn::tensor::{DType, Tensor};

/// a · b in the element type of `a`, accumulated in f32.
///
/// CubeCL devices accumulate halves in f32 by themselves; Burn's CPU backends accumulate them in
/// their own type, so there the product is taken in f32.
pub(crate) fn matmul<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    let dtype = a.dtype();
    if dtype == DType::F32 || crate::policy::is_cube(&a.device()) {
        return a.matmul(b);
    }
    a.cast(DType::F32).matmul(b.cast(DType::F32)).cast(dtype)
}
