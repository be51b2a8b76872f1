//! The triangular product in plain Burn operations.

use burn::tensor::Tensor;

/// [`tril_matmul`](super::tril_matmul) without its checks: a dense product between masks.
pub fn tril_matmul<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    crate::matmul::reference::exact(a.tril(0), b.tril(0)).tril(0)
}
