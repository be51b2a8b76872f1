//! Causal self-attention with grouped key and value heads, RoPE and optional QK-norm:
//! softmax(scale · Q·Kᵀ + mask) · V between a product that makes queries, keys and values in one tensor, where
//! attention reads them, and one back.

use crate::{
    KvCache, Linear, LinearConfig, RmsNorm, RmsNormConfig, Rope, RopeConfig, check_size,
    check_width, expect,
};
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param, ParamId};
use burn::nn::Initializer;
use burn::tensor::{Device, Shape, Tensor};
use kiln_ops::prelude::{AttentionOptions, RopeOptions, attention_cached, attention_qkv};

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
    /// RMSNorm on queries and keys, head by head, before they are rotated.
    #[config(default = false)]
    pub qk_norm: bool,
    /// Epsilon of the QK-norm.
    #[config(default = 1e-5)]
    pub norm_eps: f64,
    /// Frequencies and layout of the rotary embedding.
    #[config(default = "kiln_ops::rope::RopeOptions::default()")]
    pub rope: RopeOptions,
    /// Start values of the matrices; those of queries, keys and values are made one by one.
    #[config(default = "crate::default_initializer()")]
    pub initializer: Initializer,
}

/// Causal self-attention over `[B, T, d_model]`.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct CausalSelfAttention {
    /// To queries, keys and values, `[d_model, (heads + 2 · kv_heads) · head_dim]`: three matrices side by side, in
    /// columns of [`parts`](Self::parts). An optimizer that works on whole matrices, as Muon does, has to take
    /// each by itself.
    pub w_qkv: Linear,
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
    /// If `d_model` is 0 or no multiple of `heads` or `heads` none of `kv_heads`, and with the message
    /// of [`kiln_ops::OpError`] if the heads have an odd width.
    #[track_caller]
    pub fn init(&self, device: &Device) -> CausalSelfAttention {
        let (d_model, heads) = (self.d_model, self.heads);
        let kv_heads = self.kv_heads.unwrap_or(heads);
        check_size("attention", "d_model", d_model);
        let fits = heads > 0 && d_model.is_multiple_of(heads);
        assert!(fits, "attention: d_model = {d_model}, expected a multiple of heads = {heads}");
        let fits = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        assert!(fits, "attention: heads = {heads}, expected a multiple of kv_heads = {kv_heads}");
        let head_dim = d_model / heads;
        let norm = || {
            self.qk_norm.then(|| RmsNormConfig::new(head_dim).with_eps(self.norm_eps).init(device))
        };
        CausalSelfAttention {
            w_qkv: Linear {
                weight: self.side_by_side(parts(heads, kv_heads, head_dim), device),
                bias: None,
            },
            w_o: LinearConfig::new(d_model, d_model)
                .with_initializer(self.initializer.clone())
                .init(device),
            q_norm: norm(),
            k_norm: norm(),
            rope: RopeConfig::new(self.positions, head_dim).with_options(self.rope).init(device),
            heads,
            kv_heads,
        }
    }

    /// Matrices of so many columns side by side, each with start values of its own.
    fn side_by_side(&self, columns: [usize; 3], device: &Device) -> Param<Tensor<2>> {
        let (rows, initializer) = (self.d_model, self.initializer.clone());
        let shape = Shape::new([rows, columns.iter().sum()]);
        let values = move |device: &Device, require_grad: bool| {
            let matrix = |columns| {
                let of: Param<Tensor<2>> =
                    initializer.init_with([rows, columns], Some(rows), Some(columns), device);
                of.val()
            };
            // A leaf of its own.
            let all = Tensor::cat(columns.map(matrix).into(), 1).detach();
            if require_grad { all.require_grad() } else { all }
        };
        Param::uninitialized(ParamId::new(), values, device.clone(), true, shape)
    }
}

/// Columns of the queries, the keys and the values.
fn parts(heads: usize, kv_heads: usize, head_dim: usize) -> [usize; 3] {
    [heads, kv_heads, kv_heads].map(|heads| heads * head_dim)
}

impl CausalSelfAttention {
    /// Columns of the queries, the keys and the values in `w_qkv`.
    pub fn parts(&self) -> [usize; 3] {
        let [_, all] = self.w_qkv.weight.shape().dims();
        parts(self.heads, self.kv_heads, all / (self.heads + 2 * self.kv_heads))
    }

    /// Attention of every position of `x`, `[B, T, d_model]`, over itself and those before it.
    ///
    /// # Panics
    ///
    /// If `x` has another width or more positions than the layer; with Burn's message if it has none.
    #[track_caller]
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let (qkv, options) = (self.project(x, 0), AttentionOptions::default());
        self.w_o.forward(expect(attention_qkv(qkv, self.heads, self.kv_heads, None, options)))
    }

    /// The same for positions that follow those in `cache`, to which they are added. For generation: no gradient
    /// flows through it.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward), the positions in the cache included; if there are more than it has room for; and if
    /// what is in it is of another batch, element type or device.
    #[track_caller]
    pub fn forward_cached(&self, x: Tensor<3>, cache: &mut KvCache) -> Tensor<3> {
        let qkv = self.project(x, cache.len());
        let cache = cache.of(&qkv, self.heads, self.kv_heads);
        self.w_o.forward(expect(attention_cached(
            qkv,
            self.heads,
            cache,
            AttentionOptions::default(),
        )))
    }

    /// Queries, keys and values, `[B, T, (heads + 2 · kv_heads) · head_dim]`, the first two rotated.
    #[track_caller]
    fn project(&self, x: Tensor<3>, offset: usize) -> Tensor<3> {
        let [d_model, _] = self.w_qkv.weight.shape().dims();
        check_width("attention", &x, d_model);
        let [_, length, _] = x.dims();
        // RoPE would speak of its offset.
        let (positions, most) = (offset + length, self.rope.positions());
        assert!(
            positions <= most,
            "attention: positions = {positions}, expected at most {most}, those of the layer"
        );
        let qkv = self.normed(self.w_qkv.forward(x));
        self.rope.forward_qkv(qkv, self.heads, self.kv_heads, offset)
    }

    /// With queries and keys normalised head by head.
    #[track_caller]
    fn normed(&self, qkv: Tensor<3>) -> Tensor<3> {
        let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) else { return qkv };
        let [batch, length, _] = qkv.dims();
        let [queries, keys, values] = self.parts();
        let part = |first, columns| qkv.clone().narrow(2, first, columns);
        let normed = |x: Tensor<3>, norm: &RmsNorm| {
            let [_, _, columns] = x.dims();
            let width = norm.weight.shape()[0];
            let heads = x.reshape([batch, length, columns / width, width]);
            norm.forward(heads).reshape([batch, length, columns])
        };
        let (q, k) = (normed(part(0, queries), q_norm), normed(part(queries, keys), k_norm));
        Tensor::cat(vec![q, k, part(queries + keys, values)], 2)
    }
}

impl ModuleDisplay for CausalSelfAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_model, _] = self.w_qkv.weight.shape().dims();
        let content = content.add("d_model", &d_model).add("heads", &self.heads);
        content.add("kv_heads", &self.kv_heads).add("qk_norm", &self.q_norm.is_some()).optional()
    }
}
