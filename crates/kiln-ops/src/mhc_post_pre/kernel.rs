//! The kernels of both sides, with one launch for the forward where `mhc_pre` has one that mixes too, and one pass over the
//! streams for most of the backward where it has one that takes dx back.

use crate::autodiff::Maybe;
use crate::launch;
use crate::mhc_pre::MhcPreOptions;
use crate::tile::Family;
use crate::{mhc_post, mhc_pre};
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

/// What goes in, γ in φ.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Forward<B: Backend> {
    /// The streams and the layer's output.
    #[extension_type]
    pub post: mhc_post::kernel::Forward<B>,
    /// `[n² + 2n, n·D]`.
    pub phi: FloatTensor<B>,
    /// `[3]`.
    pub alpha: FloatTensor<B>,
    /// `[n² + 2n]`.
    pub bias: FloatTensor<B>,
    /// Options.
    pub options: MhcPreOptions,
    /// The kernels that products run on.
    pub family: Option<Family>,
}

/// What the gradients are made of.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// The inputs.
    #[extension_type]
    pub of: Forward<B>,
    /// The streams after the layer.
    pub y: FloatTensor<B>,
    /// Their cotangent.
    #[extension_type]
    pub dy: Maybe<B>,
    /// That of h_in.
    #[extension_type]
    pub dh_in: Maybe<B>,
    /// That of h_post of the next layer.
    #[extension_type]
    pub dh_post: Maybe<B>,
    /// That of h_res of the next layer.
    #[extension_type]
    pub dh_res: Maybe<B>,
    /// y·φᵀ, as the forward left it.
    pub mix: FloatTensor<B>,
    /// The inverse root mean squares.
    pub norm: FloatTensor<B>,
    /// Whose gradients are wanted: x, f, h_post, h_res, φ, α, bias.
    pub wanted: [bool; 7],
}

/// The streams after the layer, and what precedes the next one.
pub(super) fn forward(of: Forward<CubeBackend>) -> mhc_pre::kernel::Left {
    let Forward { post, phi, alpha, bias, options, family } = of;
    let op = post.op;
    let x = launch::output(&post.x, op, "y", post.x.meta.shape().clone(), post.x.dtype);
    let of = mhc_pre::kernel::Forward { op, x, phi, alpha, bias, options, family };
    mhc_pre::kernel::forward_after(post, of)
}

/// Those gradients that are wanted.
pub(super) fn backward(backward: Backward<CubeBackend>) -> [Option<CubeTensor>; 7] {
    let Backward { of, y: x, dy, dh_in, dh_post, dh_res, mix, norm, wanted } = backward;
    let Forward { post, phi, alpha, bias, options, family } = of;
    let [dx, df, dpost, dres, dphi, dalpha, dbias] = wanted;
    let of_post = [dx, df, dpost, dres];
    let wanted = [of_post.contains(&true), dphi, dalpha, dbias];
    let of = mhc_pre::kernel::Forward { op: post.op, x, phi, alpha, bias, options, family };
    let of = mhc_pre::kernel::Backward { of, dh_in, dh_post, dh_res, mix, norm, also: dy, wanted };
    let before = of_post.iter().all(|wanted| *wanted).then_some(&post);
    let ([dy, dphi, dalpha, dbias], back) = mhc_pre::kernel::backward_through(of, before);
    if let Some(back) = back {
        let [dx, df, dpost, dres] = back.map(Some);
        return [dx, df, dpost, dres, dphi, dalpha, dbias];
    }
    let [dx, df, dpost, dres] = dy.map_or([const { None }; 4], |dy| {
        let mhc_post::kernel::Forward { op, x, f, h_post, h_res } = post;
        let wanted = of_post;
        let of = mhc_post::kernel::Backward { op, dy, x, f, h_post, h_res, wanted };
        mhc_post::kernel::backward(of)
    });
    [dx, df, dpost, dres, dphi, dalpha, dbias]
}
