//! SwiGLU as a Burn operation: dispatch, fusion and autodiff.

pub use super::kernel::Backward;

use super::OP;
use super::kernel;
use crate::autodiff::{Graph, Maybe, maybe};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// SwiGLU, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait SwiGluOps: Backend {
    /// y = silu(gate) · up.
    #[fusion(dtype = gate, shape = gate)]
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Its gradients; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait SwiGluGradOps: Backend {
    /// dgate and dup.
    #[fusion(meta = |of| (maybe(of.wanted[0], &of.gate), maybe(of.wanted[1], &of.up)))]
    fn swiglu_backward(#[extension_type] of: Backward<Self>) -> (Maybe<Self>, Maybe<Self>);
}

impl SwiGluOps for CubeBackend {
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        kernel::forward(OP, gate, up)
    }
}

impl SwiGluGradOps for CubeBackend {
    fn swiglu_backward(of: Backward<Self>) -> (Maybe<Self>, Maybe<Self>) {
        let (dgate, dup) = kernel::backward(of);
        (dgate.into(), dup.into())
    }
}

impl<B: SwiGluOps + SwiGluGradOps, C: CheckpointStrategy> SwiGluOps for Autodiff<B, C> {
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        Graph::<C>::output([gate, up], [0, 1], |[gate, up], wanted| {
            (B::swiglu(gate, up), move |dy, [gate, up]| {
                B::swiglu_backward(Backward { op: OP, dy, gate, up, wanted }).into()
            })
        })
    }
}

/// [`swiglu`](fn@super::swiglu) through the kernels, without its checks.
pub(crate) fn fused<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::swiglu(gate.into_dispatch(), up.into_dispatch()))
}

/// dgate and dup through the kernels, past autodiff and without checks.
pub fn backward<const D: usize>(
    dy: Tensor<D>,
    gate: Tensor<D>,
    up: Tensor<D>,
) -> (Tensor<D>, Tensor<D>) {
    let [dy, gate, up] = [dy, gate, up].map(Tensor::into_dispatch);
    let of = Backward { op: OP, dy, gate, up, wanted: [true; 2] };
    let (dgate, dup) = Dispatch::swiglu_backward(of);
    (dgate.tensor(), dup.tensor())
}
