//! One block: attention and MLP, each behind its RMSNorm.

use crate::config::ModelConfig;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Initializer};
use burn::tensor::{Device, Tensor};
use kiln_nn::prelude::*;

/// Attention and MLP with the norms before them.
///
/// The block hands what its MLP returns to whoever comes next instead of adding it itself: the
/// addition is then one operation with the norm that follows
/// ([`add_rms_norm`](kiln_ops::add_rms_norm)).
#[derive(Module, Debug)]
pub struct Block {
    /// Before attention.
    pub attention_norm: RmsNorm,
    /// Causal self-attention.
    pub attention: CausalSelfAttention,
    /// Before the MLP.
    pub mlp_norm: RmsNorm,
    /// SwiGLU MLP.
    pub mlp: SwiGlu,
    dropout: Dropout,
}

impl Block {
    pub(super) fn new(config: &ModelConfig, device: &Device) -> Self {
        let norm = || RmsNormConfig::new(config.width).with_eps(config.norm_eps).init(device);
        let rope = RopeOptions { base: config.rope_base, ..RopeOptions::default() };
        Self {
            attention_norm: norm(),
            attention: CausalSelfAttentionConfig::new(config.width, config.heads, config.context)
                .with_kv_heads(Some(config.resolved_kv_heads()))
                .with_qk_norm(config.qk_norm)
                .with_norm_eps(config.norm_eps)
                .with_rope(rope)
                .with_initializer(Initializer::Zeros)
                .init(device),
            mlp_norm: norm(),
            mlp: SwiGluConfig::new(config.width, config.resolved_mlp_width())
                .with_initializer(Initializer::Zeros)
                .init(device),
            dropout: DropoutConfig::new(config.dropout).init(),
        }
    }

    /// From the residual stream `x` and `y`, its norm: the stream after attention, and what the
    /// MLP adds to it.
    pub(super) fn forward(
        &self,
        x: Tensor<3>,
        y: Tensor<3>,
        cache: Option<&mut KvCache>,
    ) -> (Tensor<3>, Tensor<3>) {
        let attended = match cache {
            Some(cache) => self.attention.forward_cached(y, cache),
            None => self.attention.forward(y),
        };
        let (x, y) = self.mlp_norm.forward_add(self.dropout.forward(attended), x);
        (x, self.dropout.forward(self.mlp.forward(y)))
    }
}
