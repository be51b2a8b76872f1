//! Products through mma.sync fed by TMA: compute capability 9.0 and later.
//!
//! As [`super::cp_async`], but a unit of each warp asks for 64 rows or columns of a block at once, and
//! barriers of the stages take the place of those of the cube. (A warp that only loads would leave too
//! few registers to the others, and one unit that loads whole blocks delays its warp: 433 TFLOP/s at 8192³ on
//! an H200, 476 so.) The first blocks of the next tile are on their way while this one is
//! stored.

use super::store::store;
use super::warp::*;
use crate::tile::cuda::pipeline::{PipelineState, Ring, rings_ready};
use crate::tile::cuda::producer::{self, Buffers, Stages};
use crate::tile::cuda::schedule::{DEPTH, PART, ROWS, TileGrid, WorkTile, work_index, work_tile};
use crate::tile::cuda::second::Dual;
use crate::tile::finish::Finish;
use crate::tile::view::Order;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

impl MmaProduct {
    /// What is loaded.
    pub(super) fn stages(&self) -> Stages {
        let Self { n, stages: count, a, b, scheduler, .. } = *self;
        Stages { a, b, n, count, scheduler, dual: Dual::None, add: false }
    }

    /// Parts of a block, as many warps load.
    fn parts(&self) -> u32 {
        ((ROWS + self.n) / 64) as u32
    }
}

/// Loads this warp's part of block `k` of a tile into the next stage, once that has been read; for one unit.
#[cube]
fn load_part(
    a_map: u64,
    b_map: u64,
    buffers: &Buffers,
    fill: &mut PipelineState,
    tile: &WorkTile,
    k: u32,
    part: u32,
    #[comptime] product: MmaProduct,
) {
    let a_parts = comptime!((ROWS / 64) as u32);
    let bar = buffers.ring.acquire(fill.stage, fill.phase, PART);
    let k = (tile.block + k) * comptime!(DEPTH as u32);
    if part < a_parts {
        let e = tile.row * comptime!(ROWS as u32) + part * 64;
        let dst = buffers.a + fill.stage * comptime!(product.a_bytes()) + part * PART;
        let along_k = comptime!(product.a == Order::RowMajor);
        producer::load_part(dst, a_map, bar, e, k, tile.a, along_k);
    } else {
        let part = part - a_parts;
        let e = tile.col * comptime!(product.n as u32) + part * 64;
        let dst = buffers.b + fill.stage * comptime!(product.b_bytes()) + part * PART;
        let along_k = comptime!(product.b == Order::ColMajor);
        producer::load_part(dst, b_map, bar, e, k, tile.b, along_k);
    }
    fill.advance(comptime!(product.stages as u32));
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn mma_tma_kernel<E: Float, C: Float, O: Float, V: Size>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    add: &[C],
    scales: &[f32],
    order: &[u32],
    out: &mut [Vector<O, V>],
    finish: Finish,
    pitch: usize,
    grid: TileGrid,
    #[comptime] product: MmaProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    let bytes = comptime!(product.stages().bytes());
    let stages = comptime!(product.stages as u32);
    let (a_bytes, b_bytes) = comptime!((product.a_bytes(), product.b_bytes()));
    let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(bytes / 4), 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let barriers = base + comptime!(stages * (a_bytes + b_bytes));
    let ring = Ring::new(barriers, stages, comptime!(product.parts()), comptime!(UNITS / 32));
    rings_ready();
    let buffers = Buffers { a: base, b: base + comptime!(stages * a_bytes), ring };
    let (a_map, b_map) = (tensor_map_address(a), tensor_map_address(b));

    let part = plane_broadcast(UNIT_POS / 32, 0u32);
    let lane = UNIT_POS % 32;
    let loads = lane == 0u32 && part < comptime!(product.parts());
    let ahead = comptime!(stages - 1);
    let mut fill = PipelineState::start();
    let mut read = PipelineState::start();
    let count = comptime!(product.fragments_n());
    let lanes = lanes(buffers.a, buffers.b, product);
    let b_at = comptime!(stages * a_bytes);
    let mut round = 0u32;
    let mut at = work_index(order, round, product.scheduler);
    // No cube is without a tile.
    let start = work_tile(at, &grid, product.scheduler);
    if loads {
        for k in 0..min(start.depth, ahead) {
            load_part(a_map, b_map, &buffers, &mut fill, &start, k, part, product);
        }
    }
    while at < grid.total {
        let following = work_index(order, round + 1, product.scheduler);
        let tile = work_tile(at, &grid, product.scheduler);
        let row0 = tile.row * comptime!(ROWS as u32);
        let col0 = tile.col * comptime!(product.n as u32);
        let first = tile.block;
        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(8 * count));
        #[unroll]
        for i in 0..comptime!(8 * count) {
            sums[i] = Vector::new(0.0f32);
        }
        // Fragments of the step at hand and of the next.
        let mut left = Array::<Vector<u32, Const<4>>>::new(8usize);
        let mut right = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * count));
        if tile.depth > 0 {
            let (a_offset, b_offset) = (read.stage * a_bytes, read.stage * b_bytes);
            buffers.ring.wait(read.stage, read.phase);
            mask_stage(&mut shared, a_offset, b_at + b_offset, first, row0, col0, true, product);
            load_left(&mut left, &lanes, a_offset, 0u32, product);
            load_right(&mut right, &lanes, b_offset, 0u32, product);
        }
        for block in 0..tile.depth {
            let (a_offset, b_offset) = (read.stage * a_bytes, read.stage * b_bytes);
            let done = read.stage;
            read.advance(stages);
            #[unroll]
            for step in 0..STEPS {
                if comptime!(step + 1 < STEPS) {
                    let next = comptime!(step + 1);
                    load_left(&mut left, &lanes, a_offset, next, product);
                    load_right(&mut right, &lanes, b_offset, next, product);
                } else if block + 1 < tile.depth {
                    let (a_next, b_next) = (read.stage * a_bytes, read.stage * b_bytes);
                    let k = first + block + 1;
                    buffers.ring.wait(read.stage, read.phase);
                    mask_stage(&mut shared, a_next, b_at + b_next, k, row0, col0, true, product);
                    load_left(&mut left, &lanes, a_next, 0u32, product);
                    load_right(&mut right, &lanes, b_next, 0u32, product);
                }
                multiply_step(&mut sums, &left, &right, step, product);
                if comptime!(step == 0) && loads && block + ahead < tile.depth {
                    let k = block + ahead;
                    load_part(a_map, b_map, &buffers, &mut fill, &tile, k, part, product);
                }
            }
            if lane == 0u32 {
                buffers.ring.release(done);
            }
        }
        if loads && following < grid.total {
            let next = work_tile(following, &grid, product.scheduler);
            for k in 0..min(next.depth, ahead) {
                load_part(a_map, b_map, &buffers, &mut fill, &next, k, part, product);
            }
        }
        store::<C, O, V>(&sums, out, add, scales, &finish, &grid, pitch, &lanes, &tile, product);
        round += 1;
        at = following;
    }
}
