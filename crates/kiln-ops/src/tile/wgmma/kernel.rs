//! Products on Hopper's tensor cores: wgmma fed by TMA.
//!
//! As many cubes as multiprocessors walk over the tiles, or pairs of cubes make one tile each, half of K by
//! each. Of the nine warps of a cube one loads: its first lane keeps a ring of stages of both operands full
//! through TMA. The others are two groups of 128 units: each multiplies 64 rows of the tile, releases the
//! stage, and at the end of K rounds its sums into shared memory, from where TMA stores them. Of cubes that
//! walk the ring runs on across tiles, so that the loads of the next tile hide behind the stores of this one;
//! a pair needs its rings at the end, to hand over the sums of the rows that the other one finishes. (Groups
//! that take whole tiles in turns need an order among themselves: a parity tells only one time round the ring
//! from the next.)

use crate::exponential::sigmoid;
use crate::tile::feed::{Feed, Maps, load_all, ring};
use crate::tile::mask::{crossed, mask_block, mask_result};
use crate::tile::operand::Order;
use crate::tile::ptx::*;
use crate::tile::schedule::{Blocks, DEPTH, ROWS, Walk, place, turn};
use crate::tile::{Addend, Epilogue, Pair};
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

/// Two groups that multiply and a warp that loads: within 168 registers a unit, 96 for two cubes.
pub(crate) const UNITS: u32 = 288;
/// Bytes of a chunk of 64 rows on the way out.
const CHUNK: usize = 8192;

/// The tile; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WgmmaTile {
    /// Columns: 64 to 256 in steps of 64.
    pub(crate) n: usize,
    /// Stages of the ring, as many as fit.
    pub(crate) stages: usize,
    /// Chunks on the way out of each group.
    pub(crate) staged: usize,
    /// Cubes on a multiprocessor.
    pub(crate) cubes: usize,
    /// Cubes of a cluster, 1 or 2, which share a tile, and make no other: each adds up a part of K.
    pub(crate) cluster: usize,
}

impl WgmmaTile {
    /// One cube on a multiprocessor.
    pub(crate) const fn new(n: usize) -> Self {
        Self::shared_by(1, n, 2)
    }

    /// Two cubes on a multiprocessor: one stores while the other multiplies.
    pub(crate) const fn two(n: usize) -> Self {
        Self::shared_by(2, n, 1)
    }

    /// One cube on a multiprocessor, and two of them share a tile.
    pub(crate) const fn clustered(n: usize) -> Self {
        Self { cluster: 2, ..Self::new(n) }
    }

    const fn shared_by(cubes: usize, n: usize, staged: usize) -> Self {
        let stage = (ROWS + n) * DEPTH * 2;
        // The device keeps 1 KiB of each cube to itself; barriers and alignment take less than 512.
        let room = (SHARED + 1024) / cubes - 1024 - 512 - 2 * staged * CHUNK;
        let stages = room / stage;
        Self { n, stages: if stages < 6 { stages } else { 6 }, staged, cubes, cluster: 1 }
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
    pub(crate) walk: Walk,
    pub(crate) pair: Pair,
}

impl WgmmaProduct {
    /// What is loaded.
    pub(crate) fn feed(&self) -> Feed {
        let WgmmaTile { n, stages, .. } = self.tile;
        let Self { a, b, walk, pair, .. } = *self;
        Feed { a, b, n, stages, walk, pair }
    }

    /// Chunks that a group stores.
    fn chunks(&self) -> usize {
        let all = self.tile.n / self.stored.columns();
        match self.pair {
            Pair::Gate { keep: true } => all + all / 2,
            Pair::Gate { keep: false } => all / 2,
            // All of a tile as it is, then transposed.
            _ if self.walk.symmetric => 2 * all,
            Pair::None | Pair::Sum => all,
        }
    }

