//! Thin products of bf16 and f16 on tensor cores: mma.sync fed by cp.async, compute capability 8.0 and
//! later.
//!
//! The large operand is the side of 16 rows of the instruction, the thin one that of 8 columns. A cube
//! makes a tile of 64, 128 or 256 rows and all columns, over a part of K: eight warps copy blocks of 64 of K of
//! both operands into a ring of stages, 16 bytes a unit and swizzled by 128 bytes, and multiply 32 rows each.
//! Where the tile has fewer than eight times 32 rows, warps share rows and take steps of K in turn;
//! what they have is added up in order at the end, through shared memory.
//!
//! A block of 256 rows is 32 KiB, which take 1780 clocks of a multiprocessor's share of 4.26 TB/s. Of 80
//! columns they are 640 instructions a cube, about 1000 clocks at the rate that mma.sync reaches,
//! and 150 KiB of shared memory, 1200 clocks: why fragments of the thin side serve 32 rows.

use super::plan::{Plan, plan};
use super::{Oriented, Places};
use crate::launch;
use crate::tile::cuda::copies::{Source, copy_block, source};
use crate::tile::cuda::fragment::{offset, origin};
use crate::tile::cuda::ptx::*;
use crate::tile::cuda::schedule::{DEPTH, PART};
use crate::tile::finish::{Finish, Linear};
use crate::tile::split_k;
use crate::tile::view::{Operand, OperandLaunch};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// Units of a cube.
const UNITS: u32 = 256;

/// What a product is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ThinProduct {
    /// Rows of a tile: 64, 128 or 256.
    pub(super) rows: u32,
    /// Columns, in eights.
    pub(super) eights: u32,
    pub(super) stages: u32,
    float: Float16,
    /// Whether k is the contiguous dimension.
    pub(super) large_along_k: bool,
    pub(super) thin_along_k: bool,
    /// Rows of the large operand stand side by side in the result.
    swapped: bool,
    linear: Linear,
}

impl ThinProduct {
    /// Warps that share rows.
    fn sharing(&self) -> u32 {
        256 / self.rows
    }

    /// Columns in sixteens, as they are loaded.
    fn pairs(&self) -> u32 {
        self.eights.div_ceil(2)
    }

    /// Bytes of a stage's rows of the large operand.
    fn large_bytes(&self) -> u32 {
        self.rows * 128
    }

    /// Bytes of a stage of both.
    fn stage_bytes(&self) -> u32 {
        self.large_bytes() + thin_bytes(self.eights as usize, self.thin_along_k) as u32
    }

    /// f32 that the warps hand over at the end.
    fn handed(&self) -> u32 {
        self.sharing() * self.eights * 8 * (self.rows + 1)
    }

    /// Elements of shared memory, of four bytes.
    fn shared(&self) -> u32 {
        (self.stages * self.stage_bytes() / 4).max(self.handed())
    }
}

/// Bytes of a stage's columns of the thin operand.
pub(super) fn thin_bytes(eights: usize, along_k: bool) -> usize {
    let columns = eights.next_multiple_of(2) * 8;
    if along_k { columns * 128 } else { columns.div_ceil(64) * PART as usize }
}

