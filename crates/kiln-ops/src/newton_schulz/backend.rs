//! The Newton-Schulz iteration as a Burn operation: dispatch and fusion.

use super::{NewtonSchulzOptions, kernel};
use crate::tile::{self, Family};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// The iteration, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait NewtonSchulzOps: Backend {
    /// The matrices of `g`, which has elements, after the steps.
    #[fusion(meta = |g, _, _| g.clone())]
    fn newton_schulz(
        g: FloatTensor<Self>,
        options: NewtonSchulzOptions,
        family: Option<Family>,
    ) -> FloatTensor<Self>;
}

impl NewtonSchulzOps for CubeBackend {
    fn newton_schulz(
        g: FloatTensor<Self>,
        options: NewtonSchulzOptions,
        family: Option<Family>,
    ) -> FloatTensor<Self> {
        kernel::newton_schulz(g, options, family)
    }
}

/// [`newton_schulz`](fn@super::newton_schulz) through the kernels, without its checks.
pub(super) fn fused<const D: usize>(g: Tensor<D>, options: NewtonSchulzOptions) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::newton_schulz(g.into_dispatch(), options, tile::forced()))
}
