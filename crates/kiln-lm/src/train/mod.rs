//! The training loop, by optimizer steps.
//!
//! What one replica does (`replica.rs`) is apart from what the run does: files, metrics, evaluations.
//!
//! One step: `accumulation` forward and backward passes over batches of windows, the global
//! gradient norm, clipping, AdamW at the scheduled learning rate. Now and then: metrics, the
//! validation loss, a sample, a checkpoint.
//!
//! A run that is stopped and resumed goes on bit for bit as if it had never stopped (where the
//! device itself repeats bit for bit, as the CPU does): the order of the data is in the state of
//! the sampler, and the random numbers of dropout are seeded anew from (seed, step, micro-batch)
//! before every forward pass, so that neither evaluations nor samples nor a new process disturb
//! them. On the CPU they come from one generator of the process: train one model at a time in it.

mod error;
mod evaluate;
mod memory;
mod observer;
mod optimizer;
mod replica;
mod seeds;
mod state;
mod steps;
mod trained;

pub use error::TrainError;
pub use kiln_nn::kasmina::TransitionError;
pub use observer::{Evaluation, Observer, Outcome, Start, StepMetrics, Summary};
pub use seeds::SeedStep;
pub use trained::{Trained, Which};

use crate::config::{Config, TrainConfig};
use crate::data::{Batch, Dataset, ValidationBatches};
use crate::model::Transformer;
use crate::run::{CheckpointStore, EventWriter, MetricsLog, RunDir, RunLock};
use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_ops::device;
use replica::Replica;
use seeds::Garden;
use state::State;
use std::time::Duration;

/// A run: a replica of the model, data and folder, and where it is.
pub struct Trainer {
    config: Config,
    dataset: Dataset,
    dtype: DType,
    replica: Replica<Transformer>,
    validation: ValidationBatches,
    /// The seeds of the model, if it has some; away only while an epoch of theirs ends.
    garden: Option<Garden>,
    /// Tokens that samples continue.
    prompt: Vec<u32>,
    run: RunDir,
    _lock: RunLock,
    store: CheckpointStore,
    metrics: MetricsLog,
    events: EventWriter,
    state: State,
    rejected: Vec<String>,
    /// Loss and gradient norm of the steps that were not looked at yet, `[2]` each.
    pending: Vec<Tensor<1>>,
    /// Steps that were looked at since the last metrics.
    unlogged: u64,
    /// Of the last step that was looked at.
    gradient_norm: f32,
    training_time: Duration,
}

impl Trainer {
    /// Starts a run in the folder `config.train.out`, which must not hold one.
    ///
    /// # Errors
    ///
    /// [`TrainError`] if the configuration is out of range or cannot fit into memory, the device does not have
    /// its precision, a split is shorter than one window, the prompt of the samples has unknown characters, a
    /// group of the optimizer holds no parameter, or the folder cannot be used.
    pub fn new(config: Config, dataset: Dataset, device: &Device) -> Result<Self, TrainError> {
        config.validate()?;
        check_precision(&config, device)?;
        dataset.check_window(config.model.context)?;
        let prompt = sample_prompt(&config, &dataset)?;
        memory::check(&config, dataset.meta.vocab_size, device)?;
        let device = device.clone().autodiff();
        let skeleton = config.model.skeleton(dataset.meta.vocab_size, &device);
        optimizer::optimizer(&config.optimizer, &config.model, &skeleton)?;
        // Made when everything else is known to fit.
        let (run, lock) = RunDir::create(&config.train.out, &config)?;
        let store = run.open_checkpoints(config.train.keep)?;
        let begin = state::first(&config, &dataset, &device)?;
        Self::open(config, dataset, (run, lock), store, prompt, begin)
    }

    /// Goes on with the run in the folder `config.train.out` from its newest whole checkpoint, or
    /// from the start if it has none yet.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and if another run goes on in the folder, no checkpoint is whole, or it is of other data,
    /// another model or a step beyond the last; the run stays as it is.
    pub fn resume(config: Config, dataset: Dataset, device: &Device) -> Result<Self, TrainError> {
        config.validate()?;
        check_precision(&config, device)?;
        dataset.check_window(config.model.context)?;
        let prompt = sample_prompt(&config, &dataset)?;
        memory::check(&config, dataset.meta.vocab_size, device)?;
        let run = RunDir::open(&config.train.out)?;
        let lock = run.lock()?;
        let store = run.open_checkpoints(config.train.keep)?;
        let latest = store.latest()?;
        let device = device.clone().autodiff();
        let begin = match &latest.checkpoint {
            Some(checkpoint) => state::restored(&config, &dataset, &device, checkpoint)?,
            None => state::first(&config, &dataset, &device)?,
        };
        let (step, steps) = (begin.1.step, config.train.steps as u64);
        if step > steps {
            return Err(TrainError::Beyond { steps, step });
        }
        run.save_config(&config)?;
        let mut trainer = Self::open(config, dataset, (run, lock), store, prompt, begin)?;
        trainer.rejected = latest.rejected.iter().map(ToString::to_string).collect();
        Ok(trainer)
    }

