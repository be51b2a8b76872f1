//! The chunks of dx, and what the other gradients are made of.
//!
//! What a cube has found of 128 rows goes through shared memory once more, since the gradients of weights are sums over
//! rows: x, dy, the hidden units and their cotangents, of which each warp makes 32 rows of dW₁ or dW₂ᵀ. Of narrow chunks
//! those are fewer than there are warps, so that half of the warps has the other half of the 128 rows.

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

    /// From one row of hidden units to the next: eight rows lie in different banks.
    fn wide_pitch(self) -> usize {
        4 * self.width + 16
    }

    /// From one row of features to the next.
    fn pitch(self) -> usize {
        2 * self.width
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

    /// Warps that make both gradients of weights of the same rows.
    fn sharers(self) -> usize {
        2 * 2 * self.width / (16 * PARTS)
    }

    /// Parts that the 128 rows are in, each of as many warps.
    fn halves(self) -> usize {
        WARPS / self.sharers()
    }
}

/// Groups of 16 rows of a gradient of weights that a warp has.
const PARTS: usize = 2;

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

/// Puts a lane's features of the row `own` and of that eight further down where gradients of weights are made of them.
#[cube]
fn keep_features(
    words: &Array<u32>,
    to: u32,
    own: u32,
    #[comptime] layout: Layout,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for i in 0..comptime!(2 * plan.groups()) {
        let (row, eight) = (own + comptime!(i as u32 % 2 * 8), comptime!(i as u32 / 2 * 4));
        let at = to + eight_at(row, eight + UNIT_POS % 4, layout);
        store_16_shared(at, four_of(words, comptime!(4 * i)));
    }
}

/// Where eight features of a row lie: those that eight rows have at one place are in different banks, and those that two
/// neighbouring rows have in one group of 32.
#[cube]
fn eight_at(row: u32, eight: u32, #[comptime] layout: Layout) -> u32 {
    let lines = comptime!((128 / layout.pitch()) as u32);
    row / lines * 128 + (eight ^ (row % 2 * 4 + row / 2 % 4)) * 16
}

/// Adds 128 rows to a warp's part of the gradients of weights: what hidden units are times features.
#[cube]
fn add_weights(
    of_weights: &mut Array<Vector<f32, Const<4>>>,
    of_biases: &mut Array<Vector<f32, Const<4>>>,
    base: u32,
    of: &WarpRows,
    #[comptime] layout: Layout,
    #[comptime] float: Float16,
) {
    let lane = UNIT_POS % 32;
    let (low, quarter) = (lane % 8, lane / 8);
    // dW₁ is of the cotangents and x, dW₂ᵀ of the hidden units and dy.
    let hidden = base
        + select(
            of.first,
            comptime!(layout.hidden(1) as u32).runtime(),
            comptime!(layout.hidden(0) as u32).runtime(),
        );
    let features = base
        + select(
            of.first,
            comptime!(layout.features(0) as u32).runtime(),
            comptime!(layout.features(1) as u32).runtime(),
        );
    let wide_pitch = comptime!(layout.wide_pitch() as u32);
    let mut ones = Array::<u32>::new(1usize);
    ones[0] =
        comptime!(if float == Float16::Bf16 { 0x3F80_3F80u32 } else { 0x3C00_3C00u32 }).runtime();
    let steps = comptime!((ROWS / 16 / layout.halves()) as u32);
    for step in 0..steps {
        let step = of.half * steps + step;
        let row = step * 16 + quarter / 2 * 8 + low;
        let mut left = Array::<Vector<u32, Const<4>>>::new(PARTS);
        #[unroll]
        for part in 0..PARTS {
            let column = of.row + comptime!(part as u32 * 16) + quarter % 2 * 8;
            left[part] = load_matrices(hidden + row * wide_pitch + column * 2, true);
            of_biases[part] = mma_16x8x16(left[part], ones[0], ones[0], of_biases[part], float);
        }
        let row = step * 16 + quarter % 2 * 8 + low;
        #[unroll]
        for pair in 0..comptime!(layout.width / 16) {
            let eight = comptime!((pair * 2) as u32) + quarter / 2;
            let right = load_matrices(features + eight_at(row, eight, layout), true);
            #[unroll]
            for part in 0..PARTS {
                #[unroll]
                for i in 0..2usize {
                    let at = comptime!(part * layout.width / 8 + 2 * pair + i);
                    let (b0, b1) =
                        (right.extract(comptime!(2 * i)), right.extract(comptime!(2 * i + 1)));
                    of_weights[at] = mma_16x8x16(left[part], b0, b1, of_weights[at], float);
                }
            }
        }
    }
}

