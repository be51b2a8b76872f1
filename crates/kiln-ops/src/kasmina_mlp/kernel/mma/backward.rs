//! The chunks of dx, and what the other gradients are made of.
//!
//! What a cube has found of 128 rows goes through shared memory once more, since the gradients of weights are sums over
//! rows: x, dy, the hidden units and their cotangents, of which each warp makes some rows of dW₁ or dW₂ᵀ.

use super::super::{
    CubeTensor, LEFT, Rows, Sizes, SizesLaunch, Wanted, left, record, share, weights,
};
use super::*;
use crate::kasmina::backend::Blueprints;
use crate::kasmina::kernel::mlp_of;
use crate::launch;
use crate::reduce::{Shuffle, shuffle};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use cubecl_cpp::cuda::ptx::generic_to_shared;

/// Where things stand in shared memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    width: usize,
}

impl Layout {
    /// W₁ by rows, W₂ᵀ by rows, W₁ by columns; then hidden units, their cotangents, x and dy.
    fn weights(self, which: usize) -> usize {
        which * 4 * self.width * self.width
    }

    /// From one row of hidden units to the next, and of features: eight rows lie in different banks.
    fn wide_pitch(self) -> usize {
        4 * self.width + 16
    }

    fn pitch(self) -> usize {
        2 * self.width + 16
    }

    fn hidden(self, which: usize) -> usize {
        self.weights(3) + which * ROWS * self.wide_pitch()
    }

    fn features(self, which: usize) -> usize {
        self.hidden(2) + which * ROWS * self.pitch()
    }

    fn bytes(self, train: bool) -> usize {
        if train { self.features(2) } else { self.weights(3) }
    }

    /// Groups of 16 rows of both gradients of weights that a warp has.
    fn parts(self) -> usize {
        2 * (2 * self.width / 16) / WARPS
    }
}

/// Bytes of shared memory of a cube at most.
pub(super) fn shared(width: usize) -> usize {
    let found = WARPS * (width + 1);
    Layout { width }.bytes(true) + (3 * width + found) * size_of::<f32>()
}

/// A word's worth of two sums of 16 bits, to shared memory.
#[cube]
fn keep(base: u32, row: usize, column: usize, #[comptime] pitch: usize, word: u32) {
    store_word(base + (row * pitch + column * 2) as u32, word);
}

/// Adds what 128 rows of hidden units times features are to a warp's part of a gradient of weights: rows of hidden units
/// from `from` on.
#[cube]
fn add_rows(
    sums: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] first: usize,
    biases: &mut Array<Vector<f32, Const<4>>>,
    #[comptime] part: usize,
    hidden: u32,
    from: u32,
    features: u32,
    #[comptime] layout: Layout,
    #[comptime] float: Float16,
) {
    let lane = UNIT_POS % 32;
    let (low, quarter) = (lane % 8, lane / 8);
    let (wide_pitch, pitch) = comptime!((layout.wide_pitch() as u32, layout.pitch() as u32));
    let mut ones = Array::<u32>::new(1usize);
    ones[0] =
        comptime!(if float == Float16::Bf16 { 0x3F80_3F80u32 } else { 0x3C00_3C00u32 }).runtime();
    for step in 0..comptime!((ROWS / 16) as u32) {
        let row = step * 16 + quarter / 2 * 8 + low;
        let mut left = Array::<Vector<u32, Const<4>>>::new(1usize);
        left[0] = load_matrices(hidden + row * wide_pitch + (from + quarter % 2 * 8) * 2, true);
        biases[part] = mma_16x8x16(left[0], ones[0], ones[0], biases[part], float);
        let row = step * 16 + quarter % 2 * 8 + low;
        #[unroll]
        for pair in 0..comptime!(layout.width / 16) {
            let column = comptime!((pair * 16) as u32) + quarter / 2 * 8;
            let right = load_matrices(features + row * pitch + column * 2, true);
            #[unroll]
            for i in 0..2usize {
                let at = comptime!(first + 2 * pair + i);
                let (b0, b1) =
                    (right.extract(comptime!(2 * i)), right.extract(comptime!(2 * i + 1)));
                sums[at] = mma_16x8x16(left[0], b0, b1, sums[at], float);
            }
        }
    }
}

