//! The SwiGLU MLP in plain Burn operations.

use crate::matmul::reference::exact as matmul;
use crate::swiglu::reference::swiglu;
use burn::tensor::Tensor;

/// [`swiglu_mlp`](super::swiglu_mlp) without its checks.
pub fn swiglu_mlp<const D: usize>(
    x: Tensor<D>,
    w_gate: Tensor<2>,
    w_up: Tensor<2>,
    w_down: Tensor<2>,
) -> Tensor<D> {
    let shape = x.dims();
    let width = shape[D - 1];
    let rows: usize = shape[..D - 1].iter().product();
    let x = x.reshape([rows, width]);
    let hidden = swiglu(matmul(x.clone(), w_gate), matmul(x, w_up));
    matmul(hidden, w_down).reshape(shape)
}
