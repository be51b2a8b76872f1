//! What precedes a layer in manifold-constrained hyper-connections: its input, and how its output will be mixed in.
//!
//! For each token with n streams of D elements, X = vec(x) and K = n·D (Xie et al., *mHC: Manifold-Constrained
//! Hyper-Connections*, 2025, [arXiv 2512.24880](https://arxiv.org/abs/2512.24880)):
//!
//! * r = (mean(X²) + `norm_eps`)^-½ and y = r · φ·(γ ∘ X), of n, n and n² elements
//! * h_pre = sigmoid(α₀·y + bias) + `hc_eps`, h_post = 2·sigmoid(α₁·y + bias)
//! * h_res = α₂·y + bias, and then R repeats of Sinkhorn: the softmax of each row plus `hc_eps`, its columns divided by
//!   their sums plus `hc_eps`, and R − 1 times the rows and the columns
//! * h_in = Σ_i h_pre\[i\]·x\[i\]
//!
//! Backward, with s the sigmoids and the gradients g of what they and Sinkhorn are given: g_pre\[i\] = ⟨dh_in,
//! x\[i\]⟩·s·(1 − s), g_post = 2·dh_post·s·(1 − s), and g_res is Sinkhorn's, step by step back. Then dbias = Σ g and
//! dα = Σ ⟨g, y⟩ over the tokens, and with dm = r·α∘g: dφ = Σ dm·(γ ∘ X)ᵀ, dγ = Σ X ∘ φᵀ·dm and
//! dX = γ ∘ φᵀ·dm − (⟨α∘g, y⟩·r²/K)·X + h_pre\[i\]·dh_in, and what the streams are given that are handed on.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
pub(crate) mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::mhc_post::MAX_STREAMS;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Tensor};

const OP: &str = "mhc_pre";

/// Most repeats of Sinkhorn.
pub const MAX_SINKHORN: usize = 32;

/// Options of [`mhc_pre`](fn@mhc_pre).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MhcPreOptions {
    /// Added to the mean of the squares; at least 0.
    pub norm_eps: f64,
    /// Added to h_pre and inside Sinkhorn; at least 0.
    pub hc_eps: f64,
    /// Repeats of Sinkhorn, up to [`MAX_SINKHORN`]; 0: h_res as it is.
    pub sinkhorn: usize,
}

impl Default for MhcPreOptions {
    /// 1e-6, 1e-6, and the 20 repeats of the paper.
    fn default() -> Self {
        Self { norm_eps: 1e-6, hc_eps: 1e-6, sinkhorn: 20 }
    }
}

/// What [`mhc_pre`](fn@mhc_pre) returns.
#[derive(Debug, Clone)]
pub struct MhcPre {
    /// The streams, `[B, S, n, D]`, for [`mhc_post`](fn@crate::mhc_post::mhc_post). What gradient they are given is added where that
    /// of x is made; if x itself is used again, Burn adds it in another pass.
    pub x: Tensor<4>,
    /// The layer's input, `[B, S, D]`, in the element type of x.
    pub h_in: Tensor<3>,
    /// How much of the layer's output each stream gets, `[B, S, n]`, f32.
    pub h_post: Tensor<3>,
    /// How the streams are mixed, `[B, S, n, n]`, f32: the first n is the stream that is written, as
    /// [`mhc_post`](fn@crate::mhc_post::mhc_post) takes it.
    pub h_res: Tensor<4>,
}

/// The layer's input, and the streams and weights that [`mhc_post`](fn@crate::mhc_post::mhc_post) takes, from a token's streams.
///
/// * `x`: `[B, S, n, D]`, f32, bf16 or f16, n from 1 to [`MAX_STREAMS`], D at least 1; B and S may be 0.
/// * `phi`: `[n² + 2n, n·D]`, f32: n rows for h_pre, n for h_post, n² for h_res, which are its rows one after another.
/// * `alpha`: `[3]`, f32, for the three.
/// * `bias`: `[n² + 2n]`, f32.
/// * `gamma`: `[n, D]`, f32, scales x where φ reads it; none: 1.
///
/// Arithmetic is f32; beside an x of bf16 φ, and in its backward the gradient of φ·X, may count 17 bits where they are
/// multiplied. Gradients flow to all of them; two runs agree bit for bit.
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type, device or option, and where the fused kernel was asked for on a device
/// that has none.
pub fn mhc_pre(
    x: Tensor<4>,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    gamma: Option<Tensor<2>>,
    options: MhcPreOptions,
) -> Result<MhcPre, OpError> {
    check(OP, &x, &phi, &alpha, &bias, gamma.as_ref(), options)?;
    Ok(match policy::choose(OP, x.shape().num_elements(), &x)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(x, phi, alpha, bias, gamma, options),
        Choice::Reference => reference::mhc_pre(x, phi, alpha, bias, gamma, options),
    })
}

/// What is checked before a layer's input is made of streams like `x`.
pub(crate) fn check(
    op: &'static str,
    x: &Tensor<4>,
    phi: &Tensor<2>,
    alpha: &Tensor<1>,
    bias: &Tensor<1>,
    gamma: Option<&Tensor<2>>,
    options: MhcPreOptions,
) -> Result<(), OpError> {
    let check = Check(op);
    let [_, _, n, d] = x.dims();
    let streams = (1..=MAX_STREAMS).contains(&n) && d >= 1;
    let expected = format!("[B, S, n, D] with n from 1 to {MAX_STREAMS} and D at least 1");
    check.shape("x", &x.dims(), streams, expected)?;
    check.float("x", x)?;
    let (rows, device) = (n * n + 2 * n, x.device());
    check.shape("phi", &phi.dims(), phi.dims() == [rows, n * d], format!("{:?}", [rows, n * d]))?;
    check.shape("alpha", &alpha.dims(), alpha.dims() == [3], "[3]")?;
    check.shape("bias", &bias.dims(), bias.dims() == [rows], format!("[{rows}]"))?;
    check.dtype("phi", phi, &[DType::F32])?;
    check.dtype("alpha", alpha, &[DType::F32])?;
    check.dtype("bias", bias, &[DType::F32])?;
    check.device("phi", &phi.device(), &device)?;
    check.device("alpha", &alpha.device(), &device)?;
    check.device("bias", &bias.device(), &device)?;
    if let Some(gamma) = gamma {
        check.shape("gamma", &gamma.dims(), gamma.dims() == [n, d], format!("{:?}", [n, d]))?;
        check.dtype("gamma", gamma, &[DType::F32])?;
        check.device("gamma", &gamma.device(), &device)?;
    }
    let MhcPreOptions { norm_eps, hc_eps, sinkhorn } = options;
    check.number("norm_eps", norm_eps, norm_eps >= 0.0, "a number of at least 0")?;
    check.number("hc_eps", hc_eps, hc_eps >= 0.0, "a number of at least 0")?;
    let expected = format!("0 to {MAX_SINKHORN}");
    check.number("sinkhorn", sinkhorn as f64, sinkhorn <= MAX_SINKHORN, &expected)?;
    Ok(())
}

/// φ times γ, if there is one.
pub fn scaled(phi: Tensor<2>, gamma: Option<Tensor<2>>) -> Tensor<2> {
    let width = phi.dims()[1];
    match gamma {
        Some(gamma) => phi * gamma.reshape([1, width]),
        None => phi,
    }
}
