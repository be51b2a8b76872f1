//! MLPs on plain units: exact f32 arithmetic, any device.
//!
//! A cube takes some rows of its chunk at a time through shared memory, and a unit makes 4×4 of what comes next; weights
//! are read where they are, since a cube's are few.

use super::{CubeTensor, LEFT, Rows, Sizes, SizesLaunch, Wanted, left, record, share};
use crate::kasmina::backend::Blueprints;
use crate::kasmina::kernel::{Garden, MlpSeed, mlp_of};
use crate::launch;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use cubecl::prelude::*;

/// Bytes of shared memory of a cube at most.
const SHARED: usize = 32 << 10;

/// How a cube works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    units: u32,
    /// Rows at a time, a multiple of 4.
    rows: usize,
    /// Features of a chunk at most, a multiple of 4.
    width: usize,
}

impl Plan {
    /// For chunks of up to `widest` features, with `tiles` numbers in shared memory for each row and feature.
    fn new(client: &Client, widest: usize, tiles: usize) -> Self {
        let hardware = &client.properties().hardware;
        let width = widest.next_multiple_of(4);
        let units = (if width <= 32 { 128 } else { 256 }).min(hardware.max_units_per_cube);
        let shared = SHARED.min(hardware.max_shared_memory_size) / size_of::<f32>();
        let rows = (shared.saturating_sub(units as usize) / (tiles * width)).min(32) / 4 * 4;
        Self { units: 1 << units.ilog2(), rows: rows.max(4), width }
    }

    /// 4×4 of a gradient of weights that a unit has.
    fn tiles(&self) -> usize {
        (self.width * self.width / 8).div_ceil(self.units as usize)
    }
}

/// 4×4 sums of rows of `left` from `row` on, `pitch` apart, times columns of weights from `column` on, of `columns`.
#[cube]
fn product<E: Float>(
    left: &[f32],
    row: usize,
    #[comptime] pitch: usize,
    depth: usize,
    weights: &[E],
    base: usize,
    column: usize,
    columns: usize,
    // From one column of the weights to the next, and down one.
    across: usize,
    down: usize,
) -> Array<f32> {
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        sums[i] = 0.0f32;
    }
    for k in 0..depth {
        let mut right = Array::<f32>::new(4usize);
        #[unroll]
        for j in 0..4usize {
            let at = base + min(column + j, columns - 1) * across + k * down;
            right[j] = f32::cast_from(weights[at]);
        }
        #[unroll]
        for i in 0..4usize {
            let value = left[(row + i) * pitch + k];
            #[unroll]
            for j in 0..4usize {
                sums[comptime!(i * 4 + j)] = fma(value, right[j], sums[comptime!(i * 4 + j)]);
            }
        }
    }
    sums
}

/// Adds the products of two columns of tiles over their rows: 4 of `left` and 4 of `right`.
#[cube]
fn add_rows(
    sums: &mut Array<f32>,
    #[comptime] first: usize,
    left: &[f32],
    at_left: usize,
    #[comptime] pitch_left: usize,
    right: &[f32],
    at_right: usize,
    #[comptime] pitch_right: usize,
    #[comptime] rows: usize,
) {
    for r in 0..rows {
        let mut values = Array::<f32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            values[i] = right[at_right + r * pitch_right + i];
        }
        #[unroll]
        for j in 0..4usize {
            let value = left[at_left + r * pitch_left + j];
            #[unroll]
            for i in 0..4usize {
                let at = comptime!(first + j * 4 + i);
                sums[at] = fma(value, values[i], sums[at]);
            }
        }
    }
}

/// Reads rows of a chunk into shared memory; zero past the last one.
#[cube]
fn load<E: Float>(
    from: &[E],
    to: &mut [f32],
    stride: usize,
    row: usize,
    end: usize,
    of: &MlpSeed,
    #[comptime] plan: Plan,
) {
    let count = of.size * comptime!(plan.rows);
    for at in range_stepped(UNIT_POS as usize, count, comptime!(plan.units as usize)) {
        let r = at / of.size;
        let c = at - r * of.size;
        let mut value = f32::new(0.0);
        if row + r < end {
            value = f32::cast_from(from[(row + r) * stride + of.begin + c]);
        }
        to[r * comptime!(plan.width) + c] = value;
    }
}

/// Where the parts of an MLP begin.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Weights {
    pub(super) first: usize,
    pub(super) second: usize,
    pub(super) first_bias: usize,
    pub(super) second_bias: usize,
}

