//! Families of kernels on NVIDIA's tensor cores, written in PTX: wgmma and mma.sync.

mod bf16x3;
pub(crate) mod copies;
pub(crate) mod dual;
pub(crate) mod fragment;
pub(crate) mod maps;
mod mask;
mod mma;
pub(crate) mod pipeline;
mod producer;
pub(crate) mod ptx;
pub(crate) mod schedule;
mod second;
pub(crate) mod store;
#[cfg(test)]
mod tests;
mod wgmma;

use super::epilogue::Plain;
use super::family::Family;
use super::problem::Problem;
use super::view::MatrixView;
use burn_cubecl::tensor::CubeTensor;

/// Whether tensor-core kernels can take this problem and write its result to `given`, where that is given.
/// Operands whose lines are not aligned are copied.
pub(super) fn takes(problem: &mut Problem, family: Family, given: Option<&CubeTensor>) -> bool {
    family != Family::Simt
        && problem.n > 1
        && given.is_none_or(holds)
        && [&mut problem.a, &mut problem.b].into_iter().all(aligned)
}

/// Makes the operands aligned, and says whether they are.
fn aligned(view: &mut MatrixView) -> bool {
    if !view.aligned() {
        view.align();
    }
    view.aligned()
}

/// Runs a problem that a tensor-core family [takes](takes); `out` has rows aligned to 16 bytes,
/// and holds C if `in_place`.
pub(super) fn run(problem: &Problem, family: Family, in_place: bool, out: &CubeTensor) {
    match family {
        Family::Wgmma => wgmma::run::<Plain>(problem, None, in_place, out),
        Family::MmaTma => mma::run(problem, out, true),
        Family::Mma | Family::Simt => mma::run(problem, out, false),
    }
}

/// f32 operands as bf16, of the same product, where a family that multiplies those is there.
pub(super) fn in_bf16(problem: &mut Problem) {
    problem.a = bf16x3::split(&problem.a, problem.op, false);
    problem.b = bf16x3::split(&problem.b, problem.op, true);
    problem.k *= 3;
}

/// Whether tensor-core kernels can write a result there: rows at one distance that begin at multiples of 16
/// bytes, whatever the number of rows, and matrices behind each other.
pub(super) fn holds(out: &CubeTensor) -> bool {
    let (shape, strides) = (out.meta.shape(), out.meta.strides());
    let last = shape.num_dims() - 2;
    let offset = out.handle.offset_start.unwrap_or(0) as usize;
    let aligned = [offset, strides[last] * out.dtype.size()].iter().all(|b| b.is_multiple_of(16));
    let behind = (0..last).all(|i| strides[i] == strides[i + 1] * shape[i + 1]);
    aligned && behind && strides[last] >= shape[last + 1] && strides[last + 1] == 1
}
