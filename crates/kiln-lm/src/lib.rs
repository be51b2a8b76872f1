//! A small language model built from Kiln layers: data, model, training, generation.
//!
//! * [`config`]: one TOML file describes a run.
//! * [`data`]: text becomes memory-mapped tokens, tokens become batches.
//! * [`model`]: the transformer.
//! * [`train`]: the loop, by steps, resumable bit for bit.
//! * [`run`]: the folder of a run: checkpoints, metrics, curves.
//! * [`generate`](mod@generate): text from a trained model.

pub mod config;
pub mod data;
mod earlier;
pub mod generate;
pub mod model;
mod names;
pub mod run;
pub mod tensors;
pub mod train;

/// Everything a program that trains or generates needs.
pub mod prelude {
    pub use crate::config::{self, Config, ConfigError};
    pub use crate::data::{self, DataError, Dataset, Tokenizer};
    pub use crate::generate::{GenerateError, Sampling, generate};
    pub use crate::model::Transformer;
    pub use crate::run::RunDir;
    pub use crate::train::{Observer, Summary, TrainError, Trained, Trainer};
}
