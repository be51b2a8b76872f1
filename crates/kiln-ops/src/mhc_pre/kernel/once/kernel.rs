//! The kernel: warps that multiply, and warps that weight.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::super::token::sigmoid;
use super::plan::{BOX, MULTIPLY, OWNERS, Once, TOKENS, WARPS};
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
    /// The ring, in shared memory.
    base: u32,
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
    // Released by the warps that multiply; the one that weights comes after them, and fills it again.
    let ring = Ring::new(barriers, stages, 1u32, comptime!(WARPS as u32));
    let cube = CUBE_POS as u32;
    let (group, rank) = (cube / comptime!(once.cubes as u32), cube % comptime!(once.cubes as u32));
    let sixteens = (sizes.tokens + comptime!(TOKENS as u32 - 1)) / comptime!(TOKENS as u32);
    let count = (sixteens + (sizes.groups - 1) - group) / sizes.groups;
    let place = Place { group, rank, count, base };
    if UNIT_POS < comptime!(once.streams as u32) {
        shared[comptime!(once.biases_at()) + UNIT_POS as usize] = bias[UNIT_POS as usize];
    }
    rings_ready();
    // The same in all lanes, and known to be.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp < comptime!(WARPS as u32) {
        multiply(phi, &mut shared, parts, warp, &ring, &place, &sizes, once);
    } else {
        let of = Weighting {
            map: tensor_map_address(x),
            parts: global_address::<f32>(parts.as_ptr()),
            out: global_address::<E>(h_in.as_ptr()),
            alpha: alpha[0],
            owner: warp - comptime!(WARPS as u32),
        };
        weight(&of, mix, norm, &mut shared, counters, &ring, &place, &sizes, once);
    }
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
                let (high, low) = two_bf16(first, second);
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
        // What is there of the tokens two times before has been read: of those before, all have gone on.
        let side = comptime!(once.sides_at() as u32) + number % 2 * comptime!(once.side() as u32);
        let to = side + warp * comptime!(TOKENS as u32 * columns) + lane / 4 * columns;
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
        let part = comptime!(once.part() as u32);
        let workspace = place.workspace(number, once) + (place.rank * part) as usize;
        #[unroll]
        for i in 0..comptime!(once.part().div_ceil(MULTIPLY)) {
            let at = UNIT_POS + comptime!((i * MULTIPLY) as u32);
            if at < part {
                let from = side + place_of(at, once);
                let mut sum = f32::new(0.0);
                #[unroll]
                for warp in 0..WARPS {
                    let of_warp = comptime!((warp * TOKENS) as u32 * columns);
                    sum += shared[(from + of_warp) as usize];
                }
                parts[workspace + at as usize] = sum;
            }
        }
        sync_plane();
        if lane == 0 {
            ring.release(state.stage);
        }
        state.advance(comptime!(once.stages as u32));
    }
}

/// Where a warp has what is left at `at`.
#[cube]
fn place_of(at: u32, #[comptime] once: Once) -> u32 {
    let (n, columns) = comptime!((once.streams as u32, once.columns() as u32));
    let (firsts, rest) = comptime!((once.firsts() as u32, once.rest() as u32));
    if at < firsts {
        let j = at % comptime!(n + 1);
        at / comptime!(n + 1) * columns + select(j < n, j, comptime!(columns - 1))
    } else {
        let (token, j) = ((at - firsts) / rest, (at - firsts) % rest);
        // What fills up a four is not read.
        token * columns + min(j + n, comptime!(columns - 1))
    }
}

/// What warps that weight are given.
#[derive(CubeType, Clone, Copy)]
struct Weighting {
    map: u64,
    /// Addresses of the workspace and of h_in.
    parts: u64,
    out: u64,
    alpha: f32,
    /// Which of the warps.
    owner: u32,
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
    let boxes = comptime!(once.boxes as u32);
    let bytes = comptime!(once.stage_bytes() as u32);
    if lane == 0 {
        ring.expect(stage, bytes);
    }
    sync_plane();
    // There are at most 24.
    if lane < comptime!((once.streams * once.boxes) as u32) {
        let to = place.base + stage * bytes + lane * comptime!(once.box_bytes() as u32);
        let column = (place.rank * boxes + lane % boxes) * comptime!(BOX as u32);
        let token = place.token(number, sizes);
        tma_load(to, map, ring.filling(stage), column, token, lane / boxes);
    }
}

