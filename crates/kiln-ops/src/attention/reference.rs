//! Attention in plain Burn operations; the T×S scores are stored.

use super::{AttentionOptions, Documents};
use crate::matmul::reference::exact as matmul;
use burn::tensor::{Bool, DType, Device, Int, IntDType, Tensor};

/// [`attention`](super::attention), or [`attention_documents`](super::attention_documents), without its checks.
pub fn attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    documents: Option<&Documents>,
    options: AttentionOptions,
) -> Tensor<4> {
    let dtype = q.dtype();
    let [batch, heads, queries, width] = q.dims();
    let [_, kv_heads, keys, _] = k.dims();
    let group = heads / kv_heads;
    let scale = options.scale_for(width);
    if q.shape().num_elements() == 0 {
        return q;
    }

    // The queries of one key head stand below each other, so that no key is repeated.
    let q = q.reshape([batch, kv_heads, group * queries, width]);
    // Sums of products may be more than f16 holds.
    let wide = |t: Tensor<4>| if dtype == DType::F16 { t.cast(DType::F32) } else { t };
    let scores = matmul(wide(q), wide(k).swap_dims(2, 3)).cast(DType::F32).mul_scalar(scale);
    let mut scores = scores.reshape([batch * kv_heads, group, queries, keys]);
    if let Some(cap) = options.softcap {
        scores = scores.div_scalar(cap).tanh().mul_scalar(cap);
    }
    let device = scores.device().inner();
    if let Some(hidden) = hidden([queries, keys], documents, options, &device) {
        let hidden = hidden.unsqueeze::<4>().expand([batch * kv_heads, group, queries, keys]);
        scores = scores.mask_fill(hidden, -1e30);
    }
    let weights = scores.clone() - scores.max_dim(3).detach();
    let weights = weights.exp();
    let weights = weights.clone() / weights.sum_dim(3);
    let weights = weights.cast(dtype).reshape([batch, kv_heads, group * queries, keys]);
    let out = matmul(weights, v).reshape([batch, heads, queries, width]);
    // The first queries see nothing where there are more of them than keys.
    let blind = if options.causal { queries.saturating_sub(keys) } else { 0 };
    if blind == 0 {
        return out;
    }
    let zeros = out.clone().narrow(2, 0, blind).detach().zeros_like();
    Tensor::cat(vec![zeros, out.narrow(2, blind, queries - blind)], 2)
}

/// [`attention_qkv`](super::attention_qkv) without its checks.
pub fn attention_qkv(
    qkv: Tensor<3>,
    [heads, kv_heads]: [usize; 2],
    documents: Option<&Documents>,
    options: AttentionOptions,
) -> Tensor<3> {
    let [batch, length, all] = qkv.dims();
    let width = all / (heads + 2 * kv_heads);
    let part = |first, count| part(&qkv, width, first, count);
    let (q, k) = (part(0, heads), part(heads, kv_heads));
    let v = part(heads + kv_heads, kv_heads);
    let y = attention(q, k, v, documents, options);
    y.swap_dims(1, 2).reshape([batch, length, heads * width])
}

/// [`attention_cached`](super::attention_cached) without its checks, after the first `before` positions of the keys
/// and values that are `held`; and those with the new ones.
pub(super) fn attention_cached(
    qkv: Tensor<3>,
    heads: usize,
    held: [Tensor<4>; 2],
    before: usize,
    options: AttentionOptions,
) -> (Tensor<3>, [Tensor<4>; 2]) {
    let [batch, length, _] = qkv.dims();
    let [_, kv_heads, _, width] = held[0].dims();
    let end = before + length;
    let part = |first, count| part(&qkv, width, first, count);
    let mut first = heads;
    let held = held.map(|all| {
        let new = part(first, kv_heads);
        first += kv_heads;
        all.slice_assign([0..batch, 0..kv_heads, before..end, 0..width], new)
    });
    let [k, v] = held.clone().map(|all| all.narrow(2, 0, end));
    let y = attention(part(0, heads), k, v, None, options);
    (y.swap_dims(1, 2).reshape([batch, length, heads * width]), held)
}

/// Some of the heads of a packed tensor, `[B, heads, T, D]`.
fn part(qkv: &Tensor<3>, width: usize, first: usize, count: usize) -> Tensor<4> {
    let [batch, length, _] = qkv.dims();
    let part = qkv.clone().narrow(2, first * width, count * width);
    part.reshape([batch, length, count, width]).swap_dims(1, 2)
}

/// `[T, S]`: what a query may not see; nothing if all see all.
fn hidden(
    [queries, keys]: [usize; 2],
    documents: Option<&Documents>,
    options: AttentionOptions,
    device: &Device,
) -> Option<Tensor<2, Bool>> {
    let mut hidden: Option<Tensor<2, Bool>> = None;
    let mut hide = |more: Tensor<2, Bool>| {
        hidden = Some(match hidden.take() {
            Some(hidden) => hidden.bool_or(more),
            None => more,
        });
    };
    let offset = keys as i64 - queries as i64;
    if options.causal {
        // true above the diagonal
        hide(Tensor::tril_mask([queries, keys], offset, device));
        if let Some(window) = options.window.filter(|window| *window < keys) {
            let before =
                Tensor::<2, Bool>::tril_mask([queries, keys], offset - window as i64, device);
            hide(before.bool_not());
        }
    }
    if let Some(documents) = documents {
        let bounds = documents.bounds.clone().cast(IntDType::I32);
        let bound =
            |i: usize| bounds.clone().narrow(0, i, 1).swap_dims(0, 1).expand([queries, keys]);
        let key = Tensor::<1, Int>::arange(0..keys as i64, device).cast(IntDType::I32);
        let key = key.unsqueeze::<2>().expand([queries, keys]);
        hide(key.clone().lower(bound(0)));
        hide(key.greater_equal(bound(1)));
    }
    hidden
}
