//! The chunks of dx, and what the other gradients are made of.

use super::super::{CubeTensor, LEFT, Parts, Rows, Sizes, Wanted, Weights, left, record, weights};
use super::weights::{Layout, PARTS, add_weights, keep_both, rows_of_warp, write_sums};
use super::*;
use crate::kasmina::backend::Blueprints;
use crate::kasmina::kernel::mlp_of;
use crate::launch;
use crate::reduce::{Shuffle, shuffle};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// Bytes of shared memory of a cube at most.
pub(super) fn shared(width: usize) -> usize {
    let found = WARPS * (width + 1);
    Layout { width }.bytes(true) + (3 * width + found) * size_of::<f32>()
}

/// Adds 16 rows to what a lane has of alpha's gradient and of that of the outputs' bias.
#[cube]
fn add_outputs(
    of_alpha: &mut Array<f32>,
    of_outputs: &mut Array<f32>,
    x: &Array<u32>,
    dy: &Array<u32>,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for i in 0..comptime!(8 * plan.groups()) {
        #[unroll]
        for e in 0..2usize {
            let d = half_of(dy[i], comptime!(e == 1), plan.float);
            of_alpha[e] -= half_of(x[i], comptime!(e == 1), plan.float) * d;
            of_outputs[comptime!(i / 8 * 8 + i % 4 * 2 + e)] += d;
        }
    }
}

/// Writes what the warps of a cube have found of alpha, and of the outputs' bias.
#[cube]
fn write_found(
    of_alpha: f32,
    of_outputs: &mut Array<f32>,
    left: &mut [f32],
    to: usize,
    record: usize,
    warp: usize,
    lane: usize,
    of: &MlpSeed,
    widest: usize,
    bias: &Shared<[f32]>,
    #[comptime] plan: Plan,
) {
    let width = comptime!(plan.width);
    // What warps have found of alpha and of the outputs' bias.
    let mut found = Shared::<[f32]>::new_slice(comptime!(WARPS * (width + 1)));
    let mut alpha = Array::<f32>::new(1usize);
    alpha[0] = of_alpha;
    #[unroll]
    for i in 0..comptime!(8 * plan.groups()) {
        let column = comptime!(i / 8 * 32 + i % 8) + lane % 4 * 8;
        alpha[0] += bias[comptime!(2 * width) + column] * of_outputs[i];
    }
    #[unroll]
    for level in 0..5u32 {
        let step = comptime!(1u32 << level);
        alpha[0] += shuffle(alpha[0], step, Shuffle::Xor, true);
    }
    if lane == 0 {
        found[warp * comptime!(width + 1) + width] = alpha[0];
    }
    #[unroll]
    for i in 0..comptime!(8 * plan.groups()) {
        #[unroll]
        for level in 2..5u32 {
            let step = comptime!(1u32 << level);
            of_outputs[i] += shuffle(of_outputs[i], step, Shuffle::Xor, true);
        }
        if lane < 4 {
            let column = comptime!(i / 8 * 32 + i % 8) + lane * 8;
            found[warp * comptime!(width + 1) + column] = of_outputs[i];
        }
    }
    sync_cube();
    let unit = UNIT_POS as usize;
    if unit <= width {
        let mut sum = f32::new(0.0);
        #[unroll]
        for warp in 0..WARPS {
            sum += found[comptime!(warp * (width + 1)) + unit];
        }
        let base = weights(0usize, widest);
        if unit == width {
            left[to + record - 1] = sum;
        } else if unit < of.size && of.trains {
            left[to + base.second_bias + unit] = of.alpha * sum;
        }
    }
}

/// So many sums of nothing.
#[cube]
fn zeros(#[comptime] count: usize) -> Array<Vector<f32, Const<4>>> {
    let mut sums = Array::<Vector<f32, Const<4>>>::new(count);
    #[unroll]
    for i in 0..count {
        sums[i] = Vector::new(0.0f32);
    }
    sums
}

/// Puts zeros where a lane adds up.
#[cube]
fn begin_sums(
    of_weights: &mut Array<Vector<f32, Const<4>>>,
    of_biases: &mut Array<Vector<f32, Const<4>>>,
    of_outputs: &mut Array<f32>,
    of_alpha: &mut Array<f32>,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for i in 0..2usize {
        of_alpha[i] = 0.0f32;
    }
    #[unroll]
    for i in 0..comptime!(PARTS * plan.width / 8) {
        of_weights[i] = Vector::new(0.0f32);
    }
    #[unroll]
    for i in 0..PARTS {
        of_biases[i] = Vector::new(0.0f32);
    }
    #[unroll]
    for i in 0..comptime!(8 * plan.groups()) {
        of_outputs[i] = 0.0f32;
    }
}