/// The sum of all cubes of the four that are at `from`, an address.
#[cube]
fn of_all(from: u64, #[comptime] once: Once) -> Vector<f32, Const<4>> {
    let (bytes, cubes) = comptime!((4 * once.part() as u64, once.cubes));
    let mut sum = Vector::<f32, Const<4>>::new(0.0f32);
    // Eight loads are on their way at a time.
    for eight in 0..comptime!((cubes / 8) as u32) {
        sum = of_some(sum, from + u64::cast_from(eight) * comptime!(8 * bytes), 8usize, once);
    }
    if comptime!(cubes % 8 > 0) {
        let rest = from + comptime!((cubes / 8 * 8) as u64 * bytes);
        sum = of_some(sum, rest, comptime!(cubes % 8), once);
    }
    sum
}

/// `sum` and the fours of `count` cubes.
#[cube]
fn of_some(
    sum: Vector<f32, Const<4>>,
    from: u64,
    #[comptime] count: usize,
    #[comptime] once: Once,
) -> Vector<f32, Const<4>> {
    let bytes = comptime!(4 * once.part() as u64);
    let mut quads = Array::<Vector<f32, Const<4>>>::new(count);
    #[unroll]
    for i in 0..count {
        quads[i] = load_quad(from + comptime!(i as u64 * bytes));
    }
    let mut all = sum;
    #[unroll]
    for i in 0..count {
        all += quads[i];
    }
    all
}

/// Weights the streams of the tokens that are this warp's turn, in this cube's columns.
#[cube]
fn weight(
    of: &Weighting,
    mix: &mut [f32],
    norm: &mut [f32],
    shared: &mut Shared<[f32]>,
    counters: &mut [Atomic<u32>],
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let stages = comptime!(once.stages as u32);
    let (n, cubes) = comptime!((once.streams as u32, once.cubes as u32));
    let lane = UNIT_POS % 32;
    if of.owner == 0 {
        for number in 0..min(place.count, stages) {
            load(of.map, number, number, ring, place, sizes, once);
        }
    }
    let owned = comptime!(once.owned_at() as u32) + of.owner * comptime!(once.owned() as u32);
    for number in range_stepped(of.owner, place.count, comptime!(OWNERS as u32)) {
        let (stage, phase) = (number % stages, number / stages);
        ring.wait_released(stage, phase);
        if comptime!(cubes > 1) {
            let at = number % comptime!(once.places() as u32);
            let counter = counter(&*counters, place.group, at, once);
            if lane == 0 {
                counter_add(counter + 0);
            }
            let times = number / comptime!(once.places() as u32) + 1;
            counter_wait(counter + 0, times * cubes);
        }
        gather(of, mix, shared, owned, number, place, sizes, once);
        sync_plane();
        weights(of, mix, norm, shared, owned, number, place, sizes, once);
        sync_plane();
        // Has been filled, as those who multiplied saw; now this warp sees it too.
        ring.wait(stage, phase);
        let stage_at = place.base + stage * comptime!(once.stage_bytes() as u32);
        let weights_at = owned + comptime!(once.firsts() as u32);
        let token = place.token(number, sizes);
        for four in 0..comptime!(TOKENS as u32 / 4) {
            let row = four * 4 + lane / 8;
            mixed(of.out, &*shared, weights_at + row * n, stage_at, row, token, place, sizes, once);
        }
        // All lanes have read the stage.
        sync_plane();
        if number + stages < place.count {
            load(of.map, number + stages, stage, ring, place, sizes, once);
        }
    }
    if comptime!(cubes > 1) {
        sync_plane();
        if lane == 0 {
            leave(counters, place.group, once);
        }
    }
}

/// Adds up what all cubes have left: y of the weights and the sums of the squares, for this warp, and the rest of x·φᵀ
/// of the tokens that this cube writes.
#[cube]
fn gather(
    of: &Weighting,
    mix: &mut [f32],
    shared: &mut Shared<[f32]>,
    owned: u32,
    number: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (n, rows, cubes) = comptime!((once.streams as u32, once.rows as u32, once.cubes));
    let firsts = comptime!(once.firsts() as u32 / 4);
    // Fours of a token.
    let fours = comptime!(once.rest() as u32 / 4);
    let all = comptime!(firsts + TOKENS.div_ceil(cubes) as u32 * fours);
    let workspace = of.parts + u64::cast_from(place.workspace(number, once)) * 4;
    let first_token = place.token(number, sizes);
    for turn in 0..comptime!(all.div_ceil(32)) {
        let four = turn * 32 + UNIT_POS % 32;
        if four < firsts {
            let sum = of_all(workspace + u64::cast_from(four) * 16, once);
            #[unroll]
            for e in 0..4usize {
                shared[(owned + four * 4) as usize + e] = sum.extract(e);
            }
        } else {
            let (nth, piece) = ((four - firsts) / fours, (four - firsts) % fours);
            let row = place.rank + nth * comptime!(cubes as u32);
            if row < comptime!(TOKENS as u32) && first_token + row < sizes.tokens {
                let from = firsts + row * fours + piece;
                let sum = of_all(workspace + u64::cast_from(from) * 16, once);
                let j = n + piece * 4;
                let to = (first_token + row) as usize * comptime!(rows as usize) + j as usize;
                #[unroll]
                for e in 0..4usize {
                    if j + comptime!(e as u32) < rows {
                        mix[to + e] = sum.extract(e);
                    }
                }
            }
        }
    }
}

