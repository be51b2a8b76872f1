//! The kernel: warps that multiply, and warps that weight.

use super::super::token::sigmoid;
use super::plan::{BOX, MULTIPLY, Once, TOKENS, WARPS, WEIGHT};
use crate::reduce::{Shuffle, shuffle};
use crate::tile::cuda::pipeline::{PipelineState, Ring, rings_ready};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    tokens: u32,
    /// Columns of a stream.
    width: u32,
    groups: u32,
    norm_eps: f32,
    hc_eps: f32,
}

/// Where a cube is in its group, and what the group goes through.
#[derive(CubeType, Clone, Copy)]
struct Place {
    group: u32,
    rank: u32,
    /// How many times sixteen tokens.
    count: u32,
    /// In shared memory: the ring, and the barriers that say that sums have been left.
    base: u32,
    left: u32,
}

#[cube]
impl Place {
    /// The first of the tokens that come as number `number`.
    fn token(&self, number: u32, sizes: &Sizes) -> u32 {
        (self.group + number * sizes.groups) * comptime!(TOKENS as u32)
    }

    /// Where in the workspace the first cube's sums are.
    fn workspace(&self, number: u32, #[comptime] once: Once) -> usize {
        let place = number % comptime!(once.places() as u32);
        let place = self.group * comptime!(once.places() as u32) + place;
        place as usize * comptime!(once.cubes * once.part())
    }
}

/// Where a counter is.
#[cube]
fn counter(counters: &[Atomic<u32>], group: u32, at: u32, #[comptime] once: Once) -> u64 {
    let number = group * comptime!(once.counters() as u32) + at;
    global_address::<Atomic<u32>>(counters.as_ptr()) + u64::cast_from(number) * 4
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn once_kernel<E: Float>(
    x: &TensorMap<E, Tiled>,
    phi: &[f32],
    alpha: &[f32],
    bias: &[f32],
    h_in: &mut [E],
    mix: &mut [f32],
    norm: &mut [f32],
    parts: &mut [f32],
    counters: &mut [Atomic<u32>],
    sizes: Sizes,
    #[comptime] once: Once,
    #[define(E)] _dtype: ElemType,
) {
    let stages = comptime!(once.stages as u32);
    let mut shared = Shared::<[f32]>::new_aligned_slice(comptime!(once.words()), 1024usize);
    let base = generic_to_shared::<f32>(shared.as_ptr());
    let barriers = base + comptime!(once.barriers_at() as u32);
    // Nobody says that a stage is empty: the warp that fills it again knows.
    let ring = Ring::new(barriers, stages, 1u32, 1u32);
    // The second half of its barriers says that sums have been left.
    let left = barriers + comptime!(8 * stages);
    let cube = CUBE_POS as u32;
    let (group, rank) = (cube / comptime!(once.cubes as u32), cube % comptime!(once.cubes as u32));
    let sixteens = (sizes.tokens + comptime!(TOKENS as u32 - 1)) / comptime!(TOKENS as u32);
    let count = (sixteens - group + sizes.groups - 1) / sizes.groups;
    let place = Place { group, rank, count, base, left };
    if UNIT_POS < comptime!(once.streams as u32) {
        shared[comptime!(once.biases_at()) + UNIT_POS as usize] = bias[UNIT_POS as usize];
    }
    rings_ready();
    // The same in all lanes, and known to be.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp < comptime!(WARPS as u32) {
        multiply(phi, &mut shared, parts, &*counters, warp, &ring, &place, &sizes, once);
    } else {
        let map = tensor_map_address(x);
        let out = global_address::<E>(h_in.as_ptr());
        let alpha = alpha[0];
        weight(
            map,
            alpha,
            out,
            mix,
            norm,
            &mut shared,
            &*parts,
            counters,
            &ring,
            &place,
            &sizes,
            once,
        );
    }
}

/// An f32 as two bf16, each beside that of the next number.
#[cube]
fn two_parts(first: f32, second: f32) -> (u32, u32) {
    let high = round_pair(first, second, comptime!(Float16::Bf16));
    let (a, b) = bf16_pair(high);
    (high, round_pair(first - a, second - b, comptime!(Float16::Bf16)))
}

/// φ at a row and a column of a stream, 0 outside.
#[cube]
fn phi_at(
    phi: &[f32],
    row: u32,
    stream: u32,
    column: u32,
    sizes: &Sizes,
    #[comptime] once: Once,
) -> f32 {
    let there = row < comptime!(once.rows as u32) && column < sizes.width;
    let width = sizes.width as usize;
    let at = row as usize * width * comptime!(once.streams) + stream as usize * width;
    select(there, phi[select(there, at + column as usize, 0usize)], 0.0)
}

