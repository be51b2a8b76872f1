//! The folder of a training run: configuration, tokenizer, metrics, loss curve and checkpoints.

mod checkpoint;
mod curve;
mod disk;
mod folder;
mod manifest;
mod metrics;
mod series;
mod tensorboard;

pub use checkpoint::{Checkpoint, CheckpointError, CheckpointStore, Latest, Rejected};
pub use curve::{CurveError, draw};
pub use disk::DiskError;
pub use folder::{RunDir, RunDirError};
pub use manifest::Damage;
pub use metrics::{Kind, MetricsError, MetricsLog, Record, read};
pub use tensorboard::EventWriter;
