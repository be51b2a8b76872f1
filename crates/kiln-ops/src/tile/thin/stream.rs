//! Thin products of at most 8 columns on plain units: exact f32 arithmetic, any device.
//!
//! A cube goes along a part of K in blocks of 512, whose part of the thin operand stands in shared
//! memory as f32. The large operand goes straight to registers, 16 bytes a load and eight loads of a unit
//! under way, and is used once. If k is its contiguous dimension, 32 units share four rows and each has
//! a part of their K; if not, 32 units stand side by side along the rows and eight groups of them
//! share K. Either way the sums of units meet in shared memory at the end, and are added in order.
//!
//! An element of the large operand makes as many multiplications as there are columns: 17 TFLOP/s for
//! 8 of f32 at the rate of copies, a quarter of what plain units make.

use super::{Oriented, Places, PlacesLaunch};
use crate::launch;
use crate::tile::finish::{Finish, Linear};
use crate::tile::split_k;
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

const UNITS: usize = 256;
/// Units side by side, of which a cube has `GROUPS`.
const LANES: usize = 32;
const GROUPS: usize = UNITS / LANES;
/// Rows of a unit where k is the contiguous dimension.
const ROWS: usize = 4;
/// Vectors that a unit loads before it uses the first.
const LOADS: usize = 8;
/// Depth of a block of K.
const DEPTH: usize = 512;

/// What a product is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamProduct {
    /// Columns of the thin operand, those without an element included.
    cols: usize,
    /// Whether k is the contiguous dimension.
    large_along_k: bool,
    thin_along_k: bool,
    /// Reads shared memory in vectors of 4 and unrolls: software drivers compile that for minutes.
    unrolled: bool,
    linear: Linear,
}

impl StreamProduct {
    /// Rows that a unit adds up.
    fn held(&self, size: usize) -> usize {
        if self.large_along_k { ROWS } else { size }
    }

    /// Rows of a cube.
    fn rows(&self, size: usize) -> usize {
        self.held(size) * if self.large_along_k { GROUPS } else { LANES }
    }
}

