//! What a run tells while it goes on; the trainer itself knows no terminal.

use super::SeedStep;
use kiln_nn::kasmina::SeedState;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Listens to a run. Every method has a body that does nothing.
pub trait Observer {
    /// The run begins or goes on.
    fn started(&mut self, start: &Start) {
        let _ = start;
    }

    /// An optimizer step was given to the device. `step` is the number of steps done.
    fn stepped(&mut self, step: u64) {
        let _ = step;
    }

    /// Numbers of a step, every `log_every` steps.
    fn logged(&mut self, metrics: &StepMetrics) {
        let _ = metrics;
    }

    /// The validation loss was measured.
    fn evaluated(&mut self, evaluation: &Evaluation) {
        let _ = evaluation;
    }

    /// A seed has gone to another state.
    fn seed_stepped(&mut self, seed: &SeedStep) {
        let _ = seed;
    }

    /// The model wrote something.
    fn sampled(&mut self, step: u64, prompt: &str, text: &str) {
        let _ = (step, prompt, text);
    }

    /// A checkpoint is on the disk.
    fn saved(&mut self, step: u64, path: &Path) {
        let _ = (step, path);
    }
}

/// Hears nothing.
impl Observer for () {}

/// How a run begins.
#[derive(Debug, Clone)]
pub struct Start {
    /// Trainable numbers.
    pub parameters: usize,
    /// Tokens the model knows.
    pub vocab_size: usize,
    /// Tokens to train on.
    pub train_tokens: u64,
    /// Tokens to evaluate on.
    pub validation_tokens: u64,
    /// Digits that tell this text in its tokens from others: [`DataId::short`](crate::data::DataId::short).
    pub text: String,
    /// Tokens of one optimizer step.
    pub tokens_per_step: usize,
    /// Steps done before: 0 but for a resumed run.
    pub step: u64,
    /// Steps in all.
    pub steps: u64,
    /// Validation loss of a model that ignores its context.
    pub unigram_loss: f64,
    /// Element type of the activations: `f32` or `bf16`.
    pub precision: String,
    /// The step after which the first seed of the model germinates; none without seeds.
    pub first_seed: Option<u64>,
    /// What the config says to no effect, [`Config::unused`](crate::config::Config::unused).
    pub unused: Vec<String>,
    /// Checkpoints that were damaged and passed over, newest first, each with its reason.
    pub rejected: Vec<String>,
}

/// Numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepMetrics {
    /// Steps done, this one included.
    pub step: u64,
    /// Its training loss.
    pub loss: f32,
    /// Its learning rate.
    pub learning_rate: f64,
    /// Global norm of its gradient, before clipping.
    pub gradient_norm: f32,
    /// Speed since the metrics before, without evaluation, samples and checkpoints.
    pub tokens_per_second: f64,
}

/// A measured validation loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// Steps done.
    pub step: u64,
    /// Validation loss.
    pub loss: f32,
    /// Whether no evaluation of the run was lower.
    pub best: bool,
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// The stop flag was set; the run can be resumed.
    Stopped,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Why it ended.
    pub outcome: Outcome,
    /// Steps done.
    pub step: u64,
    /// Training loss of the first step.
    pub first_loss: Option<f32>,
    /// Training loss of the last step.
    pub last_loss: Option<f32>,
    /// Step and value of the lowest validation loss.
    pub best_validation: Option<(u64, f32)>,
    /// Validation loss of a model that ignores its context.
    pub unigram_loss: f64,
    /// Tokens trained on, over all sessions of the run.
    pub tokens: u64,
    /// Training speed of this session, without evaluation, samples and checkpoints.
    pub tokens_per_second: f64,
    /// Time of this session.
    pub elapsed: Duration,
    /// Seeds of the model by their states; empty without seeds.
    pub seeds: BTreeMap<SeedState, usize>,
    /// Folder of the run.
    pub run: PathBuf,
}
