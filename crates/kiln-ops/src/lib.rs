//! Fused operators for training language models: each one CubeCL kernel with a hand-written
//! backward, exposed as a Burn operation with autodiff, beside a reference of the same signature
//! in plain Burn operations.
//!
//! Every operator is a folder: `mod.rs` is the public function and its documentation,
//! `reference.rs` its meaning in Burn, `kernel.rs` and `backend.rs` the fused implementation
//! (features `cuda`, `wgpu`, `vulkan`), `oracle.rs` (feature `oracle`) the same formula in
//! float64 with plain loops. Which implementation runs is decided by [`policy`].
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Tensor};
//! use kiln_ops::prelude::*;
//!
//! let device = Device::flex();
//! let x = Tensor::<2>::ones([4, 8], &device);
//! let weight = Tensor::<1>::ones([8], &device);
//! let y = rms_norm(x, weight, 1e-5).unwrap();
//! assert_eq!(y.dims(), [4, 8]);
//! # }
//! ```

#[cfg(feature = "cube")]
pub mod autodiff;
mod check;
pub mod device;
mod error;
#[cfg(feature = "cube")]
pub(crate) mod exponential;
#[cfg(feature = "compile-cache")]
pub mod kernel_cache;
#[cfg(feature = "cube")]
pub mod launch;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod policy;
mod precision;
#[cfg(feature = "cube")]
pub mod reduce;
#[cfg(feature = "cube")]
pub mod scan;
#[cfg(feature = "cube")]
pub mod tile;

pub mod adamw;
pub mod add_rms_norm;
pub mod attention;
pub mod bk;
pub mod cross_entropy;
pub mod embedding;
pub mod kasmina;
pub mod kasmina_mlp;
pub mod linear_cross_entropy;
pub mod matmul;
pub mod mhc_post;
pub mod mhc_post_pre;
pub mod mhc_pre;
pub mod muon;
pub mod newton_schulz;
pub mod rms_norm;
pub mod rope;
pub mod sum_squares;
pub mod swiglu;
pub mod swiglu_mlp;
pub mod tril_matmul;

pub use error::OpError;

/// Everything a model needs.
pub mod prelude {
    pub use crate::OpError;
    pub use crate::adamw::{AdamWBatch, AdamWOptions, Moving, adamw};
    pub use crate::add_rms_norm::add_rms_norm;
    pub use crate::attention::{
        AttentionOptions, Documents, attention, attention_cached, attention_documents,
        attention_qkv,
    };
    pub use crate::bk::{BkMode, BkOptions, bk};
    pub use crate::cross_entropy::{CrossEntropyOptions, cross_entropy};
    pub use crate::embedding::{EmbeddingOptions, embedding, tied_embedding};
    pub use crate::kasmina::{
        Blend, BlueprintCounts, KasminaOptions, Seed, SeedChange, SeedState, Seeds, Telemetry,
        kasmina,
    };
    pub use crate::kasmina_mlp::{kasmina_mlp, mlp_rows};
    pub use crate::linear_cross_entropy::{linear_cross_entropy, linear_cross_entropy_of_table};
    pub use crate::matmul::{F32Precision, MatmulOptions, matmul, matmul_add};
    pub use crate::mhc_post::mhc_post;
    pub use crate::mhc_post_pre::{MhcPost, mhc_post_pre};
    pub use crate::mhc_pre::{MhcPre, MhcPreOptions, mhc_pre};
    pub use crate::muon::{LearningRateScale, MuonOptions, MuonWeight, muon};
    pub use crate::newton_schulz::{Coefficients, NewtonSchulzOptions, newton_schulz};
    pub use crate::policy::Implementation;
    pub use crate::rms_norm::rms_norm;
    pub use crate::rope::{RopeLayout, RopeOptions, RopeTable, rope, rope_qk, rope_qkv};
    pub use crate::sum_squares::{SumSquaresBatch, sum_squares};
    pub use crate::swiglu::swiglu;
    pub use crate::swiglu_mlp::swiglu_mlp;
    pub use crate::tril_matmul::tril_matmul;
}
