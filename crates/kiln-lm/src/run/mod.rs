//! The folder of a training run: configuration, tokenizer, metrics, loss curve and checkpoints.

mod checkpoint;
pub mod comparison;
pub mod curve;
mod disk;
mod folder;
mod manifest;
pub mod metrics;
mod plot;
pub mod seeds;
mod series;
mod tensorboard;

pub use checkpoint::{Checkpoint, CheckpointError, CheckpointStore, Found, Rejected};
pub use curve::CurveError;
pub use disk::DiskError;
pub use folder::{RunDir, RunDirError, RunLock};
pub use manifest::Damage;
pub use metrics::{Kind, MetricsError, MetricsLog, Record};
pub use tensorboard::EventWriter;
