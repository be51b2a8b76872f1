//! Manifold-constrained hyper-connections: n residual streams in place of one, around any layer F.
//!
//! x\[o\] ← Σ_i h_res\[o, i\]·x\[i\] + h_post\[o\]·F(Σ_i h_pre\[i\]·x\[i\]), with weights that each token makes of its own
//! streams (`kiln_ops`' `mhc_pre`): h_pre and h_post are sigmoids, and rows and columns of h_res add up to 1, so that
//! nothing grows from layer to layer.
//!
//! Streams are made once, after the embedding, and become one again before the head ([`HyperHead`]).
//!
//! Source: Xie et al., *mHC: Manifold-Constrained Hyper-Connections*, 2025
//! ([arXiv 2512.24880](https://arxiv.org/abs/2512.24880)).

use crate::{check_size, expect};
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::Initializer;
use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_ops::mhc_post::MAX_STREAMS;
use kiln_ops::mhc_pre::MAX_SINKHORN;
use kiln_ops::prelude::{MhcPost, MhcPre, MhcPreOptions, mhc_post, mhc_post_pre, mhc_pre};

/// What a stream keeps from the others at the start: their logits in h_res.
const APART: f32 = -8.0;

/// Configuration of [`HyperConnection`].
#[derive(Config, Debug)]
pub struct HyperConnectionConfig {
    /// Width of a stream.
    pub width: usize,
    /// Number of streams, up to 8.
    #[config(default = 4)]
    pub streams: usize,
    /// Repeats of Sinkhorn, up to 32; 0: h_res is not constrained.
    #[config(default = 20)]
    pub sinkhorn: usize,
    /// How much of the weights each token makes of its streams at the start; the rest are biases.
    #[config(default = 0.01)]
    pub alpha: f64,
    /// Added to the mean of the squares.
    #[config(default = 1e-6)]
    pub norm_eps: f64,
    /// Added to h_pre and inside Sinkhorn.
    #[config(default = 1e-6)]
    pub hc_eps: f64,
    /// Start values of φ.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
}

/// The streams around a layer.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct HyperConnection {
    /// From the streams of a token to its weights, `[n² + 2n, n·width]`: n rows for h_pre, n for h_post, n² for h_res.
    pub phi: Param<Tensor<2>>,
    /// Of the three, `[3]`.
    pub alpha: Param<Tensor<1>>,
    /// `[n² + 2n]`.
    pub bias: Param<Tensor<1>>,
    width: usize,
    streams: usize,
    sinkhorn: usize,
    norm_eps: f64,
    hc_eps: f64,
}

impl HyperConnectionConfig {
    /// Streams that begin as the plain residual connection but for `alpha`: h_pre is 1/n, h_post 1, h_res nearly the
    /// identity.
    ///
    /// # Panics
    ///
    /// If `width` is 0, or `streams` or `sinkhorn` is out of range.
    #[track_caller]
    pub fn init(&self, device: &Device) -> HyperConnection {
        let Self { width, streams: n, sinkhorn, norm_eps, hc_eps, .. } = *self;
        check_size("hyper_connection", "width", width);
        check_streams("hyper_connection", n);
        assert!(
            sinkhorn <= MAX_SINKHORN,
            "hyper_connection: sinkhorn = {sinkhorn}, expected 0 to {MAX_SINKHORN}"
        );
        let rows = n * n + 2 * n;
        let mixed = (0..n * n).map(|i| if i / n == i % n { 0.0 } else { APART });
        // Without Sinkhorn the logits are what streams are mixed with.
        let plain = (0..n * n).map(|i| if i / n == i % n { 1.0 } else { 0.0 });
        let mut bias = vec![mean_bias(n); n];
        bias.extend(vec![0.0; n]);
        match sinkhorn {
            0 => bias.extend(plain),
            _ => bias.extend(mixed),
        }
        HyperConnection {
            phi: self.initializer.init([rows, n * width], device),
            alpha: numbers(&[self.alpha as f32; 3], device),
            bias: numbers(&bias, device),
            width,
            streams: n,
            sinkhorn,
            norm_eps,
            hc_eps,
        }
    }
}

