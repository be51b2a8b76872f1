//! Sums of squares as a Burn operation: dispatch and fusion.

use super::kernel;
use crate::autodiff::{List, MOST};
use crate::device::is_cuda;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{Device, Tensor};
use burn_cubecl::CubeBackend;

/// Sums of squares, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait SumSquaresOps: Backend {
    /// `sums` with the squares of all of `xs` added, each of which has elements and stands behind so many chunks of its
    /// batch as `firsts` says.
    #[fusion(meta = |_, sums, _| sums.clone())]
    fn sum_squares(
        #[extension_type] xs: List<Self>,
        sums: FloatTensor<Self>,
        firsts: Vec<usize>,
    ) -> FloatTensor<Self>;
}

impl SumSquaresOps for CubeBackend {
    fn sum_squares(
        xs: List<Self>,
        sums: FloatTensor<Self>,
        firsts: Vec<usize>,
    ) -> FloatTensor<Self> {
        kernel::sum_squares(xs, sums, firsts)
    }
}

/// A tensor on its way to the kernel, of any rank, and its chunk among those of its batch.
pub(super) struct Single(FloatTensor<Dispatch>, usize);

impl Single {
    pub(super) fn new<const D: usize>(x: Tensor<D>, first: usize) -> Self {
        Self(x.into_dispatch(), first)
    }
}

/// The squares of each, in the order of their batch, through the kernel, without checks.
pub(super) fn fused(xs: Vec<Single>, sums: Tensor<1>, device: Option<&Device>) -> Tensor<1> {
    let mut sums = sums.into_dispatch();
    let most = if device.is_some_and(is_cuda) { MOST } else { 1 };
    let mut xs = xs.into_iter().peekable();
    while xs.peek().is_some() {
        let (some, firsts): (Vec<_>, Vec<_>) =
            xs.by_ref().take(most).map(|Single(x, first)| (x, first)).unzip();
        sums = Dispatch::sum_squares(some.into_iter().collect(), sums, firsts);
    }
    Tensor::from_dispatch(sums)
}
