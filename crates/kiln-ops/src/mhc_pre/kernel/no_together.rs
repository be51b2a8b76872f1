//! What stands for the kernel that makes dx and dφ together where the build has no CUDA: it takes nothing.

use super::{Dims, Made, Post, Streams, token};
use crate::tile::Family;
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;

pub(super) enum Plan {}

impl Plan {
    pub(super) fn new(
        _: [&CubeTensor; 2],
        _: Option<&CubeTensor>,
        _: Option<&Post>,
        _: Dims,
        _: Option<Family>,
    ) -> Option<Self> {
        None
    }

    pub(super) fn run(
        self,
        _: &'static str,
        _: &Streams,
        _: [&CubeTensor; 2],
        _: &token::Given<'_>,
        _: &token::Back,
        _: Option<&CubeTensor>,
        _: Shape,
    ) -> Made {
        match self {}
    }
}
