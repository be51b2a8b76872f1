//! AdamW as a Burn operation: dispatch and fusion.

use super::kernel;
use super::{AdamWOptions, Moving};
use crate::autodiff::{List, MOST, Maybe};
use crate::device::is_cuda;
use burn::backend::{Backend, Dispatch, ExtensionType, backend_extension, tensor::FloatTensor};
use burn::tensor::{Device, Tensor};
use burn_cubecl::CubeBackend;

/// Steps of several parameters.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Steps<B: Backend> {
    /// p of each.
    #[extension_type]
    pub values: List<B>,
    /// g of each.
    #[extension_type]
    pub grads: List<B>,
    /// m of each.
    #[extension_type]
    pub firsts: List<B>,
    /// v of each.
    #[extension_type]
    pub seconds: List<B>,
    /// s.
    #[extension_type]
    pub scale: Maybe<B>,
    /// Numbers.
    pub options: AdamWOptions,
}

/// p, m and v after them.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Stepped<B: Backend> {
    /// p of each.
    #[extension_type]
    pub values: List<B>,
    /// m of each.
    #[extension_type]
    pub firsts: List<B>,
    /// v of each.
    #[extension_type]
    pub seconds: List<B>,
}

/// AdamW, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait AdamWOps: Backend {
    /// p, m and v after a step, each in its memory unless somebody else holds it; all have elements.
    #[fusion(meta = |of| SteppedMetadata {
        values: of.values.clone(),
        firsts: of.firsts.clone(),
        seconds: of.seconds.clone(),
    })]
    fn adamw(#[extension_type] of: Steps<Self>) -> Stepped<Self>;
}

impl AdamWOps for CubeBackend {
    fn adamw(of: Steps<Self>) -> Stepped<Self> {
        kernel::adamw(of)
    }
}

/// A parameter on its way through the kernel, of any rank.
pub(super) struct Single {
    value: FloatTensor<Dispatch>,
    grad: FloatTensor<Dispatch>,
    first: FloatTensor<Dispatch>,
    second: FloatTensor<Dispatch>,
}

impl Single {
    pub(super) fn new<const D: usize>(of: Moving<D>, grad: Tensor<D>) -> Self {
        let Moving { value, first, second } = of;
        let [value, grad, first, second] = [value, grad, first, second].map(Tensor::into_dispatch);
        Self { value, grad, first, second }
    }
}

/// The same after its step.
pub(super) struct Done([FloatTensor<Dispatch>; 3]);

impl Done {
    /// As parameters of their rank.
    pub(super) fn moving<const D: usize>(self) -> Moving<D> {
        let [value, first, second] = self.0.map(Tensor::from_dispatch);
        Moving { value, first, second }
    }
}

/// [`adamw`](fn@super::adamw) of each through the kernel, without its checks.
pub(super) fn fused(
    of: Vec<Single>,
    scale: Option<Tensor<1>>,
    options: AdamWOptions,
    device: Option<&Device>,
) -> Vec<Done> {
    let scale = scale.map(Tensor::into_dispatch);
    // Elsewhere each is a launch of its own, and p, m and v of one are gone before those of the next are made.
    let most = if device.is_some_and(is_cuda) { MOST } else { 1 };
    let mut all = Vec::with_capacity(of.len());
    let mut of = of.into_iter().peekable();
    while of.peek().is_some() {
        let some: Vec<Single> = of.by_ref().take(most).collect();
        let (mut values, mut grads, mut firsts, mut seconds) = (vec![], vec![], vec![], vec![]);
        for Single { value, grad, first, second } in some {
            values.push(value);
            grads.push(grad);
            firsts.push(first);
            seconds.push(second);
        }
        let stepped = Dispatch::adamw(Steps {
            values: values.into_iter().collect(),
            grads: grads.into_iter().collect(),
            firsts: firsts.into_iter().collect(),
            seconds: seconds.into_iter().collect(),
            scale: scale.clone().into(),
            options,
        });
        let firsts = stepped.firsts.into_vec().into_iter();
        let moments = firsts.zip(stepped.seconds.into_vec());
        let each = stepped.values.into_vec().into_iter().zip(moments);
        all.extend(each.map(|(value, (first, second))| Done([value, first, second])));
    }
    all
}
