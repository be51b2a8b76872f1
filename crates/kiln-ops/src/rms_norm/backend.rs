//! RMSNorm as a Burn operation: dispatch, fusion and autodiff.

pub use super::kernel::Backward;

use super::OP;
use super::kernel::{self, Forward};
use crate::autodiff::{Graph, Maybe, maybe};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// RMSNorm, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait RmsNormOps: Backend {
    /// y = x · weight · (mean(x²) + eps)^-½.
    #[fusion(dtype = x, shape = x)]
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self>;
}

/// Its gradients; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait RmsNormGradOps: Backend {
    /// dx and dweight.
    #[fusion(meta = |of| (maybe(of.wanted[0], &of.x), maybe(of.wanted[1], &of.weight)))]
    fn rms_norm_backward(#[extension_type] of: Backward<Self>) -> (Maybe<Self>, Maybe<Self>);
}

impl RmsNormOps for CubeBackend {
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        kernel::forward(Forward { op: OP, x, residual: None, weight, eps }).0
    }
}

impl RmsNormGradOps for CubeBackend {
    fn rms_norm_backward(of: Backward<Self>) -> (Maybe<Self>, Maybe<Self>) {
        let (dx, dw) = kernel::backward(of);
        (dx.into(), dw.into())
    }
}

impl<B: RmsNormOps + RmsNormGradOps, C: CheckpointStrategy> RmsNormOps for Autodiff<B, C> {
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        Graph::<C>::output([x, weight], [0, 1], |[x, weight], wanted| {
            (B::rms_norm(x, weight, eps), move |dy, [x, weight]| {
                let dsum = Maybe::None;
                B::rms_norm_backward(Backward { op: OP, dy, dsum, x, weight, eps, wanted }).into()
            })
        })
    }
}

/// [`rms_norm`](fn@super::rms_norm) through the kernels, without its checks.
pub(crate) fn fused<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(<Dispatch as RmsNormOps>::rms_norm(x, weight, eps))
}

/// dx and dweight through the kernels, past autodiff and without checks.
pub fn backward<const D: usize>(
    dy: Tensor<D>,
    x: Tensor<D>,
    weight: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<1>) {
    let [dy, x] = [dy, x].map(Tensor::into_dispatch);
    let (dsum, weight, wanted) = (Maybe::None, weight.into_dispatch(), [true; 2]);
    let (dx, dw) =
        Dispatch::rms_norm_backward(Backward { op: OP, dy, dsum, x, weight, eps, wanted });
    (dx.tensor(), dw.tensor())
}
