//! One block: a mixer and an MLP, each behind its RMSNorm, between residuals.

use super::mixer::{Mixer, MixerCache};
use super::mlp::Mlp;
use super::residual::Stream;
use crate::config::{MixerKind, ModelConfig, ResidualKind};
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
    /// The streams around it, if there are several.
    pub mixer_connection: Option<HyperConnection>,
    /// Before the MLP.
    pub mlp_norm: RmsNorm,
    /// What works on each position.
    pub mlp: Mlp,
    /// The streams around it, if there are several.
    pub mlp_connection: Option<HyperConnection>,
    dropout: Dropout,
}

impl Block {
    pub(super) fn new(mixer: MixerKind, config: &ModelConfig, device: &Device) -> Self {
        let norm = || RmsNormConfig::new(config.width).with_eps(config.norm_eps).init(device);
        let connection = || match config.residual {
            ResidualKind::Plain => None,
            ResidualKind::Mhc => {
                let connection = HyperConnectionConfig::new(config.width);
                Some(connection.with_streams(config.resolved_streams()).init(device))
            }
        };
        Self {
            mixer_norm: norm(),
            mixer: Mixer::new(mixer, config, device),
            mixer_connection: connection(),
            mlp_norm: norm(),
            mlp: Mlp::new(config, device),
            mlp_connection: connection(),
            dropout: DropoutConfig::new(config.dropout).init(),
        }
    }

    /// The residual stream after the block.
    pub(super) fn forward(&self, stream: Stream, cache: Option<&mut MixerCache>) -> Stream {
        let mixer = |x| match cache {
            Some(cache) => self.mixer.forward_cached(x, cache),
            None => self.mixer.forward(x),
        };
        stream
            .around(self.mixer_connection.as_ref(), &self.mixer_norm, |x| {
                self.dropout.forward(mixer(x))
            })
            .around(self.mlp_connection.as_ref(), &self.mlp_norm, |x| {
                self.dropout.forward(self.mlp.forward(x))
            })
    }

    /// The block after an optimizer step.
    pub(super) fn after_step(self, step: u64) -> Self {
        let (mixer, mlp) = (self.mixer.after_step(step), self.mlp.after_step(step));
        Self { mixer, mlp, ..self }
    }
}
