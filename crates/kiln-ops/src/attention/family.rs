//! Which family of kernels attends.

use super::problem::{HeadsView, Kernels, Problem};
use super::{cuda, decode, simt};
use crate::tile::{self, Family};
use burn_cubecl::tensor::CubeTensor;

/// The family that takes everything.
const PLAIN: Kernels = Kernels {
    family: Family::Simt,
    takes: |_| true,
    forward: simt::forward,
    backward: simt::backward,
};

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
    let mut kernels = from_first.filter_map(|f| cuda::KERNELS.iter().find(|of| of.family == *f));
    kernels.find(|of| (of.takes)(problem)).unwrap_or(&PLAIN)
}
