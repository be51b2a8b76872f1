//! What a warpgroup does: sums over K, the end of a sum, and its way out.

use super::product::{STORE_BYTES, WgmmaProduct};
use crate::tile::cuda::fragment::{add_matrix, origin, zero_above};
use crate::tile::cuda::mask::{crossed, mask_block};
use crate::tile::cuda::pipeline::PipelineState;
use crate::tile::cuda::producer::Buffers;
use crate::tile::cuda::ptx::*;
use crate::tile::cuda::schedule::{DEPTH, PART, ROWS, TileGrid, WorkTile, work_index, work_tile};
use crate::tile::cuda::store::{ChunkAddresses, Stored, add_chunk, chunk_addresses, store_chunk};
use crate::tile::epilogue::Epilogue;
use crate::tile::finish::Finish;
use crate::tile::view::Order;
use cubecl::prelude::*;

/// Where results go: the products, and what an epilogue makes of two of them.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Results {
    pub(super) out: u64,
    pub(super) joined: u64,
}

/// A warpgroup: which of the two, a unit's number in it, its operands and its chunks in shared memory.
#[derive(CubeType, Clone, Copy)]
struct Warpgroup {
    number: u32,
    unit: u32,
    a: u64,
    b: u64,
    staging: u32,
}

/// Makes all tiles of this cube, 64 rows of each; for the units of a warpgroup.
#[cube]
pub(super) fn consume<C: Float, Ep: Epilogue>(
    shared: &mut Shared<[u32]>,
    buffers: &Buffers,
    staging: u32,
    warp: u32,
    results: &Results,
    add: &[C],
    scales: &[f32],
    order: &[u32],
    finish: &Finish,
    grid: &TileGrid,
    #[comptime] product: WgmmaProduct,
) {
    let op = comptime!(product.op());
    let scheduler = comptime!(product.scheduler);
    let cluster = comptime!(scheduler.cluster);
    let linear = comptime!(product.store.linear);
    let size!(Sums) = comptime!(op.held());
    let number = warp / 4;
    let unit = UNIT_POS % 128;
    let staged = comptime!(product.tile.staged as u32 * STORE_BYTES);
    // Blocks of 64 columns follow each other at 64 rows of 128 bytes: 512 units of 16 bytes.
    let a_columns = comptime!(if op.a_transposed { 512u32 } else { 1u32 });
    let b_columns = comptime!(if op.b_transposed { 512u32 } else { 1u32 });
    let me = Warpgroup {
        number,
        unit,
        a: descriptor(buffers.a + number * PART, a_columns),
        b: descriptor(buffers.b, b_columns),
        staging: staging + number * staged,
    };
    let places = chunk_addresses(me.staging, unit, product.store.stored);

    let mut state = PipelineState::start();
    let mut round = 0u32;
    let mut at = work_index(order, round, scheduler);
    while at < grid.total {
        let following = work_index(order, round + 1, scheduler);
        let tile = work_tile(at, grid, scheduler);
        let mut sums = Array::<Vector<f32, Sums>>::new(1usize);
        sums[0] = accumulate::<Sums>(shared, &me, buffers, &mut state, &tile, product);
        // Of two cubes each finishes 64 rows, when both have read their rings.
        let finishes = comptime!(cluster == 1) || CUBE_POS_X % cluster == number;
        if comptime!(cluster == 2) {
            sync_cluster();
            if !finishes {
                send_sums::<Sums>(sums[0], cluster_address(buffers.a, number), unit, op);
            }
            sync_cluster();
        }
        if finishes {
            if comptime!(cluster == 2) {
                sums[0] = add_sent::<Sums>(sums[0], buffers.a, unit, op);
            }
            if comptime!(linear.scaled) {
                sums[0] *= Vector::new(finish.alpha(scales, tile.out as usize, linear));
            }
            let beta = finish.beta(scales, tile.out as usize, linear);
            if comptime!(product.store.loaded) {
                sums[0] = add_loaded::<Sums>(sums[0], &me, buffers, &mut state, beta, product);
            }
            sums[0] = finished::<C, Sums>(sums[0], &me, add, finish, beta, grid, &tile, product);
            store::<Sums, Ep>(sums[0], &me, &places, results, &tile, product);
        }
        round += 1;
        at = following;
    }
    if unit == 0u32 {
        tma_store_wait();
    }
}

