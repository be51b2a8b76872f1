//! Products on plain units: exact f32 arithmetic, any device.
//!
//! A cube makes one tile of the output. It walks along K in blocks: both operands' blocks go through
//! shared memory as f32, laid out so that the elements of one k stand side by side, and every unit
//! adds up its part of the tile in registers. K is added in order, so two runs agree bit for bit.

use crate::tile::finish::{Finish, Linear};
use crate::tile::problem::{Keep, Triangle, Triangles};
use crate::tile::view::{Operand, Order};
use cubecl::prelude::*;

/// Sizes of the tile; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SimtTile {
    /// Rows of the tile.
    pub(crate) m: usize,
    /// Columns of the tile.
    pub(crate) n: usize,
    /// Depth of a block.
    pub(crate) k: usize,
    /// Rows of a unit, a multiple of 4.
    pub(crate) unit_m: usize,
    /// Columns of a unit, a multiple of 4.
    pub(crate) unit_n: usize,
    /// Reads shared memory in vectors of 4 and unrolls the block: software drivers compile that for
    /// minutes.
    pub(crate) unrolled: bool,
}

impl SimtTile {
    /// 64×64 on 128 units and 8 KiB of shared memory: any device.
    pub(crate) const PORTABLE: Self =
        Self { m: 64, n: 64, k: 16, unit_m: 8, unit_n: 4, unrolled: false };
    /// For GPUs with many registers.
    pub(crate) const LARGE: Self =
        Self { m: 128, n: 128, k: 16, unit_m: 8, unit_n: 8, unrolled: true };
    /// Where the output has few tiles.
    pub(crate) const SMALL: Self =
        Self { m: 64, n: 64, k: 16, unit_m: 4, unit_n: 4, unrolled: true };

    /// As narrow as the thin side, and 128 or 256 long: 8×8 for a unit, as in the large tile, since that
    /// multiplies most for what it reads from shared memory.
    pub(crate) fn thin(m: usize, n: usize, unrolled: bool) -> Self {
        let narrow = m.min(n).next_multiple_of(8);
        let long = if narrow <= 48 { 256 } else { 128 };
        let (m, n) = if n <= m { (long, narrow) } else { (narrow, long) };
        Self { m, n, k: 16, unit_m: 8, unit_n: 8, unrolled }
    }

    pub(crate) fn units(&self) -> usize {
        self.m / self.unit_m * (self.n / self.unit_n)
    }
}

/// What a product is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SimtProduct {
    pub(crate) tile: SimtTile,
    pub(crate) a: Order,
    pub(crate) b: Order,
    pub(crate) triangles: Triangles,
    /// Only tiles that reach below the diagonal are made, and stored mirrored too.
    pub(crate) symmetric: bool,
    pub(crate) linear: Linear,
}

/// Sizes of a product.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// Products.
    pub(crate) batches: usize,
    /// Parts of K that different cubes add up.
    pub(crate) splits: usize,
    /// Elements of K of a part.
    pub(crate) part: usize,
    /// Tiles along N.
    pub(crate) tiles_n: usize,
    /// Tiles of one product.
    pub(crate) tiles: usize,
}

/// The tile row that unit number `at` along M or N finds its `i`-th element in: groups of four, so
/// that the units of a plane read neighbouring vectors.
#[cube]
pub(crate) fn place(at: usize, #[comptime] i: usize, #[comptime] units: usize) -> usize {
    comptime!(i / 4 * 4 * units + i % 4) + at * 4
}

