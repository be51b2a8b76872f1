//! Products through mma.sync fed by cp.async: compute capability 8.0 and later.
//!
//! As many cubes as multiprocessors walk over the tiles. All eight warps copy blocks of both operands
//! into a ring of stages, 16 bytes a unit and swizzled as wgmma has them. While a step of 16 of K is
//! multiplied, the next one is on its way to registers, across blocks too: the one barrier a block
//! stands before its last step, and who passes it may overwrite the stage before. (8192³ on an H200:
//! 436 to 454 TFLOP/s; with barriers of each stage, so that warps may drift apart, 431; with the copies
//! spread over the steps 386; without fragments ahead 392.)

use super::store::store;
use super::warp::*;
use crate::tile::cuda::copies::{copy_block, source};
use crate::tile::cuda::ptx::*;
use crate::tile::cuda::schedule::{DEPTH, ROWS, TileGrid, work_index, work_tile};
use crate::tile::finish::Finish;
use crate::tile::view::{Operand, Order};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn mma_kernel<E: Float, C: Float, O: Float, V: Size>(
    a: &[E],
    b: &[E],
    add: &[C],
    scales: &[f32],
    order: &[u32],
    out: &mut [Vector<O, V>],
    a_operand: Operand,
    b_operand: Operand,
    finish: Finish,
    pitch: usize,
    grid: TileGrid,
    k: u32,
    #[comptime] product: MmaProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    let stages = comptime!(product.stages as u32);
    let a_bytes = comptime!(product.a_bytes());
    let stage_bytes = comptime!(a_bytes + product.b_bytes());
    let count = comptime!(product.fragments_n());
    let positions = comptime!([ROWS as u32, product.n as u32]);
    let along_k = comptime!([product.a == Order::RowMajor, product.b == Order::ColMajor]);
    let mut shared = Shared::<[u32]>::new_aligned_slice(
        comptime!((stages * stage_bytes / 4) as usize),
        1024usize,
    );
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let (a_base, b_base) = (global_address::<E>(a.as_ptr()), global_address::<E>(b.as_ptr()));
    let (a_line, b_line) = (u64::cast_from(a_operand.ld) * 2, u64::cast_from(b_operand.ld) * 2);
    let lanes = lanes(base, base + a_bytes, product);

    let mut round = 0u32;
    let mut at = work_index(order, round, product.scheduler);
    while at < grid.total {
        let following = work_index(order, round + 1, product.scheduler);
        let tile = work_tile(at, &grid, product.scheduler);
        let row0 = tile.row * comptime!(ROWS as u32);
        let col0 = tile.col * comptime!(product.n as u32);
        let a_at = a_base + u64::cast_from(tile.a) * u64::cast_from(a_operand.batch_stride) * 2;
        let b_at = b_base + u64::cast_from(tile.b) * u64::cast_from(b_operand.batch_stride) * 2;
        let first = tile.block;

        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(8 * count));
        #[unroll]
        for i in 0..comptime!(8 * count) {
            sums[i] = Vector::new(0.0f32);
        }
        let k_first = first * comptime!(DEPTH as u32);
        let mut a_source = source(a_at, a_line, row0, k_first, grid.m, k, along_k[0]);
        let mut b_source = source(b_at, b_line, col0, k_first, grid.n, k, along_k[1]);
        // The stages of the tile before have all been read.
        sync_cube();
        #[unroll]
        for s in 0..comptime!(stages - 1) {
            let dst = base + comptime!(s * stage_bytes);
            let there = s < tile.depth;
            copy_block(dst, &mut a_source, &mut b_source, there, positions, along_k);
        }
        // Fragments of the step at hand and of the next.
        let mut left = Array::<Vector<u32, Const<4>>>::new(8usize);
        let mut right = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * count));
        copy_wait(comptime!(stages - 2));
        sync_cube();
        mask_stage(&mut shared, 0u32, a_bytes.runtime(), first, row0, col0, false, product);
        load_left(&mut left, &lanes, 0u32, 0u32, product);
        load_right(&mut right, &lanes, 0u32, 0u32, product);
        let mut stage = 0u32;
        for block in 0..tile.depth {
            let offset = stage * stage_bytes;
            // All at once: spread over the steps they cost 15 %.
            let into = base + (stage + comptime!(stages - 1)) % stages * stage_bytes;
            let there = block + comptime!(stages - 1) < tile.depth;
            copy_block(into, &mut a_source, &mut b_source, there, positions, along_k);
            stage += 1;
            if stage == stages {
                stage = 0u32;
            }
            #[unroll]
            for step in 0..STEPS {
                if comptime!(step + 1 < STEPS) {
                    let next = comptime!(step + 1);
                    load_left(&mut left, &lanes, offset, next, product);
                    load_right(&mut right, &lanes, offset, next, product);
                } else {
                    copy_wait(comptime!(stages - 2));
                    sync_cube();
                    let next = stage * stage_bytes;
                    if block + 1 < tile.depth {
                        let block = first + block + 1;
                        mask_stage(
                            &mut shared,
                            next,
                            next + a_bytes,
                            block,
                            row0,
                            col0,
                            false,
                            product,
                        );
                    }
                    // After the last block nobody looks at them.
                    load_left(&mut left, &lanes, next, 0u32, product);
                    load_right(&mut right, &lanes, next, 0u32, product);
                }
                multiply_step(&mut sums, &left, &right, step, product);
            }
        }
        store::<C, O, V>(&sums, out, add, scales, &finish, &grid, pitch, &lanes, &tile, product);
        round += 1;
        at = following;
    }
}
