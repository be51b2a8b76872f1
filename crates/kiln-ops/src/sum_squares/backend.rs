//! Sums of squares as a Burn operation: dispatch and fusion.

use super::kernel;
use crate::autodiff::List;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// Sums of squares, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait SumSquaresOps: Backend {
    /// `sums` with the squares of all of `xs` added, each of which has elements. The first of them is number `first` of
    /// its batch.
    #[fusion(meta = |_, sums, _| sums.clone())]
    fn sum_squares(
        #[extension_type] xs: List<Self>,
        sums: FloatTensor<Self>,
        first: usize,
    ) -> FloatTensor<Self>;
}

impl SumSquaresOps for CubeBackend {
    fn sum_squares(xs: List<Self>, sums: FloatTensor<Self>, first: usize) -> FloatTensor<Self> {
        kernel::sum_squares(xs, sums, first)
    }
}

/// A tensor on its way to the kernel, of any rank.
pub(super) struct Single(FloatTensor<Dispatch>);

impl Single {
    pub(super) fn new<const D: usize>(x: Tensor<D>) -> Self {
        Self(x.into_dispatch())
    }
}

/// The squares of each, in the order of their batch, through the kernel, without checks.
pub(super) fn fused(xs: Vec<Single>, sums: Tensor<1>) -> Tensor<1> {
    let mut sums = sums.into_dispatch();
    let mut first = 0;
    let mut xs = xs.into_iter().map(|x| x.0).peekable();
    while xs.peek().is_some() {
        let some: Vec<_> = xs.by_ref().take(List::<Dispatch>::MOST).collect();
        let next = first + some.len();
        sums = Dispatch::sum_squares(some.into_iter().collect(), sums, first);
        first = next;
    }
    Tensor::from_dispatch(sums)
}
