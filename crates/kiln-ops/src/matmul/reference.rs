//! The matrix product in plain Burn operations.

use super::MatmulOptions;
use crate::device;
use burn::tensor::{DType, Tensor};

/// [`matmul`](super::matmul) and [`matmul_add`](super::matmul_add) without their checks.
///
/// On CUDA Burn multiplies f32 in TF32: there the reference for f32 is no more exact than that.
pub fn matmul<const D: usize>(
    a: Tensor<D>,
    b: Tensor<D>,
    c: Option<Tensor<D>>,
    options: MatmulOptions,
) -> Tensor<D> {
    let dtype = options.dtype.unwrap_or(a.dtype());
    if options.alpha == 1.0 && c.is_none() && dtype == a.dtype() {
        return burn_matmul(a, b);
    }
    // Elements of 16 bits are what TF32 holds, but the cotangent that meets them in the backward is f32.
    let multiply = if a.dtype() == DType::F32 { burn_matmul } else { exact };
    let product = multiply(a.cast(DType::F32), b.cast(DType::F32));
    let mut y = product.mul_scalar(options.alpha);
    if let Some(c) = c {
        y = y + c.cast(DType::F32).mul_scalar(options.beta);
    }
    y.cast(dtype)
}

/// a · b in the element type of `a`.
///
/// On CUDA Burn multiplies f32 in TF32, which is no reference: there Kiln's own product does it.
pub(crate) fn exact<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if a.dtype() == DType::F32 && device::is_cuda(&a.device()) {
        return super::backend::fused(a, b, None, Default::default());
    }
    burn_matmul(a, b)
}

/// a · b as Burn computes it, in the element type of `a`.
///
/// CubeCL devices accumulate halves in f32 by themselves; Burn's CPU backends accumulate them in
/// their own type, so there the product is taken in f32.
fn burn_matmul<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    let dtype = a.dtype();
    if device::is_cube(&a.device()) {
        return side_by_side(a).matmul(side_by_side(b));
    }
    if a.shape().num_elements() * b.shape().num_elements() == 0 {
        // Products without elements send burn-flex past the end of memory. This is as empty, and its
        // gradients are those of a product.
        return a.sum_dim(D - 1) + b.sum_dim(D - 2);
    }
    if dtype == DType::F32 {
        return a.matmul(b);
    }
    a.cast(DType::F32).matmul(b.cast(DType::F32)).cast(dtype)
}

/// Burn's kernels refuse a matrix of one row or column whose elements are not side by side, as one cut
/// out of a wider tensor: that is written anew.
fn side_by_side<const D: usize>(matrix: Tensor<D>) -> Tensor<D> {
    if matrix.dims()[D - 2..].contains(&1) { matrix.mul_scalar(1.0) } else { matrix }
}
