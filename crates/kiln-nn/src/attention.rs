//! Causal self-attention with grouped key and value heads, RoPE and optional QK-norm:
//! softmax(scale · Q·Kᵀ + mask) · V between four matrices.

use crate::{KvCache, Linear, LinearConfig, RmsNorm, RmsNormConfig, Rope, RopeConfig, expect};
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use kiln_ops::prelude::{AttentionOptions, RopeOptions, attention};

/// Configuration of [`CausalSelfAttention`].
#[derive(Config, Debug)]
pub struct CausalSelfAttentionConfig {
    /// Width of input and output; a multiple of `heads`.
    pub d_model: usize,
    /// Query heads.
    pub heads: usize,
    /// Number of positions.
    pub positions: usize,
    /// Key and value heads, as many as query heads if not given; `heads` is a multiple.
    pub kv_heads: Option<usize>,
    /// RMSNorm on queries and keys, head by head, before they are turned.
    #[config(default = false)]
    pub qk_norm: bool,
    /// Epsilon of the QK-norm.
    #[config(default = 1e-5)]
    pub norm_eps: f64,
    /// Frequencies and layout of the rotary embedding.
    #[config(default = "kiln_ops::rope::RopeOptions::default()")]
    pub rope: RopeOptions,
    /// Start values of the four matrices.
    #[config(default = "crate::default_initializer()")]
    pub initializer: Initializer,
}

/// Causal self-attention over `[B, T, d_model]`.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct CausalSelfAttention {
    /// To the queries, `[d_model, heads · head_dim]`.
    pub w_q: Linear,
    /// To the keys, `[d_model, kv_heads · head_dim]`.
    pub w_k: Linear,
    /// To the values, `[d_model, kv_heads · head_dim]`.
    pub w_v: Linear,
    /// Back to the residual stream, `[heads · head_dim, d_model]`.
    pub w_o: Linear,
    /// Norm of the queries.
    pub q_norm: Option<RmsNorm>,
    /// Norm of the keys.
    pub k_norm: Option<RmsNorm>,
    /// Position embedding.
    pub rope: Rope,
    heads: usize,
    kv_heads: usize,
}

impl CausalSelfAttentionConfig {
    /// A layer with start values.
    ///
    /// # Panics
    ///
    /// If `d_model` is no multiple of `heads` or `heads` none of `kv_heads`, and with the message
    /// of [`kiln_ops::OpError`] if the heads have an odd width.
    #[track_caller]
    pub fn init(&self, device: &Device) -> CausalSelfAttention {
        let (d_model, heads) = (self.d_model, self.heads);
        let kv_heads = self.kv_heads.unwrap_or(heads);
        let fits = heads > 0 && d_model.is_multiple_of(heads);
        assert!(fits, "attention: d_model = {d_model}, expected a multiple of heads = {heads}");
        let fits = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        assert!(fits, "attention: heads = {heads}, expected a multiple of kv_heads = {kv_heads}");
        let head_dim = d_model / heads;
        let linear = |d_input, d_output| {
            LinearConfig::new(d_input, d_output)
                .with_initializer(self.initializer.clone())
                .init(device)
        };
        let norm = || {
            self.qk_norm.then(|| RmsNormConfig::new(head_dim).with_eps(self.norm_eps).init(device))
        };
        CausalSelfAttention {
            w_q: linear(d_model, d_model),
            w_k: linear(d_model, kv_heads * head_dim),
            w_v: linear(d_model, kv_heads * head_dim),
            w_o: linear(d_model, d_model),
            q_norm: norm(),
            k_norm: norm(),
            rope: RopeConfig::new(self.positions, head_dim).with_options(self.rope).init(device),
            heads,
            kv_heads,
        }
    }
}

impl CausalSelfAttention {
    /// Attention of every position of `x`, `[B, T, d_model]`, over itself and those before it.
    ///
    /// # Panics
    ///
    /// With the message of [`kiln_ops::OpError`] if `x` has another width or more positions than
    /// the layer.
    #[track_caller]
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let (q, k, v) = self.project(x, 0);
        self.attend(q, k, v)
    }

    /// The same for positions that follow those in `cache`, to which they are added.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward), the positions in the cache included.
    #[track_caller]
    pub fn forward_cached(&self, x: Tensor<3>, cache: &mut KvCache) -> Tensor<3> {
        let (q, k, v) = self.project(x, cache.len());
        let (k, v) = cache.append(k, v);
        self.attend(q, k, v)
    }

    /// Queries, keys and values, `[B, heads, T, head_dim]`, the first two turned.
    #[track_caller]
    fn project(&self, x: Tensor<3>, offset: usize) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
        let heads = |x: Tensor<3>, heads: usize| {
            let [batch, length, width] = x.dims();
            x.reshape([batch, length, heads, width / heads]).swap_dims(1, 2)
        };
        let q = heads(self.w_q.forward(x.clone()), self.heads);
        let k = heads(self.w_k.forward(x.clone()), self.kv_heads);
        let v = heads(self.w_v.forward(x), self.kv_heads);
        let normed = |x: Tensor<4>, norm: &Option<RmsNorm>| match norm {
            Some(norm) => norm.forward(x),
            None => x,
        };
        let (q, k) = (normed(q, &self.q_norm), normed(k, &self.k_norm));
        let (q, k) = self.rope.forward_qk(q, k, offset);
        (q, k, v)
    }

    #[track_caller]
    fn attend(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<3> {
        let [batch, heads, length, head_dim] = q.dims();
        let y = expect(attention(q, k, v, AttentionOptions::default()));
        self.w_o.forward(y.swap_dims(1, 2).reshape([batch, length, heads * head_dim]))
    }
}

impl ModuleDisplay for CausalSelfAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_model, _] = self.w_q.weight.shape().dims();
        let content = content.add("d_model", &d_model).add("heads", &self.heads);
        content.add("kv_heads", &self.kv_heads).add("qk_norm", &self.q_norm.is_some()).optional()
    }
}
