//! The kernel: what a cube is given, and which of its warps multiply and which weight.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::multiply::{fetch_phi, multiply};
use super::plan::{OWNERS, Once, TOKENS, WARPS};
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
    /// Of Sinkhorn.
    pub(super) repeats: u32,
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

    /// The slot of the tokens that come as number `number`, its barriers and which time it is taken.
    pub(super) fn slot(&self, number: u32, #[comptime] once: Once) -> Slot {
        let (slots, words) = comptime!((once.slots as u32, once.slot() as u32));
        let slot = number % slots;
        let full = self.base + comptime!(once.slot_barriers_at() as u32) + slot * 8;
        Slot {
            at: comptime!(once.slots_at() as u32) + slot * words,
            full,
            empty: full + comptime!(8 * once.slots as u32),
            time: number / slots,
        }
    }

    /// Where in the workspace the first cube's sums are.
    pub(super) fn workspace(&self, number: u32, #[comptime] once: Once) -> usize {
        let place = number % comptime!(once.places() as u32);
        let place = self.group * comptime!(once.places() as u32) + place;
        place as usize * comptime!(once.cubes * once.part())
    }
}

/// Where cubes of a cluster leave their sums, each behind the one before.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Slot {
    /// In words.
    pub(super) at: u32,
    /// The barriers: all sums are there, and all cubes have read theirs.
    pub(super) full: u32,
    pub(super) empty: u32,
    pub(super) time: u32,
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

#[cube(
    launch_unchecked,
    address_type = "dynamic",
    cluster_dim = CubeDim::new_1d(if once.clustered() { once.cubes as u32 } else { 1 })
)]
pub(super) fn once_kernel<E: Float>(
    x: &TensorMap<E, Tiled>,
    phi: &[f32],
    alpha: &[f32],
    bias: &[f32],
    h_in: &mut [E],
    h_post: &mut [f32],
    h_res: &mut [f32],
    mix: &mut [f32],
    norm: &mut [f32],
    parts: &mut [f32],
    counters: &mut [Atomic<u32>],
    layer: &TensorMap<E, Tiled>,
    mixed: &TensorMap<E, Tiled>,
    layer_post: &[f32],
    layer_res: &[f32],
    sizes: Sizes,
    #[comptime] once: Once,
    #[define(E)] _dtype: ElemType,
) {
    let stages = comptime!(once.stages as u32);
    let mut shared = Shared::<[f32]>::new_aligned_slice(comptime!(once.words()), 1024usize);
    let base = generic_to_shared::<f32>(shared.as_ptr());
    let barriers = base + comptime!(once.barriers_at() as u32);
    // Who weights a stage fills it again, so nobody waits for it to be empty.
    let ring = Ring::new(barriers, stages, comptime!(once.loads() as u32), 1u32);
    let sides = base + comptime!(once.side_barriers_at() as u32);
    // A side is full for the warp whose turn it is, and empty for those that multiply.
    let sides = Ring::new(sides, comptime!(OWNERS as u32), comptime!(WARPS as u32), 1u32);
    let phi_arrived = base + comptime!(once.phi_barrier_at() as u32);
    if UNIT_POS == 0 {
        barrier_init(phi_arrived, comptime!(once.pieces() as u32));
        let slots = base + comptime!(once.slot_barriers_at() as u32);
        #[unroll]
        for slot in 0..comptime!(once.slots as u32) {
            barrier_init(slots + slot * 8, 1u32);
            barrier_init(
                slots + comptime!(8 * once.slots as u32) + slot * 8,
                comptime!(once.cubes as u32),
            );
        }
    }
    let cube = CUBE_POS as u32;
    let (group, rank) = (cube / comptime!(once.cubes as u32), cube % comptime!(once.cubes as u32));
    let sixteens = (sizes.tokens + comptime!(TOKENS as u32 - 1)) / comptime!(TOKENS as u32);
    let count = (sixteens + (sizes.groups - 1) - group) / sizes.groups;
    let place = Place { group, rank, count, base };
    if UNIT_POS < comptime!(once.streams as u32) {
        shared[comptime!(once.biases_at()) + UNIT_POS as usize] = bias[UNIT_POS as usize];
    }
    rings_ready();
    if comptime!(once.clustered()) {
        sync_cluster();
    }
    // The same in all lanes, and known to be.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp < comptime!(WARPS as u32) {
        multiply(&mut shared, warp, &ring, &sides, phi_arrived, &place, &sizes, once);
    } else {
        let owner = warp - comptime!(WARPS as u32);
        let phi = global_address::<f32>(phi.as_ptr());
        fetch_phi(phi, owner, phi_arrived, &place, &sizes, once);
        let of = Weighting {
            map: tensor_map_address(x),
            layer: tensor_map_address(layer),
            mixed: tensor_map_address(mixed),
            post: global_address::<f32>(layer_post.as_ptr()),
            res: global_address::<f32>(layer_res.as_ptr()),
            parts: global_address::<f32>(parts.as_ptr()),
            out: global_address::<E>(h_in.as_ptr()),
            alpha_pre: alpha[0],
            owner,
        };
        weight(
            &of,
            mix,
            norm,
            alpha,
            bias,
            h_post,
            h_res,
            parts,
            &mut shared,
            counters,
            &ring,
            &sides,
            &place,
            &sizes,
            once,
        );
    }
    // Others still write into this cube.
    if comptime!(once.clustered()) {
        sync_cluster();
    }
}
