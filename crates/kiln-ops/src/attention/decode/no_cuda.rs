//! What stands for the kernels on tensor cores where the build has no CUDA: they take nothing.

use super::Target;
use super::plan::Work;
use crate::attention::problem::Problem;

pub(super) enum Plan {}

impl Plan {
    pub(super) fn new(_: &Problem, _: usize) -> Option<(Self, Work)> {
        None
    }
}

pub(super) fn run(_: &Problem, _: &Target<'_>, plan: Plan, _: Work) {
    match plan {}
}