/// A parameter that begins with these numbers, however matrices begin.
fn numbers(of: &[f32], device: &Device) -> Param<Tensor<1>> {
    Param::from_tensor(Tensor::from_data(TensorData::from(of), device))
}

/// The bias whose sigmoid is 1/n: of one stream nearly.
fn mean_bias(n: usize) -> f32 {
    if n == 1 { -APART } else { -((n - 1) as f32).ln() }
}

#[track_caller]
fn check_streams(layer: &str, n: usize) {
    let fits = (1..=MAX_STREAMS).contains(&n);
    assert!(fits, "{layer}: streams = {n}, expected 1 to {MAX_STREAMS}");
}

/// Panics unless `x` is `[B, S, n, width]`.
#[track_caller]
fn check_shape(layer: &str, x: &Tensor<4>, n: usize, width: usize) {
    let shape = x.dims();
    let fits = shape[2..] == [n, width];
    assert!(fits, "{layer}: `x` has shape {shape:?}, expected [B, S, {n}, {width}]");
}

/// `[B, S, width]` as so many equal streams, `[B, S, n, width]`.
pub fn streams(x: Tensor<3>, n: usize) -> Tensor<4> {
    // A view, which kernels with TMA read as it is; others write the streams, and `mhc_pre` hands them on.
    x.unsqueeze_dim::<4>(2).repeat_dim(2, n)
}

impl HyperConnection {
    /// The streams after `layer`, which takes and returns `[B, S, width]` in the element type of `x`, `[B, S, n, width]`.
    ///
    /// # Panics
    ///
    /// If `x` has other streams, or `layer` returns another shape or element type.
    #[track_caller]
    pub fn forward(&self, x: Tensor<4>, layer: impl FnOnce(Tensor<3>) -> Tensor<3>) -> Tensor<4> {
        let MhcPre { x, h_in, h_post, h_res } = self.read(x);
        expect(mhc_post(x, layer(h_in), h_post, h_res))
    }

    /// What precedes the layer: its input, and the streams and weights that `mhc_post` takes.
    ///
    /// # Panics
    ///
    /// If `x` has other streams.
    #[track_caller]
    pub fn read(&self, x: Tensor<4>) -> MhcPre {
        check_shape("hyper_connection", &x, self.streams, self.width);
        let (phi, alpha, bias) = self.weights();
        expect(mhc_pre(x, phi, alpha, bias, None, self.options()))
    }

    /// The streams after the layer before this one, and what precedes this one: `mhc_post` and [`read`](Self::read) in one
    /// operation, which passes over the streams once less.
    ///
    /// # Panics
    ///
    /// If `before` has other streams, or `f` another shape or element type.
    #[track_caller]
    pub fn read_after(&self, before: MhcPost) -> MhcPre {
        check_shape("hyper_connection", &before.x, self.streams, self.width);
        let (phi, alpha, bias) = self.weights();
        expect(mhc_post_pre(before, phi, alpha, bias, None, self.options()))
    }

    fn options(&self) -> MhcPreOptions {
        let (norm_eps, hc_eps, sinkhorn) = (self.norm_eps, self.hc_eps, self.sinkhorn);
        MhcPreOptions { norm_eps, hc_eps, sinkhorn }
    }

    /// φ, α and bias, in f32 whatever the model computes in.
    fn weights(&self) -> (Tensor<2>, Tensor<1>, Tensor<1>) {
        let in_f32 = |of: &Param<Tensor<1>>| of.val().cast(DType::F32);
        (self.phi.val().cast(DType::F32), in_f32(&self.alpha), in_f32(&self.bias))
    }
}

impl ModuleDisplay for HyperConnection {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let content = content.add("width", &self.width).add("streams", &self.streams);
        content.add("sinkhorn", &self.sinkhorn).optional()
    }
}

