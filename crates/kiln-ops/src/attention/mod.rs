//! Scaled dot-product attention with grouped key and value heads:
//! O = softmax(scale · Q·Kᵀ + mask) · V, with the scores s soft-capped to c·tanh(s/c) if asked for.
//!
//! Source: Dao, FlashAttention-2, 2023 (arXiv 2307.08691). The forward goes through the keys in blocks with a
//! running maximum and sum of each row and keeps the logarithm of that sum; the backward makes the
//! probabilities again. The T×S scores are never stored.
//!
//! Backward, with P the probabilities and D = rowsum(dO · O): dS = P · (dO·Vᵀ − D), times 1 − tanh² under a
//! soft-cap, dQ = scale · dS·K, dK = scale · dSᵀ·Q, dV = Pᵀ·dO; a key or value head adds up the gradients
//! of the query heads that read it.
//!
//! 4·B·H·T·S·D operations forward, half of it under the causal mask, and 2.5 times that backward.

#[cfg(feature = "cube")]
pub mod backend;
pub mod cache;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(all(feature = "cube", not(feature = "cuda")))]
#[path = "no_cuda.rs"]
mod cuda;
#[cfg(feature = "cube")]
mod decode;
#[cfg(feature = "cube")]
mod delta;
mod documents;
#[cfg(feature = "cube")]
mod family;
#[cfg(feature = "oracle")]
pub mod oracle;
#[cfg(feature = "cube")]
pub(crate) mod problem;
pub mod reference;
#[cfg(feature = "cube")]
mod simt;

pub use cache::{KvCache, attention_cached};
pub use documents::Documents;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::Tensor;

const OP: &str = "attention";

/// The widest heads that kernels take.
pub const WIDEST: usize = 256;

/// Mask, scale and soft-cap.
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

    fn check(&self, width: usize) -> Result<(), OpError> {
        let check = Check(OP);
        // Kernels hold them in f32, for powers of 2.
        let held = |x: f64| ((2.0 * std::f64::consts::LOG2_E * x) as f32).is_finite();
        let scale = self.scale_for(width);
        check.number("scale", scale, held(scale), "a finite number")?;
        if let Some(window) = self.window {
            check.number("window", window as f64, window > 0, "at least 1")?;
            check.number("window", window as f64, self.causal, "none without `causal`")?;
        }
        if let Some(cap) = self.softcap {
            check.number("softcap", cap, cap as f32 > 0.0, "a number above 0")?;
            let ratio = scale / cap;
            let ok = held(cap) && held(ratio) && (ratio == 0.0 || (ratio as f32).is_normal());
            check.number("softcap", cap, ok, "one that f32 holds, and scale / softcap too")?;
        }
        Ok(())
    }
}

/// Attention of `q` over `k` and `v`.
///
/// * `q`: `[B, H, T, D]`; `k`, `v`: `[B, Hkv, S, D]`, H a multiple of Hkv; query head h reads head
///   h div (H/Hkv). f32, bf16 or f16, all the same; any strides, so a swapped `[B, T, H, D]` is read where it
///   is. B and T may be 0.
///
/// Returns `[B, H, T, D]`, in memory in the order of `q`; the softmax is f32. A query that sees no key (causal,
/// T > S) gives 0 and no gradient.
///
/// # Errors
///
/// [`OpError`] on a shape, element type, device or option that does not fit, and where a fused kernel was
/// asked for on a device that has none or for heads wider than [`WIDEST`].
pub fn attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionOptions,
) -> Result<Tensor<4>, OpError> {
    separate(q, k, v, None, options)
}

/// [`attention`] within each of the documents that are packed one after the other.
///
/// * `q`: `[1, H, T, D]`; `k`, `v`: `[1, Hkv, T, D]`, T the rows of all documents; the causal mask and the
///   window count within a document.
///
/// # Errors
///
/// As [`attention`], and if the documents have another length than the sequence.
pub fn attention_documents(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    documents: &Documents,
    options: AttentionOptions,
) -> Result<Tensor<4>, OpError> {
    separate(q, k, v, Some(documents), options)
}

