//! The SwiGLU MLP of Kiln's own operations: three products and the gate, each one kernel.

use crate::{matmul, swiglu};
use burn::tensor::Tensor;

/// [`swiglu_mlp`](super::swiglu_mlp) without its checks.
pub(super) fn swiglu_mlp<const D: usize>(
    x: Tensor<D>,
    w_gate: Tensor<2>,
    w_up: Tensor<2>,
    w_down: Tensor<2>,
) -> Tensor<D> {
    let shape = x.dims();
    let x = x.reshape([shape[..D - 1].iter().product::<usize>(), shape[D - 1]]);
    let product = |a, b| matmul::backend::fused(a, b, None, matmul::MatmulOptions::default());
    let hidden = swiglu::backend::fused(product(x.clone(), w_gate), product(x, w_up));
    product(hidden, w_down).reshape(shape)
}
