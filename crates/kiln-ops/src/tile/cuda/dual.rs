//! Dual GEMMs: two products in one launch, joined by an operator's epilogue or added up.

use super::second::{Dual, Second};
use super::{aligned, wgmma};
use crate::launch;
use crate::tile::epilogue::{Epilogue, Plain};
use crate::tile::problem::Problem;
use crate::tile::view::MatrixView;
use burn::tensor::Shape;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

/// A·B₀ and A·B₁ as `[2, M, N]` if `keep`, and what `Ep` makes of them as `[M, N]`, of matrices of 16 bits
/// where wgmma runs.
pub(crate) fn joined<Ep: Epilogue>(
    op: &'static str,
    a: CubeTensor,
    [b, second]: [CubeTensor; 2],
    keep: bool,
) -> (Option<CubeTensor>, CubeTensor) {
    let output = |name, shape| launch::output_aligned(&a, op, name, shape, a.dtype);
    let [m, n] = [a.meta.shape()[0], b.meta.shape()[1]];
    let joined = output("joined", Shape::new([m, n]));
    let products = keep.then(|| output("products", Shape::new([2, m, n])));
    let a = single(a.clone());
    let second = (second, Dual::Joined { keep }, Some(joined.clone()));
    run::<Ep>(op, a, b, second, products.as_ref().unwrap_or(&joined));
    (products, joined)
}

/// A₀·B₀ + A₁·B₁ of a batch `a` of two matrices, in its element type, where wgmma runs.
pub(crate) fn sum(
    op: &'static str,
    name: &'static str,
    a: CubeTensor,
    [b, second]: [CubeTensor; 2],
) -> CubeTensor {
    let shape = Shape::new([a.meta.shape()[1], b.meta.shape()[1]]);
    let out = launch::output_aligned(&a, op, name, shape, a.dtype);
    run::<Plain>(op, MatrixView::new(a, &[2]), b, (second, Dual::Sum, None), &out);
    out
}

fn single(matrix: CubeTensor) -> MatrixView {
    MatrixView::new(matrix, &[])
}

fn run<Ep: Epilogue>(
    op: &'static str,
    a: MatrixView,
    b: CubeTensor,
    (second, dual, joined): (CubeTensor, Dual, Option<CubeTensor>),
    out: &CubeTensor,
) {
    let [mut b, mut second] = [b, second].map(single);
    if b.order != second.order {
        [b, second] = [b, second].map(|view| single(into_contiguous(view.tensor)));
    }
    let mut problem = Problem::new(op, a, b);
    for view in [&mut problem.a, &mut problem.b, &mut second] {
        aligned(view);
    }
    wgmma::run::<Ep>(&problem, Some(&Second { b: second, dual, joined }), false, out);
}