/// Makes the weights of the streams, and writes the rest of what this cube writes of tokens.
#[cube]
fn weights(
    of: &Weighting,
    mix: &mut [f32],
    norm: &mut [f32],
    shared: &mut Shared<[f32]>,
    owned: u32,
    number: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (n, cubes) = comptime!((once.streams as u32, once.cubes as u32));
    let all = comptime!(TOKENS as u32 * n);
    let width = f32::cast_from(sizes.width * n);
    let first_token = place.token(number, sizes);
    for turn in 0..comptime!(all.div_ceil(32)) {
        let at = turn * 32 + UNIT_POS % 32;
        if at < all {
            let (row, i) = (at / n, at % n);
            let from = owned + row * comptime!(n + 1);
            let squares = shared[(from + n) as usize];
            let r = 1.0 / f32::sqrt(squares / width + sizes.norm_eps);
            let y = shared[(from + i) as usize];
            let bias = shared[comptime!(once.biases_at()) + i as usize];
            let weight = sigmoid(of.alpha * (y * r) + bias, true) + sizes.hc_eps;
            shared[(owned + comptime!(once.firsts() as u32) + at) as usize] = weight;
            let token = first_token + row;
            if row % cubes == place.rank && token < sizes.tokens {
                mix[token as usize * comptime!(once.rows) + i as usize] = y;
                if i == 0 {
                    norm[token as usize] = r;
                }
            }
        }
    }
}

/// Writes h_in of a row of the stage, 16 bytes of each box a lane, with the weights at `weights_at`.
#[cube]
fn mixed(
    out: u64,
    shared: &Shared<[f32]>,
    weights_at: u32,
    stage_at: u32,
    row: u32,
    first_token: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let n = comptime!(once.streams);
    let vector = UNIT_POS % 8;
    let mut weights = Array::<f32>::new(n);
    #[unroll]
    for i in 0..n {
        weights[i] = shared[weights_at as usize + i];
    }
    let from = stage_at + row * 128 + ((vector ^ (row % 8)) << 4);
    let token = first_token + row;
    let first = place.rank * comptime!((once.boxes * BOX) as u32) + vector * 8;
    let line = out + u64::cast_from(token) * u64::cast_from(sizes.width) * 2;
    #[unroll]
    for b in 0..comptime!(once.boxes) {
        let mut sums = Array::<f32>::new(8usize);
        #[unroll]
        for e in 0..8usize {
            sums[e] = f32::new(0.0);
        }
        #[unroll]
        for i in 0..n {
            let words =
                load_16_shared(from + comptime!(((i * once.boxes + b) * once.box_bytes()) as u32));
            #[unroll]
            for word in 0..4usize {
                let (low, high) = bf16_pair(words.extract(word));
                sums[comptime!(2 * word)] += weights[i] * low;
                sums[comptime!(2 * word + 1)] += weights[i] * high;
            }
        }
        let column = first + comptime!((b * BOX) as u32);
        if token < sizes.tokens && column < sizes.width {
            store_eight(line + u64::cast_from(column) * 2, &sums, Float16::Bf16);
        }
    }
}

/// Says that this warp waits for no more; the last one of the group makes the counters ready for the next launch.
#[cube]
fn leave(counters: &mut [Atomic<u32>], group: u32, #[comptime] once: Once) {
    let first = (group * comptime!(once.counters() as u32)) as usize;
    gpu_asm!("fence.acq_rel.gpu;");
    let done = counters[first + comptime!(once.places())].fetch_add(1u32) + 1;
    gpu_asm!("fence.acq_rel.gpu;");
    if done == comptime!((once.cubes * OWNERS) as u32) {
        for i in 0..comptime!(once.counters()) {
            counters[first + i].store(0u32);
        }
    }
}
