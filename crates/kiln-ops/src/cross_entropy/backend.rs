//! Cross-entropy as a Burn operation: dispatch, fusion and autodiff.

pub use super::gradient::Backward;
pub use super::kernel::Forward;

use super::{CrossEntropyOptions, OP, gradient, kernel};
use crate::autodiff::{Graph, Maybe, maybe};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Int, IntDType, Shape, Tensor};
use burn_cubecl::CubeBackend;

/// Cross-entropy, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait CrossEntropyOps: Backend {
    /// The mean loss, `[1]` in f32; if `keep`, the log-sum-exp of each row and one over the number of
    /// targets that count, which a backward needs and under autodiff keeps for itself.
    #[fusion(meta = |of, keep| {
        let f32 = |size: usize| TensorSpec::new(Shape::new([size]), DType::F32);
        (f32(1), maybe(*keep, &f32(of.logits.shape[0])), maybe(*keep, &f32(1)))
    })]
    fn cross_entropy(
        #[extension_type] of: Forward<Self>,
        keep: bool,
    ) -> (FloatTensor<Self>, Maybe<Self>, Maybe<Self>);
}

/// Its gradient; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait CrossEntropyGradOps: Backend {
    /// The gradient of the logits.
    #[fusion(meta = |of| of.logits.clone())]
    fn cross_entropy_backward(#[extension_type] of: Backward<Self>) -> FloatTensor<Self>;
}

impl CrossEntropyOps for CubeBackend {
    fn cross_entropy(
        of: Forward<Self>,
        keep: bool,
    ) -> (FloatTensor<Self>, Maybe<Self>, Maybe<Self>) {
        let (loss, lse, scale) = kernel::forward(of);
        (loss, keep.then_some(lse).into(), keep.then_some(scale).into())
    }
}

impl CrossEntropyGradOps for CubeBackend {
    fn cross_entropy_backward(of: Backward<Self>) -> FloatTensor<Self> {
        gradient::backward(of)
    }
}

impl<B, C> CrossEntropyOps for Autodiff<B, C>
where
    B: CrossEntropyOps + CrossEntropyGradOps,
    C: CheckpointStrategy,
{
    fn cross_entropy(
        Forward { op, logits, targets, options }: Forward<Self>,
        _keep: bool,
    ) -> (FloatTensor<Self>, Maybe<Self>, Maybe<Self>) {
        let loss = Graph::<C>::output([logits], [0], |[logits], [wanted]| {
            let of = Forward { op, logits, targets: targets.clone(), options };
            let (loss, lse, scale) = B::cross_entropy(of, wanted);
            (loss, move |dloss, [logits]| {
                let [lse, scale] = [lse, scale].map(|kept| kept.expect("the forward kept it"));
                let of = Backward { op, dloss, logits, targets, lse, scale, options };
                [Maybe::Some(B::cross_entropy_backward(of))]
            })
        });
        (loss, Maybe::None, Maybe::None)
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
    let (logits, targets) = (logits.into_dispatch(), known(targets).into_dispatch());
    let (loss, ..) = Dispatch::cross_entropy(Forward { op: OP, logits, targets, options }, false);
    Tensor::from_dispatch(loss)
}

/// What the forward keeps for [`backward`], past autodiff and without checks: the log-sum-exp of each row and
/// one over the number of targets that count.
pub fn kept(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
) -> [Tensor<1>; 2] {
    let (logits, targets) = (logits.into_dispatch(), known(targets).into_dispatch());
    let forward = Forward { op: OP, logits, targets, options };
    let (_, lse, scale) = Dispatch::cross_entropy(forward, true);
    [lse.tensor(), scale.tensor()]
}

/// The gradient of the logits through the kernel, past autodiff and without checks.
pub fn backward(
    dloss: Tensor<1>,
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    kept: [Tensor<1>; 2],
    options: CrossEntropyOptions,
) -> Tensor<2> {
    let (logits, targets) = (logits.into_dispatch(), known(targets).into_dispatch());
    let (dloss, [lse, scale]) = (dloss.into_dispatch(), kept.map(Tensor::into_dispatch));
    let backward = Backward { op: OP, dloss, logits, targets, lse, scale, options };
    Tensor::from_dispatch(Dispatch::cross_entropy_backward(backward))
}
