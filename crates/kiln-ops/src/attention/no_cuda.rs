//! What stands for the kernels on tensor cores where the build has no CUDA: there are none.

use super::problem::Kernels;

pub(super) const KERNELS: &[Kernels] = &[];
