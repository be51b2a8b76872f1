//! What stands for the tensor-core families where the build has no CUDA: they take nothing.

use super::family::Family;
use super::problem::Problem;
use burn_cubecl::tensor::CubeTensor;

pub(super) fn takes(_: &mut Problem, _: Family, _: Option<&CubeTensor>) -> bool {
    false
}

pub(super) fn run(problem: &Problem, family: Family, _: bool, _: &CubeTensor) {
    unreachable!("{}: {family} is not part of this build", problem.op)
}

pub(super) fn in_bf16(problem: &mut Problem) {
    unreachable!("{}: there are no tensor cores in this build", problem.op)
}

pub(super) fn holds(_: &CubeTensor) -> bool {
    false
}

pub(crate) mod dual {
    //! Never asked for: [`dual_runs`](crate::tile::dual_runs) is false.

    use burn_cubecl::tensor::CubeTensor;

    pub(crate) fn joined<Ep>(
        op: &'static str,
        _: CubeTensor,
        _: [CubeTensor; 2],
        _: bool,
    ) -> (Option<CubeTensor>, CubeTensor) {
        unreachable!("{op}: there are no tensor cores in this build")
    }

    pub(crate) fn sum(
        op: &'static str,
        _: &'static str,
        _: CubeTensor,
        _: [CubeTensor; 2],
    ) -> CubeTensor {
        unreachable!("{op}: there are no tensor cores in this build")
    }
}