    fn open(
        config: Config,
        dataset: Dataset,
        (run, lock): (RunDir, RunLock),
        store: CheckpointStore,
        prompt: Vec<u32>,
        (mut replica, state): (Replica<Transformer>, State),
    ) -> Result<Self, TrainError> {
        let tokenizer = dataset.tokenizer.to_json()?;
        run.save_file(&run.tokenizer(), tokenizer.as_bytes())?;
        run.save_data(&state.data)?;
        let shard = dataset.validation.clone();
        let TrainConfig { batch_size, eval_batches, precision, .. } = config.train;
        let context = config.model.context;
        let dtype = precision.dtype(replica.device());
        let resume_from = (state.step > 0).then_some(state.step);
        let batches = |limit| ValidationBatches::new(shard.clone(), batch_size, context, limit);
        let of_seeds = batches(config.seeds.eval_batches)?;
        let garden = Garden::open(&config, of_seeds, replica.model_mut())?;
        Ok(Self {
            validation: batches(eval_batches)?,
            garden,
            metrics: run.open_metrics(resume_from)?,
            events: run.open_tensorboard(resume_from)?,
            prompt,
            config,
            dataset,
            dtype,
            replica,
            run,
            _lock: lock,
            store,
            state,
            rejected: Vec::new(),
            pending: Vec::new(),
            unlogged: 0,
            gradient_norm: f32::NAN,
            training_time: Duration::ZERO,
        })
    }

    /// The model as it is now: in 16 bits its matrices are rounded, and checkpoints have what they are rounded from.
    pub fn model(&self) -> &Transformer {
        self.replica.model()
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.state.step
    }

    /// What the run begins with.
    fn start(&self) -> Start {
        let meta = &self.dataset.meta;
        Start {
            parameters: self.model().num_params(),
            vocab_size: meta.vocab_size,
            train_tokens: meta.train_tokens,
            validation_tokens: meta.validation_tokens,
            text: self.state.data.short(),
            tokens_per_step: self.config.tokens_per_step(),
            step: self.state.step,
            steps: self.config.train.steps as u64,
            unigram_loss: self.dataset.unigram_loss(),
            precision: format!("{:?}", self.dtype).to_lowercase(),
            first_seed: self.garden.as_ref().map(Garden::first),
            unused: self.config.unused(),
            rejected: self.rejected.clone(),
        }
    }
}

/// Refuses a precision that the device does not have.
fn check_precision(config: &Config, device: &Device) -> Result<(), TrainError> {
    let dtype = config.train.precision.dtype(device);
    if device.supports_dtype(dtype) {
        return Ok(());
    }
    let precision = format!("{dtype:?}").to_lowercase();
    Err(TrainError::Precision { precision, device: device::name(device) })
}

/// The tokens that samples continue: at least one.
fn sample_prompt(config: &Config, dataset: &Dataset) -> Result<Vec<u32>, TrainError> {
    let prompt = dataset.tokenizer.encode(&config.sample.prompt);
    let prompt = prompt.map_err(|error| TrainError::Prompt(error.to_string()))?;
    if prompt.is_empty() {
        return Err(TrainError::Prompt("it is empty, expected text to continue".into()));
    }
    Ok(prompt)
}

/// Inputs and targets of a batch on a device.
fn tensors(batch: Batch, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let Batch { inputs, targets, batch, context } = batch;
    let tensor = |tokens| Tensor::from_data(TensorData::new(tokens, [batch, context]), device);
    (tensor(inputs), tensor(targets))
}

/// A seed for one use of random numbers in one step.
fn derived_seed(seed: u64, step: u64, what: u64) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("kiln-lm 2026 random numbers of a step");
    for number in [seed, step, what] {
        hasher.update(&number.to_le_bytes());
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}
