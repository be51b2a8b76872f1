//! What follows one layer and what precedes the next, in manifold-constrained hyper-connections: the streams that
//! [`mhc_post`](fn@crate::mhc_post::mhc_post) makes, and what [`mhc_pre`](fn@crate::mhc_pre::mhc_pre) makes of them.
//!
//! y = mhc_post(x, f, h_post, h_res) and (h_in, h_post', h_res') = mhc_pre(y, φ, α, bias, γ), with y as it is stored.
//!
//! Backward: dy of y itself and what mhc_pre gives y are added, and mhc_post takes the sum.
//!
//! Bytes that must move, for T tokens of n streams of D elements of s bytes: forward T·D·s·(2n + 2) (x and f in, y and h_in
//! out), where the two by themselves read y again, T·D·s·(3n + 2). Backward T·D·s·(4n + 3) (x, f, y, dy and dh_in in, dx and
//! df out).

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::mhc_pre::{MhcPre, MhcPreOptions};
use crate::policy::{self, Choice};
use crate::{mhc_post, mhc_pre};
use burn::tensor::Tensor;

const OP: &str = "mhc_post_pre";

/// What [`mhc_post`](fn@crate::mhc_post::mhc_post) mixes, with the shapes that it takes.
#[derive(Debug, Clone)]
pub struct MhcPost {
    /// The streams before a layer, `[B, S, n, D]`.
    pub x: Tensor<4>,
    /// The layer's output, `[B, S, D]`.
    pub f: Tensor<3>,
    /// How much of it each stream gets, `[B, S, n]`, f32.
    pub h_post: Tensor<3>,
    /// How the streams are mixed, `[B, S, n, n]`, f32.
    pub h_res: Tensor<4>,
}

/// The streams after a layer, `[B, S, n, D]`, and what the next one is given of them.
///
/// * `post`: as [`mhc_post`](fn@crate::mhc_post::mhc_post) takes it.
/// * `phi`, `alpha`, `bias`, `gamma`, `options`: as [`mhc_pre`](fn@crate::mhc_pre::mhc_pre) takes them.
///
/// The streams are rounded to their element type before the next layer's input is made, so they are exactly those of
/// `mhc_post`, and the rest is what `mhc_pre` makes of them. Gradients flow to all inputs; two runs agree bit for bit.
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type, device or option, and where the fused kernel was asked for on a device
/// that has none.
pub fn mhc_post_pre(
    post: MhcPost,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    gamma: Option<Tensor<2>>,
    options: MhcPreOptions,
) -> Result<MhcPre, OpError> {
    let MhcPost { x, f, h_post, h_res } = &post;
    mhc_post::check(OP, x, f, h_post, h_res)?;
    mhc_pre::check(OP, x, &phi, &alpha, &bias, gamma.as_ref(), options)?;
    Ok(match policy::choose(OP, x.shape().num_elements(), x)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(post, phi, alpha, bias, gamma, options),
        Choice::Reference => reference::mhc_post_pre(post, phi, alpha, bias, gamma, options),
    })
}
