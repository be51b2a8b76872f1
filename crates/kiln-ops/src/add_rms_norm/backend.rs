//! The sum and its RMSNorm as a Burn operation: dispatch, fusion and autodiff.
//!
//! The kernels are those of [`rms_norm`](crate::rms_norm) with a sum in front, and so is the operation
//! of the gradients.

use super::OP;
use crate::autodiff::{Graph, Maybe};
use crate::rms_norm::backend::{Backward, RmsNormGradOps};
use crate::rms_norm::kernel::{self, Forward};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// Sum and norm, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait AddRmsNormOps: Backend {
    /// (x + residual, rms_norm(x + residual)).
    #[fusion(meta = |x, _residual, _weight, _eps| (x.clone(), x.clone()))]
    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl AddRmsNormOps for CubeBackend {
    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let residual = Some(residual);
        let (y, sum) = kernel::forward(Forward { op: OP, x, residual, weight, eps });
        (sum.expect("there is a residual"), y)
    }
}

impl<B: AddRmsNormOps + RmsNormGradOps, C: CheckpointStrategy> AddRmsNormOps for Autodiff<B, C> {
    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        // The sum is kept by the backward: no node of the graph holds it before both are made.
        Graph::<C>::outputs([x, residual, weight], [2], |[x, residual, weight], wanted| {
            let (sum, y) = B::add_rms_norm(x, residual, weight, eps);
            let wanted = [wanted[0] || wanted[1], wanted[2]];
            ([sum.clone(), y], move |[dsum, dy], [weight]| {
                let Maybe::Some(dy) = dy else { return [dsum.clone(), dsum, Maybe::None] };
                let of = Backward { op: OP, dy, dsum, x: sum, weight, eps, wanted };
                let (dx, dw) = B::rms_norm_backward(of);
                [dx.clone(), dx, dw]
            })
        })
        .into()
    }
}

/// [`add_rms_norm`](fn@super::add_rms_norm) through the kernels, without its checks.
pub(crate) fn fused<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<D>) {
    let [x, residual] = [x, residual].map(Tensor::into_dispatch);
    let (sum, y) = Dispatch::add_rms_norm(x, residual, weight.into_dispatch(), eps);
    (Tensor::from_dispatch(sum), Tensor::from_dispatch(y))
}

/// The gradient that both inputs share and dweight, through the kernels, past autodiff and without
/// checks.
pub fn backward<const D: usize>(
    dsum: Tensor<D>,
    dy: Tensor<D>,
    sum: Tensor<D>,
    weight: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<1>) {
    let [dsum, dy, x] = [dsum, dy, sum].map(Tensor::into_dispatch);
    let (dsum, weight, wanted) = (Maybe::Some(dsum), weight.into_dispatch(), [true; 2]);
    let (dx, dw) =
        Dispatch::rms_norm_backward(Backward { op: OP, dy, dsum, x, weight, eps, wanted });
    (dx.tensor(), dw.tensor())
}
