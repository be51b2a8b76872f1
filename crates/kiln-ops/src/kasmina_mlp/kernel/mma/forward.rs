//! The chunks of y.

use super::super::{CubeTensor, Parts, Rows, Sizes, weights};
use super::*;
use crate::kasmina::backend::Blueprints;
use crate::kasmina::kernel::mlp_of;
use crate::launch;
use burn_cubecl::CubeBackend;
use cubecl_cpp::cuda::ptx::generic_to_shared;

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
    let (width, words) = comptime!((plan.width, plan.words()));
    let place = place_of::<W, I>(garden, &sizes);
    let of = mlp_of::<W, I>(garden, place.seed, sizes.mlps);
    if of.contributes && place.first < place.end {
        let warp = plane_broadcast(UNIT_POS / 32, 0u32) as usize;
        let first = place.first + warp * 16;
        // Under way while weights are packed.
        let mut held = load_rows::<E>(x, sizes.x, first, place.end, &of, plan);
        let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(2 * words), 128usize);
        let mut bias = Shared::<[f32]>::new_aligned_slice(comptime!(3 * width), 8usize);
        let at = weights(of.mlp, sizes.widest);
        let wide = 2 * of.size;
        pack_rows::<E>(mlps, at.first, sizes.widest, wide, of.size, &mut shared, 0usize, plan);
        pack_columns::<E>(mlps, at.second, sizes.widest, wide, of.size, &mut shared, words, plan);
        pack_bias::<E>(mlps, at.first_bias, wide, &mut bias, 0usize, comptime!(2 * width));
        pack_bias::<E>(mlps, at.second_bias, of.size, &mut bias, comptime!(2 * width), width);
        sync_cube();
        let base = unknown(generic_to_shared::<u32>(shared.as_ptr()));
        let zero = unknown(0u32);
        let pair = UNIT_POS % 4 * 2;
        let biases = unknown(generic_to_shared::<f32>(bias.as_ptr()) + pair * 4);
        for row in range_stepped(first, place.end, ROWS) {
            let next = load_rows::<E>(x, sizes.x, row + ROWS, place.end, &of, plan);
            let mut out = Array::<Vector<f32, Const<4>>>::new(comptime!(4 * plan.groups()));
            #[unroll]
            for i in 0..comptime!(4 * plan.groups()) {
                out[i] = Vector::new(0.0f32);
            }
            let x = operands(&held, zero, plan);
            #[unroll]
            for step in 0..comptime!((plan.tiles() / 2) as u32) {
                let mut hidden = Array::<u32>::new(4usize);
                #[unroll]
                for i in 0..2usize {
                    let tile = 2 * step + i as u32;
                    let sums = multiply_rows(&x, base, tile, plan);
                    let mut units = Array::<f32>::new(4usize);
                    let of_pair = load_pair(biases + tile * 32);
                    #[unroll]
                    for e in 0..4usize {
                        let sum = sums.extract(e) + of_pair.extract(comptime!(e % 2));
                        let unit = tile * 8 + pair + comptime!(e as u32 % 2);
                        units[e] = select(off(sum, unit, wide, false), f32::new(0.0), sum);
                    }
                    hidden[comptime!(2 * i)] = round_pair(units[0], units[1], plan.float);
                    hidden[comptime!(2 * i + 1)] = round_pair(units[2], units[3], plan.float);
                }
                let hidden = four(hidden[0], hidden[1], hidden[2], hidden[3]);
                add_columns(&mut out, hidden, base + comptime!((words * 4) as u32), step, plan);
            }
            let from = comptime!(Some(2 * width));
            let features = garden.features;
            store_rows::<E>(y, features, row, place.end, &of, &x, &out, &bias, from, plan);
            #[unroll]
            for i in 0..comptime!(8 * plan.groups()) {
                held[i] = next[i];
            }
        }
    }
}

/// As on plain units.
pub(in super::super) fn forward(
    x: Rows,
    of: Blueprints<CubeBackend>,
    mlps: CubeTensor,
    y: &CubeTensor,
    plan: Plan,
) {
    let client = y.client.clone();
    let ([seeds, ..], [count, _, widest]) = (of.sizes(), mlps.meta.shape().dims());
    let parts = Parts::new(&client, x.rows, seeds, ROWS, usize::MAX);
    let address = launch::address_type(&[&x.tensor, y, &mlps, &of.rows]);
    launch::plans::note("kasmina_mlp on mma", &(&plan, address), &parts.ways());
    let types = of.types(y.dtype);
    // SAFETY: rows, features and hidden units are looked at before every read and write, seeds follow from cubes.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, seeds * parts.count),
            CubeDim::new_1d(UNITS as u32),
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
