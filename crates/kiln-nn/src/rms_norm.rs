//! RMSNorm with a learned scale: y = x · w · (mean(x²) + eps)^-½.

use crate::{check_size, check_width, expect};
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use kiln_ops::prelude::{add_rms_norm, rms_norm};

/// Configuration of [`RmsNorm`].
#[derive(Config, Debug)]
pub struct RmsNormConfig {
    /// Width of what is normalised.
    pub d_model: usize,
    /// Added to the mean square.
    #[config(default = 1e-5)]
    pub eps: f64,
}

/// Root mean square normalisation over the last dimension.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct RmsNorm {
    /// Scale, `[d_model]`, f32.
    pub weight: Param<Tensor<1>>,
    /// Added to the mean square.
    pub eps: f64,
}

impl RmsNormConfig {
    /// A norm with scale 1.
    ///
    /// # Panics
    ///
    /// If `d_model` is 0.
    #[track_caller]
    pub fn init(&self, device: &Device) -> RmsNorm {
        check_size("rms_norm", "d_model", self.d_model);
        RmsNorm { weight: Initializer::Ones.init([self.d_model], device), eps: self.eps }
    }
}

impl RmsNorm {
    /// Normalises `x`, `[..., d_model]`, in its element type.
    ///
    /// # Panics
    ///
    /// If the last dimension of `x` is not `d_model`.
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        check_width("rms_norm", &x, self.d_model());
        expect(rms_norm(x, self.weight.val(), self.eps))
    }

    /// Adds `residual` to `x` and normalises the sum: returns `(sum, y)`.
    ///
    /// # Panics
    ///
    /// If the last dimension of `x` is not `d_model`, and with the message of [`kiln_ops::OpError`] if the shapes
    /// differ.
    #[track_caller]
    pub fn forward_add<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
    ) -> (Tensor<D>, Tensor<D>) {
        check_width("add_rms_norm", &x, self.d_model());
        expect(add_rms_norm(x, residual, self.weight.val(), self.eps))
    }

    fn d_model(&self) -> usize {
        let [d_model] = self.weight.shape().dims();
        d_model
    }
}

impl ModuleDisplay for RmsNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content.add("d_model", &self.d_model()).add("eps", &self.eps).optional()
    }
}
