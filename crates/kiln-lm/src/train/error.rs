//! Why a run cannot start, go on or be loaded.

use crate::config::ConfigError;
use crate::data::DataError;
use crate::generate::GenerateError;
use crate::run::{CheckpointError, CurveError, DiskError, MetricsError, RunDirError};
use crate::tensors::TensorsError;
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Why a run cannot start, go on or be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The folder of the run.
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The seeds of a model.
    #[error("the seeds of block {block}: {source}")]
    Seeds {
        /// Number of the block.
        block: usize,
        /// What was wrong.
        source: kiln_ops::OpError,
    },
    /// A file in a checkpoint that is whole but does not fit.
    #[error("the checkpoint in {} does not fit: {reason}", path.display())]
    Unfit {
        /// Folder of the checkpoint.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// The weights or the optimizer state cannot be written.
    #[error(transparent)]
    Tensors(#[from] TensorsError),
    /// The metrics.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The filesystem refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The loss curve.
    #[error(transparent)]
    Curve(#[from] CurveError),
    /// The prompt of the samples.
    #[error("sample.prompt: {0}")]
    Prompt(String),
    /// A sample cannot be generated.
    #[error("cannot generate a sample: {0}")]
    Sample(#[from] GenerateError),
    /// The run was started on other data.
    #[error(
        "the data is not what this run was trained on: {what} was {saved} and is {found}; start a \
         new run, or restore text, tokenizer and [data]"
    )]
    OtherData {
        /// What differs.
        what: &'static str,
        /// What it was.
        saved: String,
        /// What it is.
        found: String,
    },
    /// The run is beyond its last step already.
    #[error("train.steps is {steps}, expected at least {step}: the run has done that many")]
    Beyond {
        /// What the configuration says.
        steps: u64,
        /// Steps done.
        step: u64,
    },
    /// A loss, a gradient norm or a parameter is no finite number any more.
    #[error("step {step}: the {what} is {value}; {kept}. A lower learning rate may help")]
    Diverged {
        /// Optimizer step, counted from 1.
        step: u64,
        /// What: `loss`, `gradient norm`.
        what: String,
        /// Its value.
        value: f32,
        /// What stays on disk.
        kept: String,
    },
    /// A group of `[[optimizer.groups]]` holds no parameter.
    #[error(
        "optimizer.groups: `{pattern}` is no parameter of the model, expected a pattern for some of: {}",
        .names.join(", ")
    )]
    NoSuchParameters {
        /// The pattern.
        pattern: String,
        /// Names of all parameters.
        names: Vec<String>,
    },
    /// The parameters or the activations are more than there is memory for.
    #[error(
        "training takes at least {} of memory, of which {device} has {}{}: {} for parameters and moments, \
         {} for {what}; expected a smaller [model] or train.batch_size",
        gib(*least), gib(*memory), if *free { " free" } else { "" }, gib(*parameters), gib(*rest)
    )]
    Memory {
        /// Bytes that training takes at least.
        least: f64,
        /// Bytes for the parameters with the moments of the optimizer.
        parameters: f64,
        /// Bytes for gradients or for the activations of one batch, whichever are more.
        rest: f64,
        /// Which of the two: `gradients`, `a batch`.
        what: &'static str,
        /// The device.
        device: String,
        /// Bytes that it has.
        memory: f64,
        /// Whether those are what nobody uses now, not all there are.
        free: bool,
    },
    /// The device does not have the element type of the activations.
    #[error(
        "train.precision is {precision}, which {device} does not have; expected one that it has, such as f32"
    )]
    Precision {
        /// The element type.
        precision: String,
        /// The device.
        device: String,
    },
    /// A step has fewer micro-batches than there are ranks to share them.
    #[error(
        "train.accumulation is {accumulation}, of which {ranks} ranks cannot each have a micro-batch: \
         expected at least {ranks}"
    )]
    TooManyRanks {
        /// Micro-batches of a step.
        accumulation: usize,
        /// Ranks.
        ranks: usize,
    },
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(String),
    /// There is a run but no checkpoint yet.
    #[error("the run in {} has no checkpoint yet", path.display())]
    NoCheckpoint {
        /// Folder of the run.
        path: PathBuf,
    },
}

fn gib(bytes: f64) -> String {
    format!("{:.1} GiB", bytes / f64::from(1 << 30))
}

impl TrainError {
    /// A file of the checkpoint in `path` that does not fit.
    pub(super) fn unfit(path: &Path, reason: impl Display) -> Self {
        Self::Unfit { path: path.to_path_buf(), reason: reason.to_string() }
    }
}