    fn op(&self) -> Wgmma {
        Wgmma {
            half: self.half,
            n: self.tile.n,
            a_transposed: self.a == Order::Columns,
            b_transposed: self.b == Order::Rows,
        }
    }
}

/// silu(g) · u of the first `half` sums and the others, in place of the first.
#[cube]
fn gate_sums<N: Size>(sums: Vector<f32, N>, #[comptime] half: usize) -> Vector<f32, N> {
    let mut gated = sums;
    #[unroll]
    for i in 0..half {
        let (g, u) = (sums.extract(i), sums.extract(comptime!(i + half)));
        let s = sigmoid::<Const<1>>(Vector::new(g), true);
        gated.insert(i, g * s.extract(0usize) * u);
    }
    gated
}

/// What takes a box out of the result if `skipped`. (Selecting the result's width instead ended in an illegal
/// instruction at the store.)
#[cube]
fn outside(skipped: bool) -> u32 {
    u32::cast_from(skipped) << 24
}

/// One product by cubes on their own. (As clusters of one they would be placed otherwise, 1.3 times as slow
/// at 768×4096 from 8192 on an H200.)
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn wgmma_kernel<E: Float, C: Float, O: Float>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    b_second: &TensorMap<E, Tiled>,
    out: &TensorMap<O, Tiled>,
    hidden: &TensorMap<O, Tiled>,
    add: &[C],
    order: &[u32],
    addend: Addend,
    m: u32,
    n: u32,
    blocks: Blocks,
    alpha: f32,
    #[comptime] product: WgmmaProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    multiply::<E, C, O>(
        a, b, b_second, out, hidden, add, order, &addend, m, n, &blocks, alpha, product,
    );
}

/// One product by clusters that share a tile.
#[cube(
    launch_unchecked,
    address_type = "dynamic",
    cluster_dim = CubeDim::new_1d(product.walk.cluster)
)]
pub(crate) fn wgmma_cluster_kernel<E: Float, C: Float, O: Float>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    b_second: &TensorMap<E, Tiled>,
    out: &TensorMap<O, Tiled>,
    hidden: &TensorMap<O, Tiled>,
    add: &[C],
    order: &[u32],
    addend: Addend,
    m: u32,
    n: u32,
    blocks: Blocks,
    alpha: f32,
    #[comptime] product: WgmmaProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    multiply::<E, C, O>(
        a, b, b_second, out, hidden, add, order, &addend, m, n, &blocks, alpha, product,
    );
}

