//! Cross-entropy as a Burn operation: dispatch, fusion and autodiff.

use super::{CrossEntropyOptions, OP, gradient, kernel};
use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Autodiff, Backend, Dispatch, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Int, IntDType, Shape, Tensor};
use burn_cubecl::CubeBackend;

/// Cross-entropy, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait CrossEntropyOps: Backend {
    /// The mean loss, `[1]` in f32.
    #[fusion(meta = loss)]
    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self>;
}

/// Its two passes; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait CrossEntropyPassOps: Backend {
    /// The mean loss, the log-sum-exp of each row, and one over the number of targets that count.
    #[fusion(meta = outputs)]
    fn cross_entropy_forward(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: CrossEntropyOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// The gradient of the logits.
    #[fusion(dtype = logits, shape = logits)]
    fn cross_entropy_backward(
        dloss: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        lse: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self>;
}

fn loss(logits: &TensorSpec, targets: &TensorSpec, options: &CrossEntropyOptions) -> TensorSpec {
    outputs(logits, targets, options).0
}

fn outputs(
    logits: &TensorSpec,
    _targets: &TensorSpec,
    _options: &CrossEntropyOptions,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    let f32 = |size: usize| TensorSpec::new(Shape::new([size]), DType::F32);
    (f32(1), f32(logits.shape[0]), f32(1))
}

impl CrossEntropyOps for CubeBackend {
    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self> {
        kernel::forward(OP, logits, targets, &options).0
    }
}

impl CrossEntropyPassOps for CubeBackend {
    fn cross_entropy_forward(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: CrossEntropyOptions,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        kernel::forward(OP, logits, targets, &options)
    }

    fn cross_entropy_backward(
        dloss: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        lse: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self> {
        gradient::backward(OP, dloss, logits, targets, [lse, scale], &options)
    }
}

/// The logits can be checkpointed; what the forward made of them is kept here.
#[derive(Debug)]
struct State<B: Backend> {
    logits: NodeId,
    targets: IntTensor<B>,
    lse: FloatTensor<B>,
    scale: FloatTensor<B>,
    options: CrossEntropyOptions,
}

impl<B: Backend> Clone for State<B> {
    fn clone(&self) -> Self {
        Self {
            logits: self.logits,
            targets: self.targets.clone(),
            lse: self.lse.clone(),
            scale: self.scale.clone(),
            options: self.options,
        }
    }
}

#[derive(Debug)]
struct CrossEntropyBackward;

impl<B: Backend + CrossEntropyPassOps> Backward<B, 1> for CrossEntropyBackward {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let dloss = grads.consume::<B>(&ops.node);
        let State { logits, targets, lse, scale, options } = ops.state;
        let logits = checkpointer.retrieve_node_output(logits);
        if let [Some(node)] = ops.parents {
            let dlogits = B::cross_entropy_backward(dloss, logits, targets, lse, scale, options);
            grads.register::<B>(node.id, dlogits);
        }
    }
}

impl<B, C> CrossEntropyOps for Autodiff<B, C>
where
    B: Backend + CrossEntropyOps + CrossEntropyPassOps,
    C: CheckpointStrategy,
{
    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        options: CrossEntropyOptions,
    ) -> FloatTensor<Self> {
        match CrossEntropyBackward.prepare::<C>([logits.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let node = prep.checkpoint(&logits);
                let logits = logits.into_primitive();
                let (loss, lse, scale) = B::cross_entropy_forward(logits, targets.clone(), options);
                prep.finish(State { logits: node, targets, lse, scale, options }, loss)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::cross_entropy(logits.into_primitive(), targets, options))
            }
        }
    }
}

/// The kernels know the two types that Burn makes targets of.
pub(crate) fn known(targets: Tensor<1, Int>) -> Tensor<1, Int> {
    match targets.dtype() {
        DType::I32 | DType::I64 => targets,
        _ => targets.cast(IntDType::I32),
    }
}

/// [`cross_entropy`](fn@super::cross_entropy) through the kernels, without its checks.
pub(crate) fn fused(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
) -> Tensor<1> {
    Tensor::from_dispatch(<Dispatch as CrossEntropyOps>::cross_entropy(
        logits.into_dispatch(),
        known(targets).into_dispatch(),
        options,
    ))
}
