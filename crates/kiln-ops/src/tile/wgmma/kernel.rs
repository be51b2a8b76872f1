//! Products on Hopper's tensor cores: wgmma fed by TMA.
//!
//! As many cubes as multiprocessors walk over the tiles. Of the nine warps of a cube one loads: its
//! first lane keeps a ring of stages of both operands full through TMA. The others are two groups of
//! 128 units: each multiplies 64 rows of the tile, releases the stage, and at the end of K rounds its
//! sums into shared memory, from where TMA stores them. The ring runs on across tiles, so that the
//! loads of the next tile hide behind the stores of this one.

use crate::tile::mask::{crossed, mask_block, mask_result};
use crate::tile::operand::Order;
use crate::tile::ptx::*;
use crate::tile::schedule::{Blocks, DEPTH, ROWS, place, turn};
use crate::tile::{Epilogue, Triangles};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

/// Two groups that multiply and a warp that loads: within 168 registers a unit.
pub(crate) const UNITS: u32 = 288;
/// Bytes of a chunk of 64 rows on the way out; two for each group.
const CHUNK: usize = 8192;

/// The tile; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaTile {
    /// Columns: 64 to 256 in steps of 64.
    pub(crate) n: usize,
    /// Stages of the ring, as many as fit.
    pub(crate) stages: usize,
    /// Rows of tiles that are made together, so that they share columns of B in the cache.
    pub(crate) group: u32,
}

impl WgmmaTile {
    pub(crate) const fn new(n: usize) -> Self {
        let stage = (ROWS + n) * DEPTH * 2;
        let stages = (SHARED - 4 * CHUNK - 1024) / stage;
        Self { n, stages: if stages < 6 { stages } else { 6 }, group: 16 }
    }

    fn a_bytes(&self) -> usize {
        ROWS * DEPTH * 2
    }

    fn b_bytes(&self) -> usize {
        self.n * DEPTH * 2
    }
}

/// Shared memory that a cube may have.
const SHARED: usize = 227 * 1024;

/// What a product is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaProduct {
    pub(crate) tile: WgmmaTile,
    pub(crate) half: Half,
    pub(crate) a: Order,
    pub(crate) b: Order,
    pub(crate) stored: Stored,
    pub(crate) epilogue: Epilogue,
    pub(crate) triangles: Triangles,
}

