//! The matrix product in plain Burn operations.

use super::MatmulOptions;
use crate::precision;
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
        return precision::burn_matmul(a, b);
    }
    // Elements of 16 bits are what TF32 holds, but the cotangent that meets them in the backward is f32.
    let multiply = if a.dtype() == DType::F32 { precision::burn_matmul } else { precision::matmul };
    let product = multiply(a.cast(DType::F32), b.cast(DType::F32));
    let mut y = product.mul_scalar(options.alpha);
    if let Some(c) = c {
        y = y + c.cast(DType::F32).mul_scalar(options.beta);
    }
    y.cast(dtype)
}