/// Configuration of [`HyperHead`].
#[derive(Config, Debug)]
pub struct HyperHeadConfig {
    /// Width of a stream.
    pub width: usize,
    /// Number of streams, up to 8.
    #[config(default = 4)]
    pub streams: usize,
    /// How much of the weights each token makes of its streams at the start.
    #[config(default = 0.01)]
    pub alpha: f64,
    /// Added to the mean of the squares.
    #[config(default = 1e-6)]
    pub norm_eps: f64,
    /// Added to the weights.
    #[config(default = 1e-6)]
    pub hc_eps: f64,
    /// Start values of φ.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
}

/// One of all streams: Σ_i (sigmoid(α·y + bias) + `hc_eps`)\[i\]·x\[i\] with y = φ·norm(x).
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct HyperHead {
    /// `[n, n·width]`.
    pub phi: Param<Tensor<2>>,
    /// `[1]`.
    pub alpha: Param<Tensor<1>>,
    /// `[n]`.
    pub bias: Param<Tensor<1>>,
    width: usize,
    streams: usize,
    norm_eps: f64,
    hc_eps: f64,
}

impl HyperHeadConfig {
    /// A head that begins as the mean of the streams but for `alpha`.
    ///
    /// # Panics
    ///
    /// If `width` is 0 or `streams` is out of range.
    #[track_caller]
    pub fn init(&self, device: &Device) -> HyperHead {
        let Self { width, streams: n, norm_eps, hc_eps, .. } = *self;
        check_size("hyper_head", "width", width);
        check_streams("hyper_head", n);
        HyperHead {
            phi: self.initializer.init([n, n * width], device),
            alpha: numbers(&[self.alpha as f32], device),
            bias: numbers(&vec![mean_bias(n); n], device),
            width,
            streams: n,
            norm_eps,
            hc_eps,
        }
    }
}

impl HyperHead {
    /// Number of streams.
    pub fn streams(&self) -> usize {
        self.streams
    }

    /// `[B, S, n, width]` to `[B, S, width]`, in the element type of `x`.
    ///
    /// # Panics
    ///
    /// If `x` has other streams.
    #[track_caller]
    pub fn forward(&self, x: Tensor<4>) -> Tensor<3> {
        check_shape("hyper_head", &x, self.streams, self.width);
        let (phi, alpha, bias) = self.weights();
        expect(mhc_pre(x, phi, alpha, bias, None, self.options())).h_in
    }

    /// [`forward`](Self::forward) of the streams after a layer, as one operation with `mhc_post`.
    ///
    /// # Panics
    ///
    /// If `before` has other streams, or `f` another shape or element type.
    #[track_caller]
    pub fn forward_after(&self, before: MhcPost) -> Tensor<3> {
        check_shape("hyper_head", &before.x, self.streams, self.width);
        let (phi, alpha, bias) = self.weights();
        expect(mhc_post_pre(before, phi, alpha, bias, None, self.options())).h_in
    }

    fn options(&self) -> MhcPreOptions {
        MhcPreOptions { norm_eps: self.norm_eps, hc_eps: self.hc_eps, sinkhorn: 0 }
    }

    /// What `mhc_pre` makes the same of: the weights with which a layer would be written are of zeros.
    fn weights(&self) -> (Tensor<2>, Tensor<1>, Tensor<1>) {
        let phi = self.phi.val().cast(DType::F32);
        let [n, k] = phi.dims();
        let device = phi.device();
        let rest = n * n + n;
        let phi = Tensor::cat(vec![phi, Tensor::zeros([rest, k], (&device, DType::F32))], 0);
        let and = |of: &Param<Tensor<1>>, zeros: usize| {
            let zeros = Tensor::zeros([zeros], (&device, DType::F32));
            Tensor::cat(vec![of.val().cast(DType::F32), zeros], 0)
        };
        (phi, and(&self.alpha, 2), and(&self.bias, rest))
    }
}

impl ModuleDisplay for HyperHead {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content.add("width", &self.width).add("streams", &self.streams).optional()
    }
}