/// Adds 128 rows to a warp's part of the gradients of weights.
#[cube]
fn add_weights(
    of_weights: &mut Array<Vector<f32, Const<4>>>,
    of_biases: &mut Array<Vector<f32, Const<4>>>,
    base: u32,
    warp: usize,
    #[comptime] layout: Layout,
    #[comptime] float: Float16,
) {
    #[unroll]
    for part in 0..layout.parts() {
        // The first warps have dW₁, of the cotangents and x; the others dW₂ᵀ, of the hidden units and dy.
        let of_first = warp < comptime!(WARPS / 2);
        let hidden = select(
            of_first,
            comptime!(layout.hidden(1) as u32).runtime(),
            comptime!(layout.hidden(0) as u32).runtime(),
        );
        let features = select(
            of_first,
            comptime!(layout.features(0) as u32).runtime(),
            comptime!(layout.features(1) as u32).runtime(),
        );
        let from = (warp as u32 % comptime!((WARPS / 2) as u32)
            + comptime!((part * WARPS / 2) as u32))
            * 16;
        let first = comptime!(part * layout.width / 8);
        add_rows(
            of_weights,
            first,
            of_biases,
            part,
            base + hidden,
            from,
            base + features,
            layout,
            float,
        );
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
    #[comptime] plan: Plan,
) {
    let width = comptime!(plan.width);
    // What warps have found of alpha and of the outputs' bias.
    let mut found = Shared::<[f32]>::new_slice(comptime!(WARPS * (width + 1)));
    let mut alpha = Array::<f32>::new(1usize);
    alpha[0] = of_alpha;
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
    let (width, words, groups) = comptime!((plan.width, plan.words(), plan.groups()));
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
        let mut bias = Shared::<[f32]>::new_slice(comptime!(3 * width));
        let at = weights(of.mlp, sizes.widest);
        let wide = 2 * of.size;
        pack_rows::<E>(mlps, at.first, sizes.widest, wide, of.size, &mut shared, 0usize, plan);
        pack_rows::<E>(mlps, at.second, sizes.widest, wide, of.size, &mut shared, words, plan);
        let third = comptime!(2 * words);
        pack_columns::<E>(mlps, at.first, sizes.widest, wide, of.size, &mut shared, third, plan);
        pack_bias::<E>(mlps, at.first_bias, wide, &mut bias, 0usize, comptime!(2 * width));
        pack_bias::<E>(mlps, at.second_bias, of.size, &mut bias, comptime!(2 * width), width);
        sync_cube();
        let base = generic_to_shared::<u32>(shared.as_ptr());
        let pair = lane % 4 * 2;
        // The rows of a lane in the cube's.
        let own = warp * 16 + lane / 4;
        let parts = comptime!(layout.parts());
        let mut of_weights = Array::<Vector<f32, Const<4>>>::new(comptime!(parts * width / 8));
        let mut of_biases = Array::<Vector<f32, Const<4>>>::new(parts);
        let mut of_outputs = Array::<f32>::new(comptime!(8 * groups));
        if comptime!(wanted.sums) {
            #[unroll]
            for i in 0..comptime!(parts * width / 8) {
                of_weights[i] = Vector::new(0.0f32);
            }
            #[unroll]
            for i in 0..parts {
                of_biases[i] = Vector::new(0.0f32);
            }
            #[unroll]
            for i in 0..comptime!(8 * groups) {
                of_outputs[i] = 0.0f32;
            }
        }
        let mut of_alpha = f32::new(0.0);
        // Of 16 hidden units each. Not known before, so that the loop is not unrolled, which takes too many registers.
        let steps = (wide as u32).div_ceil(16);
        // All warps meet at barriers, also those that have no rows left.
        for block in range_stepped(place.first, place.end, ROWS) {
            let row = block + warp * 16;
            let next_x = load_rows::<E>(x, sizes.x, row + ROWS, place.end, &of, plan);
            let next_dy = load_rows::<E>(dy, sizes.dy, row + ROWS, place.end, &of, plan);
            if comptime!(wanted.sums) {
                #[unroll]
                for i in 0..comptime!(8 * groups) {
                    let (half, word) = comptime!((i / 4 % 2, i % 4));
                    let column = comptime!(i / 8 * 32 + word * 2) + lane % 4 * 8;
                    #[unroll]
                    for e in 0..2usize {
                        let upper = comptime!(e == 1);
                        let d = half_of(held_dy[i], upper, plan.float);
                        let x = half_of(held_x[i], upper, plan.float);
                        of_alpha += (bias[comptime!(2 * width + e) + column] - x) * d;
                        of_outputs[comptime!(i / 8 * 8 + word * 2 + e)] += d;
                    }
                    if of.trains {
                        let row = own + comptime!(half * 8);
                        let pitch = comptime!(layout.pitch());
                        let to = base + comptime!(layout.features(0) as u32);
                        keep(to, row, column, pitch, held_x[i]);
                        let to = base + comptime!(layout.features(1) as u32);
                        keep(to, row, column, pitch, held_dy[i]);
                    }
                }
            }
            let mut out = Array::<Vector<f32, Const<4>>>::new(comptime!(4 * groups));
            #[unroll]
            for i in 0..comptime!(4 * groups) {
                out[i] = Vector::new(0.0f32);
            }

            for step in 0..steps {
                let mut back = Array::<u32>::new(4usize);
                #[unroll]
                for i in 0..2usize {
                    let tile = 2 * step + i as u32;
                    let sums = multiply_rows(&held_x, base, tile, plan);
                    let second = base + comptime!(layout.weights(1) as u32);
                    let through = multiply_rows(&held_dy, second, tile, plan);
                    let mut units = Array::<f32>::new(4usize);
                    let mut cotangents = Array::<f32>::new(4usize);
                    #[unroll]
                    for e in 0..4usize {
                        let sum =
                            sums.extract(e) + bias[tile as usize * 8 + pair + comptime!(e % 2)];
                        let unit = tile as usize * 8 + pair + comptime!(e % 2);
                        let (off, u) = (unit >= wide || sum <= 0.0, through.extract(e));
                        units[e] = select(off, f32::new(0.0), sum);
                        cotangents[e] = select(off, f32::new(0.0), u);
                        if comptime!(wanted.sums) {
                            of_alpha += units[e] * cotangents[e];
                        }
                    }
                    #[unroll]
                    for half in 0..2usize {
                        let (a, b) = comptime!((2 * half, 2 * half + 1));
                        let at = comptime!(2 * i + half);
                        back[at] = round_pair(cotangents[a], cotangents[b], plan.float);
                        if comptime!(wanted.sums) && of.trains {
                            let row = own + comptime!(half * 8);
                            let column = tile as usize * 8 + pair;
                            let pitch = comptime!(layout.wide_pitch());
                            let to = base + comptime!(layout.hidden(1) as u32);
                            keep(to, row, column, pitch, back[at]);
                            let mut unit = Array::<u32>::new(1usize);
                            unit[0] = round_pair(units[a], units[b], plan.float);
                            let to = base + comptime!(layout.hidden(0) as u32);
                            keep(to, row, column, pitch, unit[0]);
                        }
                    }
                }
                if comptime!(wanted.x) {
                    let third = base + comptime!(layout.weights(2) as u32);
                    let back = four(back[0], back[1], back[2], back[3]);
                    add_columns(&mut out, back, third, step, plan);
                }
            }
            if comptime!(wanted.x) {
                let none = comptime!(None);
                let features = garden.features;
                store_rows::<E>(
                    dx, features, row, place.end, &of, &held_dy, &out, &bias, none, plan,
                );
            }
            if comptime!(wanted.sums) && of.trains {
                sync_cube();
                add_weights(&mut of_weights, &mut of_biases, base, warp, layout, plan.float);
                sync_cube();
            }
            #[unroll]
            for i in 0..comptime!(8 * groups) {
                held_x[i] = next_x[i];
                held_dy[i] = next_dy[i];
            }
        }
        if comptime!(wanted.sums) {
            let to = (place.part * garden.seeds + place.seed) * record;
            write_found(
                of_alpha,
                &mut of_outputs,
                left,
                to,
                record,
                warp,
                lane,
                &of,
                sizes.widest,
                plan,
            );
            if of.trains {
                write_weights(&of_weights, &of_biases, left, to, &of, sizes.widest, layout);
            }
        }
    }
}

