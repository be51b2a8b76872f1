//! What follows a layer and what precedes the next as a Burn operation: dispatch, fusion and autodiff.

pub use super::kernel::{Backward, Forward};

use super::{MhcPost, OP, kernel};
use crate::autodiff::{Graph, Maybe, maybe};
use crate::mhc_pre::backend::{Outputs, specs};
use crate::mhc_pre::{self, MhcPre, MhcPreOptions};
use crate::{mhc_post, tile};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// What follows a layer and what precedes the next, differentiable.
#[allow(clippy::type_complexity)] // The macro wants to see the tuple.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait MhcPostPreOps: Backend {
    /// The streams, h_in, h_post and h_res; if `keep`, y·φᵀ and the inverse root mean squares, which a backward needs and
    /// under autodiff keeps for itself.
    #[fusion(meta = |of, keep| specs(&of.post.x, *keep))]
    fn mhc_post_pre(
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
#[allow(clippy::type_complexity)] // The macro wants to see the tuple.
#[backend_extension(Cube, Fusion)]
pub trait MhcPostPreGradOps: Backend {
    /// dx, df, dh_post, dh_res, dφ, dα and dbias.
    #[fusion(meta = |of| (
        maybe(of.wanted[0], &of.of.post.x),
        maybe(of.wanted[1], &of.of.post.f),
        maybe(of.wanted[2], &of.of.post.h_post),
        maybe(of.wanted[3], &of.of.post.h_res),
        maybe(of.wanted[4], &of.of.phi),
        maybe(of.wanted[5], &of.of.alpha),
        maybe(of.wanted[6], &of.of.bias),
    ))]
    fn mhc_post_pre_backward(
        #[extension_type] of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>);
}

impl MhcPostPreOps for CubeBackend {
    fn mhc_post_pre(of: Forward<Self>, keep: bool) -> Outputs<Self> {
        let mhc_pre::kernel::Left { x, h_in, h_post, h_res, mix, norm } = kernel::forward(of);
        (x, h_in, h_post, h_res, keep.then_some(mix).into(), keep.then_some(norm).into())
    }
}

impl MhcPostPreGradOps for CubeBackend {
    fn mhc_post_pre_backward(
        of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>)
    {
        kernel::backward(of).map(Maybe::from).into()
    }
}

impl<B: MhcPostPreOps + MhcPostPreGradOps, C: CheckpointStrategy> MhcPostPreOps for Autodiff<B, C> {
    fn mhc_post_pre(of: Forward<Self>, _keep: bool) -> Outputs<Self> {
        let Forward { post, phi, alpha, bias, options, family } = of;
        let mhc_post::backend::Forward { op, x, f, h_post, h_res } = post;
        let inputs = [x, f, h_post, h_res, phi, alpha, bias];
        let outputs = Graph::<C>::outputs(inputs, [0, 1, 2, 3, 4, 5, 6], |inputs, wanted| {
            let of = move |inputs: [FloatTensor<B>; 7]| {
                let [x, f, h_post, h_res, phi, alpha, bias] = inputs;
                let post = mhc_post::backend::Forward { op, x, f, h_post, h_res };
                Forward { post, phi, alpha, bias, options, family }
            };
            let keep = wanted.contains(&true);
            let (y, h_in, h_post, h_res, mix, norm) = B::mhc_post_pre(of(inputs), keep);
            let streams = y.clone();
            ([y, h_in, h_post, h_res], move |cotangents: [Maybe<B>; 4], inputs| {
                let [dy, dh_in, dh_post, dh_res] = cotangents;
                let [mix, norm] =
                    [mix, norm].map(|kept: Maybe<B>| kept.expect("the forward kept it"));
                let (of, y) = (of(inputs), streams);
                let of = Backward { of, y, dy, dh_in, dh_post, dh_res, mix, norm, wanted };
                B::mhc_post_pre_backward(of).into()
            })
        });
        let [y, h_in, h_post, h_res] = outputs;
        (y, h_in, h_post, h_res, Maybe::None, Maybe::None)
    }
}

