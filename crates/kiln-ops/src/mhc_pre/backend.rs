//! What precedes a layer as a Burn operation: dispatch, fusion and autodiff.

pub use super::kernel::{Backward, Forward};

use super::{MhcPre, MhcPreOptions, OP, kernel};
use crate::autodiff::{Graph, Maybe, MaybeMetadata, maybe};
use crate::tile;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::CubeBackend;

/// The streams, h_in, h_post, h_res; if `keep`, x·φᵀ and the inverse root mean squares.
pub(crate) type Outputs<B> =
    (FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, FloatTensor<B>, Maybe<B>, Maybe<B>);

/// What the fusion is told of them.
pub(crate) fn specs(
    x: &TensorSpec,
    keep: bool,
) -> (TensorSpec, TensorSpec, TensorSpec, TensorSpec, MaybeMetadata, MaybeMetadata) {
    let [b, s, n, d] = x.shape[..] else { unreachable!("rank 4") };
    let f32 = |shape: &[usize]| TensorSpec::new(Shape::from(shape.to_vec()), DType::F32);
    (
        x.clone(),
        TensorSpec::new(Shape::new([b, s, d]), x.dtype),
        f32(&[b, s, n]),
        f32(&[b, s, n, n]),
        maybe(keep, &f32(&[b * s, n * (n + 2)])),
        maybe(keep, &f32(&[b * s])),
    )
}

/// What precedes a layer, differentiable.
#[allow(clippy::type_complexity)] // The macro wants to see the tuple.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait MhcPreOps: Backend {
    /// x itself, h_in, h_post and h_res; if `keep`, x·φᵀ and the inverse root mean squares, which a backward needs and under
    /// autodiff keeps for itself.
    #[fusion(meta = |of, keep| specs(&of.x, *keep))]
    fn mhc_pre(
        #[extension_type] of: Forward<Self>,
        keep: bool,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        Maybe<Self>,
        Maybe<Self>,
    );
}

/// Its gradients; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait MhcPreGradOps: Backend {
    /// dx, dφ, dα and dbias.
    #[fusion(meta = |of| (
        maybe(of.wanted[0], &of.of.x),
        maybe(of.wanted[1], &of.of.phi),
        maybe(of.wanted[2], &of.of.alpha),
        maybe(of.wanted[3], &of.of.bias),
    ))]
    fn mhc_pre_backward(
        #[extension_type] of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>);
}

impl MhcPreOps for CubeBackend {
    fn mhc_pre(of: Forward<Self>, keep: bool) -> Outputs<Self> {
        let kernel::Left { x, h_in, h_post, h_res, mix, norm } = kernel::forward(of);
        (x, h_in, h_post, h_res, keep.then_some(mix).into(), keep.then_some(norm).into())
    }
}

impl MhcPreGradOps for CubeBackend {
    fn mhc_pre_backward(
        of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>) {
        kernel::backward(of).map(Maybe::from).into()
    }
}

impl<B: MhcPreOps + MhcPreGradOps, C: CheckpointStrategy> MhcPreOps for Autodiff<B, C> {
    fn mhc_pre(of: Forward<Self>, _keep: bool) -> Outputs<Self> {
        let Forward { op, x, phi, alpha, bias, options, family } = of;
        let (given, mut followed) = (x.clone(), false);
        let inputs = [x, phi, alpha, bias];
        let outputs = Graph::<C>::outputs(inputs, [0, 1, 2, 3], |inputs, wanted| {
            let of = move |[x, phi, alpha, bias]: [FloatTensor<B>; 4]| Forward {
                op,
                x,
                phi,
                alpha,
                bias,
                options,
                family,
            };
            let keep = wanted.contains(&true);
            followed = wanted[0];
            let (x, h_in, h_post, h_res, mix, norm) = B::mhc_pre(of(inputs), keep);
            ([x, h_in, h_post, h_res], move |[also, dh_in, dh_post, dh_res], inputs| {
                let [mix, norm] =
                    [mix, norm].map(|kept: Maybe<B>| kept.expect("the forward kept it"));
                let of = of(inputs);
                let of = Backward { of, dh_in, dh_post, dh_res, mix, norm, also, wanted };
                B::mhc_pre_backward(of).into()
            })
        });
        let [x, h_in, h_post, h_res] = outputs;
        // Whose gradient nobody wants has none for its being handed on.
        let x = if followed { x } else { given };
        (x, h_in, h_post, h_res, Maybe::None, Maybe::None)
    }
}

fn forward(
    x: Tensor<4>,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    options: MhcPreOptions,
) -> Forward<Dispatch> {
    let [alpha, bias] = [alpha, bias].map(Tensor::into_dispatch);
    let (x, phi, family) = (x.into_dispatch(), phi.into_dispatch(), tile::forced());
    Forward { op: OP, x, phi, alpha, bias, options, family }
}

/// [`mhc_pre`](fn@super::mhc_pre) through the kernels, without its checks.
pub(crate) fn fused(
    x: Tensor<4>,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    gamma: Option<Tensor<2>>,
    options: MhcPreOptions,
) -> MhcPre {
    let phi = super::scaled(phi, gamma);
    let of = forward(x, phi, alpha, bias, options);
    let (x, h_in, h_post, h_res, ..) = Dispatch::mhc_pre(of, false);
    MhcPre {
        x: Tensor::from_dispatch(x),
        h_in: Tensor::from_dispatch(h_in),
        h_post: Tensor::from_dispatch(h_post),
        h_res: Tensor::from_dispatch(h_res),
    }
}

/// What the forward keeps for [`backward`], past autodiff and without checks: x·φᵀ, as it is stored, and the inverse root
/// mean squares. γ is in φ.
pub fn kept(
    x: Tensor<4>,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    options: MhcPreOptions,
) -> (Tensor<2>, Tensor<1>) {
    let (.., mix, norm) = Dispatch::mhc_pre(forward(x, phi, alpha, bias, options), true);
    (mix.tensor(), norm.tensor())
}

/// dx, dφ, dα and dbias through the kernels, past autodiff and without checks. γ is in φ.
pub fn backward(
    cotangents: (Tensor<3>, Tensor<3>, Tensor<4>),
    inputs: (Tensor<4>, Tensor<2>, Tensor<1>, Tensor<1>),
    kept: (Tensor<2>, Tensor<1>),
    options: MhcPreOptions,
) -> (Tensor<4>, Tensor<2>, Tensor<1>, Tensor<1>) {
    let (x, phi, alpha, bias) = inputs;
    let of = forward(x, phi, alpha, bias, options);
    let dh_in = Maybe::Some(cotangents.0.into_dispatch());
    let dh_post = Maybe::Some(cotangents.1.into_dispatch());
    let dh_res = Maybe::Some(cotangents.2.into_dispatch());
    let (mix, norm, wanted) = (kept.0.into_dispatch(), kept.1.into_dispatch(), [true; 4]);
    let also = Maybe::None;
    let backward = Backward { of, dh_in, dh_post, dh_res, mix, norm, also, wanted };
    let (dx, dphi, dalpha, dbias) = Dispatch::mhc_pre_backward(backward);
    (dx.tensor(), dphi.tensor(), dalpha.tensor(), dbias.tensor())
}
