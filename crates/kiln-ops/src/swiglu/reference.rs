//! SwiGLU in plain Burn operations.

use burn::tensor::{DType, Tensor, activation::silu};

/// [`swiglu`](super::swiglu) without its checks.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    let dtype = gate.dtype();
    (silu(gate.cast(DType::F32)) * up.cast(DType::F32)).cast(dtype)
}
