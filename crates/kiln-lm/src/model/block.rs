//! One block: a mixer and an MLP, each behind its RMSNorm, between residuals.

use super::mixer::{Mixer, MixerCache};
use super::mlp::Mlp;
use super::residual::{Residual, Stream};
use crate::config::{MixerKind, ModelConfig};
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::Device;
use kiln_nn::prelude::*;

/// Mixer and MLP with the norms before them.
#[derive(Module, Debug)]
pub struct Block {
    /// Before the mixer.
    pub mixer_norm: RmsNorm,
    /// What mixes positions.
    pub mixer: Mixer,
    /// Before the MLP.
    pub mlp_norm: RmsNorm,
    /// What works on each position.
    pub mlp: Mlp,
    dropout: Dropout,
    #[module(skip)]
    residual: Residual,
}

impl Block {
    pub(super) fn new(mixer: MixerKind, config: &ModelConfig, device: &Device) -> Self {
        let norm = || RmsNormConfig::new(config.width).with_eps(config.norm_eps).init(device);
        Self {
            mixer_norm: norm(),
            mixer: Mixer::new(mixer, config, device),
            mlp_norm: norm(),
            mlp: Mlp::new(config, device),
            dropout: DropoutConfig::new(config.dropout).init(),
            residual: Residual::new(config.residual),
        }
    }

    /// The residual stream after the block.
    pub(super) fn forward(&self, stream: Stream, cache: Option<&mut MixerCache>) -> Stream {
        let (stream, y) = self.residual.read(stream, &self.mixer_norm);
        let y = match cache {
            Some(cache) => self.mixer.forward_cached(y, cache),
            None => self.mixer.forward(y),
        };
        let stream = self.residual.write(stream, self.dropout.forward(y));
        let (stream, y) = self.residual.read(stream, &self.mlp_norm);
        self.residual.write(stream, self.dropout.forward(self.mlp.forward(y)))
    }

    /// The block after an optimizer step.
    pub(super) fn after_step(self, step: u64) -> Self {
        let (mixer, mlp) = (self.mixer.after_step(step), self.mlp.after_step(step));
        Self { mixer, mlp, ..self }
    }
}
