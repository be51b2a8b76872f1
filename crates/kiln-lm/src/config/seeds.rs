//! The lives of the seeds of a `kasmina` MLP.

use kiln_nn::kasmina::{LifecycleConfig, Schedule};
use serde::{Deserialize, Serialize};

/// When seeds germinate, how long they stay in a state at least, and what it takes to leave it.
///
/// An epoch is `epoch_steps` steps of the optimizer. At the end of each the next dormant seed may germinate, one block
/// after another, and every seed goes on as far as its state, its epochs and what has been measured allow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SeedsConfig {
    /// Optimizer steps in an epoch.
    pub epoch_steps: usize,
    /// Epochs before the first seed germinates.
    pub first: usize,
    /// Epochs from one germination to the next.
    pub every: usize,
    /// Seeds that germinate at most; 0 stands for all.
    pub most: usize,
    /// Epochs in Training, Grafting, Stabilization, Evaluating and FineTuning, at least.
    pub minimum_epochs: [usize; 5],
    /// Epochs in which alpha grows from 0 to 1.
    pub ramp: usize,
    /// How it grows.
    pub schedule: Schedule,
    /// Training to Grafting: the largest reconstruction loss.
    pub reconstruction_loss: f32,
    /// Evaluating to FineTuning: the least stability, 1 / (1 + the variance of the last epochs' losses).
    pub stability: f32,
    /// Evaluating to Culled: by how much the loss is higher with the seed than without, as a negative number.
    pub culled_below: f32,
    /// FineTuning to Fossilized: by how much the loss is lower with the seed than without,
    pub total_improvement: f32,
    /// and the least stability.
    pub final_stability: f32,
    /// A seed that is not let on for so many times the least epochs of its state, or of the ramp, is taken out.
    pub patience: usize,
    /// Validation batches by which a seed is measured.
    pub eval_batches: usize,
}

impl Default for SeedsConfig {
    fn default() -> Self {
        let rules = LifecycleConfig::new();
        Self {
            epoch_steps: 10,
            first: 5,
            every: 10,
            most: 0,
            minimum_epochs: [20, 10, 4, 6, 10],
            ramp: 10,
            schedule: rules.schedule,
            reconstruction_loss: rules.reconstruction_loss,
            stability: rules.stability,
            culled_below: rules.culled_below,
            total_improvement: rules.total_improvement,
            final_stability: rules.final_stability,
            patience: 3,
            eval_batches: 10,
        }
    }
}

impl SeedsConfig {
    /// Nothing was said about seeds.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The same as the layer takes it.
    pub(crate) fn rules(&self) -> LifecycleConfig {
        LifecycleConfig::new()
            .with_epoch_steps(self.epoch_steps)
            .with_minimum_epochs(self.minimum_epochs)
            .with_ramp(self.ramp)
            .with_schedule(self.schedule)
            .with_reconstruction_loss(self.reconstruction_loss)
            .with_stability(self.stability)
            .with_culled_below(self.culled_below)
            .with_total_improvement(self.total_improvement)
            .with_final_stability(self.final_stability)
    }
}
