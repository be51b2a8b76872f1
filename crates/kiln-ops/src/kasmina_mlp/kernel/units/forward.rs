//! The chunks of y.

use super::super::{Parts, Rows, Sizes, part_of, weights};
use super::{CubeTensor, Plan, load, product};
use crate::kasmina::backend::Blueprints;
use crate::kasmina::kernel::{Garden, mlp_of};
use crate::launch;
use burn_cubecl::CubeBackend;
use cubecl::prelude::*;

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
    let (begin, end) = part_of(&sizes, part);
    let first = select(of.contributes, begin, end);
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

/// Blends the MLPs of seeds into their chunks of `y`.
pub(in super::super) fn forward(
    x: Rows,
    of: Blueprints<CubeBackend>,
    mlps: CubeTensor,
    y: &CubeTensor,
) {
    let (client, dtype) = (y.client.clone(), y.dtype);
    let ([seeds, ..], [count, _, widest]) = (of.sizes(), mlps.meta.shape().dims());
    let plan = Plan::new(&client, widest, 3);
    let parts = Parts::new(&client, x.rows, seeds, plan.rows, usize::MAX);
    let address = launch::address_type(&[&x.tensor, y, &mlps, &of.rows]);
    launch::plans::note("kasmina_mlp on plain units", &(&plan, address), &parts.ways());
    let types = of.types(dtype);
    // SAFETY: rows, features and hidden units are looked at before every read and write, seeds follow from cubes.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, seeds * parts.count),
            CubeDim::new_1d(plan.units),
            address,
            x.tensor.into_buffer_arg(),
            of.garden(),
            mlps.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            parts.sizes([x.stride, 0], count, widest),
            plan,
            types,
        );
    }
}
