//! The sum and its RMSNorm as a Burn operation: dispatch, fusion and autodiff.
//!
//! The kernels are those of [`rms_norm`](crate::rms_norm) with a sum in front.

use crate::autodiff::{self, MultiBackward};
use crate::rms_norm::backend::RmsNormGradOps;
use crate::rms_norm::kernel::{self, Wanted};
use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
};
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor,
};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

const OP: &str = "add_rms_norm";

/// Sum and norm, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait AddRmsNormOps: Backend {
    /// (x + residual, rms_norm(x + residual)).
    #[fusion(meta = outputs)]
    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

/// The gradients where both outputs were used; with one used, those of a sum or of
/// [`RmsNormGradOps`] do.
#[backend_extension(Cube, Fusion)]
pub trait AddRmsNormGradOps: Backend {
    /// The gradient that x and the residual share, and dweight.
    #[fusion(meta = gradients)]
    fn add_rms_norm_backward(
        dsum: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        sum: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The gradient that x and the residual share, alone.
    #[fusion(dtype = sum, shape = sum)]
    fn add_rms_norm_backward_x(
        dsum: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        sum: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self>;
}

fn outputs(
    x: &TensorSpec,
    _residual: &TensorSpec,
    _weight: &TensorSpec,
    _eps: &f64,
) -> (TensorSpec, TensorSpec) {
    (x.clone(), x.clone())
}

fn gradients(
    _dsum: &TensorSpec,
    _dy: &TensorSpec,
    sum: &TensorSpec,
    weight: &TensorSpec,
    _eps: &f64,
) -> (TensorSpec, TensorSpec) {
    (sum.clone(), weight.clone())
}

impl AddRmsNormOps for CubeBackend {
    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (y, sum) = kernel::forward(OP, x, Some(residual), weight, eps);
        (sum.expect("there is a residual"), y)
    }
}

impl AddRmsNormGradOps for CubeBackend {
    fn add_rms_norm_backward(
        dsum: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        sum: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match kernel::backward(
            OP,
            dy,
            Some(dsum),
            sum,
            weight,
            eps,
            Wanted { x: true, weight: true },
        ) {
            (Some(dx), Some(dw)) => (dx, dw),
            _ => unreachable!("both are wanted"),
        }
    }

    fn add_rms_norm_backward_x(
        dsum: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        sum: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> FloatTensor<Self> {
        let wanted = Wanted { x: true, weight: false };
        let (dx, _) = kernel::backward(OP, dy, Some(dsum), sum, weight, eps, wanted);
        dx.expect("dx is wanted")
    }
}

#[derive(Debug)]
struct AddRmsNormBackward;

/// The sum is kept for the backward itself: no node of the graph holds it before both are made.
#[derive(Debug)]
struct State<B: Backend> {
    sum: FloatTensor<B>,
    weight: NodeId,
    eps: f64,
}

impl<B: Backend> Clone for State<B> {
    fn clone(&self) -> Self {
        Self { sum: self.sum.clone(), weight: self.weight, eps: self.eps }
    }
}

impl<B: Backend + RmsNormGradOps + AddRmsNormGradOps> MultiBackward<B, 3, 2>
    for AddRmsNormBackward
{
    type State = State<B>;

    fn backward(
        self,
        [x, residual, weight_node]: [Option<NodeId>; 3],
        State { sum, weight, eps }: Self::State,
        [dsum, dy]: [Option<FloatTensor<B>>; 2],
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let weight: FloatTensor<B> = checkpointer.retrieve_node_output(weight);
        let wants_x = x.is_some() || residual.is_some();
        let (dx, dw) = match (dy, dsum) {
            (None, dsum) => {
                let zeros =
                    || B::float_zeros(weight.shape(), &weight.device(), weight.dtype().into());
                (dsum, weight_node.is_some().then(zeros))
            }
            (Some(dy), None) => match (wants_x, weight_node.is_some()) {
                (true, true) => {
                    let (dx, dw) = B::rms_norm_backward(dy, sum, weight, eps);
                    (Some(dx), Some(dw))
                }
                (true, false) => (Some(B::rms_norm_backward_x(dy, sum, weight, eps)), None),
                (false, _) => (None, Some(B::rms_norm_backward_weight(dy, sum, weight, eps))),
            },
            (Some(dy), Some(dsum)) => match (wants_x, weight_node.is_some()) {
                (true, true) => {
                    let (dx, dw) = B::add_rms_norm_backward(dsum, dy, sum, weight, eps);
                    (Some(dx), Some(dw))
                }
                (true, false) => {
                    (Some(B::add_rms_norm_backward_x(dsum, dy, sum, weight, eps)), None)
                }
                (false, _) => (None, Some(B::rms_norm_backward_weight(dy, sum, weight, eps))),
            },
        };
        if let Some(dx) = dx {
            for node in [x, residual].into_iter().flatten() {
                grads.register::<B>(node, dx.clone());
            }
        }
        if let (Some(node), Some(dw)) = (weight_node, dw) {
            grads.register::<B>(node, dw);
        }
    }
}

impl<B, C> AddRmsNormOps for Autodiff<B, C>
where
    B: Backend + AddRmsNormOps + AddRmsNormGradOps + RmsNormGradOps,
    C: CheckpointStrategy,
{
    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let nodes = [x.node(), residual.node(), weight.node()];
        let (x, residual) = (x.into_primitive(), residual.into_primitive());
        let weight_primitive = weight.clone().into_primitive();
        let (sum, y) = B::add_rms_norm(x, residual, weight_primitive, eps);
        let kept = sum.clone();
        let [sum, y] = autodiff::outputs::<B, C, _, 3, 2>(
            AddRmsNormBackward,
            nodes,
            |prep| State { sum: kept, weight: prep.checkpoint(&weight), eps },
            || [sum, y],
        );
        (sum, y)
    }
}

/// [`add_rms_norm`](fn@super::add_rms_norm) through the kernels, without its checks.
pub(crate) fn fused<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    eps: f64,
) -> (Tensor<D>, Tensor<D>) {
    let (sum, y) = <Dispatch as AddRmsNormOps>::add_rms_norm(
        x.into_dispatch(),
        residual.into_dispatch(),
        weight.into_dispatch(),
        eps,
    );
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
    let (dx, dw) = <Dispatch as AddRmsNormGradOps>::add_rms_norm_backward(
        dsum.into_dispatch(),
        dy.into_dispatch(),
        sum.into_dispatch(),
        weight.into_dispatch(),
        eps,
    );
    (Tensor::from_dispatch(dx), Tensor::from_dispatch(dw))
}
