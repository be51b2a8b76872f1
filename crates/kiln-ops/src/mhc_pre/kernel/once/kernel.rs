//! The kernel: what a cube is given, and which of its warps multiply and which weight.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::multiply::multiply;
use super::plan::{Once, TOKENS, WARPS};
use super::weight::{Weighting, weight};
use crate::tile::cuda::pipeline::{Ring, rings_ready};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    pub(super) tokens: u32,
    /// Columns of a stream.
    pub(super) width: u32,
    pub(super) groups: u32,
    pub(super) norm_eps: f32,
    pub(super) hc_eps: f32,
}

/// Where a cube is in its group, and what the group goes through.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    pub(super) group: u32,
    pub(super) rank: u32,
    /// How many times sixteen tokens.
    pub(super) count: u32,
    /// The ring, in shared memory.
    pub(super) base: u32,
}

#[cube]
impl Place {
    /// The first of the tokens that come as number `number`.
    pub(super) fn token(&self, number: u32, sizes: &Sizes) -> u32 {
        (self.group + number * sizes.groups) * comptime!(TOKENS as u32)
    }

    /// Where in the workspace the first cube's sums are.
    pub(super) fn workspace(&self, number: u32, #[comptime] once: Once) -> usize {
        let place = number % comptime!(once.places() as u32);
        let place = self.group * comptime!(once.places() as u32) + place;
        place as usize * comptime!(once.cubes * once.part())
    }
}

/// Where a counter is.
#[cube]
pub(super) fn counter(
    counters: &[Atomic<u32>],
    group: u32,
    at: u32,
    #[comptime] once: Once,
) -> u64 {
    let number = group * comptime!(once.counters() as u32) + at;
    global_address::<Atomic<u32>>(counters.as_ptr()) + u64::cast_from(number) * 4
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn once_kernel<E: Float>(
    x: &TensorMap<E, Tiled>,
    phi: &[f32],
    alpha: &[f32],
    bias: &[f32],
    h_in: &mut [E],
    mix: &mut [f32],
    norm: &mut [f32],
    parts: &mut [f32],
    counters: &mut [Atomic<u32>],
    sizes: Sizes,
    #[comptime] once: Once,
    #[define(E)] _dtype: ElemType,
) {
    let stages = comptime!(once.stages as u32);
    let mut shared = Shared::<[f32]>::new_aligned_slice(comptime!(once.words()), 1024usize);
    let base = generic_to_shared::<f32>(shared.as_ptr());
    let barriers = base + comptime!(once.barriers_at() as u32);
    // Released by the warps that multiply; the one that weights comes after them, and fills it again.
    let ring = Ring::new(barriers, stages, 1u32, comptime!(WARPS as u32));
    let cube = CUBE_POS as u32;
    let (group, rank) = (cube / comptime!(once.cubes as u32), cube % comptime!(once.cubes as u32));
    let sixteens = (sizes.tokens + comptime!(TOKENS as u32 - 1)) / comptime!(TOKENS as u32);
    let count = (sixteens + (sizes.groups - 1) - group) / sizes.groups;
    let place = Place { group, rank, count, base };
    if UNIT_POS < comptime!(once.streams as u32) {
        shared[comptime!(once.biases_at()) + UNIT_POS as usize] = bias[UNIT_POS as usize];
    }
    rings_ready();
    // The same in all lanes, and known to be.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp < comptime!(WARPS as u32) {
        multiply(phi, &mut shared, parts, warp, &ring, &place, &sizes, once);
    } else {
        let of = Weighting {
            map: tensor_map_address(x),
            parts: global_address::<f32>(parts.as_ptr()),
            out: global_address::<E>(h_in.as_ptr()),
            alpha: alpha[0],
            owner: warp - comptime!(WARPS as u32),
        };
        weight(&of, mix, norm, &mut shared, counters, &ring, &place, &sizes, once);
    }
}
