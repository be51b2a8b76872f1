//! The chunks of dx, and what the other gradients are made of.

use super::super::{LEFT, Parts, Rows, Sizes, Wanted, left, part_of, record, weights};
use super::{CubeTensor, Plan, load, product};
use crate::kasmina::backend::Blueprints;
use crate::kasmina::kernel::{Garden, MlpSeed, mlp_of};
use crate::launch;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use cubecl::prelude::*;

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

/// (1 − alpha)·dy + alpha·W₁ᵀ·d of some rows of a chunk.
#[cube]
fn store<E: Float>(
    dhidden: &[f32],
    dys: &[f32],
    mlps: &[E],
    dx: &mut [E],
    first: usize,
    step: usize,
    row: usize,
    end: usize,
    features: usize,
    of: &MlpSeed,
    #[comptime] plan: Plan,
) {
    let across = of.size.div_ceil(4);
    for tile in range_stepped(
        UNIT_POS as usize,
        across * comptime!(plan.rows / 4),
        comptime!(plan.units as usize),
    ) {
        let (r, c) = (tile / across * 4, tile % across * 4);
        let sums = product::<E>(
            dhidden,
            r,
            comptime!(2 * plan.width),
            2 * of.size,
            mlps,
            first,
            c,
            of.size,
            1usize,
            step,
        );
        #[unroll]
        for j in 0..4usize {
            if c + j < of.size {
                #[unroll]
                for i in 0..4usize {
                    if row + r + i < end {
                        let d = dys[(r + i) * comptime!(plan.width) + c + j];
                        let back = sums[comptime!(i * 4 + j)];
                        let value = (1.0 - of.alpha) * d + of.alpha * back;
                        dx[(row + r + i) * features + of.begin + c + j] = E::cast_from(value);
                    }
                }
            }
        }
    }
}

/// Adds some rows to a unit's part of the gradients of weights.
#[cube]
fn add_weights(
    of_first: &mut Array<f32>,
    of_second: &mut Array<f32>,
    hidden: &[f32],
    dhidden: &[f32],
    xs: &[f32],
    dys: &[f32],
    of: &MlpSeed,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for t in 0..plan.tiles() {
        let tile = UNIT_POS as usize + comptime!(t * plan.units as usize);
        let (j, i) = (tile / comptime!(plan.width / 4) * 4, tile % comptime!(plan.width / 4) * 4);
        if j < 2 * of.size && i < of.size {
            let first = comptime!(16 * t);
            add_rows(
                of_first,
                first,
                dhidden,
                j,
                comptime!(2 * plan.width),
                xs,
                i,
                plan.width,
                plan.rows,
            );
            add_rows(
                of_second,
                first,
                hidden,
                j,
                comptime!(2 * plan.width),
                dys,
                i,
                plan.width,
                plan.rows,
            );
        }
    }
}

/// Writes a unit's part of the gradients of weights.
#[cube]
fn write_weights(
    of_first: &Array<f32>,
    of_second: &Array<f32>,
    left: &mut [f32],
    to: usize,
    step: usize,
    second: usize,
    of: &MlpSeed,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for t in 0..plan.tiles() {
        let tile = UNIT_POS as usize + comptime!(t * plan.units as usize);
        let j0 = tile / comptime!(plan.width / 4) * 4;
        let i0 = tile % comptime!(plan.width / 4) * 4;
        #[unroll]
        for j in 0..4usize {
            #[unroll]
            for i in 0..4usize {
                if j0 + j < 2 * of.size && i0 + i < of.size {
                    let place = to + (j0 + j) * step + i0 + i;
                    let from = comptime!(16 * t + 4 * j + i);
                    left[place] = of.alpha * of_first[from];
                    left[place + second] = of.alpha * of_second[from];
                }
            }
        }
    }
}

/// Puts zeros where a unit adds up.
#[cube]
fn begin_sums(of_first: &mut Array<f32>, of_second: &mut Array<f32>, #[comptime] plan: Plan) {
    #[unroll]
    for i in 0..comptime!(16 * plan.tiles()) {
        of_first[i] = 0.0f32;
        of_second[i] = 0.0f32;
    }
}

/// Adds up what the units of a cube have, in the first place.
#[cube]
fn add_up(shared: &mut Shared<[f32]>, #[comptime] plan: Plan) {
    let unit = UNIT_POS as usize;
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
}

/// Writes what a cube has of the gradients of an MLP.
#[cube]
fn write_sums(
    of_first: &Array<f32>,
    of_second: &Array<f32>,
    of_biases: (f32, f32),
    left: &mut [f32],
    to: usize,
    widest: usize,
    of: &MlpSeed,
    #[comptime] plan: Plan,
) {
    let (unit, wide) = (UNIT_POS as usize, 2 * of.size);
    let base = weights(0usize, widest);
    write_weights(of_first, of_second, left, to, widest, base.second, of, plan);
    if unit < wide {
        left[to + base.first_bias + unit] = of.alpha * of_biases.0;
    }
    if unit < of.size {
        left[to + base.second_bias + unit] = of.alpha * of_biases.1;
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
    begin_sums(&mut of_first, &mut of_second, plan);
    let mut of_first_bias = f32::new(0.0);
    let mut of_second_bias = f32::new(0.0);
    let mut of_alpha = f32::new(0.0);
    let (begin, end) = part_of(&sizes, part);
    let first = select(of.contributes, begin, end);
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
            store::<E>(
                &dhidden,
                &dys,
                mlps,
                dx,
                at.first,
                step,
                row,
                end,
                garden.features,
                &of,
                plan,
            );
        }
        if comptime!(wanted.sums) && of.trains {
            add_weights(&mut of_first, &mut of_second, &hidden, &dhidden, &xs, &dys, &of, plan);
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
        add_up(&mut shared, plan);
        if of.contributes && begin < end {
            let to = (part * garden.seeds + seed) * record;
            if unit == 0 {
                left[to + record - 1] = shared[0];
            }
            if of.trains {
                let biases = (of_first_bias, of_second_bias);
                write_sums(&of_first, &of_second, biases, left, to, step, &of, plan);
            }
        }
    }
}

/// Writes the chunks of `dx` that MLPs are blended into. Returns what the other gradients are made of, if `sums`, and how
/// many MLPs there are of how many features.
pub(in super::super) fn backward(
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
    let parts = Parts::new(&client, x.rows, seeds, plan.rows, most);
    let wanted = Wanted { x: dx.is_some(), sums };
    let unused = |dtype| launch::unused(&mlps, dtype);
    let left = match sums {
        true => left(&mlps, parts.count, seeds, widest),
        false => unused(DType::F32),
    };
    let of_x = dx.cloned().unwrap_or_else(|| unused(dtype));
    let address = launch::address_type(&[&x.tensor, &dy.tensor, &mlps, &of_x, &left, &of.rows]);
    launch::plans::note(
        "kasmina_mlp backward on plain units",
        &(&plan, wanted, address),
        &parts.ways(),
    );
    let types = of.types(dtype);
    // SAFETY: as in the forward; what is not wanted is not written.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, seeds * parts.count),
            CubeDim::new_1d(plan.units),
            address,
            x.tensor.into_buffer_arg(),
            dy.tensor.into_buffer_arg(),
            of.garden(),
            mlps.into_buffer_arg(),
            of_x.into_buffer_arg(),
            left.clone().into_buffer_arg(),
            parts.sizes([x.stride, dy.stride], count, widest),
            record(widest),
            plan,
            wanted,
            types,
        );
    }
    sums.then_some((left, [count, widest]))
}