/// The sums of 64 rows of a tile over its blocks of K.
#[cube]
fn accumulate<N: Size>(
    shared: &mut Shared<[u32]>,
    me: &Warpgroup,
    buffers: &Buffers,
    state: &mut PipelineState,
    tile: &WorkTile,
    #[comptime] product: WgmmaProduct,
) -> Vector<f32, N> {
    let op = comptime!(product.op());
    let stages = comptime!(product.stages());
    let mut sums = Array::<Vector<f32, N>>::new(1usize);
    sums[0] = Vector::new(0.0f32);
    for k in 0..tile.depth {
        buffers.ring.wait(state.stage, state.phase);
        if comptime!(product.scheduler.triangles.masked()) {
            mask(shared, me, state.stage, tile, tile.block + k, product);
        }
        let a = me.a + u64::cast_from(state.stage * comptime!(stages.a_bytes() / 16));
        let b = me.b + u64::cast_from(state.stage * comptime!(stages.b_bytes() / 16));
        sums[0] = wgmma_issue::<N>(sums[0], a, b, op);
        wgmma_commit();
        // One product under way while the next is issued won nothing (0.98 to 1.01 in 20 products of training on an
        // H200): two warpgroups cover each other.
        sums[0] = wgmma_wait::<N>(sums[0], 0u32, op);
        if me.unit == 0u32 {
            buffers.ring.release(state.stage);
        }
        state.advance(comptime!(stages.count as u32));
    }
    sums[0]
}

/// Masks a stage of triangles: each warpgroup its rows of A and its half of the columns of B.
#[cube]
fn mask(
    shared: &mut Shared<[u32]>,
    me: &Warpgroup,
    stage: u32,
    tile: &WorkTile,
    block: u32,
    #[comptime] product: WgmmaProduct,
) {
    let stages = comptime!(product.stages());
    let triangles = comptime!(product.scheduler.triangles);
    let (a_keeps, b_keeps) = comptime!((triangles.a_keeps(), triangles.b_keeps()));
    let a_along_k = comptime!(product.a == Order::RowMajor);
    let b_along_k = comptime!(product.b == Order::ColMajor);
    let rows = comptime!(ROWS as u32);
    let k0 = block * comptime!(DEPTH as u32);
    let (row0, col0) = (tile.row * rows, tile.col * rows);
    let part = me.number * 64;
    let a_at = stage * comptime!(stages.a_bytes()) + me.number * PART;
    let b_from = comptime!(stages.count as u32 * stages.a_bytes());
    let b_at = b_from + stage * comptime!(stages.b_bytes()) + me.number * PART;
    mask_block(shared, a_at, row0 + part, k0, me.unit, 128u32, a_along_k, a_keeps);
    mask_block(shared, b_at, col0 + part, k0, me.unit, 128u32, b_along_k, b_keeps);
    // Both warpgroups read all of B, and pass the barrier together.
    if crossed(k0, row0, rows, a_keeps) || crossed(k0, col0, rows, b_keeps) {
        async_proxy_fence();
        sync_units(3u32, 256u32);
    }
}

/// sums + beta · C, whose rows come through the ring: those of each warpgroup in a stage.
#[cube]
fn add_loaded<N: Size>(
    sums: Vector<f32, N>,
    me: &Warpgroup,
    buffers: &Buffers,
    state: &mut PipelineState,
    beta: f32,
    #[comptime] product: WgmmaProduct,
) -> Vector<f32, N> {
    let stages = comptime!(product.stages());
    let count = comptime!(stages.count as u32);
    let stored = comptime!(Stored::Float16(product.float));
    let mut added = Array::<Vector<f32, N>>::new(1usize);
    added[0] = sums;
    // `state` goes on at the end: a copy of a variable is the variable.
    let last = state.stage == count - 1;
    let second = select(last, 0u32, state.stage + 1);
    // Both by both: who releases a stage has seen that it was filled.
    buffers.ring.wait(state.stage, state.phase);
    buffers.ring.wait(second, select(last, state.phase ^ 1, state.phase));
    let mine = select(me.number == 0u32, state.stage, second);
    let places = chunk_addresses(buffers.b + mine * stages.b_bytes(), me.unit, stored);
    #[unroll]
    for chunk in 0..comptime!(product.tile.n / 64) {
        added[0] = add_chunk::<N>(added[0], &places, beta, chunk, product.float);
    }
    sync_units(me.number + 1, 128u32);
    if me.unit == 0u32 {
        buffers.ring.release(state.stage);
        buffers.ring.release(second);
    }
    state.advance(count);
    state.advance(count);
    added[0]
}

/// What is left to do with sums: plus beta · C where that was not loaded, the part above the diagonal zero where only
/// the lower triangle is wanted.
#[cube]
fn finished<C: Float, N: Size>(
    sums: Vector<f32, N>,
    me: &Warpgroup,
    add: &[C],
    finish: &Finish,
    beta: f32,
    grid: &TileGrid,
    tile: &WorkTile,
    #[comptime] product: WgmmaProduct,
) -> Vector<f32, N> {
    let linear = comptime!(product.store.linear);
    let (row, col) = origin(me.unit);
    let row = tile.row * comptime!(ROWS as u32) + me.number * 64 + row;
    let col = tile.col * comptime!(product.columns() as u32) + col;
    let mut done = Array::<Vector<f32, N>>::new(1usize);
    done[0] = sums;
    if comptime!(linear.add && !product.store.loaded) {
        let count = comptime!(product.op().sums());
        let (m, n) = (grid.m, grid.n);
        done[0] = add_matrix::<C, N>(done[0], add, finish, beta, tile.out, row, col, m, n, count);
    }
    if comptime!(product.scheduler.triangles.out_lower) {
        done[0] = zero_above::<N>(done[0], row, col);
    }
    done[0]
}

