//! What stands for the kernel that makes dx and dφ together where the build has no CUDA: it takes nothing.

use super::input::Gradients;
use super::{Dims, Post};
use crate::tile::Family;
use burn_cubecl::tensor::CubeTensor;

pub(super) fn through(
    _: &'static str,
    _: &CubeTensor,
    _: &CubeTensor,
    _: &CubeTensor,
    _: &Gradients<'_>,
    _: &Post,
    _: Dims,
    _: Option<Family>,
) -> Option<(CubeTensor, [CubeTensor; 4])> {
    None
}

pub(super) enum Plan {}

impl Plan {
    pub(super) fn new(
        _: &CubeTensor,
        _: &CubeTensor,
        _: Option<&CubeTensor>,
        _: Dims,
        _: Option<Family>,
    ) -> Option<Self> {
        None
    }

    pub(super) fn run(
        self,
        _: &'static str,
        _: &CubeTensor,
        _: &CubeTensor,
        _: &CubeTensor,
        _: &Gradients<'_>,
        _: Dims,
        _: &CubeTensor,
    ) -> CubeTensor {
        match self {}
    }
}
