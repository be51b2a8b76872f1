//! What stands for CUDA devices where the build has none.

use super::{DeviceError, Opened, not_built};

pub(super) fn open(_: usize) -> Result<Opened, DeviceError> {
    not_built("cuda", "cuda")
}

pub(crate) fn cuda_kind(_: usize) -> Option<String> {
    None
}

/// `None`: it is not in this build.
pub fn nvrtc() -> Option<String> {
    None
}
