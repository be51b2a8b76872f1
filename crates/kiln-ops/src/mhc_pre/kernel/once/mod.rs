//! x·φᵀ, the norms and h_in from one pass over x, bf16, on Hopper.
//!
//! A cube holds a part of φ in registers, as the sum of two bf16: the columns of all streams from one place to another.
//! As many cubes as that takes for all columns are a group and go through the same tokens, sixteen at a time, which TMA
//! brings into a ring of stages. Eight warps multiply them with φ and add up squares; what a cube has of a token's sums
//! it leaves in the workspace. Four more warps take sixteen tokens each in turn: one waits until all cubes of the group
//! have left their sums, adds them up, in order, and weights the streams, which still are in shared memory.
//!
//! The cubes of a group wait for each other, so all of them have to run at a time. There are no more cubes than
//! multiprocessors, each has one for itself, and the cubes of a group follow each other: of a launch at most one group
//! is there in part, and waits until others that are done make room.
//!
//! A multiprocessor's share of 4 TB/s is 30 KB in a microsecond, so a stage of 40 KB takes 1.4. From a stage's load to its
//! end are some six: the ring and the warps that take turns hide them.

mod kernel;
mod multiply;
mod plan;
mod weight;

use super::token::Given;
use super::{Dims, hopper};
use crate::launch;
use crate::tile::Family;
use crate::tile::cuda::maps::map;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use kernel::{SizesLaunch, once_kernel};
use plan::{BOX, COUNTERS, MULTIPLY, OWNERS, Once, TOKENS};

/// How many tokens are made by how many groups.
pub(super) struct Plan {
    once: Once,
    groups: usize,
}

impl Plan {
    /// For x as `[T, n·D]`, if this kernel takes it.
    pub(super) fn new(
        x: &CubeTensor,
        h_in: &CubeTensor,
        d: Dims,
        family: Option<Family>,
    ) -> Option<Self> {
        let client = &x.client;
        if !hopper(&[x, h_in], d, family) {
            return None;
        }
        let multiprocessors = launch::multiprocessors(client);
        let memory = client.properties().hardware.max_shared_memory_size;
        let once = Once::new(d.streams, d.width, multiprocessors, memory)?;
        let groups = (multiprocessors / once.cubes).min(d.tokens.div_ceil(TOKENS));
        (groups * once.counters() <= COUNTERS).then_some(Self { once, groups })
    }

    /// Writes h_in, and what `given` names: x·φᵀ and the norms.
    pub(super) fn run(
        self,
        x: &CubeTensor,
        phi: &CubeTensor,
        given: &Given<'_>,
        h_in: &CubeTensor,
    ) {
        let Self { once, groups } = self;
        let (d, options, client) = (given.d, given.options, &x.client);
        let places = groups * once.places() * once.cubes * once.part();
        let parts = launch::unread(x, Shape::new([places]), DType::F32);
        let address = launch::address_type(&[phi, h_in, given.mix, &parts]);
        let sixteens = d.tokens.div_ceil(TOKENS);
        let ways = [
            ("more tokens than stages", sixteens.div_ceil(groups) > once.stages),
            ("places taken again", sixteens.div_ceil(groups) > once.places()),
            ("columns beyond the last", d.width < once.cubes * once.boxes * BOX),
        ];
        launch::plans::note("mhc_pre once", &(&once, address), &ways);
        let x_map = map(x, [d.streams, d.tokens, d.width], [d.width, d.streams * d.width], TOKENS);
        let sizes = SizesLaunch::new(
            d.tokens as u32,
            d.width as u32,
            groups as u32,
            options.norm_eps as f32,
            options.hc_eps as f32,
        );
        // SAFETY: TMA keeps to the shape of its map; φ and results are only touched inside their rows and columns, the
        // workspace inside the places of the groups.
        unsafe {
            once_kernel::launch_unchecked(
                client,
                launch::grid(client, groups * once.cubes),
                CubeDim::new_1d((MULTIPLY + 32 * OWNERS) as u32),
                address,
                x_map,
                phi.clone().into_buffer_arg(),
                given.alpha.clone().into_buffer_arg(),
                given.bias.clone().into_buffer_arg(),
                h_in.clone().into_buffer_arg(),
                given.mix.clone().into_buffer_arg(),
                given.norm.clone().into_buffer_arg(),
                parts.into_buffer_arg(),
                match once.cubes {
                    1 => launch::unused(x, DType::U32).into_buffer_arg(),
                    _ => launch::kept::counters(client, "mhc_pre", COUNTERS),
                },
                sizes,
                once,
                dtype_to_elem_type(x.dtype),
            );
        }
    }
}