/// Puts the weights and biases of an MLP where a cube reads them.
#[cube]
fn pack<E: Float>(
    mlps: &[E],
    at: &Weights,
    of: &MlpSeed,
    wide: usize,
    widest: usize,
    shared: &mut Shared<[u32]>,
    bias: &mut Shared<[f32]>,
    #[comptime] plan: Plan,
) {
    let (width, words) = comptime!((plan.width, plan.words()));
    pack_rows::<E>(mlps, at.first, widest, wide, of.size, shared, 0usize, plan);
    pack_rows::<E>(mlps, at.second, widest, wide, of.size, shared, words, plan);
    let third = comptime!(2 * words);
    pack_columns::<E>(mlps, at.first, widest, wide, of.size, shared, third, plan);
    pack_bias::<E>(mlps, at.first_bias, wide, bias, 0usize, comptime!(2 * width));
    pack_bias::<E>(mlps, at.second_bias, of.size, bias, comptime!(2 * width), width);
}

/// Where a lane finds things in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Places {
    /// The first matrix of weights, and with it all of shared memory.
    weights: u32,
    /// Biases of its pairs of hidden units.
    biases: u32,
    /// Its own hidden units.
    hidden: u32,
}

/// Goes through 16 hidden units of 16 rows: to alpha's gradient, to dx, and to where gradients of weights are made of them.
#[cube]
fn through_units(
    of_alpha: &mut Array<f32>,
    out: &mut Array<Vector<f32, Const<4>>>,
    of_x: &Array<Vector<u32, Const<4>>>,
    of_dy: &Array<Vector<u32, Const<4>>>,
    places: &Places,
    step: u32,
    of: &MlpSeed,
    #[comptime] layout: Layout,
    #[comptime] plan: Plan,
    #[comptime] wanted: Wanted,
) {
    let wide = 2 * of.size;
    let pair = UNIT_POS % 4 * 2;
    let wide_pitch = comptime!(layout.wide_pitch() as u32);
    let mut back = Array::<u32>::new(4usize);
    let mut kept = Array::<u32>::new(4usize);
    #[unroll]
    for i in 0..2usize {
        let tile = 2 * step + i as u32;
        let sums = multiply_rows(of_x, places.weights, tile, plan);
        let second = places.weights + comptime!(layout.weights(1) as u32);
        let through = multiply_rows(of_dy, second, tile, plan);
        let mut units = Array::<f32>::new(4usize);
        let mut cotangents = Array::<f32>::new(4usize);
        let of_pair = load_pair(places.biases + tile * 32);
        #[unroll]
        for e in 0..4usize {
            let sum = sums.extract(e) + of_pair.extract(comptime!(e % 2));
            let unit = tile * 8 + pair + comptime!(e as u32 % 2);
            let off = off(sum, unit, wide, plan.aligned);
            units[e] = select(off, f32::new(0.0), sum);
            cotangents[e] = select(off, f32::new(0.0), through.extract(e));
            if comptime!(wanted.sums) {
                of_alpha[i] += units[e] * cotangents[e];
            }
        }
        #[unroll]
        for half in 0..2usize {
            let (a, b) = comptime!((2 * half, 2 * half + 1));
            let at = comptime!(2 * i + half);
            back[at] = round_pair(cotangents[a], cotangents[b], plan.float);
            if comptime!(wanted.sums) {
                kept[at] = round_pair(units[a], units[b], plan.float);
            }
        }
    }
    if comptime!(wanted.sums) && of.trains {
        #[unroll]
        for at in 0..4usize {
            let to = places.hidden
                + step * 32
                + comptime!(at as u32 / 2 * 16 + at as u32 % 2 * 8 * wide_pitch);
            store_word(to + comptime!(layout.hidden(0) as u32), kept[at]);
            store_word(to + comptime!(layout.hidden(1) as u32), back[at]);
        }
    }
    if comptime!(wanted.x) {
        let third = places.weights + comptime!(layout.weights(2) as u32);
        let back = four(back[0], back[1], back[2], back[3]);
        add_columns(out, back, third, step, plan);
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
    let (width, groups) = comptime!((plan.width, plan.groups()));
    let layout = comptime!(Layout { width: plan.width });
    let place = place_of::<W, I>(garden, &sizes);
    let of = mlp_of::<W, I>(garden, place.seed, sizes.mlps);
    if of.contributes && place.first < place.end {
        let warp = plane_broadcast(UNIT_POS / 32, 0u32) as usize;
        let lane = UNIT_POS as usize % 32;
        let first = place.first + warp * 16;
        let mut held_x = load_rows::<E>(x, sizes.x, first, place.end, &of, plan);
        let mut held_dy = load_rows::<E>(dy, sizes.dy, first, place.end, &of, plan);
        let bytes = comptime!(layout.bytes(wanted.sums));
        let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(bytes / 4), 128usize);
        let mut bias = Shared::<[f32]>::new_aligned_slice(comptime!(3 * width), 8usize);
        let at = weights(of.mlp, sizes.widest);
        let wide = 2 * of.size;
        pack::<E>(mlps, &at, &of, wide, sizes.widest, &mut shared, &mut bias, plan);
        sync_cube();
        let base = unknown(generic_to_shared::<u32>(shared.as_ptr()));
        let zero = unknown(0u32);
        let pair = UNIT_POS % 4 * 2;
        let biases = unknown(generic_to_shared::<f32>(bias.as_ptr()) + pair * 4);
        let own = (warp * 16 + lane / 4) as u32;
        let wide_pitch = comptime!(layout.wide_pitch() as u32);
        let hidden = unknown(base + own * wide_pitch + pair * 2);
        let places = Places { weights: base, biases, hidden };
        let part = rows_of_warp(warp, layout);
        let mut of_weights = Array::<Vector<f32, Const<4>>>::new(comptime!(PARTS * width / 8));
        let mut of_biases = Array::<Vector<f32, Const<4>>>::new(PARTS);
        let mut of_outputs = Array::<f32>::new(comptime!(8 * groups));
        let mut of_alpha = Array::<f32>::new(2usize);
        if comptime!(wanted.sums) {
            begin_sums(&mut of_weights, &mut of_biases, &mut of_outputs, &mut of_alpha, plan);
        }
        // Of 16 hidden units each, and of an aligned chunk no more than there are. Not known before, so that the loop is not
        // unrolled, which takes too many registers.
        let steps = (wide as u32).div_ceil(16);
        // All warps meet at barriers, also those that have no rows left.
        for block in range_stepped(place.first, place.end, ROWS) {
            let row = block + warp * 16;
            if comptime!(wanted.sums) {
                add_outputs(&mut of_alpha, &mut of_outputs, &held_x, &held_dy, plan);
                if of.trains {
                    keep_both(&held_x, &held_dy, base, own, layout, plan);
                }
            }
            let of_x = operands(&held_x, zero, plan);
            let of_dy = operands(&held_dy, zero, plan);
            let mut out = zeros(comptime!(4 * groups));

            for step in 0..steps {
                through_units(
                    &mut of_alpha,
                    &mut out,
                    &of_x,
                    &of_dy,
                    &places,
                    step,
                    &of,
                    layout,
                    plan,
                    wanted,
                );
            }
            if comptime!(wanted.x) {
                let none = comptime!(None);
                let features = garden.features;
                store_rows::<E>(dx, features, row, place.end, &of, &of_dy, &out, &bias, none, plan);
            }
            // Under way while gradients of weights are made; before, there are no registers for them.
            held_x = load_rows::<E>(x, sizes.x, row + ROWS, place.end, &of, plan);
            held_dy = load_rows::<E>(dy, sizes.dy, row + ROWS, place.end, &of, plan);
            if comptime!(wanted.sums) && of.trains {
                sync_cube();
                add_weights(&mut of_weights, &mut of_biases, base, &part, layout, plan.float);
                sync_cube();
            }
        }
        if comptime!(wanted.sums) {
            let to = (place.part * garden.seeds + place.seed) * record;
            write_found(
                of_alpha[0] + of_alpha[1],
                &mut of_outputs,
                left,
                to,
                record,
                warp,
                lane,
                &of,
                sizes.widest,
                &bias,
                plan,
            );
            if of.trains {
                write_sums(
                    &mut of_weights,
                    &mut of_biases,
                    &mut shared,
                    left,
                    to,
                    &of,
                    sizes.widest,
                    &part,
                    layout,
                );
            }
        }
    }
}