/// Makes `out`, contiguous.
pub(super) fn run(t: &Oriented<'_>, out: &CubeTensor) {
    let (o, client) = (t.o, &out.client);
    let [large_along_k, thin_along_k] = t.along_k();
    let size = t.large.vector_size(client, 16);
    let mut product = StreamProduct {
        cols: t.cols.next_power_of_two(),
        large_along_k,
        thin_along_k,
        unrolled: launch::plane_size(client) != 1,
        linear: Linear::of(o, false),
    };
    let tiles = t.rows.div_ceil(product.rows(size));
    // Two cubes of a multiprocessor, of whole blocks.
    let [all, k, batches] = [t.rows, o.k, o.batches].map(launch::limits::reckoned);
    let jobs = all.div_ceil(product.rows(size)) * batches;
    let wanted = split_k::number(client, jobs, k.div_ceil(DEPTH / 8));
    let part = o.k.div_ceil(wanted).next_multiple_of(DEPTH);
    let splits = o.k.div_ceil(part);
    let split = splits > 1;
    product.linear = Linear::of(o, split);
    let target = match split {
        true => split_k::workspace(out, o.op, splits * o.batches * o.m, o.n, o.n),
        false => out.clone(),
    };
    let add = o.add.as_ref().filter(|_| product.linear.add).map(|(add, _)| &add.tensor);
    let dtype = t.large.tensor.dtype;
    let dtypes = [dtype, add.map_or(dtype, |add| add.dtype), target.dtype];
    let total = tiles * splits * o.batches;
    let thin = match (t.thin.strides(), t.swapped) {
        ((k, col), false) | ((col, k), true) => PlacesLaunch::new(t.thin.batch_step(), k, col),
    };
    let address = launch::address_type(&[&t.large.tensor, &t.thin.tensor, &target]);
    let ways = [("parts of K", split), ("a batch", t.o.batches > 1)];
    launch::plans::note(launch::plans::THIN, &(&product, size, address, dtypes), &ways);
    // SAFETY: positions are checked against R, C and K before every read and write; without C the
    // alias that stands in for it is not touched.
    unsafe {
        stream_kernel::launch_unchecked(
            client,
            launch::grid(client, total),
            CubeDim::new_1d(UNITS as u32),
            address,
            size,
            t.large.tensor.clone().into_buffer_arg(),
            t.thin.tensor.clone().into_buffer_arg(),
            add.map_or_else(|| BufferArg::alias(0, 1), |add| add.clone().into_buffer_arg()),
            target.clone().into_buffer_arg(),
            t.large.batch_step() / size,
            t.large.ld / size,
            thin,
            t.out_places(),
            t.finish(),
            SizesLaunch::new(t.rows, t.cols, o.k, part, splits, tiles, total),
            product,
            dtypes.map(dtype_to_elem_type),
        );
    }
    if split {
        split_k::add_up(&target, splits, o, out);
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: usize,
    cols: usize,
    k: usize,
    /// Elements of K of a part.
    part: usize,
    /// Parts of K.
    splits: usize,
    /// Tiles of rows.
    tiles: usize,
    /// Tiles of all parts of all products.
    total: usize,
}

/// The thin operand's block of K from `k0` on, as [column][k]; zero outside.
#[cube]
fn load_thin<E: Float>(
    thin: &[E],
    block: &mut [f32],
    base: usize,
    places: &Places,
    k0: usize,
    k_end: usize,
    cols: usize,
    #[comptime] product: StreamProduct,
) {
    #[unroll(product.unrolled)]
    for i in 0..comptime!(product.cols * DEPTH / UNITS) {
        let at = UNIT_POS as usize + i * UNITS;
        let (col, k) = if comptime!(product.thin_along_k) {
            (at / DEPTH, at % DEPTH)
        } else {
            (at % product.cols, at / product.cols)
        };
        let mut x = 0.0f32;
        if col < cols && k0 + k < k_end {
            x = f32::cast_from(thin[base + (k0 + k) * places.row + col * places.col]);
        }
        block[col * DEPTH + k] = x;
    }
}

/// `to[..count]` from shared memory; `at` is a multiple of 4 where `count` is.
#[cube]
fn read_thin(
    block: &[f32],
    to: &mut Array<f32>,
    at: usize,
    #[comptime] count: usize,
    #[comptime] vectors: bool,
) {
    if comptime!(vectors && count.is_multiple_of(4)) {
        let block = block.as_vectorized().with_vector_size::<Const<4>>();
        #[unroll]
        for group in 0..comptime!(count / 4) {
            let four = block[at / 4 + group];
            #[unroll]
            for i in 0..4usize {
                to[comptime!(group * 4 + i)] = four.extract(i);
            }
        }
    } else {
        #[unroll]
        for i in 0..count {
            to[i] = block[at + i];
        }
    }
}

/// The piece of work of a cube: a tile of rows over a part of K.
#[derive(CubeType, Clone, Copy)]
struct Job {
    tile: usize,
    /// The unit's first row.
    row0: usize,
    first: usize,
    end: usize,
    /// Product of the batch, and matrix of the result: that, or its part.
    batch: usize,
    out: usize,
}

/// Multiplies a block of K where it is the contiguous dimension: a unit has four rows, and of each two vectors at
/// a time.
#[cube]
fn multiply_along<E: Float, N: Size>(
    sums: &mut Array<f32>,
    large: &[Vector<E, N>],
    block: &[f32],
    base: usize,
    large_line: usize,
    k0: usize,
    job: &Job,
    sizes: &Sizes,
    #[comptime] product: StreamProduct,
) {
    let size = N::value();
    let cols = comptime!(product.cols);
    let lane = UNIT_POS as usize % LANES;
    for round in 0..comptime!(DEPTH * ROWS / (LANES * LOADS * size)) {
        let mut loaded = Array::<Vector<E, N>>::new(LOADS);
        let at = (round * comptime!(LOADS / ROWS) * LANES + lane) * size;
        #[unroll]
        for i in 0..LOADS {
            let k = k0 + at + comptime!(i / ROWS * LANES * size);
            let row = min(job.row0 + comptime!(i % ROWS), sizes.rows - 1);
            let mut value = Vector::<E, N>::new(E::new(0.0));
            // Rows end at multiples of the vector: inside is inside for all of it.
            if k < job.end {
                value = large[base + row * large_line + k / size];
            }
            loaded[i] = value;
        }
        #[unroll]
        for part in 0..comptime!(LOADS / ROWS) {
            let at = at + comptime!(part * LANES * size);
            #[unroll]
            for col in 0..cols {
                let mut right = Array::<f32>::new(size);
                let from = comptime!(col * DEPTH) + at;
                read_thin(block, &mut right, from, size, product.unrolled);
                #[unroll]
                for row in 0..ROWS {
                    let left = Vector::<f32, N>::cast_from(loaded[comptime!(part * ROWS + row)]);
                    let i = comptime!(row * cols + col);
                    #[unroll]
                    for v in 0..size {
                        sums[i] = fma(left.extract(v), right[v], sums[i]);
                    }
                }
            }
        }
    }
}

/// Multiplies a block of K where rows are the contiguous dimension: a unit has a vector of them, and twice four
/// k at a time.
#[cube]
fn multiply_across<E: Float, N: Size>(
    sums: &mut Array<f32>,
    large: &[Vector<E, N>],
    block: &[f32],
    base: usize,
    large_line: usize,
    k0: usize,
    job: &Job,
    sizes: &Sizes,
    #[comptime] product: StreamProduct,
) {
    let size = N::value();
    let cols = comptime!(product.cols);
    let group = UNIT_POS as usize / LANES;
    for round in 0..comptime!(DEPTH / (GROUPS * LOADS)) {
        let mut loaded = Array::<Vector<E, N>>::new(LOADS);
        #[unroll]
        for i in 0..LOADS {
            let at = (round * comptime!(LOADS / 4) + comptime!(i / 4)) * GROUPS + group;
            let k = k0 + at * 4 + comptime!(i % 4);
            let mut value = Vector::<E, N>::new(E::new(0.0));
            if k < job.end && job.row0 < sizes.rows {
                value = large[base + k * large_line + job.row0 / size];
            }
            loaded[i] = value;
        }
        #[unroll]
        for part in 0..comptime!(LOADS / 4) {
            let at = ((round * comptime!(LOADS / 4) + part) * GROUPS + group) * 4;
            #[unroll]
            for col in 0..cols {
                let mut right = Array::<f32>::new(4usize);
                let from = comptime!(col * DEPTH) + at;
                read_thin(block, &mut right, from, 4usize, product.unrolled);
                #[unroll]
                for k in 0..4usize {
                    let left = Vector::<f32, N>::cast_from(loaded[comptime!(part * 4 + k)]);
                    #[unroll]
                    for v in 0..size {
                        let i = comptime!(v * cols + col);
                        sums[i] = fma(left.extract(v), right[k], sums[i]);
                    }
                }
            }
        }
    }
}

/// Adds up what the units of a cube have, one row of every unit at a time, and stores it if `stores`.
#[cube]
fn store<C: Float, O: Float>(
    sums: &Array<f32>,
    block: &mut [f32],
    add: &[C],
    out: &mut [O],
    places: &Places,
    finish: &Finish,
    stores: bool,
    job: &Job,
    sizes: &Sizes,
    #[comptime] held: usize,
    #[comptime] product: StreamProduct,
) {
    let cols = comptime!(product.cols);
    let along_k = comptime!(product.large_along_k);
    let across = comptime!(if along_k { GROUPS } else { LANES });
    let (at, col) = (UNIT_POS as usize % across, UNIT_POS as usize / across);
    #[unroll]
    for i in 0..held {
        sync_cube();
        #[unroll]
        for col in 0..cols {
            block[comptime!(col * UNITS) + UNIT_POS as usize] = sums[comptime!(i * cols + col)];
        }
        sync_cube();
        let row = (job.tile * across + at) * held + comptime!(i);
        if stores && row < sizes.rows && col < sizes.cols {
            let from = col * UNITS + if comptime!(along_k) { at * LANES } else { at };
            let mut x = 0.0f32;
            for other in 0..comptime!(UNITS / across) {
                x += block[from + other * comptime!(if along_k { 1 } else { LANES })];
            }
            let (alpha, beta) = (finish.alpha, finish.beta);
            x = finish.element::<C>(x, alpha, beta, add, job.batch, row, col, product.linear);
            let at = job.out * places.batch + row * places.row + col * places.col;
            out[at] = O::cast_from(x);
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn stream_kernel<E: Float, C: Float, O: Float, N: Size>(
    large: &[Vector<E, N>],
    thin: &[E],
    add: &[C],
    out: &mut [O],
    large_batch: usize,
    large_line: usize,
    thin_places: Places,
    places: Places,
    finish: Finish,
    sizes: Sizes,
    #[comptime] product: StreamProduct,
    #[define(E, C, O)] _dtypes: [ElemType; 3],
) {
    let size = N::value();
    let (cols, along_k) = comptime!((product.cols, product.large_along_k));
    let held = comptime!(product.held(size));
    let mut block = Shared::<[f32]>::new_aligned_slice(comptime!(cols * DEPTH), 16usize);

    // Cubes past the end make the last tile again and write nothing: all units meet the barriers.
    let number = min(CUBE_POS, sizes.total - 1);
    let (tile, stack) = (number % sizes.tiles, number / sizes.tiles);
    let (split, batch) = (stack % sizes.splits, stack / sizes.splits);
    let first = split * sizes.part;
    let (group, lane) = (UNIT_POS as usize / LANES, UNIT_POS as usize % LANES);
    let row0 = tile * comptime!(product.rows(size))
        + if comptime!(along_k) { group * ROWS } else { lane * size };
    let end = min(first + sizes.part, sizes.k);
    let job = Job { tile, row0, first, end, batch, out: stack };
    let base = batch * large_batch;
    let thin_base = batch * thin_places.batch;

    let mut sums = Array::<f32>::new(comptime!(held * cols));
    #[unroll]
    for i in 0..comptime!(held * cols) {
        sums[i] = 0.0f32;
    }
    for k0 in range_stepped(job.first, job.end, DEPTH) {
        sync_cube();
        load_thin::<E>(thin, &mut block, thin_base, &thin_places, k0, job.end, sizes.cols, product);
        sync_cube();
        if comptime!(along_k) {
            multiply_along(&mut sums, large, &block, base, large_line, k0, &job, &sizes, product);
        } else {
            multiply_across(&mut sums, large, &block, base, large_line, k0, &job, &sizes, product);
        }
    }
    let stores = CUBE_POS < sizes.total;
    store::<C, O>(
        &sums, &mut block, add, out, &places, &finish, stores, &job, &sizes, held, product,
    );
}
