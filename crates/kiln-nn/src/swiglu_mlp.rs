//! The SwiGLU MLP: y = (silu(x · w_gate) · (x · w_up)) · w_down.

use crate::{check_size, check_width, expect};
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use kiln_ops::prelude::swiglu_mlp;

/// Configuration of [`SwiGlu`].
#[derive(Config, Debug)]
pub struct SwiGluConfig {
    /// Width of input and output.
    pub d_model: usize,
    /// Width inside.
    pub d_hidden: usize,
    /// Start values of the three matrices.
    #[config(default = "crate::default_initializer()")]
    pub initializer: Initializer,
}

/// The gated MLP of today's language models, without biases.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct SwiGlu {
    /// `[d_model, d_hidden]`, f32.
    pub w_gate: Param<Tensor<2>>,
    /// `[d_model, d_hidden]`, f32.
    pub w_up: Param<Tensor<2>>,
    /// `[d_hidden, d_model]`, f32.
    pub w_down: Param<Tensor<2>>,
}

impl SwiGluConfig {
    /// An MLP with start values.
    ///
    /// # Panics
    ///
    /// If a width is 0.
    #[track_caller]
    pub fn init(&self, device: &Device) -> SwiGlu {
        check_size("swiglu_mlp", "d_model", self.d_model);
        check_size("swiglu_mlp", "d_hidden", self.d_hidden);
        let matrix = |rows, columns| {
            self.initializer.init_with([rows, columns], Some(rows), Some(columns), device)
        };
        SwiGlu {
            w_gate: matrix(self.d_model, self.d_hidden),
            w_up: matrix(self.d_model, self.d_hidden),
            w_down: matrix(self.d_hidden, self.d_model),
        }
    }
}

impl SwiGlu {
    /// The MLP of `x`, `[..., d_model]` of rank 2 or more, in its element type.
    ///
    /// # Panics
    ///
    /// If the last dimension of `x` is not `d_model`, and with the message of [`kiln_ops::OpError`] if it is of rank 1.
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let [d_model, _] = self.w_gate.shape().dims();
        check_width("swiglu_mlp", &x, d_model);
        let weight = |w: &Param<Tensor<2>>| w.val().cast(x.dtype());
        let (gate, up, down) = (weight(&self.w_gate), weight(&self.w_up), weight(&self.w_down));
        expect(swiglu_mlp(x, gate, up, down))
    }
}

impl ModuleDisplay for SwiGlu {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_model, d_hidden] = self.w_gate.shape().dims();
        content.add("d_model", &d_model).add("d_hidden", &d_hidden).optional()
    }
}
