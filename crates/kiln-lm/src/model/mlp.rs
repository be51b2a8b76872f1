//! What works on each position in a block. A new kind is a variant here, one of
//! [`MlpKind`](crate::config::MlpKind), and a row of `kiln-lm/src/names.rs`.

use crate::config::{MlpKind, ModelConfig};
use burn::module::Module;
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use kiln_nn::prelude::*;

/// A layer that works on each position by itself.
#[derive(Module, Debug)]
pub enum Mlp {
    /// The SwiGLU MLP.
    SwiGlu(SwiGlu),
}

impl Mlp {
    pub(super) fn new(config: &ModelConfig, device: &Device) -> Self {
        match config.mlp {
            MlpKind::SwiGlu => {
                let mlp = SwiGluConfig::new(config.width, config.resolved_mlp_width());
                Self::SwiGlu(mlp.with_initializer(Initializer::Zeros).init(device))
            }
        }
    }

    /// `[B, T, width]` to the same.
    pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::SwiGlu(mlp) => mlp.forward(x),
        }
    }

    /// The layer after an optimizer step.
    pub(super) fn after_step(self, _step: u64) -> Self {
        match self {
            // Nothing in it changes but by the optimizer.
            Self::SwiGlu(_) => self,
        }
    }
}
