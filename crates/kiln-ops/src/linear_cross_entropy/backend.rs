//! Linear cross-entropy as a Burn operation: dispatch, fusion and autodiff.
//!
//! The forward makes the gradients too, for a cotangent of 1; the backward scales them.

pub use super::chunks::Forward;

use super::OP;
use super::chunks;
use crate::autodiff::{Graph, Maybe, maybe};
use crate::cross_entropy::CrossEntropyOptions;
use crate::tile;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor,
};
use burn::tensor::{DType, FloatDType, Int, Shape, Tensor};
use burn_cubecl::CubeBackend;

/// The loss, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait LinearCrossEntropyOps: Backend {
    /// The mean loss, `[1]` in f32; dx, and dW in f32, for a cotangent of 1 if they are wanted, which under
    /// autodiff the backward keeps for itself.
    #[fusion(meta = |of, wanted| {
        let loss = TensorSpec::new(Shape::new([1]), DType::F32);
        let dw = TensorSpec::new(of.weight.shape.clone(), DType::F32);
        (loss, maybe(wanted[0], &of.x), maybe(wanted[1], &dw))
    })]
    fn linear_cross_entropy(
        #[extension_type] of: Forward<Self>,
        wanted: [bool; 2],
    ) -> (FloatTensor<Self>, Maybe<Self>, Maybe<Self>);
}

impl LinearCrossEntropyOps for CubeBackend {
    fn linear_cross_entropy(
        of: Forward<Self>,
        wanted: [bool; 2],
    ) -> (FloatTensor<Self>, Maybe<Self>, Maybe<Self>) {
        let (loss, dx, dw) = chunks::run(of, wanted);
        (loss, dx.into(), dw.into())
    }
}

impl<B: LinearCrossEntropyOps, C: CheckpointStrategy> LinearCrossEntropyOps for Autodiff<B, C> {
    fn linear_cross_entropy(
        Forward { op, x, weight, table, targets, scale, options, family }: Forward<Self>,
        _wanted: [bool; 2],
    ) -> (FloatTensor<Self>, Maybe<Self>, Maybe<Self>) {
        let scale = scale.into_primitive();
        let loss = Graph::<C>::output([x, weight], [], |[x, weight], wanted| {
            let dtype = x.dtype();
            let of = Forward { op, x, weight, table, targets, scale, options, family };
            let (loss, dx, dw) = B::linear_cross_entropy(of, wanted);
            (loss, move |dloss: FloatTensor<B>, []| {
                let factor = B::float_reshape(dloss, Shape::new([1, 1]));
                [dx, dw].map(|gradient| {
                    let scaled = |gradient| times::<B>(gradient, factor.clone(), dtype);
                    gradient.option().map(scaled).into()
                })
            })
        });
        (loss, Maybe::None, Maybe::None)
    }
}

/// A gradient times a cotangent, in f32, as that of a scaled loss may be beyond f16, and then in `dtype`.
fn times<B: Backend>(
    gradient: FloatTensor<B>,
    factor: FloatTensor<B>,
    dtype: DType,
) -> FloatTensor<B> {
    let wide = B::float_cast(gradient, FloatDType::F32);
    B::float_cast(B::float_mul(wide, factor), FloatDType::from(dtype))
}

/// [`linear_cross_entropy`](fn@super::linear_cross_entropy) through the kernels, without its checks.
pub(crate) fn fused(
    x: Tensor<2>,
    weight: Tensor<2>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
    table: bool,
) -> Tensor<1> {
    let counted = targets.clone().not_equal_elem(options.ignore_index).int().sum();
    let scale = counted.float().cast(DType::F32).clamp_min(1.0).recip().into_dispatch();
    let targets = crate::cross_entropy::backend::known(targets).into_dispatch();
    let [x, weight] = [x, weight].map(Tensor::into_dispatch);
    let family = tile::forced();
    let of = Forward { op: OP, x, weight, table, targets, scale, options, family };
    Tensor::from_dispatch(Dispatch::linear_cross_entropy(of, [false; 2]).0)
}