/// As on plain units.
pub(in super::super) fn backward(
    x: Rows,
    dy: Rows,
    of: Blueprints<CubeBackend>,
    mlps: CubeTensor,
    dx: Option<&CubeTensor>,
    sums: bool,
    plan: Plan,
) -> Option<(CubeTensor, [usize; 2])> {
    let (client, dtype) = (mlps.client.clone(), mlps.dtype);
    let ([seeds, ..], [count, _, widest]) = (of.sizes(), mlps.meta.shape().dims());
    let most = LEFT / (seeds * record(widest));
    let parts = Parts::new(&client, x.rows, seeds, ROWS, most);
    let wanted = Wanted { x: dx.is_some(), sums };
    let unused = |dtype| launch::unused(&mlps, dtype);
    let left = match sums {
        true => left(&mlps, parts.count, seeds, widest),
        false => unused(DType::F32),
    };
    let of_x = dx.cloned().unwrap_or_else(|| unused(dtype));
    let address = launch::address_type(&[&x.tensor, &dy.tensor, &mlps, &of_x, &left, &of.rows]);
    launch::plans::note("kasmina_mlp backward on mma", &(&plan, wanted, address), &parts.ways());
    let types = of.types(dtype);
    // SAFETY: as in the forward; what is not wanted is not written.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, seeds * parts.count),
            CubeDim::new_1d(UNITS as u32),
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