/// What an epilogue makes of the first half of the sums and the others, in place of the first.
#[cube]
fn join<N: Size, Ep: Epilogue>(sums: Vector<f32, N>, #[comptime] half: usize) -> Vector<f32, N> {
    let mut joined = sums;
    #[unroll]
    for i in 0..half {
        joined.insert(i, Ep::join(sums.extract(i), sums.extract(comptime!(i + half)), true));
    }
    joined
}

/// What takes a box out of the result if `skipped`. (Selecting the result's width instead ended in an illegal
/// instruction at the store.)
#[cube]
fn outside(skipped: bool) -> u32 {
    u32::cast_from(skipped) << 24
}

/// Stores 64 rows of a tile chunk by chunk, through shared memory and TMA.
#[cube]
fn store<N: Size, Ep: Epilogue>(
    sums: Vector<f32, N>,
    me: &Warpgroup,
    places: &ChunkAddresses,
    results: &Results,
    tile: &WorkTile,
    #[comptime] product: WgmmaProduct,
) {
    let staged = comptime!(product.tile.staged);
    let across = comptime!(product.chunks_across());
    let chunks = comptime!(product.chunks());
    let mut held = Array::<Vector<f32, N>>::new(1usize);
    held[0] = sums;
    #[unroll]
    for number in 0..chunks {
        // Of a dual GEMM the last ones are what the epilogue makes of the two products.
        let joined = comptime!(product.dual.joins() && number + across >= chunks);
        if comptime!(joined && number + across == chunks) {
            held[0] = join::<N, Ep>(held[0], comptime!(product.op().sums() / 2));
        }
        // What was stored from this place before has been read: so many stores ago, or, as the
        // first of a tile, where the chunks of a tile do not fill all places equally, the last.
        let pending = comptime!(match number == 0 && chunks % staged != 0 {
            true => 0u32,
            false => staged as u32 - 1,
        });
        if me.unit == 0u32 {
            tma_store_read(pending);
        }
        sync_units(me.number + 1, 128u32);
        let offset = comptime!((number % staged) as u32 * STORE_BYTES);
        let mirrored = comptime!(product.scheduler.symmetric && number >= across);
        let transposed = comptime!(product.store.transposed || mirrored);
        let chunk = comptime!(match (joined, mirrored) {
            (true, _) => number + across - chunks,
            (_, true) => number - across,
            _ => number,
        });
        store_chunk::<N>(held[0], places, offset, chunk, product.store.stored, transposed);
        async_proxy_fence();
        sync_units(me.number + 1, 128u32);
        if me.unit == 0u32 {
            let from = me.staging + offset;
            send_chunk(from, me.number, results, tile, chunk, joined, transposed, product);
        }
    }
}

/// Lets TMA store a chunk. Boxes outside the result too, of which nothing is written: who waits for a place
/// counts one store for each chunk.
#[cube]
fn send_chunk(
    from: u32,
    warpgroup: u32,
    results: &Results,
    tile: &WorkTile,
    #[comptime] chunk: usize,
    #[comptime] joined: bool,
    #[comptime] transposed: bool,
    #[comptime] product: WgmmaProduct,
) {
    let width = comptime!(product.store.stored.columns());
    let across = comptime!(product.chunks_across());
    let row = tile.row * comptime!(ROWS as u32) + warpgroup * 64;
    let col0 = tile.col * comptime!(product.columns() as u32);
    let col = col0 + comptime!((chunk % across * width) as u32);
    // The first column of the square of 64 that the chunk belongs to.
    let square = col0 + comptime!((chunk % across * width / 64 * 64) as u32);
    if comptime!(transposed) {
        // Of f32 a chunk is half of a square, by its rows; of symmetric results those below the diagonal.
        let x = row + comptime!((chunk % (64 / width) * width) as u32);
        let skipped = comptime!(product.scheduler.symmetric) && square >= row;
        tma_store(results.out, from, x, square + outside(skipped), tile.out);
    } else if comptime!(product.scheduler.symmetric) {
        // On and below it.
        tma_store(results.out, from, col + outside(square > row), row, tile.out);
    } else if comptime!(joined) {
        tma_store(results.joined, from, col, row, tile.out);
    } else if comptime!(product.store.accumulate) {
        tma_add(results.out, from, col, row, tile.out);
    } else {
        let z = tile.out + comptime!((chunk / across) as u32);
        tma_store(results.out, from, col, row, z);
    }
}
