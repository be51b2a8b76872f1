//! AdamW as a Burn operation: dispatch and fusion.

use super::kernel;
use super::{AdamWOptions, Moving};
use crate::autodiff::Maybe;
use burn::backend::{Backend, Dispatch, ExtensionType, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// A step.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Step<B: Backend> {
    /// p.
    pub value: FloatTensor<B>,
    /// g.
    pub grad: FloatTensor<B>,
    /// m.
    pub first: FloatTensor<B>,
    /// v.
    pub second: FloatTensor<B>,
    /// s.
    #[extension_type]
    pub scale: Maybe<B>,
    /// Numbers.
    pub options: AdamWOptions,
}

/// AdamW, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait AdamWOps: Backend {
    /// p, m and v after a step, each in its memory unless somebody else holds it; there are elements.
    #[fusion(meta = |of| (of.value.clone(), of.first.clone(), of.second.clone()))]
    fn adamw(
        #[extension_type] of: Step<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

impl AdamWOps for CubeBackend {
    fn adamw(of: Step<Self>) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        kernel::adamw(of)
    }
}

/// [`adamw`](fn@super::adamw) through the kernel, without its checks.
pub(super) fn fused<const D: usize>(
    of: Moving<D>,
    grad: Tensor<D>,
    scale: Option<Tensor<1>>,
    options: AdamWOptions,
) -> Moving<D> {
    let Moving { value, first, second } = of;
    let [value, grad, first, second] = [value, grad, first, second].map(Tensor::into_dispatch);
    let scale = scale.map(Tensor::into_dispatch).into();
    let moved = Dispatch::adamw(Step { value, grad, first, second, scale, options });
    let [value, first, second] = [moved.0, moved.1, moved.2].map(Tensor::from_dispatch);
    Moving { value, first, second }
}
