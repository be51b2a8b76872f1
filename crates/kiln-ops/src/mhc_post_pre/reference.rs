//! What follows a layer and what precedes the next, by the references of both.

use super::MhcPost;
use crate::mhc_post::reference::mhc_post;
use crate::mhc_pre::reference::mhc_pre;
use crate::mhc_pre::{MhcPre, MhcPreOptions};
use burn::tensor::Tensor;

/// [`mhc_post_pre`](fn@super::mhc_post_pre) without its checks.
pub fn mhc_post_pre(
    post: MhcPost,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    gamma: Option<Tensor<2>>,
    options: MhcPreOptions,
) -> MhcPre {
    let MhcPost { x, f, h_post, h_res } = post;
    mhc_pre(mhc_post(x, f, h_post, h_res), phi, alpha, bias, gamma, options)
}
