//! Burn modules over the Kiln operators, in Burn's own style: a `Config` with `init(&device)`, and
//! a module with `forward`.
//!
//! Parameters are f32; a module computes in the element type of its input and casts its
//! weights to it, so that a bf16 input gives bf16 matrix products and f32 gradients. With an optimizer of `kiln_optim` that
//! keeps master weights they are bf16 too, nothing is cast, and so are their gradients.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Tensor};
//! use kiln_nn::prelude::*;
//!
//! let device = Device::flex();
//! let attention = CausalSelfAttentionConfig::new(64, 4, 16).with_kv_heads(Some(2)).init(&device);
//! let mlp = SwiGluConfig::new(64, 192).init(&device);
//! let norm = RmsNormConfig::new(64).init(&device);
//!
//! let x = Tensor::<3>::ones([1, 16, 64], &device);
//! let (x, y) = norm.forward_add(attention.forward(norm.forward(x.clone())), x);
//! let x = x + mlp.forward(y);
//! assert_eq!(x.dims(), [1, 16, 64]);
//! # }
//! ```
//!
//! A wrong shape in `forward` panics with one line that names the tensor and what was expected, as
//! Burn's own modules do; the functions of `kiln-ops` return it as an error instead.

mod attention;
mod bk_core;
mod bk_state;
mod hyper_connection;
pub mod kasmina;
mod kv_cache;
mod linear;
mod rms_norm;
mod rope;
mod swiglu_mlp;

pub use attention::{CausalSelfAttention, CausalSelfAttentionConfig};
pub use bk_core::{BkCore, BkCoreConfig};
pub use bk_state::BkState;
pub use hyper_connection::{
    HyperConnection, HyperConnectionConfig, HyperHead, HyperHeadConfig, streams,
};
pub use kasmina::{KasminaLayer, KasminaLayerConfig, Lifecycle, LifecycleConfig};
pub use kv_cache::KvCache;
pub use linear::{Linear, LinearConfig};
pub use rms_norm::{RmsNorm, RmsNormConfig};
pub use rope::{Rope, RopeConfig};
pub use swiglu_mlp::{SwiGlu, SwiGluConfig};

/// Everything a model needs.
pub mod prelude {
    pub use crate::{
        BkCore, BkCoreConfig, BkState, CausalSelfAttention, CausalSelfAttentionConfig,
        HyperConnection, HyperConnectionConfig, HyperHead, HyperHeadConfig, KasminaLayer,
        KasminaLayerConfig, KvCache, Lifecycle, LifecycleConfig, Linear, LinearConfig, RmsNorm,
        RmsNormConfig, Rope, RopeConfig, SwiGlu, SwiGluConfig, streams,
    };
    pub use kiln_ops::prelude::*;
}

/// The initializer of Burn's own `Linear`.
fn default_initializer() -> burn::nn::Initializer {
    burn::nn::Initializer::KaimingUniform { gain: 1.0 / 3f64.sqrt(), fan_out_only: false }
}

/// Panics where `x` has another width than the layer: the operator would blame the weight.
#[track_caller]
fn check_width<const D: usize>(layer: &str, x: &burn::tensor::Tensor<D>, width: usize) {
    let shape = x.dims();
    let fits = shape.last() == Some(&width);
    assert!(fits, "{layer}: `x` has shape {shape:?}, expected [..., {width}]");
}

/// Panics if a size of a layer is 0.
#[track_caller]
fn check_size(layer: &str, name: &str, size: usize) {
    assert!(size > 0, "{layer}: {name} = 0, expected at least 1");
}

/// What an operator returned, or its message as a panic: Burn's modules have no error path.
#[track_caller]
fn expect<T>(result: Result<T, kiln_ops::OpError>) -> T {
    // A closure would be the place that the panic names.
    match result {
        Ok(of) => of,
        Err(error) => panic!("{error}"),
    }
}
