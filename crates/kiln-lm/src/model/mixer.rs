//! What mixes positions in a block. A new kind is a variant here, one of
//! [`MixerKind`](crate::config::MixerKind), and a row of `kiln-lm/src/names.rs`.

use crate::config::{MixerKind, ModelConfig};
use burn::module::Module;
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use kiln_nn::prelude::*;

/// A layer that mixes positions, from those before to those after.
#[allow(clippy::large_enum_variant)] // one a block
#[derive(Module, Debug)]
pub enum Mixer {
    /// Causal self-attention.
    Attention(CausalSelfAttention),
    /// The resolvent of chains.
    Bk(BkCore),
}

/// What a mixer remembers of the tokens it has seen, for generation.
#[derive(Debug, Clone)]
pub enum MixerCache {
    /// Keys and values.
    Attention(KvCache),
    /// The last site of each chain.
    Bk(BkState),
}

impl MixerCache {
    /// Number of positions seen.
    pub fn len(&self) -> usize {
        match self {
            Self::Attention(cache) => cache.len(),
            Self::Bk(state) => state.len(),
        }
    }

    /// Whether nothing was seen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets what it has seen and keeps its memory.
    pub fn clear(&mut self) {
        match self {
            Self::Attention(cache) => cache.clear(),
            Self::Bk(state) => state.clear(),
        }
    }
}

impl Mixer {
    pub(super) fn new(kind: MixerKind, config: &ModelConfig, device: &Device) -> Self {
        match kind {
            MixerKind::Attention => {
                let rope = RopeOptions { base: config.rope_base, ..RopeOptions::default() };
                let attention =
                    CausalSelfAttentionConfig::new(config.width, config.heads, config.context)
                        .with_kv_heads(Some(config.resolved_kv_heads()))
                        .with_qk_norm(config.qk_norm)
                        .with_norm_eps(config.norm_eps)
                        .with_rope(rope)
                        .with_initializer(Initializer::Zeros);
                Self::Attention(attention.init(device))
            }
            MixerKind::Bk => {
                let bk = BkCoreConfig::new(config.width, config.resolved_bk_channels());
                Self::Bk(bk.with_initializer(Initializer::Zeros).init(device))
            }
        }
    }

    /// `[B, T, width]` to the same.
    pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Attention(attention) => attention.forward(x),
            Self::Bk(bk) => bk.forward(x),
        }
    }

    /// The same for positions that follow those in the cache, which [`empty_cache`](Self::empty_cache)
    /// of this mixer made.
    pub(super) fn forward_cached(&self, x: Tensor<3>, cache: &mut MixerCache) -> Tensor<3> {
        match (self, cache) {
            (Self::Attention(attention), MixerCache::Attention(cache)) => {
                attention.forward_cached(x, cache)
            }
            (Self::Bk(bk), MixerCache::Bk(state)) => bk.forward_cached(x, state),
            (_, cache) => panic!("a cache of another kind of mixer: {cache:?}"),
        }
    }

    /// A cache with room for a whole context that has seen nothing.
    pub(super) fn empty_cache(&self) -> MixerCache {
        match self {
            Self::Attention(attention) => {
                MixerCache::Attention(KvCache::new(attention.rope.positions()))
            }
            Self::Bk(_) => MixerCache::Bk(BkState::new()),
        }
    }

    /// The layer after an optimizer step.
    pub(super) fn after_step(self, _step: u64) -> Self {
        match self {
            // Nothing in it changes but by the optimizer.
            Self::Attention(_) | Self::Bk(_) => self,
        }
    }
}
