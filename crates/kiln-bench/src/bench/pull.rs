//! Two operations that only the bench needs: a scalar whose gradient at `y` is a given tensor,
//! without a kernel of the size of `y`, so that a backward can be timed alone; and a copy that
//! Burn's fusion can neither join with another nor leave out.

use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor,
};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// The pull of a cotangent.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait PullOps: Backend {
    /// `[1]`, with `dy` as the gradient of `y`.
    #[fusion(meta = scalar)]
    fn pull(y: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// The copy.
#[backend_extension(Cube, Fusion)]
pub trait CopyOps: Backend {
    /// A copy of x.
    #[fusion(dtype = x, shape = x)]
    fn plain_copy(x: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl CopyOps for CubeBackend {
    fn plain_copy(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x.copy()
    }
}

/// A copy of `x`.
pub(super) fn copy(x: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(<Dispatch as CopyOps>::plain_copy(x.into_dispatch()))
}

fn scalar(y: &TensorSpec, _dy: &TensorSpec) -> TensorSpec {
    TensorSpec { shape: [1].into(), dtype: y.dtype }
}

impl PullOps for CubeBackend {
    fn pull(y: FloatTensor<Self>, _dy: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_zeros([1].into(), &y.device(), float_dtype(y.dtype()))
    }
}

fn float_dtype(dtype: burn::tensor::DType) -> burn::tensor::FloatDType {
    dtype.into()
}

impl<B: Backend + PullOps, C: CheckpointStrategy> PullOps for Autodiff<B, C> {
    fn pull(y: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Pull;

        impl<B: Backend> Backward<B, 1> for Pull {
            type State = FloatTensor<B>;

            fn backward(
                self,
                ops: Ops<Self::State, 1>,
                grads: &mut Gradients,
                _: &mut Checkpointer,
            ) {
                grads.consume::<B>(&ops.node);
                if let [Some(y)] = ops.parents {
                    grads.register::<B>(y.id, ops.state);
                }
            }
        }

        let dy = dy.into_primitive();
        match Pull.prepare::<C>([y.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(dy.clone(), B::pull(y.into_primitive(), dy)),
            OpsKind::UnTracked(prep) => prep.finish(B::pull(y.into_primitive(), dy)),
        }
    }
}

/// A scalar whose gradient at `y` is `dy`.
pub(super) fn pull(y: Tensor<1>, dy: Tensor<1>) -> Tensor<1> {
    Tensor::from_dispatch(<Dispatch as PullOps>::pull(y.into_dispatch(), dy.into_dispatch()))
}
