//! Optimizers for language models on Burn modules: rules for groups of parameters and a state that is
//! saved by the names of the parameters, and clipping by the global gradient norm.
//!
//! [`Optimizer`] walks the module, puts its parameters into groups, and keeps their state; a [`Rule`] is the
//! formula of a group: AdamW, or Muon.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::nn::LinearConfig;
//! use burn::tensor::{Device, Tensor};
//! use kiln_optim::prelude::*;
//!
//! let device = Device::flex().autodiff();
//! let mut layer = LinearConfig::new(4, 2).init(&device);
//! let config = AdamWConfig::new().with_weight_decay(0.1);
//! let no_decay = below_rank_two(&layer);
//! let mut optimizer = config.init().with_group(no_decay, config.clone().with_weight_decay(0.0));
//!
//! let loss = layer.forward(Tensor::<2>::ones([3, 4], &device)).square().mean();
//! let grads = GradientsParams::from_grads(loss.backward(), &layer);
//! let (grads, norm) = clip_global_norm(&layer, grads, 1.0);
//! layer = optimizer.step(layer, grads, 1e-3);
//! assert!(norm.into_scalar::<f32>().is_finite());
//! # }
//! ```
//!
//! Burn's own `ModuleOptimizer` keys its state by random parameter ids and clips tensor by tensor;
//! a run that is resumed bit for bit needs names, and a language model the global norm. Gradients
//! are Burn's [`GradientsParams`](burn::optim::GradientsParams), added up over several backward
//! passes by Burn's [`GradientsAccumulator`](burn::optim::GradientsAccumulator). A [`Rule`] is also an optimizer of Burn's,
//! for what wants one.

mod adamw;
mod burn_optimizer;
mod by_name;
mod clip;
mod groups;
mod masters;
mod muon;
mod names;
mod optimizer;
mod rest;
mod rule;
mod state;

pub use adamw::AdamWConfig;
pub use burn_optimizer::RuleState;
pub use clip::{clip_global_norm, clip_scale, global_norm, global_norm_without};
pub use groups::{Settings, below_rank_two};
pub use kiln_ops::muon::LearningRateScale;
pub use kiln_ops::newton_schulz::Coefficients;
pub use muon::MuonConfig;
pub use names::{Names, Naming};
pub use optimizer::Optimizer;
pub use rule::Rule;
pub use state::StateError;

/// Everything a training loop needs.
pub mod prelude {
    pub use crate::{
        AdamWConfig, Coefficients, LearningRateScale, MuonConfig, Optimizer, Rule, Settings,
        StateError, below_rank_two, clip_global_norm, clip_scale, global_norm, global_norm_without,
    };
    pub use burn::module::ParamGroup;
    pub use burn::optim::{GradientsAccumulator, GradientsParams};
}