/// Reads a block of `extent` × `depth` elements, beginning at (`start`, `k0`), into shared memory as
/// [k][extent]; zero outside the matrix and outside its triangle.
#[cube]
pub(crate) fn load_block<E: Float, N: Size>(
    from: &[Vector<E, N>],
    to: &mut [f32],
    base: usize,
    line_stride: usize,
    start: usize,
    k0: usize,
    extent_end: usize,
    k_end: usize,
    #[comptime] extent: usize,
    #[comptime] depth: usize,
    #[comptime] units: usize,
    #[comptime] along_k: bool,
    // Of (position along the extent, k): keep k up to it, or from it.
    #[comptime] keep: Keep,
) {
    let size = N::value();
    let lines = comptime!(if along_k { extent } else { depth });
    let width = comptime!(if along_k { depth } else { extent });
    let per_line = comptime!(width / size);
    let count = comptime!(lines * per_line);
    let rounds = comptime!(count.div_ceil(units));
    #[unroll]
    for round in 0..rounds {
        let at = UNIT_POS as usize + comptime!(round * units);
        if comptime!(count.is_multiple_of(units)) || at < count {
            let line = at / per_line;
            let along = at % per_line * size;
            let e0 = start + if comptime!(along_k) { line } else { along };
            let kk0 = k0 + if comptime!(along_k) { along } else { line };
            let mut value = Vector::<f32, N>::new(0.0f32);
            // Lines end at multiples of the vector: inside is inside for all of it.
            if e0 < extent_end && kk0 < k_end {
                let (line, along) = if comptime!(along_k) { (e0, kk0) } else { (kk0, e0) };
                value = Vector::cast_from(from[base + line * line_stride + along / size]);
            }
            #[unroll]
            for v in 0..size {
                let mut x = value.extract(v);
                if comptime!(keep != Keep::All) {
                    let e = if comptime!(along_k) { e0 } else { e0 + v };
                    let k = if comptime!(along_k) { kk0 + v } else { kk0 };
                    let outside = if comptime!(keep == Keep::UpTo) { k > e } else { k < e };
                    if outside {
                        x = 0.0f32;
                    }
                }
                if comptime!(along_k) {
                    to[(along + v) * extent + line] = x;
                } else {
                    to[line * extent + along + v] = x;
                }
            }
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn simt_kernel<A: Float, C: Float, O: Float, NA: Size, NB: Size, NO: Size>(
    a: &[Vector<A, NA>],
    b: &[Vector<A, NB>],
    add: &[C],
    scales: &[f32],
    out: &mut [Vector<O, NO>],
    a_operand: Operand,
    b_operand: Operand,
    sizes: Sizes,
    finish: Finish,
    #[comptime] product: SimtProduct,
    #[define(A, C, O)] _dtypes: [ElemType; 3],
) {
    let tile = comptime!(product.tile);
    let units = comptime!(tile.units());
    let (across, down) = comptime!((tile.n / tile.unit_n, tile.m / tile.unit_m));
    let mut a_block = Shared::<[f32]>::new_aligned_slice(comptime!(tile.m * tile.k), 16usize);
    let mut b_block = Shared::<[f32]>::new_aligned_slice(comptime!(tile.n * tile.k), 16usize);

    // Cubes past the end make the last tile again and write nothing: all units meet the barriers.
    let total = sizes.tiles * sizes.splits * sizes.batches;
    let job = min(CUBE_POS, total - 1);
    let (which, stack) = (job % sizes.tiles, job / sizes.tiles);
    let (split, batch) = (stack % sizes.splits, stack / sizes.splits);
    // Of triangles the long rows first.
    let which =
        if comptime!(product.triangles.out_lower) { sizes.tiles - 1 - which } else { which };
    let row0 = which / sizes.tiles_n * tile.m;
    let col0 = which % sizes.tiles_n * tile.n;

    let mut first = split * sizes.part;
    let mut end = min(first + sizes.part, sizes.k);
    if comptime!(product.triangles.a == Triangle::Lower) {
        end = min(end, row0 + tile.m);
    }
    if comptime!(product.triangles.a == Triangle::Upper) {
        first = max(first, row0 / tile.k * tile.k);
    }
    if comptime!(product.triangles.b == Triangle::Lower) {
        first = max(first, col0 / tile.k * tile.k);
    }
    if comptime!(product.triangles.b == Triangle::Upper) {
        end = min(end, col0 + tile.n);
    }
    let half = comptime!(product.triangles.out_lower || product.symmetric);
    if half && col0 > row0 + comptime!(tile.m - 1) {
        end = first;
    }

    let unit = UNIT_POS as usize;
    let (ty, tx) = (unit / across, unit % across);
    let mut sums = Array::<f32>::new(comptime!(tile.unit_m * tile.unit_n));
    #[unroll]
    for i in 0..comptime!(tile.unit_m * tile.unit_n) {
        sums[i] = 0.0f32;
    }
    for k0 in range_stepped(first, end, tile.k) {
        load_block::<A, NA>(
            a,
            &mut a_block,
            batch * a_operand.batch_stride,
            a_operand.ld,
            row0,
            k0,
            sizes.m,
            end,
            tile.m,
            tile.k,
            units,
            comptime!(product.a == Order::RowMajor),
            comptime!(product.triangles.a_keeps()),
        );
        load_block::<A, NB>(
            b,
            &mut b_block,
            batch * b_operand.batch_stride,
            b_operand.ld,
            col0,
            k0,
            sizes.n,
            end,
            tile.n,
            tile.k,
            units,
            comptime!(product.b == Order::ColMajor),
            comptime!(product.triangles.b_keeps()),
        );
        sync_cube();
        #[unroll(tile.unrolled)]
        for k in 0..tile.k {
            let mut left = Array::<f32>::new(tile.unit_m);
            let mut right = Array::<f32>::new(tile.unit_n);
            fragment(&a_block, &mut left, k * tile.m, ty, down, tile.unit_m, tile.unrolled);
            fragment(&b_block, &mut right, k * tile.n, tx, across, tile.unit_n, tile.unrolled);
            #[unroll]
            for i in 0..tile.unit_m {
                #[unroll]
                for j in 0..tile.unit_n {
                    let at = comptime!(i * tile.unit_n + j);
                    sums[at] = fma(left[i], right[j], sums[at]);
                }
            }
        }
        sync_cube();
    }

    if CUBE_POS < total {
        store::<C, O, NO>(&sums, add, scales, out, row0, col0, stack, &sizes, &finish, product);
    }
}

/// Finishes and stores the sums of a unit.
#[cube]
fn store<C: Float, O: Float, NO: Size>(
    sums: &Array<f32>,
    add: &[C],
    scales: &[f32],
    out: &mut [Vector<O, NO>],
    row0: usize,
    col0: usize,
    stack: usize,
    sizes: &Sizes,
    finish: &Finish,
    #[comptime] product: SimtProduct,
) {
    let tile = comptime!(product.tile);
    let linear = comptime!(product.linear);
    let (across, down) = comptime!((tile.n / tile.unit_n, tile.m / tile.unit_m));
    let (ty, tx) = (UNIT_POS as usize / across, UNIT_POS as usize % across);
    let batch = stack / sizes.splits;
    let alpha = finish.alpha(scales, batch, linear);
    let beta = finish.beta(scales, batch, linear);
    let out_base = stack * sizes.m * sizes.n;
    let width = NO::value();
    #[unroll]
    for i in 0..tile.unit_m {
        let row = row0 + place(ty, i, down);
        #[unroll]
        for group in 0..comptime!(tile.unit_n / width) {
            let col = col0 + place(tx, comptime!(group * width), across);
            if row < sizes.m && col < sizes.n && (comptime!(!product.symmetric) || col <= row) {
                let mut value = Vector::<O, NO>::new(O::new(0.0));
                #[unroll]
                for v in 0..width {
                    let sum = sums[comptime!(i * tile.unit_n + group * width + v)];
                    let col = col + v;
                    let mut x = finish.element::<C>(sum, alpha, beta, add, batch, row, col, linear);
                    if comptime!(product.triangles.out_lower) && col > row {
                        x = 0.0f32;
                    }
                    value.insert(v, O::cast_from(x));
                }
                out[(out_base + row * sizes.n + col) / width] = value;
                if comptime!(product.symmetric) {
                    out[(out_base + col * sizes.n + row) / width] = value;
                }
            }
        }
    }
}

/// The elements of a unit at one k.
#[cube]
pub(crate) fn fragment(
    block: &[f32],
    to: &mut Array<f32>,
    base: usize,
    at: usize,
    #[comptime] units: usize,
    #[comptime] count: usize,
    #[comptime] vectors: bool,
) {
    if comptime!(vectors) {
        let block = block.as_vectorized().with_vector_size::<Const<4>>();
        #[unroll]
        for group in 0..comptime!(count / 4) {
            let four = block[(base + place(at, comptime!(group * 4), units)) / 4];
            #[unroll]
            for i in 0..4usize {
                to[comptime!(group * 4 + i)] = four.extract(i);
            }
        }
    } else {
        #[unroll]
        for i in 0..count {
            to[i] = block[base + place(at, i, units)];
        }
    }
}
