//! RMSNorm as a Burn operation: dispatch, fusion and autodiff.

use super::kernel::{self, Wanted};
use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::fusion::custom::TensorSpec;
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

/// Its gradients, those that somebody asked for; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait RmsNormGradOps: Backend {
    /// dx and dweight.
    #[fusion(meta = gradients)]
    fn rms_norm_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// dx alone.
    #[fusion(dtype = x, shape = x)]
    fn rms_norm_backward_x(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;

    /// dweight alone.
    #[fusion(dtype = weight, shape = weight)]
    fn rms_norm_backward_weight(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;
}

fn gradients(
    _dy: &TensorSpec,
    x: &TensorSpec,
    weight: &TensorSpec,
    _eps: &f64,
) -> (TensorSpec, TensorSpec) {
    (x.clone(), weight.clone())
}

impl RmsNormOps for CubeBackend {
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        kernel::forward("rms_norm", x, None, weight, eps).0
    }
}

impl RmsNormGradOps for CubeBackend {
    fn rms_norm_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match kernel::backward(
            "rms_norm",
            dy,
            None,
            x,
            weight,
            eps,
            Wanted { x: true, weight: true },
        ) {
            (Some(dx), Some(dw)) => (dx, dw),
            _ => unreachable!("both are wanted"),
        }
    }

    fn rms_norm_backward_x(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self> {
        let (dx, _) = kernel::backward(
            "rms_norm",
            dy,
            None,
            x,
            weight,
            eps,
            Wanted { x: true, weight: false },
        );
        dx.expect("dx is wanted")
    }

    fn rms_norm_backward_weight(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self> {
        let (_, dw) = kernel::backward(
            "rms_norm",
            dy,
            None,
            x,
            weight,
            eps,
            Wanted { x: false, weight: true },
        );
        dw.expect("dweight is wanted")
    }
}

impl<B: Backend + RmsNormOps + RmsNormGradOps, C: CheckpointStrategy> RmsNormOps
    for Autodiff<B, C>
{
    fn rms_norm(x: FloatTensor<Self>, weight: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct RmsNormBackward;

        impl<B: Backend + RmsNormGradOps> Backward<B, 2> for RmsNormBackward {
            type State = (NodeId, NodeId, f64);

            fn backward(
                self,
                ops: Ops<Self::State, 2>,
                grads: &mut Gradients,
                checkpointer: &mut Checkpointer,
            ) {
                let dy = grads.consume::<B>(&ops.node);
                let (x, weight, eps) = ops.state;
                let x = checkpointer.retrieve_node_output(x);
                let weight = checkpointer.retrieve_node_output(weight);
                match ops.parents {
                    [Some(x_node), Some(weight_node)] => {
                        let (dx, dw) = B::rms_norm_backward(dy, x, weight, eps);
                        grads.register::<B>(x_node.id, dx);
                        grads.register::<B>(weight_node.id, dw);
                    }
                    [Some(x_node), None] => {
                        let dx = B::rms_norm_backward_x(dy, x, weight, eps);
                        grads.register::<B>(x_node.id, dx);
                    }
                    [None, Some(weight_node)] => {
                        let dw = B::rms_norm_backward_weight(dy, x, weight, eps);
                        grads.register::<B>(weight_node.id, dw);
                    }
                    [None, None] => {}
                }
            }
        }

        match RmsNormBackward.prepare::<C>([x.node(), weight.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = (prep.checkpoint(&x), prep.checkpoint(&weight), eps);
                let y = B::rms_norm(x.into_primitive(), weight.into_primitive(), eps);
                prep.finish(state, y)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::rms_norm(x.into_primitive(), weight.into_primitive(), eps))
            }
        }
    }
}

/// [`rms_norm`](super::rms_norm) through the kernels, without its checks.
pub(crate) fn fused<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as RmsNormOps>::rms_norm(
        x.into_dispatch(),
        weight.into_dispatch(),
        eps,
    ))
}

/// dx and dweight through the kernels, past autodiff and without checks.
pub fn backward<const D: usize>(
    dy: Tensor<D>,
    x: Tensor<D>,
    weight: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<1>) {
    let (dx, dw) = <Dispatch as RmsNormGradOps>::rms_norm_backward(
        dy.into_dispatch(),
        x.into_dispatch(),
        weight.into_dispatch(),
        eps,
    );
    (Tensor::from_dispatch(dx), Tensor::from_dispatch(dw))
}
