//! AdamW as a Burn operation: dispatch and fusion.

use super::kernel;
use super::{AdamWOptions, Moving};
use crate::autodiff::{List, MOST, Maybe, in_lists};
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
    /// p in 16 bits of each, or of none.
    #[extension_type]
    pub copies: List<B>,
    /// s.
    #[extension_type]
    pub scale: Maybe<B>,
    /// Numbers.
    pub options: AdamWOptions,
}

/// p, m and v after them, and p in 16 bits.
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
    /// p in 16 bits of each, or of none.
    #[extension_type]
    pub copies: List<B>,
}

/// AdamW, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait AdamWOps: Backend {
    /// p, m and v after a step, each in its memory unless somebody else holds it; all have elements.
    #[fusion(meta = |of| SteppedMetadata {
        values: of.values.clone(),
        firsts: of.firsts.clone(),
        seconds: of.seconds.clone(),
        copies: of.copies.clone(),
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
    copy: Option<FloatTensor<Dispatch>>,
}

impl Single {
    pub(super) fn new<const D: usize>(of: Moving<D>, grad: Tensor<D>) -> Self {
        let Moving { value, first, second, copy } = of;
        let [value, grad, first, second] = [value, grad, first, second].map(Tensor::into_dispatch);
        Self { value, grad, first, second, copy: copy.map(Tensor::into_dispatch) }
    }
}

/// The same after its step.
pub(super) struct Done {
    value: FloatTensor<Dispatch>,
    first: FloatTensor<Dispatch>,
    second: FloatTensor<Dispatch>,
    copy: Option<FloatTensor<Dispatch>>,
}

impl Done {
    /// As parameters of their rank.
    pub(super) fn moving<const D: usize>(self) -> Moving<D> {
        let Self { value, first, second, copy } = self;
        let [value, first, second] = [value, first, second].map(Tensor::from_dispatch);
        Moving { value, first, second, copy: copy.map(Tensor::from_dispatch) }
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
    // Elsewhere each is a launch of its own, and what one had is gone before that of the next is made.
    let most = if device.is_some_and(is_cuda) { MOST } else { 1 };
    in_lists(of, most, |of| of.copy.is_some(), |some| step(some, &scale, options))
}

/// A list of parameters, which have copies or have none.
fn step(
    of: Vec<Single>,
    scale: &Option<FloatTensor<Dispatch>>,
    options: AdamWOptions,
) -> Vec<Done> {
    let (mut values, mut grads, mut firsts, mut seconds) = (vec![], vec![], vec![], vec![]);
    let mut copies = vec![];
    for Single { value, grad, first, second, copy } in of {
        values.push(value);
        grads.push(grad);
        firsts.push(first);
        seconds.push(second);
        copies.extend(copy);
    }
    let Stepped { values, firsts, seconds, copies } = Dispatch::adamw(Steps {
        values: values.into_iter().collect(),
        grads: grads.into_iter().collect(),
        firsts: firsts.into_iter().collect(),
        seconds: seconds.into_iter().collect(),
        copies: copies.into_iter().collect(),
        scale: scale.clone().into(),
        options,
    });
    let moments = firsts.into_vec().into_iter().zip(seconds.into_vec());
    let mut copies = copies.into_vec().into_iter();
    let done = |(value, (first, second))| Done { value, first, second, copy: copies.next() };
    values.into_vec().into_iter().zip(moments).map(done).collect()
}
