//! A toy text, a small configuration, and an observer that remembers.

use burn::tensor::Device;
use kiln_lm::config::{Config, parse};
use kiln_lm::data::{Dataset, prepare};
use kiln_lm::train::{Evaluation, Observer, SeedStep, StepMetrics, Summary, TrainError, Trainer};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tempfile::TempDir;

/// The CPU's random numbers come from one generator of the process: one training at a time.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(|error| error.into_inner())
}

/// A folder with a text and room for runs.
pub(crate) struct Place {
    folder: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..400)
            .map(|i| {
                format!("{} apples and {} pears make {} fruits\n", i % 7, i % 5, i % 7 + i % 5)
            })
            .collect();
        fs::write(folder.path().join("text.txt"), text).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn run(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// A small model with dropout and accumulation, in the run folder `name`.
    pub(crate) fn config(&self, name: &str, overrides: &[&str]) -> Config {
        let text = format!(
            "[data]\nsources = [{:?}]\ntokenizer = \"char\"\ncache = {:?}\n\
             [model]\nlayers = 2\nwidth = 32\nheads = 4\nkv_heads = 2\ncontext = 16\ndropout = 0.1\n\
             [optimizer]\nlearning_rate = 1e-2\n\
             [schedule]\nwarmup = 4\n\
             [train]\nsteps = 12\nbatch_size = 4\naccumulation = 2\nlog_every = 1\neval_every = 4\n\
             eval_batches = 3\nsample_every = 5\ncheckpoint_every = 3\nout = {:?}\n\
             [sample]\nprompt = \"1 apples\"\ntokens = 20\n",
            self.path().join("text.txt"),
            self.path().join("cache"),
            self.run(name)
        );
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        parse(&text, "test", &overrides).unwrap()
    }

    pub(crate) fn new_trainer(&self, name: &str, overrides: &[&str]) -> Trainer {
        let config = self.config(name, overrides);
        let dataset = dataset(&config);
        Trainer::new(config, dataset, &Device::flex()).unwrap()
    }

    pub(crate) fn resume(&self, name: &str, overrides: &[&str]) -> Result<Trainer, TrainError> {
        let config = self.config(name, overrides);
        let dataset = dataset(&config);
        Trainer::resume(config, dataset, &Device::flex())
    }
}

pub(crate) fn dataset(config: &Config) -> Dataset {
    prepare(&config.data, Path::new(""), &mut |_| {}).unwrap()
}

/// Remembers what it is told, and sets the stop flag after a step.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) stop_after: Option<u64>,
    pub(crate) stop: Arc<AtomicBool>,
    /// The last step that was given to the device.
    pub(crate) given: u64,
    pub(crate) steps: Vec<StepMetrics>,
    pub(crate) evaluations: Vec<Evaluation>,
    pub(crate) samples: Vec<String>,
    pub(crate) saved: Vec<u64>,
    pub(crate) rejected: Vec<String>,
    pub(crate) seeds: Vec<SeedStep>,
}

impl Memory {
    pub(crate) fn stopping_after(step: u64) -> Self {
        Self { stop_after: Some(step), ..Self::default() }
    }

    pub(crate) fn run(&mut self, trainer: &mut Trainer) -> Result<Summary, TrainError> {
        let stop = self.stop.clone();
        trainer.run(self, &stop)
    }

    /// Step, loss and gradient norm, to the bit.
    pub(crate) fn numbers(&self) -> Vec<(u64, u32, u32)> {
        let bits = |m: &StepMetrics| (m.step, m.loss.to_bits(), m.gradient_norm.to_bits());
        self.steps.iter().map(bits).collect()
    }
}

impl Observer for Memory {
    fn started(&mut self, start: &kiln_lm::train::Start) {
        self.rejected = start.rejected.clone();
    }
    fn stepped(&mut self, step: u64) {
        self.given = step;
        if Some(step) == self.stop_after {
            self.stop.store(true, Ordering::SeqCst);
        }
    }
    fn logged(&mut self, metrics: &StepMetrics) {
        self.steps.push(*metrics);
    }
    fn evaluated(&mut self, evaluation: &Evaluation) {
        self.evaluations.push(*evaluation);
    }
    fn sampled(&mut self, _step: u64, _prompt: &str, text: &str) {
        self.samples.push(text.to_string());
    }
    fn seed_stepped(&mut self, seed: &SeedStep) {
        self.seeds.push(seed.clone());
    }
    fn saved(&mut self, step: u64, _path: &Path) {
        self.saved.push(step);
    }
}

/// Every file of a checkpoint but its configuration, which names the run's own folder.
pub(crate) fn checkpoint(run: &Path, step: u64) -> Vec<(String, Vec<u8>)> {
    let folder = run.join(format!("checkpoints/step-{step:08}"));
    ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"]
        .map(|name| (name.to_string(), fs::read(folder.join(name)).unwrap()))
        .into()
}
