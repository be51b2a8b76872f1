//! The SwiGLU MLP as a Burn operation: dispatch, fusion and autodiff.

pub use super::kernel::{Backward, Mlp};

use super::kernel;
use crate::autodiff::{Graph, Maybe, maybe};
use crate::tile;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// The MLP, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait SwiGluMlpOps: Backend {
    /// y; if `keep`, x·w_gate and x·w_up, which a backward needs and under autodiff keeps for itself.
    #[fusion(meta = |mlp, keep| {
        let product = TensorSpec::new(tile::shape(&mlp.x.shape, &mlp.w_gate.shape), mlp.x.dtype);
        (mlp.x.clone(), maybe(*keep, &product), maybe(*keep, &product))
    })]
    fn swiglu_mlp(
        #[extension_type] mlp: Mlp<Self>,
        keep: bool,
    ) -> (FloatTensor<Self>, Maybe<Self>, Maybe<Self>);
}

/// Its gradients; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait SwiGluMlpGradOps: Backend {
    /// dx, dw_gate, dw_up and dw_down.
    #[fusion(meta = |of| {
        let ([x, gate, up, down], mlp) = (of.wanted, &of.mlp);
        (maybe(x, &mlp.x), maybe(gate, &mlp.w_gate), maybe(up, &mlp.w_up), maybe(down, &mlp.w_down))
    })]
    fn swiglu_mlp_backward(
        #[extension_type] of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>);
}

impl SwiGluMlpOps for CubeBackend {
    fn swiglu_mlp(mlp: Mlp<Self>, keep: bool) -> (FloatTensor<Self>, Maybe<Self>, Maybe<Self>) {
        let (y, products) = kernel::forward(mlp, keep);
        let (gate, up) = products.map(|[gate, up]| (gate, up)).unzip();
        (y, gate.into(), up.into())
    }
}

impl SwiGluMlpGradOps for CubeBackend {
    fn swiglu_mlp_backward(
        of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>) {
        kernel::backward(of).map(Maybe::from).into()
    }
}

impl<B: SwiGluMlpOps + SwiGluMlpGradOps, C: CheckpointStrategy> SwiGluMlpOps for Autodiff<B, C> {
    fn swiglu_mlp(mlp: Mlp<Self>, _keep: bool) -> (FloatTensor<Self>, Maybe<Self>, Maybe<Self>) {
        let Mlp { x, w_gate, w_up, w_down, family } = mlp;
        let inputs = [x, w_gate, w_up, w_down];
        let y = Graph::<C>::output(inputs, [0, 1, 2, 3], |inputs, wanted| {
            let (y, gate, up) = B::swiglu_mlp(Mlp::new(inputs, family), wanted.contains(&true));
            (y, move |dy, inputs| {
                let [gate, up] = [gate, up].map(|kept| kept.expect("the forward kept it"));
                let mlp = Mlp::new(inputs, family);
                B::swiglu_mlp_backward(Backward { dy, mlp, gate, up, wanted }).into()
            })
        });
        (y, Maybe::None, Maybe::None)
    }
}

/// x, w_gate, w_up and w_down, on the kernels that this thread has forced.
fn mlp(of: [Tensor<2>; 4]) -> Mlp<Dispatch> {
    Mlp::new(of.map(Tensor::into_dispatch), tile::forced())
}

/// x·w_gate and x·w_up of x and the weights, as the forward keeps them, past autodiff and without
/// checks.
pub fn products(of: [Tensor<2>; 4]) -> [Tensor<2>; 2] {
    let (_, gate, up) = Dispatch::swiglu_mlp(mlp(of), true);
    [gate, up].map(Maybe::tensor)
}

/// The gradients of x, w_gate, w_up and w_down through the kernels, from those and what the forward
/// keeps, past autodiff and without checks.
pub fn backward(dy: Tensor<2>, of: [Tensor<2>; 4], products: [Tensor<2>; 2]) -> [Tensor<2>; 4] {
    let [gate, up] = products.map(Tensor::into_dispatch);
    let (dy, mlp, wanted) = (dy.into_dispatch(), mlp(of), [true; 4]);
    let gradients: [_; 4] =
        Dispatch::swiglu_mlp_backward(Backward { dy, mlp, gate, up, wanted }).into();
    gradients.map(Maybe::tensor)
}

/// [`swiglu_mlp`](fn@super::swiglu_mlp) through the kernels, without its checks.
pub(crate) fn fused<const D: usize>(
    x: Tensor<D>,
    w_gate: Tensor<2>,
    w_up: Tensor<2>,
    w_down: Tensor<2>,
) -> Tensor<D> {
    let shape = x.dims();
    let x = x.reshape([shape[..D - 1].iter().product::<usize>(), shape[D - 1]]);
    let (y, ..) = Dispatch::swiglu_mlp(mlp([x, w_gate, w_up, w_down]), false);
    Tensor::<2>::from_dispatch(y).reshape(shape)
}