fn forward(
    post: MhcPost,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    options: MhcPreOptions,
) -> Forward<Dispatch> {
    let MhcPost { x, f, h_post, h_res } = post;
    let [x, h_res] = [x, h_res].map(Tensor::into_dispatch);
    let [f, h_post] = [f, h_post].map(Tensor::into_dispatch);
    let post = mhc_post::backend::Forward { op: OP, x, f, h_post, h_res };
    let [alpha, bias] = [alpha, bias].map(Tensor::into_dispatch);
    Forward { post, phi: phi.into_dispatch(), alpha, bias, options, family: tile::forced() }
}

/// [`mhc_post_pre`](fn@super::mhc_post_pre) through the kernels, without its checks.
pub(crate) fn fused(
    post: MhcPost,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    gamma: Option<Tensor<2>>,
    options: MhcPreOptions,
) -> MhcPre {
    let of = forward(post, mhc_pre::scaled(phi, gamma), alpha, bias, options);
    let (y, h_in, h_post, h_res, ..) = Dispatch::mhc_post_pre(of, false);
    MhcPre {
        x: Tensor::from_dispatch(y),
        h_in: Tensor::from_dispatch(h_in),
        h_post: Tensor::from_dispatch(h_post),
        h_res: Tensor::from_dispatch(h_res),
    }
}

/// What the forward keeps for [`backward`], past autodiff and without checks: the streams, y·φᵀ as it is stored, and the
/// inverse root mean squares. γ is in φ.
pub fn kept(
    post: MhcPost,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    options: MhcPreOptions,
) -> (Tensor<4>, Tensor<2>, Tensor<1>) {
    let (y, .., mix, norm) = Dispatch::mhc_post_pre(forward(post, phi, alpha, bias, options), true);
    (Tensor::from_dispatch(y), mix.tensor(), norm.tensor())
}

/// What [`backward`] returns: the gradients of the four of [`MhcPost`], and of φ, α and bias.
pub struct Gradients {
    /// Of x, f, h_post and h_res.
    pub post: MhcPost,
    /// Of φ.
    pub phi: Tensor<2>,
    /// Of α.
    pub alpha: Tensor<1>,
    /// Of bias.
    pub bias: Tensor<1>,
}

/// The gradients through the kernels, past autodiff and without checks, from the cotangents of the streams and of what the
/// next layer is given. γ is in φ.
pub fn backward(
    cotangents: MhcPre,
    inputs: (MhcPost, Tensor<2>, Tensor<1>, Tensor<1>),
    kept: (Tensor<4>, Tensor<2>, Tensor<1>),
    options: MhcPreOptions,
) -> Gradients {
    let (post, phi, alpha, bias) = inputs;
    let of = forward(post, phi, alpha, bias, options);
    let MhcPre { x: dy, h_in, h_post, h_res } = cotangents;
    let (y, mix, norm) = (kept.0.into_dispatch(), kept.1.into_dispatch(), kept.2.into_dispatch());
    let backward = Backward {
        of,
        y,
        dy: Maybe::Some(dy.into_dispatch()),
        dh_in: Maybe::Some(h_in.into_dispatch()),
        dh_post: Maybe::Some(h_post.into_dispatch()),
        dh_res: Maybe::Some(h_res.into_dispatch()),
        mix,
        norm,
        wanted: [true; 7],
    };
    let (x, f, h_post, h_res, phi, alpha, bias) = Dispatch::mhc_post_pre_backward(backward);
    let post =
        MhcPost { x: x.tensor(), f: f.tensor(), h_post: h_post.tensor(), h_res: h_res.tensor() };
    Gradients { post, phi: phi.tensor(), alpha: alpha.tensor(), bias: bias.tensor() }
}
