//! Attention in plain Burn operations; the T×S scores are stored.

use super::AttentionOptions;
use crate::precision::matmul;
use burn::tensor::{Bool, DType, Tensor};

/// [`attention`](super::attention) without its checks.
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: AttentionOptions) -> Tensor<4> {
    let dtype = q.dtype();
    let [batch, heads, queries, width] = q.dims();
    let [_, kv_heads, keys, _] = k.dims();
    let group = heads / kv_heads;
    let scale = options.scale_for(width);

    // The queries of one key head stand below each other, so that no key is repeated.
    let q = q.reshape([batch, kv_heads, group * queries, width]);
    let scores = matmul(q, k.swap_dims(2, 3)).cast(DType::F32).mul_scalar(scale);
    let mut scores = scores.reshape([batch * kv_heads, group, queries, keys]);
    let mut blind = 0;
    if options.causal {
        let offset = keys as i64 - queries as i64;
        blind = (-offset).max(0) as usize;
        let device = scores.device().inner();
        // true above the diagonal: what a query may not see
        let mask = Tensor::<2, Bool>::tril_mask([queries, keys], offset, &device);
        let mask = if scores.is_autodiff() { mask.autodiff() } else { mask };
        scores = scores.mask_fill(
            mask.unsqueeze::<4>().expand([batch * kv_heads, group, queries, keys]),
            -1e30,
        );
    }
    let weights = scores.clone() - scores.max_dim(3).detach();
    let weights = weights.exp();
    let weights = weights.clone() / weights.sum_dim(3);
    let weights = weights.cast(dtype).reshape([batch, kv_heads, group * queries, keys]);
    let out = matmul(weights, v).reshape([batch, heads, queries, width]);
    if blind == 0 {
        return out;
    }
    let blind = blind.min(queries);
    let zeros = out.clone().narrow(2, 0, blind).detach().zeros_like();
    if blind == queries {
        return zeros;
    }
    Tensor::cat(vec![zeros, out.narrow(2, blind, queries - blind)], 2)
}