#[cube]
fn multiply<E: Float, C: Float, O: Float>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    b_second: &TensorMap<E, Tiled>,
    out: &TensorMap<O, Tiled>,
    hidden: &TensorMap<O, Tiled>,
    add: &[C],
    order: &[u32],
    addend: &Addend,
    m: u32,
    n: u32,
    blocks: &Blocks,
    alpha: f32,
    #[comptime] product: WgmmaProduct,
) {
    let tile = comptime!(product.tile);
    let op = comptime!(product.op());
    let feed = comptime!(product.feed());
    let triangles = comptime!(product.walk.triangles);
    let cluster = comptime!(product.walk.cluster);
    let stages = comptime!(tile.stages as u32);
    let (a_bytes, b_bytes) = comptime!((feed.a_bytes(), feed.b_bytes()));
    let columns = comptime!(product.pair.columns(tile.n) as u32);
    let b_offset = comptime!(stages * a_bytes);
    let chunks_offset = comptime!(stages * (a_bytes + b_bytes));
    let staged_bytes = comptime!((tile.staged * CHUNK) as u32);
    let bytes = comptime!(feed.bytes() + 2 * staged_bytes as usize);
    let size!(Sums) = comptime!(op.held());

    // One allocation for everything: its address is all that the instructions see.
    let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(bytes / 4), 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let barriers = base + comptime!(chunks_offset + 2 * staged_bytes);
    let ring = ring(base, barriers, 1u32, 2u32, feed);
    let maps = Maps {
        a: tensor_map_address(a),
        b: tensor_map_address(b),
        b_second: tensor_map_address(b_second),
    };
    let (out_map, hidden_map) = (tensor_map_address(out), tensor_map_address(hidden));

    // The same in all lanes, and known to be, so that descriptors stay in uniform registers.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    let lane = UNIT_POS % 32;
    if warp == 8u32 {
        if lane == 0u32 {
            load_all(&maps, &ring, order, blocks, feed);
        }
    } else {
        let mut round = 0u32;
        let mut at = turn(order, round, product.walk);
        let mut stage = 0u32;
        let mut phase = 0u32;
        let group = warp / 4;
        let t = UNIT_POS % 128;
        // Blocks of 64 columns follow each other at 64 rows of 128 bytes: 512 units of 16 bytes.
        let a_desc =
            descriptor(base + group * 8192, comptime!(if op.a_transposed { 512u32 } else { 1u32 }));
        let b_desc =
            descriptor(base + b_offset, comptime!(if op.b_transposed { 512u32 } else { 1u32 }));
        let staging = base + chunks_offset + group * staged_bytes;
        let s0 = chunk_address(staging, t, 0u32, product.stored, false);
        let s1 = chunk_address(staging, t, 1u32, product.stored, false);
        let s2 = chunk_address(staging, t, 2u32, product.stored, false);
        let s3 = chunk_address(staging, t, 3u32, product.stored, false);

        let symmetric = comptime!(product.walk.symmetric);
        let t0 = chunk_address(staging, t, 0u32, product.stored, true);
        let t1 = chunk_address(staging, t, 1u32, product.stored, true);
        let t2 = chunk_address(staging, t, 2u32, product.stored, true);
        let t3 = chunk_address(staging, t, 3u32, product.stored, true);

        while at < blocks.total {
            let following = turn(order, round + 1, product.walk);
            let place = place(at, blocks, product.walk);
            let row0 = place.row * comptime!(ROWS as u32) + group * 64;
            let col0 = place.col * columns;
            let mut sums = Array::<Vector<f32, Sums>>::new(1usize);
            sums[0] = Vector::new(0.0f32);
            for k in 0..place.depth {
                barrier_wait(ring.full + stage * 8, phase & 1);
                if comptime!(triangles.masked()) {
                    // Each group of units masks its rows of A and its half of the columns of B.
                    let k0 = (place.block + k) * comptime!(DEPTH as u32);
                    let a_at = stage * a_bytes + group * 8192;
                    let b_at = b_offset + stage * b_bytes + group * 8192;
                    let cols = col0 + group * 64;
                    let (a_keeps, b_keeps) = comptime!((triangles.a_keeps(), triangles.b_keeps()));
                    let along_k =
                        comptime!((product.a == Order::Rows, product.b == Order::Columns));
                    mask_block(&mut shared, a_at, row0, k0, t, 128u32, along_k.0, a_keeps);
                    mask_block(&mut shared, b_at, cols, k0, t, 128u32, along_k.1, b_keeps);
                    // Both groups read all of B, and pass the barrier together.
                    let tile_row = place.row * comptime!(ROWS as u32);
                    let extent = comptime!(ROWS as u32);
                    if crossed(k0, tile_row, extent, a_keeps) || crossed(k0, col0, extent, b_keeps)
                    {
                        async_proxy_fence();
                        sync_units(3u32, 256u32);
                    }
                }
                let da = a_desc + u64::cast_from(stage * comptime!(a_bytes / 16));
                let db = b_desc + u64::cast_from(stage * comptime!(b_bytes / 16));
                sums[0] = wgmma_block::<Sums>(sums[0], da, db, op);
                if t == 0u32 {
                    barrier_arrive(ring.empty + stage * 8);
                }
                stage += 1;
                if stage == stages {
                    stage = 0u32;
                    phase ^= 1;
                }
            }

            // Of two cubes each finishes 64 rows, when both have read their rings.
            let finishes = comptime!(cluster == 1) || CUBE_POS_X % cluster == group;
            if comptime!(cluster == 2) {
                sync_cluster();
                if !finishes {
                    send_sums::<Sums>(sums[0], cluster_address(base, group), t, op);
                }
                sync_cluster();
            }
            if finishes {
                if comptime!(cluster == 2) {
                    sums[0] = add_sent::<Sums>(sums[0], base, t, op);
                }
                if comptime!(product.epilogue.scaled) {
                    sums[0] *= Vector::new(alpha);
                }
                if comptime!(product.epilogue.add) {
                    let row = row0 + t / 32 * 16 + t % 32 / 4;
                    let col = col0 + t % 4 * 2;
                    let base = place.out as usize * addend.batch;
                    #[unroll]
                    for i in 0..comptime!(op.sums()) {
                        let row = row + comptime!(i as u32 % 4 / 2 * 8);
                        let col = col + comptime!(i as u32 / 4 * 8 + i as u32 % 2);
                        if row < m && col < n {
                            let more =
                                add[base + row as usize * addend.row + col as usize * addend.col];
                            let mut changed = sums[0];
                            changed
                                .insert(i, changed.extract(i) + addend.beta * f32::cast_from(more));
                            sums[0] = changed;
                        }
                    }
                }
                if comptime!(triangles.out_lower) {
                    sums[0] = mask_result::<Sums>(sums[0], row0, col0, t);
                }
                let chunks = comptime!(product.chunks());
                let hidden_chunks = comptime!(columns as usize / product.stored.columns());
                #[unroll]
                for number in 0..chunks {
                    // Of a gate the last ones are what it makes of the two products.
                    let gated = comptime!(product.pair.gates() && number + hidden_chunks >= chunks);
                    if comptime!(gated && number + hidden_chunks == chunks) {
                        sums[0] = gate_sums::<Sums>(sums[0], comptime!(op.sums() / 2));
                    }
                    // What was stored from this place before has been read: so many stores ago, or, as the
                    // first of a tile, where the chunks of a tile do not fill all places equally, the last.
                    let pending = comptime!(match number == 0 && chunks % tile.staged != 0 {
                        true => 0u32,
                        false => tile.staged as u32 - 1,
                    });
                    if t == 0u32 {
                        tma_store_read(pending);
                    }
                    sync_units(group + 1, 128u32);
                    let offset = comptime!((number % tile.staged * CHUNK) as u32);
                    let turned = comptime!(symmetric && number >= hidden_chunks);
                    let c = comptime!(if gated { number + hidden_chunks - chunks } else { number });
                    let c = comptime!(if turned { c - hidden_chunks } else { c });
                    let (to0, to1, to2, to3) =
                        if comptime!(turned) { (t0, t1, t2, t3) } else { (s0, s1, s2, s3) };
                    store_chunk::<Sums>(
                        sums[0],
                        to0,
                        to1,
                        to2,
                        to3,
                        offset,
                        c,
                        product.stored,
                        turned,
                    );
                    async_proxy_fence();
                    sync_units(group + 1, 128u32);
                    if t == 0u32 {
                        let x =
                            col0 + comptime!((c % hidden_chunks * product.stored.columns()) as u32);
                        // Boxes outside the result too, of which nothing is written: the wait above
                        // counts one store for each chunk.
                        if comptime!(turned) {
                            // Below the diagonal.
                            let y = x + outside(x >= row0);
                            tma_store(out_map, staging + offset, row0, y, place.out);
                        } else if comptime!(symmetric) {
                            // On and below it.
                            let x = x + outside(x > row0);
                            tma_store(out_map, staging + offset, x, row0, place.out);
                        } else if comptime!(gated) {
                            tma_store(hidden_map, staging + offset, x, row0, place.out);
                        } else if comptime!(product.epilogue.accumulate) {
                            tma_add(out_map, staging + offset, x, row0, place.out);
                        } else {
                            let z = place.out + comptime!((c / hidden_chunks) as u32);
                            tma_store(out_map, staging + offset, x, row0, z);
                        }
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
