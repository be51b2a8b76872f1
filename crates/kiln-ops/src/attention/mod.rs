//! Scaled dot-product attention with grouped key and value heads:
//! O = softmax(scale · Q·Kᵀ + mask) · V.
//!
//! Backward, with P the probabilities and D = rowsum(dO · O): dS = P · (dO·Vᵀ − D),
//! dQ = scale · dS·K, dK = scale · dSᵀ·Q, dV = Pᵀ·dO; a key or value head adds up the gradients
//! of the query heads that read it.
//!
//! 4·B·H·T·S·D operations forward, half of it under the causal mask, and 2.5 times that backward.

#[cfg(feature = "oracle")]
pub mod oracle;
#[cfg(feature = "cube")]
pub(crate) mod problem;
pub mod reference;

use crate::check::Check;
use crate::{OpError, policy};
use burn::tensor::Tensor;

/// Mask and scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionOptions {
    /// Query t sees the keys up to t + S − T: the ends of queries and keys line up.
    pub causal: bool,
    /// Factor on the scores; D^-½ if none is given.
    pub scale: Option<f64>,
    /// A query sees only so many of the last keys that it would see, at least 1. With `causal` only.
    pub window: Option<usize>,
    /// c·tanh(s/c) in place of the scaled score s, c above 0.
    pub softcap: Option<f64>,
}

impl Default for AttentionOptions {
    fn default() -> Self {
        Self { causal: true, scale: None, window: None, softcap: None }
    }
}

impl AttentionOptions {
    /// The factor on the scores for heads of width `head_dim`.
    pub fn scale_for(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or(1.0 / (head_dim as f64).sqrt())
    }
}

/// Attention of `q` over `k` and `v`.
///
/// * `q`: `[B, H, T, D]`; `k`, `v`: `[B, Hkv, S, D]`, H a multiple of Hkv; query head h reads head
///   h div (H/Hkv). f32, bf16 or f16, all the same.
///
/// Returns `[B, H, T, D]`; the softmax is f32. A query that sees no key (causal, T > S) gives 0
/// and no gradient.
///
/// # Errors
///
/// [`OpError`] on a shape, element type, device or scale that does not fit, and where a fused
/// kernel was asked for.
pub fn attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionOptions,
) -> Result<Tensor<4>, OpError> {
    const OP: &str = "attention";
    let check = Check(OP);
    let dtype = check.float("q", &q)?;
    let [batch, heads, _, width] = q.dims();
    let [k_batch, kv_heads, length, k_width] = k.dims();
    check.shape("q", &q.dims(), heads > 0 && width > 0, "[B, H, T, D] with H, D at least 1")?;
    let groups = kv_heads > 0 && heads.is_multiple_of(kv_heads);
    let ok = k_batch == batch && k_width == width && groups && length > 0;
    let expected =
        format!("[{batch}, Hkv, S, {width}] with {heads} a multiple of Hkv, S at least 1");
    check.shape("k", &k.dims(), ok, expected)?;
    check.shape("v", &v.dims(), v.dims() == k.dims(), format!("{:?}, that of `k`", k.dims()))?;
    for (name, t) in [("k", &k), ("v", &v)] {
        check.dtype(name, t, &[dtype])?;
        check.device(name, &t.device(), &q.device())?;
    }
    let scale = options.scale_for(width);
    check.number("scale", scale, true, "a finite number")?;
    policy::reference_only(OP, &q)?;
    Ok(reference::attention(q, k, v, options))
}