/// Those of an MLP.
#[cube]
pub(super) fn weights(mlp: usize, widest: usize) -> Weights {
    let first = mlp * (4 * widest + 3) * widest;
    Weights {
        first,
        second: first + 2 * widest * widest,
        first_bias: first + 4 * widest * widest,
        second_bias: first + (4 * widest + 2) * widest,
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<E: Float, W: Float, I: Int>(
    x: &[E],
    garden: &Garden<W, I>,
    mlps: &[E],
    y: &mut [E],
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(E, W, I)] _dtypes: [ElemType; 3],
) {
    let (width, units) = comptime!((plan.width, plan.units as usize));
    let part = CUBE_POS / garden.seeds;
    let of = mlp_of::<W, I>(garden, CUBE_POS - part * garden.seeds, sizes.mlps);
    let at = weights(of.mlp, sizes.widest);
    let mut xs = Shared::<[f32]>::new_slice(comptime!(plan.rows * width));
    let mut hidden = Shared::<[f32]>::new_slice(comptime!(plan.rows * 2 * width));
    let end = min((part + 1) * sizes.share, sizes.rows);
    let first = select(of.contributes, part * sizes.share, end);
    for row in range_stepped(first, end, comptime!(plan.rows)) {
        load::<E>(x, &mut xs, sizes.x, row, end, &of, plan);
        sync_cube();
        let across = (2 * of.size).div_ceil(4);
        for tile in range_stepped(UNIT_POS as usize, across * comptime!(plan.rows / 4), units) {
            let (r, c) = (tile / across * 4, tile % across * 4);
            let wide = 2 * of.size;
            let step = sizes.widest;
            let sums = product::<E>(&xs, r, width, of.size, mlps, at.first, c, wide, step, 1usize);
            #[unroll]
            for j in 0..4usize {
                if c + j < wide {
                    let bias = f32::cast_from(mlps[at.first_bias + c + j]);
                    #[unroll]
                    for i in 0..4usize {
                        let sum = sums[comptime!(i * 4 + j)] + bias;
                        let relu = select(sum <= 0.0, f32::new(0.0), sum);
                        hidden[(r + i) * comptime!(2 * width) + c + j] = relu;
                    }
                }
            }
        }
        sync_cube();
        let across = of.size.div_ceil(4);
        for tile in range_stepped(UNIT_POS as usize, across * comptime!(plan.rows / 4), units) {
            let (r, c) = (tile / across * 4, tile % across * 4);
            let (deep, step) = (2 * of.size, sizes.widest);
            let pitch = comptime!(2 * width);
            let sums =
                product::<E>(&hidden, r, pitch, deep, mlps, at.second, c, of.size, 1usize, step);
            #[unroll]
            for j in 0..4usize {
                if c + j < of.size {
                    let bias = f32::cast_from(mlps[at.second_bias + c + j]);
                    #[unroll]
                    for i in 0..4usize {
                        if row + r + i < end {
                            let out = sums[comptime!(i * 4 + j)] + bias;
                            let x = xs[(r + i) * width + c + j];
                            let value = (1.0 - of.alpha) * x + of.alpha * out;
                            y[(row + r + i) * garden.features + of.begin + c + j] =
                                E::cast_from(value);
                        }
                    }
                }
            }
        }
        sync_cube();
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<E: Float, W: Float, I: Int>(
    x: &[E],
    dy: &[E],
    garden: &Garden<W, I>,
    mlps: &[E],
    dx: &mut [E],
    left: &mut [f32],
    sizes: Sizes,
    record: usize,
    #[comptime] plan: Plan,
    #[comptime] wanted: Wanted,
    #[define(E, W, I)] _dtypes: [ElemType; 3],
) {
    let (width, units) = comptime!((plan.width, plan.units as usize));
    let wide_pitch = comptime!(2 * plan.width);
    let unit = UNIT_POS as usize;
    let part = CUBE_POS / garden.seeds;
    let seed = CUBE_POS - part * garden.seeds;
    let of = mlp_of::<W, I>(garden, seed, sizes.mlps);
    let at = weights(of.mlp, sizes.widest);
    let (wide, step) = (2 * of.size, sizes.widest);
    let mut xs = Shared::<[f32]>::new_slice(comptime!(plan.rows * width));
    let mut dys = Shared::<[f32]>::new_slice(comptime!(plan.rows * width));
    let mut hidden = Shared::<[f32]>::new_slice(comptime!(plan.rows * 2 * width));
    let mut dhidden = Shared::<[f32]>::new_slice(comptime!(plan.rows * 2 * width));
    let tiles = comptime!(plan.tiles());
    // dW₁ and dW₂ᵀ, 4×4 each.
    let mut of_first = Array::<f32>::new(comptime!(16 * tiles));
    let mut of_second = Array::<f32>::new(comptime!(16 * tiles));
    #[unroll]
    for i in 0..comptime!(16 * tiles) {
        of_first[i] = 0.0f32;
        of_second[i] = 0.0f32;
    }
    let mut of_first_bias = f32::new(0.0);
    let mut of_second_bias = f32::new(0.0);
    let mut of_alpha = f32::new(0.0);
    let end = min((part + 1) * sizes.share, sizes.rows);
    let first = select(of.contributes, part * sizes.share, end);
    for row in range_stepped(first, end, comptime!(plan.rows)) {
        load::<E>(x, &mut xs, sizes.x, row, end, &of, plan);
        load::<E>(dy, &mut dys, sizes.dy, row, end, &of, plan);
        sync_cube();
        let across = wide.div_ceil(4);
        for tile in range_stepped(unit, across * comptime!(plan.rows / 4), units) {
            let (r, c) = (tile / across * 4, tile % across * 4);
            let sums = product::<E>(&xs, r, width, of.size, mlps, at.first, c, wide, step, 1usize);
            let back =
                product::<E>(&dys, r, width, of.size, mlps, at.second, c, wide, step, 1usize);
            #[unroll]
            for j in 0..4usize {
                if c + j < wide {
                    let bias = f32::cast_from(mlps[at.first_bias + c + j]);
                    #[unroll]
                    for i in 0..4usize {
                        let sum = sums[comptime!(i * 4 + j)] + bias;
                        let off = sum <= 0.0;
                        let u = back[comptime!(i * 4 + j)];
                        let relu = select(off, f32::new(0.0), sum);
                        let to = (r + i) * wide_pitch + c + j;
                        hidden[to] = relu;
                        dhidden[to] = select(off, f32::new(0.0), u);
                        if comptime!(wanted.sums) {
                            of_alpha += relu * u;
                        }
                    }
                }
            }
        }
        if comptime!(wanted.sums) {
            for i in range_stepped(unit, of.size * comptime!(plan.rows), units) {
                let r = i / of.size;
                let c = i - r * of.size;
                let bias = f32::cast_from(mlps[at.second_bias + c]);
                of_alpha += (bias - xs[r * width + c]) * dys[r * width + c];
            }
        }
        sync_cube();
        if comptime!(wanted.x) {
            let across = of.size.div_ceil(4);
            for tile in range_stepped(unit, across * comptime!(plan.rows / 4), units) {
                let (r, c) = (tile / across * 4, tile % across * 4);
                let sums = product::<E>(
                    &dhidden, r, wide_pitch, wide, mlps, at.first, c, of.size, 1usize, step,
                );
                #[unroll]
                for j in 0..4usize {
                    if c + j < of.size {
                        #[unroll]
                        for i in 0..4usize {
                            if row + r + i < end {
                                let d = dys[(r + i) * width + c + j];
                                let back = sums[comptime!(i * 4 + j)];
                                let value = (1.0 - of.alpha) * d + of.alpha * back;
                                dx[(row + r + i) * garden.features + of.begin + c + j] =
                                    E::cast_from(value);
                            }
                        }
                    }
                }
            }
        }
        if comptime!(wanted.sums) && of.trains {
            #[unroll]
            for t in 0..tiles {
                let tile = unit + comptime!(t * units);
                let (j, i) = (tile / comptime!(width / 4) * 4, tile % comptime!(width / 4) * 4);
                if j < wide && i < of.size {
                    let first = comptime!(16 * t);
                    add_rows(
                        &mut of_first,
                        first,
                        &dhidden,
                        j,
                        wide_pitch,
                        &xs,
                        i,
                        width,
                        plan.rows,
                    );
                    add_rows(
                        &mut of_second,
                        first,
                        &hidden,
                        j,
                        wide_pitch,
                        &dys,
                        i,
                        width,
                        plan.rows,
                    );
                }
            }
            if unit < wide {
                for r in 0..plan.rows {
                    of_first_bias += dhidden[r * wide_pitch + unit];
                }
            }
            if unit < of.size {
                for r in 0..plan.rows {
                    of_second_bias += dys[r * width + unit];
                }
            }
        }
        sync_cube();
    }
    if comptime!(wanted.sums) {
        let mut shared = Shared::<[f32]>::new_slice(units);
        shared[unit] = of_alpha;
        sync_cube();
        #[unroll]
        for level in 0..comptime!(plan.units.ilog2()) {
            let half = comptime!((plan.units >> (level + 1)) as usize);
            if unit < half {
                let sum = shared[unit] + shared[unit + half];
                shared[unit] = sum;
            }
            sync_cube();
        }
        if of.contributes && part < sizes.parts {
            let to = (part * garden.seeds + seed) * record;
            if unit == 0 {
                left[to + record - 1] = shared[0];
            }
            if of.trains {
                let base = weights(0usize, sizes.widest);
                #[unroll]
                for t in 0..tiles {
                    let tile = unit + comptime!(t * units);
                    let j0 = tile / comptime!(width / 4) * 4;
                    let i0 = tile % comptime!(width / 4) * 4;
                    #[unroll]
                    for j in 0..4usize {
                        #[unroll]
                        for i in 0..4usize {
                            if j0 + j < wide && i0 + i < of.size {
                                let place = to + (j0 + j) * step + i0 + i;
                                let from = comptime!(16 * t + 4 * j + i);
                                left[place] = of.alpha * of_first[from];
                                left[place + base.second] = of.alpha * of_second[from];
                            }
                        }
                    }
                }
                if unit < wide {
                    left[to + base.first_bias + unit] = of.alpha * of_first_bias;
                }
                if unit < of.size {
                    left[to + base.second_bias + unit] = of.alpha * of_second_bias;
                }
            }
        }
    }
}

/// Blends the MLPs of seeds into their chunks of `y`.
pub(super) fn forward(x: Rows, of: Blueprints<CubeBackend>, mlps: CubeTensor, y: &CubeTensor) {
    let (client, dtype) = (y.client.clone(), y.dtype);
    let ([seeds, ..], [count, _, widest]) = (of.sizes(), mlps.meta.shape().dims());
    let plan = Plan::new(&client, widest, 3);
    let share_of = |rows| share(&client, rows, seeds, plan.rows, usize::MAX);
    let (rows, share) = (x.rows, share_of(x.rows));
    let parts = rows.div_ceil(share);
    let address = launch::address_type(&[&x.tensor, y, &mlps, &of.rows]);
    launch::plans::note("kasmina_mlp on plain units", &(&plan, address), &[("parts", parts > 1)]);
    let types = of.types(dtype);
    // SAFETY: rows, features and hidden units are looked at before every read and write, seeds follow from cubes.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, seeds * parts),
            CubeDim::new_1d(plan.units),
            address,
            x.tensor.into_buffer_arg(),
            of.garden(),
            mlps.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            SizesLaunch::new(rows, share, parts, x.stride, 0, count, widest),
            plan,
            types,
        );
    }
}

/// Writes the chunks of `dx` that MLPs are blended into. Returns what the other gradients are made of, if `sums`, and how
/// many MLPs there are of how many features.
pub(super) fn backward(
    x: Rows,
    dy: Rows,
    of: Blueprints<CubeBackend>,
    mlps: CubeTensor,
    dx: Option<&CubeTensor>,
    sums: bool,
) -> Option<(CubeTensor, [usize; 2])> {
    let (client, dtype) = (mlps.client.clone(), mlps.dtype);
    let ([seeds, ..], [count, _, widest]) = (of.sizes(), mlps.meta.shape().dims());
    let plan = Plan::new(&client, widest, 6);
    let most = LEFT / (seeds * record(widest));
    let (rows, share) = (x.rows, share(&client, x.rows, seeds, plan.rows, most));
    let parts = rows.div_ceil(share);
    let wanted = Wanted { x: dx.is_some(), sums };
    let unused = |dtype| launch::unused(&mlps, dtype);
    let left = match sums {
        true => left(&mlps, parts, seeds, widest),
        false => unused(DType::F32),
    };
    let of_x = dx.cloned().unwrap_or_else(|| unused(dtype));
    let address = launch::address_type(&[&x.tensor, &dy.tensor, &mlps, &of_x, &left, &of.rows]);
    let ways = [("parts", parts > 1)];
    launch::plans::note("kasmina_mlp backward on plain units", &(&plan, wanted, address), &ways);
    let types = of.types(dtype);
    // SAFETY: as in the forward; what is not wanted is not written.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, seeds * parts),
            CubeDim::new_1d(plan.units),
            address,
            x.tensor.into_buffer_arg(),
            dy.tensor.into_buffer_arg(),
            of.garden(),
            mlps.into_buffer_arg(),
            of_x.into_buffer_arg(),
            left.clone().into_buffer_arg(),
            SizesLaunch::new(rows, share, parts, x.stride, dy.stride, count, widest),
            record(widest),
            plan,
            wanted,
            types,
        );
    }
    sums.then_some((left, [count, widest]))
}
