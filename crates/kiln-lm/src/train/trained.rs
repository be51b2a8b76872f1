//! A model from the folder of a run, for generation.

use super::replica::MODEL;
use super::state::{CONFIG, TOKENIZER, read_state};
use super::{TrainError, check_precision};
use crate::config::{self, Config};
use crate::data::Tokenizer;
use crate::model::Transformer;
use crate::run::{CheckpointStore, Found, RunDir};
use crate::tensors::from_safetensors;
use burn::tensor::Device;
use std::path::Path;

/// Which checkpoint of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Which {
    /// The one with the lowest validation loss, or the latest if none was measured.
    #[default]
    Best,
    /// The latest.
    Latest,
}

/// A trained model with its tokenizer.
#[derive(Debug)]
pub struct Trained {
    /// The model, without autodiff.
    pub model: Transformer,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// How it was trained.
    pub config: Config,
    /// Steps done.
    pub step: u64,
    /// Validation loss, where it was measured.
    pub validation_loss: Option<f64>,
    /// Checkpoints that were damaged and passed over, each with its reason.
    pub rejected: Vec<String>,
}

impl Trained {
    /// Loads a checkpoint of the run in `run`. It needs nothing but the folder, and changes
    /// nothing in it.
    ///
    /// # Errors
    ///
    /// [`TrainError`] if there is no run, no whole checkpoint, or one that does not fit, or the device does not
    /// have the precision of the run.
    pub fn load(run: &Path, which: Which, device: &Device) -> Result<Self, TrainError> {
        let run = RunDir::open(run)?;
        let store = CheckpointStore::view(run.checkpoints());
        let mut rejected = vec![];
        let mut take = |found: Found| {
            let lines = found.rejected.iter().map(ToString::to_string);
            for line in lines {
                if !rejected.contains(&line) {
                    rejected.push(line);
                }
            }
            found.checkpoint
        };
        let best = match which {
            Which::Best => take(store.best()?),
            Which::Latest => None,
        };
        let checkpoint = match best {
            Some(checkpoint) => checkpoint,
            None => {
                let none = || TrainError::NoCheckpoint { path: run.root().to_path_buf() };
                take(store.latest()?).ok_or_else(none)?
            }
        };
        let path = checkpoint.path();
        let unfit = |error: &dyn std::fmt::Display| TrainError::unfit(path, error);

        let text = checkpoint.read(CONFIG)?;
        let text = String::from_utf8(text).map_err(|error| unfit(&error))?;
        let config = config::parse(&text, &path.join(CONFIG).display().to_string(), &[])?;
        check_precision(&config, device)?;
        let tokenizer = Tokenizer::from_json(&checkpoint.read(TOKENIZER)?)?;
        let vocab_size = read_state(&checkpoint)?.data.vocab_size;
        let parameters = from_safetensors(MODEL, &checkpoint.read(MODEL)?);
        let parameters = parameters.map_err(|error| unfit(&error))?;
        let device = device.clone().inner();
        let model = config.model.restore(vocab_size, MODEL, parameters, &device);
        let dtype = config.train.precision.dtype(&device);
        Ok(Self {
            model: model.map_err(|error| unfit(&error))?.with_activations(dtype),
            tokenizer,
            config,
            step: checkpoint.step(),
            validation_loss: checkpoint.validation_loss(),
            rejected,
        })
    }
}
