//! What works on each position in a block. A new kind is a variant here, one of
//! [`MlpKind`](crate::config::MlpKind), and a row of `kiln-lm/src/names.rs`.

use crate::config::{MlpKind, ModelConfig};
use burn::module::Module;
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};
use kiln_nn::kasmina::{Lifecycle, SeedState};
use kiln_nn::prelude::*;
use kiln_ops::OpError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A layer that works on each position by itself.
#[allow(clippy::large_enum_variant)] // one a block
#[derive(Module, Debug)]
pub enum Mlp {
    /// The SwiGLU MLP.
    SwiGlu(SwiGlu),
    /// The same with seeds in its output.
    Kasmina(KasminaMlp),
}

/// The SwiGLU MLP with seeds in its output.
#[derive(Module, Debug)]
pub struct KasminaMlp {
    /// The MLP.
    pub base: SwiGlu,
    /// What its output goes through.
    pub seeds: KasminaLayer,
    /// Whether a seed is in training, as the host knows.
    #[module(skip)]
    training: bool,
    #[module(skip)]
    losses: Losses,
}

/// The reconstruction losses of the last forward with gradients: to be added to the model's, and to be looked at.
#[derive(Debug, Clone, Default)]
struct Losses(Arc<Mutex<[Option<Tensor<1>>; 2]>>);

impl Losses {
    fn lock(&self) -> MutexGuard<'_, [Option<Tensor<1>>; 2]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KasminaMlp {
    fn new(config: &ModelConfig, base: SwiGlu, device: &Device) -> Self {
        let mut seeds = config.kasmina().init(device);
        // Its seeds blend MLPs alone.
        seeds.blueprints = seeds.blueprints.set_require_grad(false);
        Self { base, seeds, training: false, losses: Losses::default() }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.seeds.forward(x, |x| {
            let h = self.base.forward(x);
            if self.training && h.is_autodiff() {
                let losses = self.seeds.reconstruction(h.clone());
                *self.losses.lock() = [Some(losses.clone()), Some(losses.inner())];
            }
            h
        })
    }

    /// Takes the sum of the reconstruction losses of the last forward, if a seed is in training; one that is no number does
    /// not count.
    pub(super) fn take_loss(&self) -> Option<Tensor<1>> {
        let losses = self.losses.lock()[0].take()?;
        let broken = losses.clone().is_finite().bool_not();
        Some(losses.mask_fill(broken, 0.0).sum())
    }

    /// The reconstruction losses of the last forward in training, `[C]`.
    pub(crate) fn reconstruction(&self) -> Option<Tensor<1>> {
        self.losses.lock()[1].clone()
    }

    /// Takes over the states of `lifecycle`.
    ///
    /// # Errors
    ///
    /// As [`KasminaLayer::follow`].
    pub fn follow(&mut self, lifecycle: &Lifecycle) -> Result<(), OpError> {
        self.seeds.follow(lifecycle)?;
        let mut lives = lifecycle.lives().iter();
        self.training = lives.any(|life| life.seed().state == SeedState::Training);
        *self.losses.lock() = [None, None];
        Ok(())
    }
}

impl Mlp {
    pub(super) fn new(config: &ModelConfig, device: &Device) -> Self {
        let mlp = SwiGluConfig::new(config.width, config.resolved_mlp_width());
        let mlp = mlp.with_initializer(Initializer::Zeros).init(device);
        match config.mlp {
            MlpKind::SwiGlu => Self::SwiGlu(mlp),
            MlpKind::Kasmina => Self::Kasmina(KasminaMlp::new(config, mlp, device)),
        }
    }

    /// The one with seeds, if it is that.
    pub fn kasmina(&self) -> Option<&KasminaMlp> {
        match self {
            Self::Kasmina(mlp) => Some(mlp),
            Self::SwiGlu(_) => None,
        }
    }

    /// The same, to be changed.
    pub fn kasmina_mut(&mut self) -> Option<&mut KasminaMlp> {
        match self {
            Self::Kasmina(mlp) => Some(mlp),
            Self::SwiGlu(_) => None,
        }
    }

    /// `[B, T, width]` to the same.
    pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::SwiGlu(mlp) => mlp.forward(x),
            Self::Kasmina(mlp) => mlp.forward(x),
        }
    }

    /// The layer after an optimizer step.
    pub(super) fn after_step(self, _step: u64) -> Self {
        match self {
            // Nothing in it changes but by the optimizer; seeds live by what the run measures.
            Self::SwiGlu(_) | Self::Kasmina(_) => self,
        }
    }
}
