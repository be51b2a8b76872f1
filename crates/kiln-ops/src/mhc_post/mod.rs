//! What follows a layer in manifold-constrained hyper-connections: its output spread over the streams, which are mixed.
//!
//! `y[o] = Σ_i h_res[o, i]·x[i] + h_post[o]·f` for each token's n streams `x[i]` of D elements (Xie et al., *mHC:
//! Manifold-Constrained Hyper-Connections*, 2025, [arXiv 2512.24880](https://arxiv.org/abs/2512.24880)). The first index
//! of `h_res` is the stream that is written; other libraries have it second.
//!
//! Backward: `dx[i] = Σ_o h_res[o, i]·dy[o]`, `df = Σ_o h_post[o]·dy[o]`, `dh_res[o, i] = ⟨x[i], dy[o]⟩` and
//! `dh_post[o] = ⟨f, dy[o]⟩`.
//!
//! Bytes that must move, for T tokens of elements of s bytes: forward T·D·s·(2n + 1) (x and f in, y out), backward
//! T·D·s·(3n + 2) (x, f and dy in, dx and df out). `h_res` and `h_post` are small beside them.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
pub(crate) mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Tensor};

const OP: &str = "mhc_post";

/// Streams of a token.
pub const MAX_STREAMS: usize = 8;

/// Mixes the streams of each token and adds a layer's output to them.
///
/// * `x`: the streams, `[B, S, n, D]`, f32, bf16 or f16, n from 1 to [`MAX_STREAMS`], D at least 1; any strides.
///   B and S may be 0.
/// * `f`: the layer's output, `[B, S, D]`, in the element type of `x`; any strides.
/// * `h_post`: `[B, S, n]`, f32.
/// * `h_res`: `[B, S, n, n]`, f32.
///
/// The result is `[B, S, n, D]` in the element type of `x`; arithmetic is f32. Gradients flow to all four; two runs agree
/// bit for bit.
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type or device, and where the fused kernel was asked for on a device that has
/// none.
pub fn mhc_post(
    x: Tensor<4>,
    f: Tensor<3>,
    h_post: Tensor<3>,
    h_res: Tensor<4>,
) -> Result<Tensor<4>, OpError> {
    check(OP, &x, &f, &h_post, &h_res)?;
    Ok(match policy::choose(OP, x.shape().num_elements(), &x)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(x, f, h_post, h_res),
        Choice::Reference => reference::mhc_post(x, f, h_post, h_res),
    })
}

/// What is checked before streams are mixed.
pub(crate) fn check(
    op: &'static str,
    x: &Tensor<4>,
    f: &Tensor<3>,
    h_post: &Tensor<3>,
    h_res: &Tensor<4>,
) -> Result<(), OpError> {
    let check = Check(op);
    let [b, s, n, d] = x.dims();
    let streams = (1..=MAX_STREAMS).contains(&n) && d >= 1;
    let expected = format!("[B, S, n, D] with n from 1 to {MAX_STREAMS} and D at least 1");
    check.shape("x", &x.dims(), streams, expected)?;
    check.float("x", x)?;
    check.shape("f", &f.dims(), f.dims() == [b, s, d], format!("{:?}", [b, s, d]))?;
    check.dtype("f", f, &[x.dtype()])?;
    check.shape(
        "h_post",
        &h_post.dims(),
        h_post.dims() == [b, s, n],
        format!("{:?}", [b, s, n]),
    )?;
    check.dtype("h_post", h_post, &[DType::F32])?;
    let expected = [b, s, n, n];
    check.shape("h_res", &h_res.dims(), h_res.dims() == expected, format!("{expected:?}"))?;
    check.dtype("h_res", h_res, &[DType::F32])?;
    let device = x.device();
    check.device("f", &f.device(), &device)?;
    check.device("h_post", &h_post.device(), &device)?;
    check.device("h_res", &h_res.device(), &device)?;
    Ok(())
}