/// What a warp makes of the gradients of weights.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct WarpRows {
    /// Of dW₁, else of dW₂ᵀ.
    first: bool,
    /// The first of its 32 rows there.
    row: u32,
    /// Which part of the rows of x it adds.
    half: u32,
}

#[cube]
fn rows_of_warp(warp: usize, #[comptime] layout: Layout) -> WarpRows {
    let sharers = comptime!(layout.sharers() as u32);
    let warp = warp as u32;
    let of_matrix = comptime!(layout.sharers() as u32 / 2);
    WarpRows {
        first: warp % sharers < of_matrix,
        row: warp % of_matrix * comptime!(PARTS as u32 * 16),
        half: warp / sharers,
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
        let mut bias = Shared::<[f32]>::new_aligned_slice(comptime!(3 * width), 8usize);
        let at = weights(of.mlp, sizes.widest);
        let wide = 2 * of.size;
        pack_rows::<E>(mlps, at.first, sizes.widest, wide, of.size, &mut shared, 0usize, plan);
        pack_rows::<E>(mlps, at.second, sizes.widest, wide, of.size, &mut shared, words, plan);
        let third = comptime!(2 * words);
        pack_columns::<E>(mlps, at.first, sizes.widest, wide, of.size, &mut shared, third, plan);
        pack_bias::<E>(mlps, at.first_bias, wide, &mut bias, 0usize, comptime!(2 * width));
        pack_bias::<E>(mlps, at.second_bias, of.size, &mut bias, comptime!(2 * width), width);
        sync_cube();
        let base = unknown(generic_to_shared::<u32>(shared.as_ptr()));
        let zero = unknown(0u32);
        let pair = UNIT_POS % 4 * 2;
        let biases = unknown(generic_to_shared::<f32>(bias.as_ptr()) + pair * 4);
        let own = (warp * 16 + lane / 4) as u32;
        let wide_pitch = comptime!(layout.wide_pitch() as u32);
        let hidden = unknown(base + own * wide_pitch + pair * 2);
        let own_weights = rows_of_warp(warp, layout);
        let mut of_weights = Array::<Vector<f32, Const<4>>>::new(comptime!(PARTS * width / 8));
        let mut of_biases = Array::<Vector<f32, Const<4>>>::new(PARTS);
        let mut of_outputs = Array::<f32>::new(comptime!(8 * groups));
        let mut of_alpha = Array::<f32>::new(2usize);
        if comptime!(wanted.sums) {
            #[unroll]
            for i in 0..2usize {
                of_alpha[i] = 0.0f32;
            }
            #[unroll]
            for i in 0..comptime!(PARTS * width / 8) {
                of_weights[i] = Vector::new(0.0f32);
            }
            #[unroll]
            for i in 0..PARTS {
                of_biases[i] = Vector::new(0.0f32);
            }
            #[unroll]
            for i in 0..comptime!(8 * groups) {
                of_outputs[i] = 0.0f32;
            }
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
                    keep_features(
                        &held_x,
                        base + comptime!(layout.features(0) as u32),
                        own,
                        layout,
                        plan,
                    );
                    keep_features(
                        &held_dy,
                        base + comptime!(layout.features(1) as u32),
                        own,
                        layout,
                        plan,
                    );
                }
            }
            let of_x = operands(&held_x, zero, plan);
            let of_dy = operands(&held_dy, zero, plan);
            let mut out = Array::<Vector<f32, Const<4>>>::new(comptime!(4 * groups));
            #[unroll]
            for i in 0..comptime!(4 * groups) {
                out[i] = Vector::new(0.0f32);
            }

            for step in 0..steps {
                let mut back = Array::<u32>::new(4usize);
                let mut kept = Array::<u32>::new(4usize);
                #[unroll]
                for i in 0..2usize {
                    let tile = 2 * step + i as u32;
                    let sums = multiply_rows(&of_x, base, tile, plan);
                    let second = base + comptime!(layout.weights(1) as u32);
                    let through = multiply_rows(&of_dy, second, tile, plan);
                    let mut units = Array::<f32>::new(4usize);
                    let mut cotangents = Array::<f32>::new(4usize);
                    let of_pair = load_pair(biases + tile * 32);
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
                        let to = hidden
                            + step * 32
                            + comptime!(at as u32 / 2 * 16 + at as u32 % 2 * 8 * wide_pitch);
                        store_word(to + comptime!(layout.hidden(0) as u32), kept[at]);
                        store_word(to + comptime!(layout.hidden(1) as u32), back[at]);
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
                store_rows::<E>(dx, features, row, place.end, &of, &of_dy, &out, &bias, none, plan);
            }
            // Under way while gradients of weights are made; before, there are no registers for them.
            held_x = load_rows::<E>(x, sizes.x, row + ROWS, place.end, &of, plan);
            held_dy = load_rows::<E>(dy, sizes.dy, row + ROWS, place.end, &of, plan);
            if comptime!(wanted.sums) && of.trains {
                sync_cube();
                add_weights(
                    &mut of_weights,
                    &mut of_biases,
                    base,
                    &own_weights,
                    layout,
                    plan.float,
                );
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
                if comptime!(layout.halves() > 1) {
                    add_halves(&mut of_weights, &mut of_biases, &mut shared, &own_weights, layout);
                }
                if own_weights.half == 0 {
                    write_weights(
                        &of_weights,
                        &of_biases,
                        left,
                        to,
                        &of,
                        sizes.widest,
                        &own_weights,
                        layout,
                    );
                }
            }
        }
    }
}

