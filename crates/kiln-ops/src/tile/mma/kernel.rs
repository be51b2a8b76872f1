//! Products on tensor cores through mma.sync, fed by cp.async: compute capability 8.0 and later.
//!
//! As many cubes as multiprocessors walk over the tiles. All eight warps copy blocks of both operands
//! into a ring of stages, 16 bytes a unit and swizzled as wgmma has them, and multiply 64 rows and a
//! quarter of the columns each. One barrier a block: who passes it may overwrite the stage before.

use crate::tile::mask::{crossed, mask_block};
use crate::tile::operand::Order;
use crate::tile::ptx::*;
use crate::tile::schedule::{Blocks, DEPTH, ROWS, place, turn};
use crate::tile::units::Lines;
use crate::tile::{Epilogue, Triangles};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// Two warps along M, four along N.
pub(super) const UNITS: u32 = 256;
const STAGES: u32 = 3;
/// Bytes of 64 positions along M or N by a block of K.
const PART: u32 = 8192;
/// Rows of tiles that are made together, so that they share columns of B in the cache.
const GROUP: u32 = 8;

/// What a product is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaProduct {
    /// Columns of a tile: 128 or 256.
    pub(super) n: usize,
    pub(super) half: Half,
    pub(super) a: Order,
    pub(super) b: Order,
    pub(super) epilogue: Epilogue,
    pub(super) triangles: Triangles,
}

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

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn mma_kernel<E: Float, C: Float, O: Float>(
    a: &[E],
    b: &[E],
    add: &[C],
    order: &[u32],
    out: &mut [O],
    a_lines: Lines,
    b_lines: Lines,
    add_batch: usize,
    add_row: usize,
    add_col: usize,
    pitch: usize,
    m: u32,
    n: u32,
    k: u32,
    blocks: Blocks,
    alpha: f32,
    beta: f32,
    #[comptime] product: MmaProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    let (a_parts, b_parts) = comptime!(((ROWS / 64) as u32, (product.n / 64) as u32));
    let stage_bytes = comptime!((a_parts + b_parts) * PART);
    let b_offset = comptime!(a_parts * PART);
    let (a_along_k, b_along_k) = comptime!((product.a == Order::Rows, product.b == Order::Columns));
    // Of a warp: rows of 16, pairs of columns of 8.
    let pairs = comptime!(product.n / 64);
    let mut shared = Shared::<[u32]>::new_aligned_slice(
        comptime!((STAGES * stage_bytes / 4) as usize),
        1024usize,
    );
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let (a_base, b_base) = (global_address::<E>(a.as_ptr()), global_address::<E>(b.as_ptr()));
    let (a_line, b_line) = (u64::cast_from(a_lines.line * 2), u64::cast_from(b_lines.line * 2));

    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let lane = UNIT_POS % 32;
    let (warp_m, warp_n) = (warp / 4, warp % 4);
    let (low, quarter) = (lane % 8, lane / 8);
    // Lanes name rows of 8×8 matrices: along M or N first for A, along K first for B.
    let a_row = if comptime!(a_along_k) { lane % 16 } else { quarter / 2 * 8 + low };
    let a_chunk = if comptime!(a_along_k) { lane / 16 } else { quarter % 2 };
    let b_row = if comptime!(b_along_k) { quarter / 2 * 8 + low } else { quarter % 2 * 8 + low };
    let b_chunk = if comptime!(b_along_k) { quarter % 2 } else { quarter / 2 };
    let a_from = base + warp_m * PART;
    let columns = warp_n * comptime!((product.n / 4) as u32);
    let b_from = base + b_offset + columns / 64 * PART;
    let b_first = columns % 64;

    let mut round = 0u32;
    let mut at = turn(order, round, product.triangles);
    while at < blocks.total {
        let following = turn(order, round + 1, product.triangles);
        let place = place(at, &blocks, GROUP, product.triangles);
        let row0 = place.row * comptime!(ROWS as u32);
        let col0 = place.col * comptime!(product.n as u32);
        let a_at = a_base + u64::cast_from(place.a as usize * a_lines.batch * 2);
        let b_at = b_base + u64::cast_from(place.b as usize * b_lines.batch * 2);
        let first = place.block;

        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(8 * pairs));
        #[unroll]
        for i in 0..comptime!(8 * pairs) {
            sums[i] = Vector::new(0.0f32);
        }
        let k_first = first * comptime!(DEPTH as u32);
        let mut a_source = source(a_at, a_line, row0, k_first, a_along_k);
        let mut b_source = source(b_at, b_line, col0, k_first, b_along_k);
        // The stages of the tile before have all been read.
        sync_cube();
        #[unroll]
        for s in 0..comptime!(STAGES - 1) {
            if s < place.depth {
                let dst = base + comptime!(s * stage_bytes);
                #[unroll]
                for i in 0..comptime!(2 * a_parts) {
                    copy_chunk(dst, &a_source, m, k, i, a_along_k);
                }
                #[unroll]
                for i in 0..comptime!(2 * b_parts) {
                    copy_chunk(dst + b_offset, &b_source, n, k, i, b_along_k);
                }
            }
            advance(&mut a_source);
            advance(&mut b_source);
            copy_commit();
        }
        let mut stage = 0u32;
        for block in 0..place.depth {
            copy_wait(comptime!(STAGES - 2));
            sync_cube();
            // All at once: spread between the products they cost 7 % at 8192³ on an H200.
            if block + comptime!(STAGES - 1) < place.depth {
                let into = base + (stage + comptime!(STAGES - 1)) % STAGES * stage_bytes;
                #[unroll]
                for i in 0..comptime!(2 * a_parts) {
                    copy_chunk(into, &a_source, m, k, i, a_along_k);
                }
                #[unroll]
                for i in 0..comptime!(2 * b_parts) {
                    copy_chunk(into + b_offset, &b_source, n, k, i, b_along_k);
                }
            }
            copy_commit();
            advance(&mut a_source);
            advance(&mut b_source);
            let offset = stage * stage_bytes;
            if comptime!(product.triangles.masked()) {
                let k0 = (first + block) * 64;
                let (a_keeps, b_keeps) =
                    comptime!((product.triangles.a_keeps(), product.triangles.b_keeps()));
                let b_crossed = crossed(k0, col0, comptime!(product.n as u32), b_keeps);
                if crossed(k0, row0, comptime!(ROWS as u32), a_keeps) || b_crossed {
                    #[unroll]
                    for part in 0..a_parts {
                        let at = offset + comptime!(part * PART);
                        let e0 = row0 + comptime!(part * 64);
                        mask_block(&mut shared, at, e0, k0, UNIT_POS, UNITS, a_along_k, a_keeps);
                    }
                    #[unroll]
                    for part in 0..b_parts {
                        let at = offset + comptime!(b_offset + part * PART);
                        let e0 = col0 + comptime!(part * 64);
                        mask_block(&mut shared, at, e0, k0, UNIT_POS, UNITS, b_along_k, b_keeps);
                    }
                    sync_cube();
                }
            }
            #[unroll]
            for step in 0..comptime!(DEPTH as u32 / 16) {
                let mut left = Array::<Vector<u32, Const<4>>>::new(4usize);
                #[unroll]
                for i in 0..4u32 {
                    let (row, chunk) = if comptime!(a_along_k) {
                        (a_row + comptime!(i * 16), a_chunk + comptime!(step * 2))
                    } else {
                        (a_row + comptime!(step * 16), a_chunk + comptime!(i * 2))
                    };
                    let from = a_from + offset + row * 128 + ((chunk ^ low) << 4);
                    left[comptime!(i as usize)] = load_matrices(from, comptime!(!a_along_k));
                }
                #[unroll]
                for j in 0..comptime!(pairs as u32) {
                    let (row, chunk) = if comptime!(b_along_k) {
                        (b_first + b_row + comptime!(j * 16), b_chunk + comptime!(step * 2))
                    } else {
                        (b_row + comptime!(step * 16), b_first / 8 + b_chunk + comptime!(j * 2))
                    };
                    let from = b_from + offset + row * 128 + ((chunk ^ low) << 4);
                    let right = load_matrices(from, comptime!(!b_along_k));
                    #[unroll]
                    for i in 0..4usize {
                        let at = comptime!((i * pairs + j as usize) * 2);
                        sums[at] = mma_16x8x16(
                            left[i],
                            right.extract(0usize),
                            right.extract(1usize),
                            sums[at],
                            product.half,
                        );
                        sums[at + 1] = mma_16x8x16(
                            left[i],
                            right.extract(2usize),
                            right.extract(3usize),
                            sums[at + 1],
                            product.half,
                        );
                    }
                }
            }
            stage += 1;
            if stage == STAGES {
                stage = 0u32;
            }
        }

        let row0 = row0 + warp_m * 64 + lane / 4;
        let col0 = col0 + columns + lane % 4 * 2;
        let matrix = place.out as usize * (m as usize * pitch);
        let more = place.out as usize * add_batch;
        #[unroll]
        for i in 0..4usize {
            #[unroll]
            for j in 0..comptime!(2 * pairs) {
                #[unroll]
                for e in 0..4usize {
                    let row = row0 + comptime!((i * 16 + e / 2 * 8) as u32);
                    let col = col0 + comptime!((j * 8 + e % 2) as u32);
                    if row < m && col < n {
                        let mut x = sums[comptime!(i * 2 * pairs + j)].extract(e);
                        if comptime!(product.epilogue.scaled) {
                            x *= alpha;
                        }
                        if comptime!(product.epilogue.add) {
                            let at = more + row as usize * add_row + col as usize * add_col;
                            x += beta * f32::cast_from(add[at]);
                        }
                        if comptime!(product.triangles.out_lower) && col > row {
                            x = 0.0f32;
                        }
                        out[matrix + row as usize * pitch + col as usize] = O::cast_from(x);
                    }
                }
            }
        }
        round += 1;
        at = following;
    }
}
