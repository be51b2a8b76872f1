//! How exact products are: of f32 operands as asked for, inside references always in f32.

use burn::tensor::{DType, Tensor};

/// How f32 operands are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum F32Precision {
    /// In f32.
    #[default]
    Highest,
    /// Where there are tensor cores, as sums of two bf16 each, hi + lo: hi·hi + hi·lo + lo·hi, added up in
    /// f32, with an error of at most 3·2⁻¹⁸ of each term. Elements must be below 3.38e38 in size, the end
    /// of bf16. In f32 elsewhere.
    High,
}

/// a · b in the element type of `a`.
///
/// On CUDA Burn multiplies f32 in TF32, which is no reference: there Kiln's own product does it.
pub(crate) fn matmul<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "cuda")]
    if a.dtype() == DType::F32 && crate::device::is_cuda(&a.device()) {
        return crate::matmul::backend::fused(a, b, None, Default::default());
    }
    burn_matmul(a, b)
}

/// a · b as Burn computes it, in the element type of `a`.
///
/// CubeCL devices accumulate halves in f32 by themselves; Burn's CPU backends accumulate them in
/// their own type, so there the product is taken in f32.
pub(crate) fn burn_matmul<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    let dtype = a.dtype();
    if crate::device::is_cube(&a.device()) {
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
