//! Products through mma.sync fed by cp.async: compute capability 8.0 and later.
//!
//! As many cubes as multiprocessors walk over the tiles. All eight warps copy blocks of both operands
//! into a ring of stages, 16 bytes a unit and swizzled as wgmma has them. While a step of 16 of K is
//! multiplied, the next one is on its way to registers, across blocks too: the one barrier a block
//! stands before its last step, and who passes it may overwrite the stage before. (8192³ on an H200:
//! 436 to 454 TFLOP/s; with barriers of each stage, so that warps may drift apart, 431; with the copies
//! spread over the steps 386; without fragments ahead 392.)

use super::store::{Finish, store};
use super::warp::*;
use crate::tile::cuda::ptx::*;
use crate::tile::cuda::schedule::{DEPTH, ROWS, TileGrid, work_index, work_tile};
use crate::tile::view::{Operand, Order};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// Where a unit copies its 16 bytes of an operand from: of a block of K, lines `first` + 32i of each
/// part, where lines are positions along M or N if K is contiguous, else K.
#[derive(CubeType, Clone, Copy)]
struct Source {
    /// Of the first chunk of the block at hand.
    from: u64,
    /// Bytes from one block to the next, from a chunk to the one 32 lines on, and of a part.
    block: u64,
    lines: u64,
    /// Position along M or N and K of the first chunk.
    e: u32,
    k: u32,
}

#[cube]
fn source(base: u64, line_bytes: u64, e0: u32, k0: u32, #[comptime] along_k: bool) -> Source {
    let (first, chunk) = (UNIT_POS / 8, UNIT_POS % 8 * 8);
    if comptime!(along_k) {
        let (e, k) = (e0 + first, k0 + chunk);
        let from = base + u64::cast_from(e) * line_bytes + u64::cast_from(k * 2);
        Source { from, block: u64::cast_from(128u32), lines: line_bytes * 32, e, k }
    } else {
        let (e, k) = (e0 + chunk, k0 + first);
        let from = base + u64::cast_from(k) * line_bytes + u64::cast_from(e * 2);
        Source { from, block: line_bytes * 64, lines: line_bytes * 32, e, k }
    }
}

/// Copies chunk `i` of a unit into the stage at `dst`; zero outside the operand.
#[cube]
fn copy_chunk(
    dst: u32,
    source: &Source,
    extent: u32,
    k_end: u32,
    #[comptime] i: u32,
    #[comptime] along_k: bool,
) {
    let (part, half) = comptime!((i / 2, i % 2));
    let line = UNIT_POS / 8 + comptime!(half * 32);
    let to = dst + comptime!(part * PART) + line * 128 + (((UNIT_POS % 8) ^ (line % 8)) << 4);
    if comptime!(along_k) {
        let left = min(k_end - min(source.k, k_end), 8u32) * 2;
        let bytes = select(source.e + comptime!(i * 32) < extent, left, 0u32);
        copy_16(to, source.from + source.lines * u64::cast_from(i), bytes);
    } else {
        let e = source.e + comptime!(part * 64);
        let left = min(extent - min(e, extent), 8u32) * 2;
        let bytes = select(source.k + comptime!(half * 32) < k_end, left, 0u32);
        let offset = source.lines * u64::cast_from(half) + u64::cast_from(comptime!(part * 128));
        copy_16(to, source.from + offset, bytes);
    }
}

/// On to the next block of K.
#[cube]
fn advance(source: &mut Source) {
    source.from += source.block;
    source.k += comptime!(DEPTH as u32);
}

/// Copies what this unit copies of a block into the stage at `dst`.
#[cube]
fn copy_block(
    dst: u32,
    a: &Source,
    b: &Source,
    m: u32,
    n: u32,
    k: u32,
    #[comptime] product: MmaProduct,
) {
    #[unroll]
    for i in 0..comptime!((ROWS / 32) as u32) {
        copy_chunk(dst, a, m, k, i, comptime!(product.a == Order::RowMajor));
    }
    let dst = dst + comptime!(product.a_bytes());
    #[unroll]
    for i in 0..comptime!((product.n / 32) as u32) {
        copy_chunk(dst, b, n, k, i, comptime!(product.b == Order::ColMajor));
    }
}

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
    grid: TileGrid,
    k: u32,
    #[comptime] product: MmaProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    let stages = comptime!(product.stages as u32);
    let a_bytes = comptime!(product.a_bytes());
    let stage_bytes = comptime!(a_bytes + product.b_bytes());
    let count = comptime!(product.fragments_n());
    let mut shared = Shared::<[u32]>::new_aligned_slice(
        comptime!((stages * stage_bytes / 4) as usize),
        1024usize,
    );
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let (a_base, b_base) = (global_address::<E>(a.as_ptr()), global_address::<E>(b.as_ptr()));
    let (a_line, b_line) = (u64::cast_from(a_operand.ld * 2), u64::cast_from(b_operand.ld * 2));
    let lanes = lanes(base, base + a_bytes, product);

    let mut round = 0u32;
    let mut at = work_index(order, round, product.scheduler);
    while at < grid.total {
        let following = work_index(order, round + 1, product.scheduler);
        let tile = work_tile(at, &grid, product.scheduler);
        let row0 = tile.row * comptime!(ROWS as u32);
        let col0 = tile.col * comptime!(product.n as u32);
        let a_at = a_base + u64::cast_from(tile.a as usize * a_operand.batch_stride * 2);
        let b_at = b_base + u64::cast_from(tile.b as usize * b_operand.batch_stride * 2);
        let first = tile.block;

        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(8 * count));
        #[unroll]
        for i in 0..comptime!(8 * count) {
            sums[i] = Vector::new(0.0f32);
        }
        let k_first = first * comptime!(DEPTH as u32);
        let mut a_source =
            source(a_at, a_line, row0, k_first, comptime!(product.a == Order::RowMajor));
        let mut b_source =
            source(b_at, b_line, col0, k_first, comptime!(product.b == Order::ColMajor));
        // The stages of the tile before have all been read.
        sync_cube();
        #[unroll]
        for s in 0..comptime!(stages - 1) {
            if s < tile.depth {
                let dst = base + comptime!(s * stage_bytes);
                copy_block(dst, &a_source, &b_source, finish.m, finish.n, k, product);
            }
            advance(&mut a_source);
            advance(&mut b_source);
            copy_commit();
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
            if block + comptime!(stages - 1) < tile.depth {
                let into = base + (stage + comptime!(stages - 1)) % stages * stage_bytes;
                copy_block(into, &a_source, &b_source, finish.m, finish.n, k, product);
            }
            copy_commit();
            advance(&mut a_source);
            advance(&mut b_source);
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
        store::<C, O, V>(&sums, out, add, scales, &finish, &lanes, &tile, product);
        round += 1;
        at = following;
    }
}
