//! Muon as a Burn operation: dispatch and fusion.

use super::{MuonOptions, MuonWeight, kernel};
use crate::autodiff::{List, MOST, Maybe};
use crate::tile::{self, Family};
use burn::backend::{Backend, Dispatch, ExtensionType, backend_extension};
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
    /// s.
    #[extension_type]
    pub scale: Maybe<B>,
    /// Numbers.
    pub options: MuonOptions,
    /// The kernels that products should run on.
    pub family: Option<Family>,
}

/// p and m after it.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Stepped<B: Backend> {
    /// p of each.
    #[extension_type]
    pub values: List<B>,
    /// m of each.
    #[extension_type]
    pub momenta: List<B>,
}

/// Muon, not differentiable.
#[backend_extension(Cube, Fusion)]
pub trait MuonOps: Backend {
    /// p and m after a step, each in its memory unless somebody else holds it; all have elements.
    #[fusion(meta = |of| SteppedMetadata { values: of.values.clone(), momenta: of.momenta.clone() })]
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
    let mut moved = Vec::with_capacity(of.len());
    let mut of = of.into_iter().zip(grads).peekable();
    while of.peek().is_some() {
        let (mut values, mut given, mut momenta) = (vec![], vec![], vec![]);
        for (MuonWeight { value, momentum }, grad) in of.by_ref().take(MOST) {
            values.push(value.into_dispatch());
            given.push(grad.into_dispatch());
            momenta.push(momentum.into_dispatch());
        }
        let stepped = Dispatch::muon(Steps {
            values: values.into_iter().collect(),
            grads: given.into_iter().collect(),
            momenta: momenta.into_iter().collect(),
            scale: scale.clone().into(),
            options: options.clone(),
            family: tile::forced(),
        });
        let each = stepped.values.into_vec().into_iter().zip(stepped.momenta.into_vec());
        moved.extend(each.map(|(value, momentum)| MuonWeight {
            value: Tensor::from_dispatch(value),
            momentum: Tensor::from_dispatch(momentum),
        }));
    }
    moved
}