/// Adds to what the first warps have what the others have of the second half of the rows, through the memory of hidden
/// units.
#[cube]
fn add_halves(
    of_weights: &mut Array<Vector<f32, Const<4>>>,
    of_biases: &mut Array<Vector<f32, Const<4>>>,
    shared: &mut Shared<[u32]>,
    own: &WarpRows,
    #[comptime] layout: Layout,
) {
    let units = comptime!(layout.sharers() * 32);
    let at = comptime!(layout.hidden(0) / 4) + UNIT_POS as usize % units;
    let sums = comptime!(PARTS * layout.width / 8);
    if own.half == 1 {
        #[unroll]
        for i in 0..comptime!(4 * sums) {
            let sum = of_weights[comptime!(i / 4)].extract(comptime!(i % 4));
            shared[at + comptime!(i * units)] = u32::reinterpret(sum);
        }
        #[unroll]
        for i in 0..comptime!(4 * PARTS) {
            let sum = of_biases[comptime!(i / 4)].extract(comptime!(i % 4));
            shared[at + comptime!((4 * sums + i) * units)] = u32::reinterpret(sum);
        }
    }
    sync_cube();
    if own.half == 0 {
        #[unroll]
        for i in 0..sums {
            of_weights[i] += four_sums(shared, at + comptime!(4 * i * units), units);
        }
        #[unroll]
        for i in 0..PARTS {
            of_biases[i] += four_sums(shared, at + comptime!(4 * (sums + i) * units), units);
        }
    }
}

#[cube]
fn four_sums(
    shared: &mut Shared<[u32]>,
    at: usize,
    #[comptime] step: usize,
) -> Vector<f32, Const<4>> {
    let mut sums = Vector::<f32, Const<4>>::empty();
    #[unroll]
    for i in 0..4usize {
        sums.insert(i, f32::reinterpret(shared[at + comptime!(i * step)]));
    }
    sums
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
    own: &WarpRows,
    #[comptime] layout: Layout,
) {
    let lane = UNIT_POS as usize % 32;
    let wide = 2 * of.size;
    let base = weights(0usize, widest);
    let matrix = to + select(own.first, base.first, base.second);
    #[unroll]
    for part in 0..PARTS {
        #[unroll]
        for half in 0..2usize {
            let row = own.row as usize + comptime!(part * 16 + half * 8) + lane / 4;
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
                if own.first && lane % 4 == 0 {
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
