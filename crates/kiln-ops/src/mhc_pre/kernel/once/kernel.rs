//! The kernel: what a cube is given, and which of its warps multiply and which weight.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::multiply::{fetch_phi, multiply};
use super::plan::{HEAD, Once, TOKENS, WARPS};
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
    /// The address of the group's workspace.
    workspace: u64,
    /// The number that tokens of the last launch had last.
    pub(super) last: u32,
}

#[cube]
impl Place {
    /// The first of the tokens that come as number `number`.
    pub(super) fn token(&self, number: u32, sizes: &Sizes) -> u32 {
        (self.group + number * sizes.groups) * comptime!(TOKENS as u32)
    }

    /// The address of what the group's first cube leaves of the tokens that come as number `number`.
    pub(super) fn left(&self, number: u32, #[comptime] once: Once) -> u64 {
        let place = number % comptime!(once.places() as u32);
        let bytes = comptime!(16 * (once.cubes * once.part()) as u64);
        self.workspace + u64::cast_from(place) * bytes
    }

    /// The number under which it is left: no other tokens had it in this memory.
    pub(super) fn tag(&self, number: u32) -> u32 {
        self.last + 1 + number
    }
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
    // The last number and how many warps are done, then the workspaces of the groups.
    workspace: &mut [Atomic<u32>],
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
    let phi_arrived = base + comptime!(once.phi_barrier_at() as u32);
    if UNIT_POS == 0 {
        barrier_init(phi_arrived, comptime!(once.pieces() as u32));
    }
    let cube = CUBE_POS as u32;
    let (group, rank) = (cube / comptime!(once.cubes as u32), cube % comptime!(once.cubes as u32));
    let sixteens = (sizes.tokens + comptime!(TOKENS as u32 - 1)) / comptime!(TOKENS as u32);
    let count = (sixteens + (sizes.groups - 1) - group) / sizes.groups;
    let before =
        comptime!(4 * HEAD as u64) + u64::cast_from(group) * comptime!(once.workspace() as u64);
    let place = Place {
        group,
        rank,
        count,
        base,
        workspace: global_address::<Atomic<u32>>(workspace.as_ptr()) + before,
        last: workspace[0].load(),
    };
    if UNIT_POS < comptime!(once.streams as u32) {
        shared[comptime!(once.biases_at()) + UNIT_POS as usize] = bias[UNIT_POS as usize];
    }
    rings_ready();
    // The same in all lanes, and known to be.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp < comptime!(WARPS as u32) {
        multiply(&mut shared, warp, &ring, phi_arrived, &place, &sizes, once);
    } else {
        let owner = warp - comptime!(WARPS as u32);
        let phi = global_address::<f32>(phi.as_ptr());
        fetch_phi(phi, owner, phi_arrived, &place, &sizes, once);
        let of = Weighting {
            map: tensor_map_address(x),
            out: global_address::<E>(h_in.as_ptr()),
            alpha: alpha[0],
            owner,
        };
        weight(&of, mix, norm, &mut shared, workspace, &ring, &place, &sizes, once);
    }
}
