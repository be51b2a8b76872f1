//! A matrix product with an f32 weight, in the element type of the input: y = x · W + b.

use crate::{check_size, check_width, expect};
use burn::config::Config;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use kiln_ops::prelude::{MatmulOptions, matmul, matmul_add};

/// Configuration of [`Linear`].
#[derive(Config, Debug)]
pub struct LinearConfig {
    /// Width of the input.
    pub d_input: usize,
    /// Width of the output.
    pub d_output: usize,
    /// Whether a bias is added.
    #[config(default = false)]
    pub bias: bool,
    /// Start values of the weight; the bias starts at 0.
    #[config(default = "crate::default_initializer()")]
    pub initializer: Initializer,
}

/// x · W + b over the last dimension.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Linear {
    /// `[d_input, d_output]`, f32.
    pub weight: Param<Tensor<2>>,
    /// `[d_output]`, f32.
    pub bias: Option<Param<Tensor<1>>>,
}

impl LinearConfig {
    /// A layer with start values.
    ///
    /// # Panics
    ///
    /// If a width is 0.
    #[track_caller]
    pub fn init(&self, device: &Device) -> Linear {
        let (d_input, d_output) = (self.d_input, self.d_output);
        check_size("linear", "d_input", d_input);
        check_size("linear", "d_output", d_output);
        let weight =
            self.initializer.init_with([d_input, d_output], Some(d_input), Some(d_output), device);
        let bias = self.bias.then(|| Initializer::Zeros.init([d_output], device));
        Linear { weight, bias }
    }
}

impl Linear {
    /// x · W + b for `x` of shape `[..., d_input]`, in the element type of `x`.
    ///
    /// # Panics
    ///
    /// If the last dimension of `x` is not `d_input`.
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let [d_input, d_output] = self.weight.shape().dims();
        check_width("linear", &x, d_input);
        let mut shape = x.dims();
        let rows = shape[..D - 1].iter().product::<usize>();
        // One matrix product, whatever the rank: a batched one would read the weight per batch.
        let weight = self.weight.val().cast(x.dtype());
        let x = x.reshape([rows, d_input]);
        let y = expect(match &self.bias {
            Some(bias) => matmul_add(x, weight, bias.val().unsqueeze(), MatmulOptions::default()),
            None => matmul(x, weight, MatmulOptions::default()),
        });
        shape[D - 1] = d_output;
        y.reshape(shape)
    }
}

impl ModuleDisplay for Linear {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_input, d_output] = self.weight.shape().dims();
        let content = content.add("d_input", &d_input).add("d_output", &d_output);
        content.add("bias", &self.bias.is_some()).optional()
    }
}
