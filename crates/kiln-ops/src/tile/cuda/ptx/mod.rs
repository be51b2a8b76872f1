//! The raw PTX of products: barriers, copies, TMA and tensor cores, behind functions that say what they
//! do.
//!
//! Addresses of shared memory are 32-bit integers, as the instructions take them. An operand of
//! `gpu_asm!` that is a mutable variable is passed by its address: pass expressions or array elements.

mod barrier;
mod chain;
mod cluster;
mod mma;
mod tma;
mod wgmma;

pub(crate) use barrier::*;
pub(crate) use chain::*;
pub(crate) use cluster::*;
pub(crate) use mma::*;
pub(crate) use tma::*;
pub(crate) use wgmma::*;

use burn::tensor::DType;
use cubecl::prelude::*;

/// Element type of the operands of a tensor-core instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Float16 {
    Bf16,
    F16,
}

impl Float16 {
    pub(crate) fn of(dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16,
            _ => Self::F16,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// `{x(0), x(1), ...}` without the braces.
fn list(n: usize, x: impl Fn(usize) -> String) -> String {
    (0..n).map(x).collect::<Vec<_>>().join(", ")
}

/// A word that the compiler does not know, so that it is kept and not made again wherever it is needed.
#[cube]
pub(crate) fn unknown(word: u32) -> u32 {
    plane_shuffle(word, UNIT_POS_PLANE)
}

/// log2(x) by `lg2.approx`.
#[cube]
pub(crate) fn log2(x: f32) -> f32 {
    let out: f32;
    gpu_asm!("lg2.approx.ftz.f32 {o}, {x};", o = out(_) out, x = in(_) x, options(pure, nomem));
    out
}
