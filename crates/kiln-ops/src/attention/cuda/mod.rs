//! Attention on NVIDIA's tensor cores.

mod mma;
pub(super) mod wgmma;

use super::problem::{Backward, Kernels, Problem};
use crate::tile::Family;

/// The families there are.
pub(super) const KERNELS: &[Kernels] = &[
    Kernels {
        family: Family::Wgmma,
        takes: wgmma::takes,
        forward: wgmma::forward,
        backward: wgmma_backward,
    },
    Kernels {
        family: Family::Mma,
        takes: mma::takes,
        forward: mma::forward,
        backward: mma::backward,
    },
];

/// The backward of wgmma; that of mma.sync where it does not fit.
fn wgmma_backward(problem: &Problem, with: &Backward<'_>) {
    match wgmma::takes_backward(problem, with) {
        true => wgmma::backward(problem, with),
        false => mma::backward(problem, with),
    }
}