/// Makes `out`, contiguous.
pub(super) fn run(t: &Oriented<'_>, out: &CubeTensor) {
    let (o, client) = (t.o, &out.client);
    let eights = super::plan::eights(t.cols);
    let [large_along_k, thin_along_k] = t.along_k();
    let Plan { rows, stages, splits, .. } = plan(
        [t.rows, t.cols, o.k, o.batches].map(launch::limits::reckoned),
        thin_bytes(eights, thin_along_k),
        launch::multiprocessors(client),
        client.properties().hardware.max_shared_memory_size,
    );
    // Planned for other sizes, as many parts as there are blocks for.
    let blocks = o.k.div_ceil(64);
    let depth = blocks.div_ceil(splits);
    let splits = blocks.div_ceil(depth);
    let split = splits > 1;
    let target = match split {
        true => split_k::workspace(out, o.op, splits * o.batches * o.m, o.n, o.n),
        false => out.clone(),
    };
    let product = ThinProduct {
        rows: rows as u32,
        eights: eights as u32,
        stages: stages as u32,
        float: Float16::of(t.large.tensor.dtype),
        large_along_k,
        thin_along_k,
        swapped: t.swapped,
        linear: Linear::of(o, split),
    };
    let add = o.add.as_ref().filter(|_| product.linear.add).map(|(add, _)| add.tensor.clone());
    let add = add.unwrap_or_else(|| launch::unused(out, DType::F32));
    let dtypes = [t.large.tensor.dtype, add.dtype, target.dtype].map(dtype_to_elem_type);
    let tiles = t.rows.div_ceil(rows);
    let jobs = tiles * splits * o.batches;
    let address = launch::address_type(&[&t.large.tensor, &t.thin.tensor, &add, &target]);
    let ways = [
        ("parts of K", split),
        ("a batch", o.batches > 1),
        ("more blocks than stages", depth > stages),
    ];
    launch::plans::note(launch::plans::THIN, &(&product, address, dtypes), &ways);
    // SAFETY: copies beyond the operands have no bytes, C and the result are only touched inside their
    // rows and columns.
    unsafe {
        thin_kernel::launch_unchecked(
            client,
            launch::grid(client, jobs),
            CubeDim::new_1d(UNITS),
            address,
            t.large.tensor.clone().into_buffer_arg(),
            t.thin.tensor.clone().into_buffer_arg(),
            add.into_buffer_arg(),
            target.clone().into_buffer_arg(),
            OperandLaunch::new(t.large.batch_step(), t.large.ld),
            OperandLaunch::new(t.thin.batch_step(), t.thin.ld),
            t.out_places(),
            SizesLaunch::new(
                t.rows as u32,
                t.cols as u32,
                o.k as u32,
                depth as u32,
                splits as u32,
                tiles as u32,
                jobs as u32,
            ),
            t.finish(),
            product,
            dtypes,
        );
    }
    if split {
        split_k::add_up(&target, splits, o, out);
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: u32,
    cols: u32,
    k: u32,
    /// Blocks of K of a part.
    depth: u32,
    /// Parts of K.
    splits: u32,
    /// Tiles of rows.
    tiles: u32,
    /// Tiles of all parts of all products.
    total: u32,
}

/// Where a lane finds the rows of 8×8 matrices that it names, in bytes from a stage's start, and its
/// first chunk of 16 bytes there, before the swizzle.
#[derive(CubeType, Clone, Copy)]
struct Lane {
    large: u32,
    large_chunk: u32,
    thin: u32,
    thin_chunk: u32,
    /// `lane % 8`, which rows are swizzled by.
    low: u32,
}

#[cube]
fn lane(warp_row: u32, #[comptime] product: ThinProduct) -> Lane {
    let lane = UNIT_POS % 32;
    let (low, quarter) = (lane % 8, lane / 8);
    let (large, large_chunk) = if comptime!(product.large_along_k) {
        ((warp_row * 32 + lane % 16) * 128, lane / 16)
    } else {
        (warp_row / 2 * PART + (quarter / 2 * 8 + low) * 128, warp_row % 2 * 4 + quarter % 2)
    };
    let (thin, thin_chunk) = if comptime!(product.thin_along_k) {
        ((quarter / 2 * 8 + low) * 128, quarter % 2)
    } else {
        ((quarter % 2 * 8 + low) * 128, quarter / 2)
    };
    let thin = thin + comptime!(product.large_bytes());
    Lane { large, large_chunk, thin, thin_chunk, low }
}

/// Adds the product of 32 rows and all columns over a step of 16 of K of the stage at `base`.
#[cube]
fn multiply(
    sums: &mut Array<Vector<f32, Const<4>>>,
    base: u32,
    step: u32,
    lane: &Lane,
    #[comptime] product: ThinProduct,
) {
    let eights = comptime!(product.eights);
    let mut left = Array::<Vector<u32, Const<4>>>::new(2usize);
    #[unroll]
    for i in 0..2u32 {
        let (row, chunk) = if comptime!(product.large_along_k) {
            (comptime!(i * 2048).runtime(), lane.large_chunk + step * 2)
        } else {
            (step * 2048, lane.large_chunk + comptime!(i * 2))
        };
        let from = base + lane.large + row + ((chunk ^ lane.low) << 4);
        left[i as usize] = load_matrices(from, comptime!(!product.large_along_k));
    }
    #[unroll]
    for j in 0..comptime!(product.pairs()) {
        let (row, chunk) = if comptime!(product.thin_along_k) {
            (comptime!(j * 2048).runtime(), lane.thin_chunk + step * 2)
        } else {
            (step * 2048 + comptime!(j / 4 * PART), lane.thin_chunk + comptime!(j % 4 * 2))
        };
        let from = base + lane.thin + row + ((chunk ^ lane.low) << 4);
        let right = load_matrices(from, comptime!(!product.thin_along_k));
        #[unroll]
        for half in 0..2u32 {
            if comptime!(2 * j + half < eights) {
                let b0 = right.extract(comptime!((2 * half) as usize));
                let b1 = right.extract(comptime!((2 * half + 1) as usize));
                #[unroll]
                for i in 0..2u32 {
                    let at = comptime!((i * eights + 2 * j + half) as usize);
                    sums[at] = mma_16x8x16(left[i as usize], b0, b1, sums[at], product.float);
                }
            }
        }
    }
}

/// The piece of work of a cube: a tile of rows over a part of K.
#[derive(CubeType, Clone, Copy)]
struct Job {
    row0: u32,
    /// Blocks of K: the first and how many.
    first: u32,
    depth: u32,
    /// Product of the batch, and matrix of the result: that, or its part.
    batch: u32,
    out: u32,
}

#[cube]
fn job(number: u32, sizes: &Sizes, #[comptime] product: ThinProduct) -> Job {
    let (tile, out) = (number % sizes.tiles, number / sizes.tiles);
    let (split, batch) = (out % sizes.splits, out / sizes.splits);
    let first = split * sizes.depth;
    let depth =
        min(sizes.depth, (sizes.k + comptime!(DEPTH as u32 - 1)) / comptime!(DEPTH as u32) - first);
    Job { row0: tile * product.rows, first, depth, batch, out }
}

/// The first source of an operand of a cube.
#[cube]
fn operand_source<E: Float>(
    operand: &[E],
    places: &Operand,
    job: &Job,
    e0: u32,
    extent: u32,
    k_end: u32,
    #[comptime] along_k: bool,
) -> Source {
    let at = global_address::<E>(operand.as_ptr())
        + u64::cast_from(job.batch) * u64::cast_from(places.batch_stride) * 2;
    let k0 = job.first * comptime!(DEPTH as u32);
    source(at, u64::cast_from(places.ld) * 2, e0, k0, extent, k_end, along_k)
}

/// The sums of a warp: those of its part of each block where warps share rows.
#[cube]
fn accumulate(
    sums: &mut Array<Vector<f32, Const<4>>>,
    base: u32,
    large: &mut Source,
    thin: &mut Source,
    lane: &Lane,
    share: u32,
    job: &Job,
    #[comptime] product: ThinProduct,
) {
    let stages = comptime!(product.stages);
    let stage_bytes = comptime!(product.stage_bytes());
    let steps = comptime!(4 / product.sharing());
    let positions = comptime!([product.rows, product.eights * 8]);
    let along_k = comptime!([product.large_along_k, product.thin_along_k]);
    #[unroll]
    for s in 0..comptime!(stages - 1) {
        copy_block(
            base + comptime!(s * stage_bytes),
            large,
            thin,
            s < job.depth,
            positions,
            along_k,
        );
    }
    let mut stage = 0u32;
    let mut into = comptime!(stages - 1).runtime();
    for block in 0..job.depth {
        // The block is there for all, and all have read the one before, whose stage is filled next.
        copy_wait(comptime!(stages - 2));
        sync_cube();
        let there = block + comptime!(stages - 1) < job.depth;
        copy_block(base + into * stage_bytes, large, thin, there, positions, along_k);
        let at = base + stage * stage_bytes;
        #[unroll]
        for i in 0..steps {
            multiply(sums, at, share * steps + i, lane, product);
        }
        into = stage;
        stage += 1;
        if stage == stages {
            stage = 0u32;
        }
    }
    copy_wait(0u32);
}

/// Lays a warp's sums down in shared memory: all rows of a column side by side, and one element between columns.
#[cube]
fn hand_over(
    shared: &mut Shared<[f32]>,
    sums: &Array<Vector<f32, Const<4>>>,
    warp_row: u32,
    share: u32,
    #[comptime] product: ThinProduct,
) {
    let eights = comptime!(product.eights);
    let column = comptime!(product.rows + 1);
    let (row, col) = origin(UNIT_POS % 32);
    let to = (share * comptime!(eights * 8) + col) * column + warp_row * 32 + row;
    #[unroll]
    for i in 0..2u32 {
        #[unroll]
        for j in 0..eights {
            let sum = sums[comptime!((i * eights + j) as usize)];
            #[unroll]
            for e in 0..4usize {
                let (row, col) = comptime!(offset(e));
                let at = comptime!(i * 16 + row + (j * 8 + col) * column);
                shared[(to + at) as usize] = sum.extract(e);
            }
        }
    }
}

/// Adds up what warps handed over, in order, and stores it: neighbours in the result by neighbouring units.
#[cube]
fn store<C: Float, O: Float>(
    shared: &Shared<[f32]>,
    add: &[C],
    out: &mut [O],
    places: &Places,
    finish: &Finish,
    job: &Job,
    sizes: &Sizes,
    #[comptime] product: ThinProduct,
) {
    let (rows, columns) = comptime!((product.rows, product.eights * 8));
    let column = comptime!(rows + 1);
    let out_at = job.out as usize * places.batch;
    for i in 0..comptime!(rows * columns / UNITS) {
        let at = i * UNITS + UNIT_POS;
        let (row, col) = if comptime!(product.swapped) {
            (at % rows, at / rows)
        } else {
            (at / columns, at % columns)
        };
        if job.row0 + row < sizes.rows && col < sizes.cols {
            let mut x = shared[(col * column + row) as usize];
            #[unroll]
            for other in 1..comptime!(product.sharing()) {
                x += shared[((comptime!(other * columns) + col) * column + row) as usize];
            }
            let (row, col) = ((job.row0 + row) as usize, col as usize);
            x = finish.element::<C>(
                x,
                finish.alpha,
                finish.beta,
                add,
                job.batch as usize,
                row,
                col,
                product.linear,
            );
            out[out_at + row * places.row + col * places.col] = O::cast_from(x);
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn thin_kernel<E: Float, C: Float, O: Float>(
    large: &[E],
    thin: &[E],
    add: &[C],
    out: &mut [O],
    large_operand: Operand,
    thin_operand: Operand,
    places: Places,
    sizes: Sizes,
    finish: Finish,
    #[comptime] product: ThinProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    let sums_held = comptime!((2 * product.eights) as usize);
    let mut shared =
        Shared::<[f32]>::new_aligned_slice(comptime!(product.shared() as usize), 1024usize);
    let base = generic_to_shared::<f32>(shared.as_ptr());
    let number = CUBE_POS as u32;
    // The same for all units of a cube.
    if number < sizes.total {
        let job = job(number, &sizes, product);
        let warp = plane_broadcast(UNIT_POS / 32, 0u32);
        let warps = comptime!(product.rows / 32);
        let (warp_row, share) = (warp % warps, warp / warps);
        let lane = lane(warp_row, product);
        let mut sums = Array::<Vector<f32, Const<4>>>::new(sums_held);
        #[unroll]
        for i in 0..sums_held {
            sums[i] = Vector::new(0.0f32);
        }
        let (rows, cols, k) = (sizes.rows, sizes.cols, sizes.k);
        let mut from_large =
            operand_source(large, &large_operand, &job, job.row0, rows, k, product.large_along_k);
        let mut from_thin =
            operand_source(thin, &thin_operand, &job, 0u32, cols, k, product.thin_along_k);
        accumulate(&mut sums, base, &mut from_large, &mut from_thin, &lane, share, &job, product);
        // The ring is free for the sums.
        sync_cube();
        hand_over(&mut shared, &sums, warp_row, share, product);
        sync_cube();
        store::<C, O>(&shared, add, out, &places, &finish, &job, &sizes, product);
    }
}
