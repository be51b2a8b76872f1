//! Products on Hopper's tensor cores: wgmma fed by TMA.
//!
//! As many cubes as multiprocessors walk over the tiles, or pairs of cubes make one tile each, half of K by
//! each. Of the nine warps of a cube one loads: its first lane keeps a ring of stages of both operands full
//! through TMA. The others are two warpgroups: each multiplies 64 rows of the tile, releases the
//! stage, and at the end of K rounds its sums into shared memory, from where TMA stores them. Of cubes that
//! walk the ring runs on across tiles, so that the loads of the next tile hide behind the stores of this one;
//! a pair needs its rings at the end, to hand over the sums of the rows that the other one finishes. (Groups
//! that take whole tiles in turns need an order among themselves: a parity tells only one time round the ring
//! from the next.)
//!
//! A unit holds 128 sums at most and needs up to 168 registers, of 224 that nine warps leave each: `setmaxnreg` has
//! nothing to give.

use super::consumer::{Results, consume};
use super::product::{STORE_BYTES, UNITS, WgmmaProduct};
use crate::tile::cuda::pipeline::{Ring, barrier_bytes, rings_ready};
use crate::tile::cuda::producer::{Buffers, Maps, produce};
use crate::tile::cuda::schedule::TileGrid;
use crate::tile::epilogue::Epilogue;
use crate::tile::finish::Finish;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

/// One product by cubes on their own. (As clusters of one they would be placed otherwise, 1.3 times as slow
/// at 768×4096 from 8192 on an H200.)
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn wgmma_kernel<E: Float, C: Float, O: Float, Ep: Epilogue>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    more: &TensorMap<E, Tiled>,
    out: &TensorMap<O, Tiled>,
    joined: &TensorMap<O, Tiled>,
    add: &[C],
    scales: &[f32],
    order: &[u32],
    finish: Finish,
    grid: TileGrid,
    #[comptime] product: WgmmaProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    let maps =
        Maps { a: tensor_map_address(a), b: tensor_map_address(b), more: tensor_map_address(more) };
    let results = Results { out: tensor_map_address(out), joined: tensor_map_address(joined) };
    multiply::<C, Ep>(&maps, &results, add, scales, order, &finish, &grid, product);
}

/// One product by clusters that share a tile.
#[cube(
    launch_unchecked,
    address_type = "dynamic",
    cluster_dim = CubeDim::new_1d(product.scheduler.cluster)
)]
pub(crate) fn wgmma_cluster_kernel<E: Float, C: Float, O: Float, Ep: Epilogue>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    more: &TensorMap<E, Tiled>,
    out: &TensorMap<O, Tiled>,
    joined: &TensorMap<O, Tiled>,
    add: &[C],
    scales: &[f32],
    order: &[u32],
    finish: Finish,
    grid: TileGrid,
    #[comptime] product: WgmmaProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    let maps =
        Maps { a: tensor_map_address(a), b: tensor_map_address(b), more: tensor_map_address(more) };
    let results = Results { out: tensor_map_address(out), joined: tensor_map_address(joined) };
    multiply::<C, Ep>(&maps, &results, add, scales, order, &finish, &grid, product);
}

/// Gives every unit its role.
#[cube]
fn multiply<C: Float, Ep: Epilogue>(
    maps: &Maps,
    results: &Results,
    add: &[C],
    scales: &[f32],
    order: &[u32],
    finish: &Finish,
    grid: &TileGrid,
    #[comptime] product: WgmmaProduct,
) {
    let stages = comptime!(product.stages());
    let count = comptime!(stages.count as u32);
    let a_bytes = comptime!(count * stages.a_bytes());
    let operands = comptime!(a_bytes + count * stages.b_bytes());
    let staged = comptime!(product.tile.staged as u32 * STORE_BYTES);
    let bytes = comptime!((operands + 2 * staged) as usize + barrier_bytes(stages.count));

    // One allocation for everything: its address is all that the instructions see.
    let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(bytes / 4), 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let ring = Ring::new(base + comptime!(operands + 2 * staged), count, 1u32, 2u32);
    rings_ready();
    let buffers = Buffers { a: base, b: base + a_bytes, ring };

    // The same in all lanes, and known to be, so that descriptors stay in uniform registers.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp == comptime!(UNITS / 32 - 1) {
        let lane = UNIT_POS % 32;
        if lane == 0u32 {
            produce(maps, &buffers, order, grid, stages);
        }
    } else {
        let staging = base + operands;
        consume::<C, Ep>(
            &mut shared,
            &buffers,
            staging,
            warp,
            results,
            add,
            scales,
            order,
            finish,
            grid,
            product,
        );
    }
}
