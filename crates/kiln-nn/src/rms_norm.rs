//! RMSNorm with a learned scale: y = x · w · (mean(x²) + eps)^-½.

use crate::expect;
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
    pub fn init(&self, device: &Device) -> RmsNorm {
        RmsNorm { weight: Initializer::Ones.init([self.d_model], device), eps: self.eps }
    }
}

impl RmsNorm {
    /// Normalises `x`, `[..., d_model]`, in its element type.
    ///
    /// # Panics
    ///
    /// With the message of [`kiln_ops::OpError`] if the last dimension is not `d_model`.
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        expect(rms_norm(x, self.weight.val(), self.eps))
    }

    /// Adds `residual` to `x` and normalises the sum: returns `(sum, y)`.
    ///
    /// # Panics
    ///
    /// With the message of [`kiln_ops::OpError`] if the shapes differ or the last dimension is not
    /// `d_model`.
    #[track_caller]
    pub fn forward_add<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
    ) -> (Tensor<D>, Tensor<D>) {
        expect(add_rms_norm(x, residual, self.weight.val(), self.eps))
    }
}

impl ModuleDisplay for RmsNorm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_model] = self.weight.shape().dims();
        content.add("d_model", &d_model).add("eps", &self.eps).optional()
    }
}
