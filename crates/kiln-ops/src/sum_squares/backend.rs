//! Sums of squares as a Burn operation: dispatch and fusion.

use super::kernel;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// Sums of squares, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait SumSquaresOps: Backend {
    /// `sums` with the squares of `x` added; `x` has elements.
    #[fusion(dtype = sums, shape = sums)]
    fn sum_squares(x: FloatTensor<Self>, sums: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl SumSquaresOps for CubeBackend {
    fn sum_squares(x: FloatTensor<Self>, sums: FloatTensor<Self>) -> FloatTensor<Self> {
        kernel::sum_squares(x, sums)
    }
}

/// [`sum_squares`](fn@super::sum_squares) through the kernel, without its checks.
pub(super) fn fused<const D: usize>(x: Tensor<D>, sums: Tensor<1>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::sum_squares(x.into_dispatch(), sums.into_dispatch()))
}
