//! Products through mma.sync fed by TMA: compute capability 9.0 and later.
//!
//! As [`super::kernel`], but a unit of each warp asks for 64 rows or columns of a block at once, and
//! barriers of the stages take the place of those of the cube. (A warp that only loads would leave too
//! few registers to the others, and one unit that loads whole blocks delays its warp: 433 TFLOP/s at 8192³ on
//! an H200, 476 so.) The first blocks of the next tile are on their way while this one is
//! stored.

use super::warp::*;
use crate::tile::feed::{Feed, Ring, ring};
use crate::tile::operand::Order;
use crate::tile::ptx::*;
use crate::tile::schedule::{self, Blocks, DEPTH, Place, ROWS, place, turn};
use crate::tile::{Addend, Pair};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

impl MmaProduct {
    /// What is loaded.
    pub(super) fn feed(&self) -> Feed {
        let Self { n, stages, a, b, walk, .. } = *self;
        Feed { a, b, n, stages, walk, pair: Pair::None }
    }

    /// Parts of a block, as many warps load.
    fn parts(&self) -> u32 {
        ((ROWS + self.n) / 64) as u32
    }
}

/// A position in a ring, and the parity of the times round it.
#[derive(CubeType, Clone, Copy)]
struct Turn {
    stage: u32,
    phase: u32,
}

/// On to the next stage.
#[cube]
fn forward(turn: &mut Turn, #[comptime] feed: Feed) {
    turn.stage += 1;
    if turn.stage == comptime!(feed.stages as u32) {
        turn.stage = 0u32;
        turn.phase ^= 1;
    }
}

/// Loads this warp's part of block `k` of a tile into the next stage, once that has been read; for one unit.
#[cube]
fn load_part(
    a_map: u64,
    b_map: u64,
    ring: &Ring,
    fill: &mut Turn,
    place: &Place,
    k: u32,
    part: u32,
    #[comptime] product: MmaProduct,
    #[comptime] feed: Feed,
) {
    let a_parts = comptime!((ROWS / 64) as u32);
    let stage = fill.stage;
    barrier_wait(ring.empty + stage * 8, (fill.phase & 1) ^ 1);
    let bar = ring.full + stage * 8;
    barrier_expect(bar, PART);
    let k = (place.block + k) * comptime!(DEPTH as u32);
    if part < a_parts {
        let e = place.row * comptime!(ROWS as u32) + part * 64;
        let dst = ring.a + stage * comptime!(product.a_bytes()) + part * PART;
        if comptime!(product.a == Order::Rows) {
            tma_load(dst, a_map, bar, k, e, place.a);
        } else {
            tma_load(dst, a_map, bar, e, k, place.a);
        }
    } else {
        let part = part - a_parts;
        let e = place.col * comptime!(product.n as u32) + part * 64;
        let dst = ring.b + stage * comptime!(product.b_bytes()) + part * PART;
        if comptime!(product.b == Order::Columns) {
            tma_load(dst, b_map, bar, k, e, place.b);
        } else {
            tma_load(dst, b_map, bar, e, k, place.b);
        }
    }
    forward(fill, feed);
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn mma_tma_kernel<E: Float, C: Float, O: Float, Two: Size>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    add: &[C],
    order: &[u32],
    out: &mut [Vector<O, Two>],
    addend: Addend,
    pitch: usize,
    m: u32,
    n: u32,
    blocks: Blocks,
    alpha: f32,
    #[comptime] product: MmaProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    let feed = comptime!(product.feed());
    let stages = comptime!(product.stages as u32);
    let (a_bytes, b_bytes) = comptime!((feed.a_bytes(), feed.b_bytes()));
    let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(feed.bytes() / 4), 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let barriers = base + comptime!(stages * (a_bytes + b_bytes));
    let ring = ring(base, barriers, comptime!(product.parts()), comptime!(UNITS / 32), feed);
    let (a_map, b_map) = (tensor_map_address(a), tensor_map_address(b));

    let part = plane_broadcast(UNIT_POS / 32, 0u32);
    let lane = UNIT_POS % 32;
    let loads = lane == 0u32 && part < comptime!(product.parts());
    let ahead = comptime!(stages - 1);
    let mut fill = Turn { stage: 0u32, phase: 0u32 };
    let mut read = Turn { stage: 0u32, phase: 0u32 };
    let pairs = comptime!(product.pairs());
    let lanes = lanes(ring.a, ring.b, product);
    let b_at = comptime!(stages * a_bytes);
    let mut round = 0u32;
    let mut at = turn(order, round, product.walk);
    // No cube is without a tile.
    let start = place(at, &blocks, product.walk);
    if loads {
        for k in 0..min(start.depth, ahead) {
            load_part(a_map, b_map, &ring, &mut fill, &start, k, part, product, feed);
        }
    }
    while at < blocks.total {
        let following = turn(order, round + 1, product.walk);
        let place = place(at, &blocks, product.walk);
        let row0 = place.row * comptime!(ROWS as u32);
        let col0 = place.col * comptime!(product.n as u32);
        let first = place.block;
        let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(8 * pairs));
        #[unroll]
        for i in 0..comptime!(8 * pairs) {
            sums[i] = Vector::new(0.0f32);
        }
        // Fragments of the step at hand and of the next.
        let mut left = Array::<Vector<u32, Const<4>>>::new(8usize);
        let mut right = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * pairs));
        if place.depth > 0 {
            let (a_offset, b_offset) = (read.stage * a_bytes, read.stage * b_bytes);
            barrier_wait(ring.full + read.stage * 8, read.phase & 1);
            mask_stage(&mut shared, a_offset, b_at + b_offset, first, row0, col0, true, product);
            load_step(&mut left, &mut right, &lanes, a_offset, b_offset, 0u32, product);
        }
        for block in 0..place.depth {
            let (a_offset, b_offset) = (read.stage * a_bytes, read.stage * b_bytes);
            let done = ring.empty + read.stage * 8;
            forward(&mut read, feed);
            #[unroll]
            for step in 0..STEPS {
                if comptime!(step + 1 < STEPS) {
                    let next = comptime!(step + 1);
                    load_step(&mut left, &mut right, &lanes, a_offset, b_offset, next, product);
                } else if block + 1 < place.depth {
                    let (a_next, b_next) = (read.stage * a_bytes, read.stage * b_bytes);
                    let k = first + block + 1;
                    barrier_wait(ring.full + read.stage * 8, read.phase & 1);
                    mask_stage(&mut shared, a_next, b_at + b_next, k, row0, col0, true, product);
                    load_step(&mut left, &mut right, &lanes, a_next, b_next, 0u32, product);
                }
                multiply_step(&mut sums, &left, &right, step, product);
                if comptime!(step == 0) && loads && block + ahead < place.depth {
                    let k = block + ahead;
                    load_part(a_map, b_map, &ring, &mut fill, &place, k, part, product, feed);
                }
            }
            if lane == 0u32 {
                barrier_arrive(done);
            }
        }
        if loads && following < blocks.total {
            let next = schedule::place(following, &blocks, product.walk);
            for k in 0..min(next.depth, ahead) {
                load_part(a_map, b_map, &ring, &mut fill, &next, k, part, product, feed);
            }
        }
        store::<C, O, Two>(&sums, out, add, &addend, &lanes, &place, m, n, pitch, alpha, product);
        round += 1;
        at = following;
    }
}
