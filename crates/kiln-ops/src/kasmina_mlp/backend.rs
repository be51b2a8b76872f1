//! The Kasmina layer with MLPs as a Burn operation: dispatch, fusion and autodiff.

pub use super::kernel::Backward;

use super::kernel;
use crate::autodiff::{Graph, Maybe, maybe};
use crate::kasmina::backend::{Blueprints, blueprints, garden};
use crate::kasmina::{Seeds, Telemetry};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Autodiff, AutodiffBackend, Backend, Dispatch, backend_extension, tensor::FloatTensor,
};
use burn::tensor::{DType, Tensor};
use burn_cubecl::CubeBackend;

/// The Kasmina layer with MLPs, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait KasminaMlpOps: Backend {
    /// y, and mean and variance of the chunks of x, `[C]` in f32, which have no gradient; the MLPs are `[Q, 4S + 3, S]`.
    #[fusion(meta = |x, of, _mlps| {
        let statistic = TensorSpec::new(of.alpha.shape.clone(), DType::F32);
        (x.clone(), statistic.clone(), statistic)
    })]
    fn kasmina_mlp(
        x: FloatTensor<Self>,
        #[extension_type] of: Blueprints<Self>,
        mlps: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

/// Its gradients; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait KasminaMlpGradOps: Backend {
    /// dx, dalpha, dblueprints and dmlps.
    #[fusion(meta = |of| (
        maybe(of.wanted[0], &of.dy),
        maybe(of.wanted[1], &of.of.alpha),
        maybe(of.wanted[2], &of.of.rows),
        maybe(of.wanted[3], &of.mlps),
    ))]
    fn kasmina_mlp_backward(
        #[extension_type] of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>);
}

impl KasminaMlpOps for CubeBackend {
    fn kasmina_mlp(
        x: FloatTensor<Self>,
        of: Blueprints<Self>,
        mlps: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let [y, mean, variance] = kernel::forward(x, of, mlps);
        (y, mean, variance)
    }
}

impl KasminaMlpGradOps for CubeBackend {
    fn kasmina_mlp_backward(
        of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>) {
        kernel::backward(of).map(Maybe::from).into()
    }
}

impl<B: KasminaMlpOps + KasminaMlpGradOps, C: CheckpointStrategy> KasminaMlpOps for Autodiff<B, C> {
    fn kasmina_mlp(
        x: FloatTensor<Self>,
        of: Blueprints<Self>,
        mlps: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let Blueprints { rows, alpha, lifecycle, blueprint_id, blend } = of;
        let mut seen = None;
        let inputs = [x, alpha, rows, mlps];
        let y = Graph::<C>::output(inputs, [0, 1, 2, 3], |[x, alpha, rows, mlps], wanted| {
            let codes = [lifecycle, blueprint_id, blend];
            let of = garden::<B>(rows, alpha, codes.clone());
            let (y, mean, variance) = B::kasmina_mlp(x, of, mlps);
            seen = Some((mean, variance));
            (y, move |dy, [x, alpha, rows, mlps]| {
                let of = garden::<B>(rows, alpha, codes);
                B::kasmina_mlp_backward(Backward { dy, x, of, mlps, wanted }).into()
            })
        });
        let (mean, variance) = seen.expect("the forward has run");
        (y, Self::from_inner(mean), Self::from_inner(variance))
    }
}

/// [`kasmina_mlp`](fn@super::kasmina_mlp) through the kernels, without its checks.
pub(super) fn fused<const D: usize>(
    x: Tensor<D>,
    rows: Tensor<2>,
    mlps: Tensor<3>,
    seeds: &Seeds,
) -> (Tensor<D>, Telemetry) {
    let (x, mlps) = (x.into_dispatch(), mlps.into_dispatch());
    let (y, mean, variance) = Dispatch::kasmina_mlp(x, blueprints(rows, seeds), mlps);
    let [mean, variance] = [mean, variance].map(Tensor::from_dispatch);
    (Tensor::from_dispatch(y), Telemetry { mean, variance })
}

/// dx, dalpha, dblueprints and dmlps through the kernels, past autodiff and without checks.
pub fn backward<const D: usize>(
    dy: Tensor<D>,
    x: Tensor<D>,
    rows: Tensor<2>,
    mlps: Tensor<3>,
    seeds: &Seeds,
) -> (Tensor<D>, Tensor<1>, Tensor<2>, Tensor<3>) {
    let (dtypes, of) = ([seeds.alpha.dtype(), rows.dtype()], blueprints(rows, seeds));
    let (dy, x, mlps) = (dy.into_dispatch(), x.into_dispatch(), mlps.into_dispatch());
    let of = Backward { dy, x, of, mlps, wanted: [true; 4] };
    let (dx, dalpha, drows, dmlps) = Dispatch::kasmina_mlp_backward(of);
    let (dalpha, drows): (Tensor<1>, Tensor<2>) = (dalpha.tensor(), drows.tensor());
    let dalpha = if dalpha.dtype() == dtypes[0] { dalpha } else { dalpha.cast(dtypes[0]) };
    let drows = if drows.dtype() == dtypes[1] { drows } else { drows.cast(dtypes[1]) };
    (dx.tensor(), dalpha, drows, dmlps.tensor())
}