/// The part of φ of this lane: of each step of its warp, for each eight rows, two words of the first parts and two of the
/// second ones, as an instruction takes them.
#[cube]
fn hold_phi(
    phi: &[f32],
    warp: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) -> Array<Vector<u32, Const<4>>> {
    let (steps, eights, boxes) = comptime!((once.steps(), once.eights(), once.boxes as u32));
    let lane = UNIT_POS % 32;
    let mut held = Array::<Vector<u32, Const<4>>>::new(comptime!(steps * eights));
    #[unroll]
    for m in 0..steps {
        // Four steps are a box.
        let step = warp + comptime!((m * WARPS) as u32);
        let number = step / 4;
        let (stream, within) = (number / boxes, number % boxes);
        let column =
            (place.rank * boxes + within) * comptime!(BOX as u32) + step % 4 * 16 + lane % 4 * 2;
        // Steps beyond the last have nothing.
        let column = select(stream < comptime!(once.streams as u32), column, sizes.width);
        #[unroll]
        for e in 0..eights {
            let row = lane / 4 + comptime!(8 * e as u32);
            let mut four = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for half in 0..2usize {
                let at = column + comptime!(8 * half as u32);
                let first = phi_at(phi, row, stream, at, sizes, once);
                let second = phi_at(phi, row, stream, at + 1, sizes, once);
                let (high, low) = two_parts(first, second);
                four.insert(half, high);
                four.insert(comptime!(2 + half), low);
            }
            held[comptime!(m * eights + e)] = four;
        }
    }
    held
}

/// Multiplies all tokens of the group with this cube's part of φ.
#[cube]
fn multiply(
    phi: &[f32],
    shared: &mut Shared<[f32]>,
    parts: &mut [f32],
    counters: &[Atomic<u32>],
    warp: u32,
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (steps, eights) = comptime!((once.steps(), once.eights()));
    let columns = comptime!(once.columns() as u32);
    let float = comptime!(Float16::Bf16);
    let held = hold_phi(phi, warp, place, sizes, once);
    let lane = UNIT_POS % 32;
    // Of a box this lane names the row of a token, and of the step's 32 bytes the first or the second half.
    let chunk = (warp % 4 * 2 + lane / 16) ^ (lane % 8);
    let at = lane % 16 * 128 + (chunk << 4);
    let mut state = PipelineState::start();
    for number in 0..place.count {
        ring.wait(state.stage, state.phase);
        let stage = place.base + state.stage * comptime!(once.stage_bytes() as u32) + at;
        let mut sums = Array::<Vector<f32, Const<4>>>::new(eights);
        #[unroll]
        for e in 0..eights {
            sums[e] = Vector::new(0.0f32);
        }
        let mut squares = Array::<f32>::new(2usize);
        squares[0] = f32::new(0.0);
        squares[1] = f32::new(0.0);
        #[unroll]
        for m in 0..steps {
            let step = warp + comptime!((m * WARPS) as u32);
            let certain = comptime!((m + 1) * WARPS <= once.all_steps());
            let there = certain || step < comptime!(once.all_steps() as u32);
            // Beyond the last step φ is zero; x is that of another step.
            let step = select(there, step, warp);
            let mut a = Array::<Vector<u32, Const<4>>>::new(1usize);
            a[0] = load_matrices(stage + step / 4 * comptime!(once.box_bytes() as u32), false);
            #[unroll]
            for word in 0..4usize {
                let (low, high) = bf16_pair(a[0].extract(word));
                let both = low * low + high * high;
                squares[comptime!(word % 2)] += select(there, both, 0.0);
            }
            #[unroll]
            for part in 0..2usize {
                #[unroll]
                for e in 0..eights {
                    let b = held[comptime!(m * eights + e)];
                    let (b0, b1) = comptime!((2 * part, 2 * part + 1));
                    sums[e] = mma_16x8x16(a[0], b.extract(b0), b.extract(b1), sums[e], float);
                }
            }
        }
        #[unroll]
        for half in 0..2usize {
            #[unroll]
            for by in [1u32, 2u32] {
                let other = shuffle(squares[half], by.runtime(), Shuffle::Xor, true);
                squares[half] += other;
            }
        }
        let to = comptime!(once.parts_at() as u32) + warp * comptime!(once.part() as u32);
        let to = to + lane / 4 * columns;
        #[unroll]
        for half in 0..2usize {
            let row = to + comptime!(8 * half as u32 * columns);
            #[unroll]
            for e in 0..eights {
                let column = row + lane % 4 * 2 + comptime!(8 * e as u32);
                shared[column as usize] = sums[e].extract(comptime!(2 * half));
                shared[column as usize + 1] = sums[e].extract(comptime!(2 * half + 1));
            }
            if lane % 4 == 0 {
                shared[(row + comptime!(8 * eights as u32)) as usize] = squares[half];
            }
        }
        sync_units(1u32, comptime!(MULTIPLY as u32));
        let part = comptime!(once.part());
        let workspace = place.workspace(number, once) + place.rank as usize * part;
        #[unroll]
        for i in 0..comptime!(part.div_ceil(MULTIPLY)) {
            let at = UNIT_POS as usize + comptime!(i * MULTIPLY);
            if at < part {
                let mut sum = f32::new(0.0);
                #[unroll]
                for warp in 0..WARPS {
                    sum += shared[comptime!(once.parts_at() + warp * part) + at];
                }
                parts[workspace + at] = sum;
            }
        }
        sync_units(1u32, comptime!(MULTIPLY as u32));
        if UNIT_POS == 0 {
            if comptime!(once.cubes > 1) {
                let at = number % comptime!(once.places() as u32);
                counter_add(counter(counters, place.group, at, once));
            }
            barrier_arrive(place.left + state.stage * 8);
        }
        state.advance(comptime!(once.stages as u32));
    }
}

