//! Muon as a Burn operation: dispatch and fusion.

use super::{MuonOptions, MuonWeight, kernel};
use crate::autodiff::{List, MOST, Maybe, in_lists};
use crate::tile::{self, Family};
use burn::backend::{Backend, Dispatch, ExtensionType, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// A step of several weights of one shape.
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
    pub momenta: List<B>,
    /// p in 16 bits of each, or of none.
    #[extension_type]
    pub copies: List<B>,
    /// s.
    #[extension_type]
    pub scale: Maybe<B>,
    /// Numbers.
    pub options: MuonOptions,
    /// The kernels that products should run on.
    pub family: Option<Family>,
}

/// p and m after it, and p in 16 bits.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Stepped<B: Backend> {
    /// p of each.
    #[extension_type]
    pub values: List<B>,
    /// m of each.
    #[extension_type]
    pub momenta: List<B>,
    /// p in 16 bits of each, or of none.
    #[extension_type]
    pub copies: List<B>,
}

/// Muon, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait MuonOps: Backend {
    /// p and m after a step, each in its memory unless somebody else holds it; all have elements.
    #[fusion(meta = |of| SteppedMetadata {
        values: of.values.clone(),
        momenta: of.momenta.clone(),
        copies: of.copies.clone(),
    })]
    fn muon(#[extension_type] of: Steps<Self>) -> Stepped<Self>;
}

impl MuonOps for CubeBackend {
    fn muon(of: Steps<Self>) -> Stepped<Self> {
        kernel::muon(of)
    }
}

/// [`muon`](fn@super::muon) through the kernels, without its checks.
pub(super) fn fused<const D: usize>(
    of: Vec<MuonWeight<D>>,
    grads: Vec<Tensor<D>>,
    scale: Option<Tensor<1>>,
    options: &MuonOptions,
) -> Vec<MuonWeight<D>> {
    let scale = scale.map(Tensor::into_dispatch);
    let of: Vec<_> = of.into_iter().zip(grads).collect();
    in_lists(of, MOST, |(of, _)| of.copy.is_some(), |some| step(some, &scale, options))
}

/// A list of weights with their gradients, which have copies or have none.
fn step<const D: usize>(
    of: Vec<(MuonWeight<D>, Tensor<D>)>,
    scale: &Option<FloatTensor<Dispatch>>,
    options: &MuonOptions,
) -> Vec<MuonWeight<D>> {
    let (mut values, mut grads, mut momenta, mut copies) = (vec![], vec![], vec![], vec![]);
    for (MuonWeight { value, momentum, copy }, grad) in of {
        values.push(value.into_dispatch());
        grads.push(grad.into_dispatch());
        momenta.push(momentum.into_dispatch());
        copies.extend(copy.map(Tensor::into_dispatch));
    }
    let Stepped { values, momenta, copies } = Dispatch::muon(Steps {
        values: values.into_iter().collect(),
        grads: grads.into_iter().collect(),
        momenta: momenta.into_iter().collect(),
        copies: copies.into_iter().collect(),
        scale: scale.clone().into(),
        options: options.clone(),
        family: tile::forced(),
    });
    let mut copies = copies.into_vec().into_iter();
    let moved = |(value, momentum)| MuonWeight {
        value: Tensor::from_dispatch(value),
        momentum: Tensor::from_dispatch(momentum),
        copy: copies.next().map(Tensor::from_dispatch),
    };
    values.into_vec().into_iter().zip(momenta.into_vec()).map(moved).collect()
}
