//! The families of product kernels that tests run.

use burn::tensor::{DType, Device};
use kiln_ops::tile::{self, Family};

/// Those of a device. On CUDA elements of 16 bits have all of them.
#[track_caller]
pub fn families(device: &Device, dtype: DType) -> Vec<Family> {
    let there = tile::families(device, dtype);
    if kiln_ops::device::is_cuda(device) && dtype != DType::F32 {
        for family in Family::ALL.into_iter().filter(|family| !there.contains(family)) {
            let needs = if family == Family::Mma { "mma" } else { "wgmma" };
            kiln_test::skip(needs, format!("{device:?} has no {family}"));
        }
    }
    there
}