/// Loads the tokens that come as number `number` into their stage; by a warp.
#[cube]
fn load(
    map: u64,
    number: u32,
    stage: u32,
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let lane = UNIT_POS % 32;
    let (boxes, all) = comptime!((once.boxes as u32, (once.streams * once.boxes) as u32));
    let bytes = comptime!(once.stage_bytes() as u32);
    if lane == 0 {
        let bar = ring.expect(stage, bytes);
        let token = place.token(number, sizes);
        let to = place.base + stage * bytes;
        for i in 0..all {
            let column = (place.rank * boxes + i % boxes) * comptime!(BOX as u32);
            tma_load(
                to + i * comptime!(once.box_bytes() as u32),
                map,
                bar,
                column,
                token,
                i / boxes,
            );
        }
    }
}

/// The sum of all cubes of what is `at` in a part.
#[cube]
fn of_all(parts: &[f32], workspace: usize, at: u32, #[comptime] once: Once) -> f32 {
    let mut sum = f32::new(0.0);
    let from = workspace + at as usize;
    // Eight loads are on their way at a time.
    for eight in 0..comptime!(once.cubes / 8) {
        let from = from + eight * comptime!(8 * once.part());
        #[unroll]
        for i in 0..8usize {
            sum += parts[from + comptime!(i * once.part())];
        }
    }
    #[unroll]
    for i in comptime!(once.cubes / 8 * 8)..comptime!(once.cubes) {
        sum += parts[from + comptime!(i * once.part())];
    }
    sum
}