impl WgmmaProduct {
    fn op(&self) -> Wgmma {
        Wgmma {
            half: self.half,
            n: self.tile.n,
            a_transposed: self.a == Order::Columns,
            b_transposed: self.b == Order::Rows,
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn wgmma_kernel<E: Float, C: Float, O: Float>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    out: &TensorMap<O, Tiled>,
    add: &[C],
    order: &[u32],
    add_batch: usize,
    add_row: usize,
    add_col: usize,
    m: u32,
    n: u32,
    blocks: Blocks,
    alpha: f32,
    beta: f32,
    #[comptime] product: WgmmaProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    let tile = comptime!(product.tile);
    let op = comptime!(product.op());
    let stages = comptime!(tile.stages as u32);
    let (a_bytes, b_bytes) = comptime!((tile.a_bytes() as u32, tile.b_bytes() as u32));
    let b_offset = comptime!(stages * a_bytes);
    let chunks_offset = comptime!(stages * (a_bytes + b_bytes));
    let barriers_offset = comptime!(chunks_offset + 4 * CHUNK as u32);
    let bytes = comptime!(barriers_offset as usize + 16 * tile.stages);
    let size!(Sums) = comptime!(op.held());

    // One allocation for everything: its address is all that the instructions see.
    let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(bytes / 4), 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let full = base + barriers_offset;
    let empty = full + comptime!(8 * stages);
    let (a_map, b_map) = (tensor_map_address(a), tensor_map_address(b));
    let out_map = tensor_map_address(out);

    // The same in all lanes, and known to be, so that descriptors stay in uniform registers.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let lane = UNIT_POS % 32;
    if UNIT_POS == 0 {
        #[unroll]
        for s in 0..stages {
            barrier_init(full + s * 8, 1u32);
            barrier_init(empty + s * 8, 2u32);
        }
        barrier_init_fence();
    }
    sync_cube();

    let mut round = 0u32;
    let mut at = turn(order, round, product.triangles);
    let mut stage = 0u32;
    let mut phase = 0u32;
    if warp == 8u32 {
        if lane == 0u32 {
            while at < blocks.total {
                let following = turn(order, round + 1, product.triangles);
                let place = place(at, &blocks, tile.group, product.triangles);
                for k in 0..place.depth {
                    barrier_wait(empty + stage * 8, phase ^ 1);
                    let bar = full + stage * 8;
                    barrier_expect(bar, comptime!(a_bytes + b_bytes));
                    let x = (place.block + k) * comptime!(DEPTH as u32);
                    let y = place.row * comptime!(ROWS as u32);
                    let dst = base + stage * a_bytes;
                    if comptime!(product.a == Order::Rows) {
                        tma_load(dst, a_map, bar, x, y, place.a);
                    } else {
                        #[unroll]
                        for i in 0..2u32 {
                            tma_load(dst + i * 8192, a_map, bar, y + i * 64, x, place.a);
                        }
                    }
                    let y = place.col * comptime!(tile.n as u32);
                    let dst = base + b_offset + stage * b_bytes;
                    if comptime!(product.b == Order::Columns) {
                        tma_load(dst, b_map, bar, x, y, place.b);
                    } else {
                        #[unroll]
                        for i in 0..comptime!(tile.n as u32 / 64) {
                            tma_load(dst + i * 8192, b_map, bar, y + i * 64, x, place.b);
                        }
                    }
                    stage += 1;
                    if stage == stages {
                        stage = 0u32;
                        phase ^= 1;
                    }
                }
                round += 1;
                at = following;
            }
        }
    } else {
        let group = warp / 4;
        let t = UNIT_POS % 128;
        // Blocks of 64 columns follow each other at 64 rows of 128 bytes: 512 units of 16 bytes.
        let a_desc =
            descriptor(base + group * 8192, comptime!(if op.a_transposed { 512u32 } else { 1u32 }));
        let b_desc =
            descriptor(base + b_offset, comptime!(if op.b_transposed { 512u32 } else { 1u32 }));
        let staging = base + chunks_offset + group * comptime!(2 * CHUNK as u32);
        let s0 = chunk_address(staging, t, 0u32, product.stored);
        let s1 = chunk_address(staging, t, 1u32, product.stored);
        let s2 = chunk_address(staging, t, 2u32, product.stored);
        let s3 = chunk_address(staging, t, 3u32, product.stored);

        while at < blocks.total {
            let following = turn(order, round + 1, product.triangles);
            let place = place(at, &blocks, tile.group, product.triangles);
            let row0 = place.row * comptime!(ROWS as u32) + group * 64;
            let col0 = place.col * comptime!(tile.n as u32);
            let mut sums = Array::<Vector<f32, Sums>>::new(1usize);
            sums[0] = Vector::new(0.0f32);
            for k in 0..place.depth {
                barrier_wait(full + stage * 8, phase & 1);
                if comptime!(product.triangles.masked()) {
                    // Each group of units masks its rows of A and its half of the columns of B.
                    let k0 = (place.block + k) * comptime!(DEPTH as u32);
                    let a_at = stage * a_bytes + group * 8192;
                    let b_at = b_offset + stage * b_bytes + group * 8192;
                    let cols = col0 + group * 64;
                    let (a_keeps, b_keeps) =
                        comptime!((product.triangles.a_keeps(), product.triangles.b_keeps()));
                    let along_k =
                        comptime!((product.a == Order::Rows, product.b == Order::Columns));
                    mask_block(&mut shared, a_at, row0, k0, t, 128u32, along_k.0, a_keeps);
                    mask_block(&mut shared, b_at, cols, k0, t, 128u32, along_k.1, b_keeps);
                    let a_crossed = crossed(k0, row0, 64u32, a_keeps);
                    let b_crossed = crossed(k0, col0, comptime!(tile.n as u32), b_keeps);
                    if a_crossed || b_crossed {
                        async_proxy_fence();
                    }
                    // Both groups read all of B.
                    if b_crossed {
                        sync_units(3u32, 256u32);
                    } else if a_crossed {
                        sync_units(group + 1, 128u32);
                    }
                }
                let da = a_desc + u64::cast_from(stage * comptime!(a_bytes / 16));
                let db = b_desc + u64::cast_from(stage * comptime!(b_bytes / 16));
                sums[0] = wgmma_block::<Sums>(sums[0], da, db, op);
                if t == 0u32 {
                    barrier_arrive(empty + stage * 8);
                }
                stage += 1;
                if stage == stages {
                    stage = 0u32;
                    phase ^= 1;
                }
            }

            if comptime!(product.epilogue.scaled) {
                sums[0] *= Vector::new(alpha);
            }
            if comptime!(product.epilogue.add) {
                let row = row0 + t / 32 * 16 + t % 32 / 4;
                let col = col0 + t % 4 * 2;
                let base = place.out as usize * add_batch;
                #[unroll]
                for i in 0..comptime!(op.sums()) {
                    let row = row + comptime!(i as u32 % 4 / 2 * 8);
                    let col = col + comptime!(i as u32 / 4 * 8 + i as u32 % 2);
                    if row < m && col < n {
                        let more = add[base + row as usize * add_row + col as usize * add_col];
                        let mut changed = sums[0];
                        changed.insert(i, changed.extract(i) + beta * f32::cast_from(more));
                        sums[0] = changed;
                    }
                }
            }
            if comptime!(product.triangles.out_lower) && col0 + comptime!(tile.n as u32) > row0 {
                sums[0] = mask_result::<Sums>(sums[0], row0, col0, t);
            }
            #[unroll]
            for c in 0..comptime!(tile.n / product.stored.columns()) {
                // The store before the last has read this half of the staging memory.
                if t == 0u32 {
                    tma_store_read(1u32);
                }
                sync_units(group + 1, 128u32);
                let offset = comptime!(c as u32 % 2 * CHUNK as u32);
                store_chunk::<Sums>(sums[0], s0, s1, s2, s3, offset, c, product.stored);
                async_proxy_fence();
                sync_units(group + 1, 128u32);
                if t == 0u32 {
                    let x = col0 + comptime!((c * product.stored.columns()) as u32);
                    // Boxes outside the result too, of which nothing is written: the wait above
                    // counts one store for each chunk.
                    if comptime!(product.epilogue.accumulate) {
                        tma_add(out_map, staging + offset, x, row0, place.out);
                    } else {
                        tma_store(out_map, staging + offset, x, row0, place.out);
                    }
                }
            }
            round += 1;
            at = following;
        }
        if t == 0u32 {
            tma_store_wait();
        }
    }
}
