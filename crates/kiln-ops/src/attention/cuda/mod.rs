//! Attention on NVIDIA's tensor cores.

pub(crate) mod mma;
pub(crate) mod wgmma;