/// Weights the streams of all tokens of the group in this cube's columns.
#[cube]
fn weight(
    map: u64,
    alpha: f32,
    out: u64,
    mix: &mut [f32],
    norm: &mut [f32],
    shared: &mut Shared<[f32]>,
    parts: &[f32],
    counters: &mut [Atomic<u32>],
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (n, rows) = comptime!((once.streams as u32, once.rows as u32));
    let (columns, cubes) = comptime!((once.columns() as u32, once.cubes as u32));
    let (tokens, units) = comptime!((TOKENS as u32, WEIGHT as u32));
    let (sums_at, weights_at) = comptime!((once.sums_at() as u32, once.weights_at() as u32));
    // There are a multiple of these before.
    let unit = UNIT_POS % units;
    let loads = unit < 32;
    if loads {
        for number in 0..min(place.count, comptime!(once.stages as u32)) {
            load(map, number, number, ring, place, sizes, once);
        }
    }
    let width = f32::cast_from(sizes.width * n);
    // Of 16 bytes of each box.
    let (row, vector) = (unit / 8, unit % 8);
    let from = row * 128 + ((vector ^ (row % 8)) << 4);
    let first_column = place.rank * comptime!((once.boxes * BOX) as u32) + vector * 8;
    let mut state = PipelineState::start();
    for number in 0..place.count {
        let token = place.token(number, sizes);
        let workspace = place.workspace(number, once);
        barrier_wait(place.left + state.stage * 8, state.phase & 1);
        if comptime!(cubes > 1) {
            let times = number / comptime!(once.places() as u32) + 1;
            let at = number % comptime!(once.places() as u32);
            counter_wait(counter(&*counters, place.group, at, once), times * cubes);
        }
        // y of the weights, and r.
        for i in 0..comptime!((tokens * (n + 1)).div_ceil(units)) {
            let at = unit + i * units;
            if at < comptime!(tokens * (n + 1)) {
                let (row, j) = (at / comptime!(n + 1), at % comptime!(n + 1));
                let column = select(j < n, j, comptime!(columns - 1));
                let mut sum = of_all(parts, workspace, row * columns + column, once);
                if j == n {
                    sum = 1.0 / f32::sqrt(sum / width + sizes.norm_eps);
                    if row % cubes == place.rank && token + row < sizes.tokens {
                        norm[(token + row) as usize] = sum;
                    }
                }
                shared[(sums_at + at) as usize] = sum;
            }
        }
        // x·φᵀ of the tokens that this cube writes.
        for i in 0..comptime!((tokens.div_ceil(cubes) * rows).div_ceil(units)) {
            let at = unit + i * units;
            let (row, j) = (place.rank + at / rows * cubes, at % rows);
            if row < tokens && token + row < sizes.tokens {
                let to = (token + row) as usize * comptime!(rows as usize) + j as usize;
                mix[to] = of_all(parts, workspace, row * columns + j, once);
            }
        }
        sync_units(2u32, units);
        if unit < comptime!(tokens * n) {
            let (row, i) = (unit / n, unit % n);
            let of_row = sums_at + row * comptime!(n + 1);
            let y = shared[(of_row + i) as usize] * shared[(of_row + n) as usize];
            let bias = shared[comptime!(once.biases_at()) + i as usize];
            shared[(weights_at + unit) as usize] = sigmoid(alpha * y + bias, true) + sizes.hc_eps;
        }
        sync_units(2u32, units);
        ring.wait(state.stage, state.phase);
        let mut weights = Array::<f32>::new(comptime!(n as usize));
        #[unroll]
        for i in 0..comptime!(n as usize) {
            weights[i] = shared[(weights_at + row * n) as usize + i];
        }
        let stage = place.base + state.stage * comptime!(once.stage_bytes() as u32) + from;
        let line = u64::cast_from(token + row) * u64::cast_from(sizes.width);
        #[unroll]
        for b in 0..comptime!(once.boxes) {
            let mut sums = Array::<f32>::new(8usize);
            #[unroll]
            for e in 0..8usize {
                sums[e] = f32::new(0.0);
            }
            #[unroll]
            for i in 0..comptime!(n as usize) {
                let at = comptime!(((i * once.boxes + b) * once.box_bytes()) as u32);
                let words = load_16_shared(stage + at);
                #[unroll]
                for word in 0..4usize {
                    let (low, high) = bf16_pair(words.extract(word));
                    sums[comptime!(2 * word)] += weights[i] * low;
                    sums[comptime!(2 * word + 1)] += weights[i] * high;
                }
            }
            let column = first_column + comptime!((b * BOX) as u32);
            if token + row < sizes.tokens && column < sizes.width {
                store_eight(out + (line + u64::cast_from(column)) * 2, &sums, Float16::Bf16);
            }
        }
        // All have read the stage.
        sync_units(2u32, units);
        let next = number + comptime!(once.stages as u32);
        if loads && next < place.count {
            load(map, next, state.stage, ring, place, sizes, once);
        }
        state.advance(comptime!(once.stages as u32));
    }
    if comptime!(cubes > 1) && unit == 0 {
        leave(counters, place.group, once);
    }
}

/// Says that this cube waits for no more; the last one of the group makes the counters ready for the next launch.
#[cube]
fn leave(counters: &mut [Atomic<u32>], group: u32, #[comptime] once: Once) {
    let first = (group * comptime!(once.counters() as u32)) as usize;
    gpu_asm!("fence.acq_rel.gpu;");
    let done = counters[first + comptime!(once.places())].fetch_add(1u32) + 1;
    gpu_asm!("fence.acq_rel.gpu;");
    if done == comptime!(once.cubes as u32) {
        for i in 0..comptime!(once.counters()) {
            counters[first + i].store(0u32);
        }
    }
}
