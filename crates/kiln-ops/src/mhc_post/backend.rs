//! The streams after a layer as a Burn operation: dispatch, fusion and autodiff.

pub use super::kernel::{Backward, Forward};

use super::{OP, kernel};
use crate::autodiff::{Graph, Maybe, maybe};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// The streams after a layer, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait MhcPostOps: Backend {
    /// `y[o] = Σ_i h_res[o, i]·x[i] + h_post[o]·f`.
    #[fusion(meta = |of| of.x.clone())]
    fn mhc_post(#[extension_type] of: Forward<Self>) -> FloatTensor<Self>;
}

/// Its gradients; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait MhcPostGradOps: Backend {
    /// dx, df, dh_post and dh_res.
    #[fusion(meta = |of| (
        maybe(of.wanted[0], &of.x),
        maybe(of.wanted[1], &of.f),
        maybe(of.wanted[2], &of.h_post),
        maybe(of.wanted[3], &of.h_res),
    ))]
    fn mhc_post_backward(
        #[extension_type] of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>);
}

impl MhcPostOps for CubeBackend {
    fn mhc_post(of: Forward<Self>) -> FloatTensor<Self> {
        kernel::forward(of)
    }
}

impl MhcPostGradOps for CubeBackend {
    fn mhc_post_backward(
        of: Backward<Self>,
    ) -> (Maybe<Self>, Maybe<Self>, Maybe<Self>, Maybe<Self>) {
        let [dx, df, dh_post, dh_res] = kernel::backward(of).map(Maybe::from);
        (dx, df, dh_post, dh_res)
    }
}

impl<B: MhcPostOps + MhcPostGradOps, C: CheckpointStrategy> MhcPostOps for Autodiff<B, C> {
    fn mhc_post(of: Forward<Self>) -> FloatTensor<Self> {
        let Forward { op, x, f, h_post, h_res } = of;
        let inputs = [x, f, h_post, h_res];
        Graph::<C>::output(inputs, [0, 1, 2, 3], |[x, f, h_post, h_res], wanted| {
            (B::mhc_post(Forward { op, x, f, h_post, h_res }), move |dy, [x, f, h_post, h_res]| {
                let of = Backward { op, dy, x, f, h_post, h_res, wanted };
                B::mhc_post_backward(of).into()
            })
        })
    }
}

fn forward(x: Tensor<4>, f: Tensor<3>, h_post: Tensor<3>, h_res: Tensor<4>) -> Forward<Dispatch> {
    let [x, h_res] = [x, h_res].map(Tensor::into_dispatch);
    let [f, h_post] = [f, h_post].map(Tensor::into_dispatch);
    Forward { op: OP, x, f, h_post, h_res }
}

/// [`mhc_post`](fn@super::mhc_post) through the kernels, without its checks.
pub(crate) fn fused(x: Tensor<4>, f: Tensor<3>, h_post: Tensor<3>, h_res: Tensor<4>) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::mhc_post(forward(x, f, h_post, h_res)))
}

/// dx, df, dh_post and dh_res through the kernels, past autodiff and without checks.
pub fn backward(
    dy: Tensor<4>,
    x: Tensor<4>,
    f: Tensor<3>,
    h_post: Tensor<3>,
    h_res: Tensor<4>,
) -> (Tensor<4>, Tensor<3>, Tensor<3>, Tensor<4>) {
    let Forward { op, x, f, h_post, h_res } = forward(x, f, h_post, h_res);
    let (dy, wanted) = (dy.into_dispatch(), [true; 4]);
    let (dx, df, dh_post, dh_res) =
        Dispatch::mhc_post_backward(Backward { op, dy, x, f, h_post, h_res, wanted });
    (dx.tensor(), df.tensor(), dh_post.tensor(), dh_res.tensor())
}