/// Writes a warp's part of the gradients of weights, and of the hidden units' biases.
#[cube]
#[allow(clippy::manual_is_multiple_of)] // kernels have no such method
fn write_weights(
    of_weights: &Array<Vector<f32, Const<4>>>,
    of_biases: &Array<Vector<f32, Const<4>>>,
    left: &mut [f32],
    to: usize,
    of: &MlpSeed,
    widest: usize,
    #[comptime] layout: Layout,
) {
    let lane = UNIT_POS as usize % 32;
    let warp = UNIT_POS as usize / 32;
    let of_first = warp < comptime!(WARPS / 2);
    let wide = 2 * of.size;
    let base = weights(0usize, widest);
    let matrix = to + select(of_first, base.first, base.second);
    #[unroll]
    for part in 0..layout.parts() {
        let row = (warp % comptime!(WARPS / 2) + comptime!(part * WARPS / 2)) * 16 + lane / 4;
        #[unroll]
        for half in 0..2usize {
            let row = row + comptime!(half * 8);
            if row < wide {
                #[unroll]
                for tile in 0..comptime!(layout.width / 8) {
                    let sums = of_weights[comptime!(part * layout.width / 8 + tile)];
                    let column = comptime!(tile * 8) + lane % 4 * 2;
                    #[unroll]
                    for e in 0..2usize {
                        if column + e < of.size {
                            let sum = sums.extract(comptime!(half * 2 + e));
                            left[matrix + row * widest + column + e] = of.alpha * sum;
                        }
                    }
                }
                if of_first && lane % 4 == 0 {
                    let sum = of_biases[part].extract(comptime!(half * 2));
                    left[to + base.first_bias + row] = of.alpha * sum;
                }
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
    let (rows, share) = (x.rows, share(&client, x.rows, seeds, ROWS, most));
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
    launch::plans::note("kasmina_mlp backward on mma", &(&plan, wanted, address), &ways);
    let types = of.types(dtype);
    // SAFETY: as in the forward; what is not wanted is not written.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, seeds * parts),
            CubeDim::new_1d(UNITS as u32),
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
