//! Which family of kernels attends.

#[cfg(feature = "cuda")]
use super::cuda::{mma, wgmma};
use super::decode;
use super::problem::{Backward, HeadsView, Problem};
use super::simt;
use crate::tile::{self, Family};
use burn_cubecl::tensor::CubeTensor;

/// What a family offers.
pub(super) struct Kernels {
    pub(super) family: Family,
    /// Whether it takes a problem: element type, width, alignment.
    takes: fn(&Problem) -> bool,
    /// Writes o; and the log-sum-exp if it is given.
    forward: fn(&Problem, &HeadsView, Option<&CubeTensor>),
    /// Writes dq, dk and dv.
    pub(super) backward: fn(&Problem, &Backward<'_>),
}

/// The families there are, the fastest first; the last takes everything.
const FAMILIES: &[Kernels] = &[
    #[cfg(feature = "cuda")]
    Kernels {
        family: Family::Wgmma,
        takes: wgmma::takes,
        forward: wgmma::forward,
        backward: wgmma_backward,
    },
    #[cfg(feature = "cuda")]
    Kernels {
        family: Family::Mma,
        takes: mma::takes,
        forward: mma::forward,
        backward: mma::backward,
    },
    Kernels {
        family: Family::Simt,
        takes: |_| true,
        forward: simt::forward,
        backward: simt::backward,
    },
];

/// The backward of wgmma; that of mma.sync where it does not fit.
#[cfg(feature = "cuda")]
fn wgmma_backward(problem: &Problem, with: &Backward<'_>) {
    match wgmma::takes_backward(problem, with) {
        true => wgmma::backward(problem, with),
        false => mma::backward(problem, with),
    }
}

/// Writes o, and the log-sum-exp if it is given, on the wanted family. If nobody wants one and there are few
/// queries, whose log-sum-exp nobody needs, on the kernels for those.
pub(super) fn forward(
    problem: &Problem,
    o: &HeadsView,
    lse: Option<&CubeTensor>,
    wanted: Option<Family>,
) {
    match lse.is_none() && wanted.is_none() && decode::takes(problem) {
        true => decode::forward(problem, o),
        false => (kernels(problem, wanted).forward)(problem, o, lse),
    }
}

/// The kernels for a problem: those of the wanted family, or of the next one that takes it.
pub(super) fn kernels(problem: &Problem, wanted: Option<Family>) -> &'static Kernels {
    let q = &problem.q.tensor;
    let first = tile::family(wanted, &q.client, q.dtype);
    let from_first = Family::ALL.iter().skip_while(|family| **family != first);
    let mut kernels = from_first.filter_map(|f| FAMILIES.iter().find(|of| of.family == *f));
    kernels.find(|of| (of.takes)(problem)).expect("plain units take everything")
}