/// [`attention`] of queries, keys and values that one product has left in one tensor, read where they are.
///
/// * `qkv`: `[B, T, (H + 2·Hkv)·D]`: the H = `heads` heads of the queries, the `kv_heads` of the keys, those of
///   the values; T at least 1.
/// * `documents`: packed documents, if any, as in [`attention_documents`].
///
/// Returns `[B, T, H·D]`. The gradient is one tensor too.
///
/// # Errors
///
/// As [`attention`].
pub fn attention_qkv(
    qkv: Tensor<3>,
    heads: usize,
    kv_heads: usize,
    documents: Option<&Documents>,
    options: AttentionOptions,
) -> Result<Tensor<3>, OpError> {
    let check = Check(OP);
    check.float("qkv", &qkv)?;
    let groups = kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads);
    let expected = format!("a multiple of `kv_heads` = {kv_heads}, both at least 1");
    check.number("heads", heads as f64, groups, &expected)?;
    let [batch, length, all] = qkv.dims();
    let total = kv_heads.saturating_mul(2).saturating_add(heads);
    let ok = length > 0 && all > 0 && all.is_multiple_of(total);
    let expected = format!("[B, T, {total}·D] with T, D at least 1");
    check.shape("qkv", &qkv.dims(), ok, expected)?;
    let width = all / total;
    options.check(width)?;
    check_documents("qkv", &qkv, documents, batch, [length, length])?;
    Ok(match choose(&qkv, width)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused_qkv(qkv, [heads, kv_heads], documents, options),
        Choice::Reference => reference::attention_qkv(qkv, [heads, kv_heads], documents, options),
    })
}

fn separate(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    documents: Option<&Documents>,
    options: AttentionOptions,
) -> Result<Tensor<4>, OpError> {
    let check = Check(OP);
    let dtype = check.float("q", &q)?;
    let [batch, heads, queries, width] = q.dims();
    let [k_batch, kv_heads, keys, k_width] = k.dims();
    check.shape("q", &q.dims(), heads > 0 && width > 0, "[B, H, T, D] with H, D at least 1")?;
    let groups = kv_heads > 0 && heads.is_multiple_of(kv_heads);
    let ok = k_batch == batch && k_width == width && groups && keys > 0;
    let expected =
        format!("[{batch}, Hkv, S, {width}] with {heads} a multiple of Hkv, S at least 1");
    check.shape("k", &k.dims(), ok, expected)?;
    check.shape("v", &v.dims(), v.dims() == k.dims(), format!("{:?}, that of `k`", k.dims()))?;
    for (name, t) in [("k", &k), ("v", &v)] {
        check.dtype(name, t, &[dtype])?;
        check.device(name, &t.device(), &q.device())?;
    }
    options.check(width)?;
    check_documents("q", &q, documents, batch, [queries, keys])?;
    let largest = if keys * kv_heads > queries * heads { &k } else { &q };
    Ok(match choose(largest, width)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(q, k, v, documents, options),
        Choice::Reference => reference::attention(q, k, v, documents, options),
    })
}

/// Documents are for one sequence of their length, on its device.
fn check_documents<const D: usize>(
    name: &'static str,
    t: &Tensor<D>,
    documents: Option<&Documents>,
    batch: usize,
    [queries, keys]: [usize; 2],
) -> Result<(), OpError> {
    let Some(documents) = documents else { return Ok(()) };
    let total = documents.total();
    let ok = batch == 1 && queries == total && keys == total;
    let expected = format!("one sequence of T = S = {total}, the rows of all documents");
    Check(OP).shape(name, &t.dims(), ok, expected)?;
    Check(OP).device("documents", &documents.bounds.device(), &t.device().inner())
}

/// Kernels take heads up to [`WIDEST`].
fn choose<const D: usize>(largest: &Tensor<D>, width: usize) -> Result<Choice, OpError> {
    let fits = match width <= WIDEST {
        true => Ok(()),
        false => Err(format!("kernels take heads of 1 to {WIDEST} elements, these have {width}")),
    };
    policy::choose_if(OP, largest.shape().num_elements(), largest, fits)
}
