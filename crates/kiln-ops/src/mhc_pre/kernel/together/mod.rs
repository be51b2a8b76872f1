//! dx and dφ from one pass over x and dh_in, and over what dx has from elsewhere, bf16, on Hopper.
//!
//! A warp has 64 columns of a stream, of which it holds φ and the sum of dφ in registers, and goes over tokens, sixteen at
//! a time: dφ += dmᵀ·x, and dx = dm·φ with what x and dh_in add, in the place of x in shared memory, from where TMA
//! takes it. The warps of a cube have the same columns of all streams, and share dh_in. Another warp loads, and cuts dm
//! into two bf16. φ and dm are sums of two bf16 each, all four products of which are added up.
//!
//! Cubes that have other tokens leave sums of their own, which are added up in order.

mod kernel;
mod load;
mod plan;

use super::input::Gradients;
use super::{Dims, hopper};
use crate::launch;
use crate::reduce::column_sum;
use crate::tile::Family;
use crate::tile::cuda::maps::map;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::{InputsLaunch, SizesLaunch, together_kernel};
use plan::{BOX, TOKENS, Together};

/// How many cubes go through the tokens beside each other.
pub(super) struct Plan {
    together: Together,
    across: usize,
    groups: usize,
}

impl Plan {
    /// For x as `[T, n·D]`, if this kernel takes it.
    pub(super) fn new(
        x: &CubeTensor,
        dh_in: &CubeTensor,
        also: Option<&CubeTensor>,
        dx: &CubeTensor,
        d: Dims,
        family: Option<Family>,
    ) -> Option<Self> {
        let client = &x.client;
        if !hopper(&[x, dh_in, also.unwrap_or(x), dx], d, family) {
            return None;
        }
        let memory = client.properties().hardware.max_shared_memory_size;
        let together = Together::new(d.streams, d.width, also.is_some(), memory)?;
        let across = d.width.div_ceil(together.boxes * BOX);
        let groups = (launch::multiprocessors(client) / across).max(1);
        Some(Self { together, across, groups: groups.min(d.tokens.div_ceil(TOKENS)) })
    }

    /// Writes dx, and returns dφ.
    pub(super) fn run(
        self,
        op: &'static str,
        x: &CubeTensor,
        phi: &CubeTensor,
        dh_in: &CubeTensor,
        of: &Gradients<'_>,
        d: Dims,
        dx: &CubeTensor,
    ) -> CubeTensor {
        let Self { together, across, groups } = self;
        let client = &x.client;
        let columns = d.streams * d.width;
        let output =
            |name, rows| launch::output(phi, op, name, Shape::new([rows, columns]), DType::F32);
        let partial = output("partial phi", groups * d.rows);
        let address = launch::address_type(&[phi, of.dm, &partial]);
        let turns = d.tokens.div_ceil(TOKENS).div_ceil(groups);
        let ways = [
            ("more tokens than stages", turns > together.stages),
            ("several groups", groups > 1),
            ("columns beyond the last", d.width < across * together.boxes * BOX),
        ];
        launch::plans::note("mhc_pre together", &(&together, address), &ways);
        let of_streams = |tensor: &CubeTensor| {
            map(tensor, [d.streams, d.tokens, d.width], [d.width, columns], TOKENS)
        };
        // SAFETY: TMA keeps to the shapes of its maps; rows, columns and tokens are checked against their numbers.
        unsafe {
            together_kernel::launch_unchecked(
                client,
                launch::grid(client, across * groups),
                CubeDim::new_1d(32 * (together.warps() as u32 + 1)),
                address,
                of_streams(x),
                map(dh_in, [1, d.tokens, d.width], [d.tokens * d.width, d.width], TOKENS),
                of_streams(of.also.unwrap_or(x)),
                of_streams(dx),
                InputsLaunch::new(
                    phi.clone().into_buffer_arg(),
                    of.dm.clone().into_buffer_arg(),
                    of.along.clone().into_buffer_arg(),
                    of.weights.clone().into_buffer_arg(),
                ),
                partial.clone().into_buffer_arg(),
                SizesLaunch::new(d.tokens as u32, d.width as u32, across as u32, groups as u32),
                together,
                dtype_to_elem_type(x.dtype),
            );
        }
        if groups == 1 {
            return partial;
        }
        let dphi = output("grad.phi", d.rows);
        column_sum(partial, groups, &dphi);
        dphi
    }
}
