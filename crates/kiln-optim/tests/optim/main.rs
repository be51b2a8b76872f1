//! The optimizers, and training with them, on the CPU and where kernels run.
#![cfg(feature = "flex")]

mod adamw;
mod burn_optimizer;
mod common;
mod learner;
mod masters;
mod muon;
