//! The kernel: warps that multiply, and warps that weight.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::super::token::sigmoid;
use super::plan::{BOX, HALF, OWNERS, Once, PAIRS, SIDES, TOKENS, UNITS, WARPS};
use crate::reduce::{Shuffle, shuffle};
use crate::tile::cuda::pipeline::{PipelineState, Ring, barrier_bytes, rings_ready};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

/// Loads that are on their way at a time.
const LOADS: usize = 14;

#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    tokens: u32,
    /// Columns of a stream.
    width: u32,
    groups: u32,
    /// Words before the workspaces of groups.
    heads: u32,
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
    /// The address of the group's workspace.
    workspace: u64,
    /// The number under which sums of its first tokens are left, one more than the last launch had.
    first_number: u32,
}

#[cube]
impl Place {
    /// The first of the tokens that come as number `number`.
    fn token(&self, number: u32, sizes: &Sizes) -> u32 {
        (self.group + number * sizes.groups) * comptime!(TOKENS as u32)
    }

    /// The address of what the group's first cube leaves of the tokens that come as number `number`.
    fn left(&self, number: u32, #[comptime] once: Once) -> u64 {
        let place = number % comptime!(once.places() as u32);
        let bytes = comptime!(16 * once.cubes as u32 * once.part() as u32);
        self.workspace + u64::cast_from(place * bytes)
    }
}

/// Leaves three sums and their number at an address: they come together, so who finds the number has the sums.
#[cube]
fn leave_three(addr: u64, x: f32, y: f32, z: f32, number: u32) {
    let first = u64::cast_from(u32::reinterpret(x)) | (u64::cast_from(u32::reinterpret(y)) << 32);
    let second = u64::cast_from(u32::reinterpret(z)) | (u64::cast_from(number) << 32);
    gpu_asm!(
        "{{ .reg .b128 all;",
        "mov.b128 all, {{{f}, {s}}};",
        "st.relaxed.gpu.global.b128 [{a}], all; }}",
        f = in(_) first, s = in(_) second, a = in(_) addr
    );
}

/// What is at an address: three sums and their number, in two times two.
#[cube]
fn found(addr: u64) -> Vector<u64, Const<2>> {
    let found: Vector<u64, Const<2>>;
    gpu_asm!(
        "{{ .reg .b128 all;",
        "ld.relaxed.gpu.global.b128 all, [{a}];",
        "mov.b128 {o}, all; }}",
        o = out(_) found, a = in(_) addr
    );
    found
}

/// The halves of a word of 64 bits.
#[cube]
fn halves_of(word: u64) -> (u32, u32) {
    (u32::cast_from(word), u32::cast_from(word >> 32))
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
    // Of each group the last number and how many warps are done, then the workspaces.
    workspace: &mut [Atomic<u32>],
    sizes: Sizes,
    #[comptime] once: Once,
    #[define(E)] _dtype: ElemType,
) {
    let stages = comptime!(once.stages as u32);
    let mut shared = Shared::<[f32]>::new_aligned_slice(comptime!(once.words()), 1024usize);
    let base = generic_to_shared::<f32>(shared.as_ptr());
    let barriers = base + comptime!(once.barriers_at() as u32);
    // Released by the warps that multiply; those that weight come after them, and fill it again.
    let ring = Ring::new(barriers, stages, 1u32, comptime!(WARPS as u32));
    // What the warps that multiply have of tokens: filled by them all, and released by a pair.
    let sides = Ring::new(
        barriers + comptime!(barrier_bytes(once.stages) as u32),
        comptime!(SIDES as u32),
        comptime!(WARPS as u32),
        2u32,
    );
    let cube = CUBE_POS as u32;
    let (group, rank) = (cube / comptime!(once.cubes as u32), cube % comptime!(once.cubes as u32));
    let sixteens = (sizes.tokens + comptime!(TOKENS as u32 - 1)) / comptime!(TOKENS as u32);
    let count = (sixteens + (sizes.groups - 1) - group) / sizes.groups;
    let of_group = sizes.heads + group * comptime!(once.workspace() as u32);
    let place = Place {
        group,
        rank,
        count,
        base,
        workspace: global_address::<Atomic<u32>>(workspace.as_ptr()) + u64::cast_from(of_group) * 4,
        first_number: workspace[2 * group as usize].load() + 1,
    };
    if UNIT_POS < comptime!(once.streams as u32) {
        shared[comptime!(once.biases_at()) + UNIT_POS as usize] = bias[UNIT_POS as usize];
    }
    fetch_phi(phi, &mut shared, rank, &sizes, once);
    // TMA is to find what units have done there before it.
    async_proxy_fence();
    rings_ready();
    // The same in all lanes, and known to be.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp < comptime!(WARPS as u32) {
        multiply(&mut shared, warp, &ring, &sides, &place, once);
    } else {
        let owner = warp - comptime!(WARPS as u32);
        let of = Weighting {
            map: tensor_map_address(x),
            out: global_address::<E>(h_in.as_ptr()),
            alpha: alpha[0],
            owner,
            pair: owner / 2,
            half: owner % 2,
        };
        weight(&of, mix, norm, &mut shared, workspace, &ring, &sides, &place, &sizes, once);
    }
}

/// Brings this cube's part of φ to the place of the ring, zero beyond the last column; all units.
#[cube]
fn fetch_phi(
    phi: &[f32],
    shared: &mut Shared<[f32]>,
    rank: u32,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let (streams, columns) = comptime!((once.streams as u32, (once.boxes * BOX) as u32));
    let all = comptime!(once.rows as u32 * streams * columns);
    // So many loads are on their way at a time.
    let some = comptime!(8u32);
    for turn in 0..comptime!(all.div_ceil(some * UNITS as u32)) {
        let mut found = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..8u32 {
            let at = (turn * some + i) * comptime!(UNITS as u32) + UNIT_POS;
            let (line, column) = (at / columns, rank * columns + at % columns);
            let there = at < all && column < sizes.width;
            let from = line as usize * sizes.width as usize + column as usize;
            found[i as usize] = select(there, phi[select(there, from, 0usize)], 0.0);
        }
        #[unroll]
        for i in 0..8u32 {
            let at = (turn * some + i) * comptime!(UNITS as u32) + UNIT_POS;
            if at < all {
                let (row, rest) = (at / (streams * columns), at % (streams * columns));
                shared[(row * comptime!(once.phi_row() as u32) + rest) as usize] =
                    found[i as usize];
            }
        }
    }
}

/// The part of φ of this lane: of each step of its warp, for each eight rows, two words of the first parts and two of the
/// second ones, as an instruction takes them.
#[cube]
fn hold_phi(
    shared: &Shared<[f32]>,
    warp: u32,
    #[comptime] once: Once,
) -> Array<Vector<u32, Const<4>>> {
    let (steps, eights) = comptime!((once.steps(), once.eights()));
    let lane = UNIT_POS % 32;
    let mut held = Array::<Vector<u32, Const<4>>>::new(comptime!(steps * eights));
    #[unroll]
    for m in 0..steps {
        let step = warp + comptime!((m * WARPS) as u32);
        // Steps beyond the last have nothing.
        let of_step = step < comptime!(once.all_steps() as u32);
        let column = step * 16 + lane % 4 * 2;
        #[unroll]
        for e in 0..eights {
            let row = lane / 4 + comptime!(8 * e as u32);
            let there = of_step && row < comptime!(once.rows as u32);
            let from = row * comptime!(once.phi_row() as u32) + column;
            let mut four = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for half in 0..2usize {
                let at = select(there, from + comptime!(8 * half as u32), 0) as usize;
                let first = select(there, shared[at], 0.0);
                let second = select(there, shared[at + 1], 0.0);
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
    shared: &mut Shared<[f32]>,
    warp: u32,
    ring: &Ring,
    sides: &Ring,
    place: &Place,
    #[comptime] once: Once,
) {
    let (steps, eights) = comptime!((once.steps(), once.eights()));
    let columns = comptime!(once.columns() as u32);
    let float = comptime!(Float16::Bf16);
    let held = hold_phi(&*shared, warp, once);
    // From here on the place is that of the ring.
    sync_units(1u32, comptime!(UNITS as u32));
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
        // The stage has been read.
        sync_plane();
        if lane == 0 {
            ring.release(state.stage);
        }
        let (which, turn) = (number % SIDES as u32, number / SIDES as u32);
        sides.vacant(which, turn);
        let side = side_at(which, once);
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
        sync_plane();
        if lane == 0 {
            sides.arrive(which);
        }
        state.advance(comptime!(once.stages as u32));
    }
}

/// Where a side is.
#[cube]
fn side_at(which: u32, #[comptime] once: Once) -> u32 {
    comptime!(once.sides_at() as u32) + which * comptime!(once.side() as u32)
}

/// Adds up what the warps have of the tokens, in order, and leaves it for all cubes of the group; a pair of warps.
#[cube]
fn leave_all(
    shared: &Shared<[f32]>,
    side: u32,
    half: u32,
    number: u32,
    place: &Place,
    #[comptime] once: Once,
) {
    let part = comptime!(once.part() as u32);
    let columns = comptime!(once.columns() as u32);
    let left = place.left(number, once) + u64::cast_from(16 * place.rank * part);
    for turn in 0..comptime!(part.div_ceil(64)) {
        let at = turn * 64 + half * 32 + UNIT_POS % 32;
        if at < part {
            let (token, three, first) = three_at(at, once);
            let mut sums = Array::<f32>::new(3usize);
            #[unroll]
            for e in 0..3usize {
                let column = column_of(three * 3 + comptime!(e as u32), first, once);
                let from = side + token * columns + column;
                let mut sum = f32::new(0.0);
                #[unroll]
                for warp in 0..WARPS {
                    let of_warp = comptime!((warp * TOKENS) as u32 * columns);
                    sum += shared[(from + of_warp) as usize];
                }
                sums[e] = sum;
            }
            let to = left + u64::cast_from(at) * 16;
            leave_three(to, sums[0], sums[1], sums[2], place.first_number + number);
        }
    }
}

/// The token and the three of the three at `at`, and whether it is one of the firsts.
#[cube]
fn three_at(at: u32, #[comptime] once: Once) -> (u32, u32, bool) {
    let (firsts, rest) = comptime!((once.firsts() as u32, once.rest() as u32));
    let all = comptime!(TOKENS as u32 * firsts);
    let first = at < all;
    let beyond = select(first, 0, at - all);
    (select(first, at / firsts, beyond / rest), select(first, at % firsts, beyond % rest), first)
}

/// Where a warp has number j of the firsts of a token, or of the rest. What fills up a three is not read.
#[cube]
fn column_of(j: u32, first: bool, #[comptime] once: Once) -> u32 {
    let (n, columns) = comptime!((once.streams as u32, once.columns() as u32));
    select(
        first && j >= n,
        comptime!(columns - 1),
        select(first, j, min(j + n, comptime!(columns - 1))),
    )
}

/// What warps that weight are given.
#[derive(CubeType, Clone, Copy)]
struct Weighting {
    map: u64,
    /// The address of h_in.
    out: u64,
    alpha: f32,
    /// Which of the warps, of which pair, and which of the pair.
    owner: u32,
    pair: u32,
    half: u32,
}

#[cube]
impl Weighting {
    /// The first of this warp's tokens among sixteen.
    fn first(&self) -> u32 {
        self.half * comptime!(HALF as u32)
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

/// Waits until the last three of each cube is there, a lane for each: asking for all of them again and again would be
/// in the way of those that multiply.
#[cube]
fn wait_for_all(left: u64, number: u32, #[comptime] once: Once) {
    let cubes = comptime!(once.cubes as u32);
    let bytes = comptime!(16 * once.part() as u32);
    #[unroll]
    for turn in 0..comptime!(cubes.div_ceil(32)) {
        let cube = turn * 32 + UNIT_POS % 32;
        let mut missing = cube < cubes;
        let of = left + u64::cast_from(min(cube, comptime!(cubes - 1)) * bytes);
        while missing {
            let (_, its) = halves_of(found(of + comptime!(bytes as u64 - 16)).extract(1usize));
            missing = its != number;
            if missing {
                pause();
            }
        }
    }
    sync_plane();
}

#[cube]
fn pause() {
    gpu_asm!("nanosleep.u32 50;");
}

/// The sums of all cubes of the three that is at `from`, of its number.
#[cube]
fn of_all(from: u64, number: u32, #[comptime] once: Once) -> Array<f32> {
    let (bytes, cubes) = comptime!((16 * once.part() as u64, once.cubes));
    let mut sums = Array::<f32>::new(3usize);
    #[unroll]
    for e in 0..3usize {
        sums[e] = f32::new(0.0);
    }
    // So many loads are on their way at a time.
    for some in 0..comptime!((cubes / LOADS) as u32) {
        let from = from + u64::cast_from(some) * comptime!(LOADS as u64 * bytes);
        add_some(&mut sums, from, number, LOADS, once);
    }
    if comptime!(cubes % LOADS > 0) {
        let rest = from + comptime!((cubes / LOADS * LOADS) as u64 * bytes);
        add_some(&mut sums, rest, number, comptime!(cubes % LOADS), once);
    }
    sums
}

/// Adds the threes of `count` cubes, once all are there.
#[cube]
fn add_some(
    sums: &mut Array<f32>,
    from: u64,
    number: u32,
    #[comptime] count: usize,
    #[comptime] once: Once,
) {
    let bytes = comptime!(16 * once.part() as u64);
    let mut threes = Array::<Vector<u64, Const<2>>>::new(count);
    #[unroll]
    for i in 0..count {
        threes[i] = found(from + comptime!(i as u64 * bytes));
    }
    let mut missing = true;
    while missing {
        missing = false;
        #[unroll]
        for i in 0..count {
            let (_, its) = halves_of(threes[i].extract(1usize));
            if its != number {
                threes[i] = found(from + comptime!(i as u64 * bytes));
                missing = true;
            }
        }
    }
    #[unroll]
    for i in 0..count {
        let (x, y) = halves_of(threes[i].extract(0usize));
        let (z, _) = halves_of(threes[i].extract(1usize));
        sums[0] += f32::reinterpret(x);
        sums[1] += f32::reinterpret(y);
        sums[2] += f32::reinterpret(z);
    }
}

/// Weights the streams of the tokens that are this warp's turn, in this cube's columns.
#[cube]
fn weight(
    of: &Weighting,
    mix: &mut [f32],
    norm: &mut [f32],
    shared: &mut Shared<[f32]>,
    workspace: &mut [Atomic<u32>],
    ring: &Ring,
    sides: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] once: Once,
) {
    let stages = comptime!(once.stages as u32);
    let n = comptime!(once.streams as u32);
    let lane = UNIT_POS % 32;
    sync_units(1u32, comptime!(UNITS as u32));
    if of.owner == 0 {
        for number in 0..min(place.count, stages) {
            load(of.map, number, number, ring, place, sizes, once);
        }
    }
    let owned = comptime!(once.owned_at() as u32) + of.owner * comptime!(once.owned() as u32);
    for number in range_stepped(of.pair, place.count, comptime!(PAIRS as u32)) {
        let (stage, phase) = (number % stages, number / stages);
        let (which, times) = (number % SIDES as u32, number / SIDES as u32);
        // Who has released the stage has filled the side the time before.
        ring.wait_released(stage, phase);
        sides.wait(which, times);
        leave_all(&*shared, side_at(which, once), of.half, number, place, once);
        sync_plane();
        if lane == 0 {
            sides.release(which);
        }
        wait_for_all(place.left(number, once), place.first_number + number, once);
        gather(of, mix, shared, owned, number, place, sizes, once);
        sync_plane();
        weights(of, mix, norm, shared, owned, number, place, sizes, once);
        sync_plane();
        // Has been filled, as those who multiplied saw; now this warp sees it too.
        ring.wait(stage, phase);
        let stage_at = place.base + stage * comptime!(once.stage_bytes() as u32);
        let weights_at = owned + comptime!(HALF as u32 * (n + 1));
        let token = place.token(number, sizes);
        for four in 0..comptime!(HALF as u32 / 4) {
            let row = four * 4 + lane / 8;
            let weights_at = weights_at + row * n;
            mixed(of, &*shared, weights_at, stage_at, row, token, place, sizes, once);
        }
        // The pair has read the stage.
        sync_units(of.pair + 2, 64u32);
        if of.half == 0 && number + stages < place.count {
            load(of.map, number + stages, stage, ring, place, sizes, once);
        }
    }
    sync_plane();
    if lane == 0 {
        leave(workspace, place, once);
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
    let (firsts, rest) = comptime!((once.firsts() as u32, once.rest() as u32));
    // Threes of this warp's tokens.
    let own = comptime!(HALF as u32 * firsts);
    let all = comptime!(own + TOKENS.div_ceil(2 * cubes) as u32 * rest);
    let left = place.left(number, once);
    let tag = place.first_number + number;
    let first_token = place.token(number, sizes);
    for turn in 0..comptime!(all.div_ceil(32)) {
        let at = turn * 32 + UNIT_POS % 32;
        let first = at < own;
        let beyond = select(first, 0, at - own);
        let (nth, three) = (beyond / rest, beyond % rest);
        // Of the tokens that this cube writes, every other one is this warp's.
        let row = place.rank + (2 * nth + of.half) * comptime!(cubes as u32);
        if first || (row < comptime!(TOKENS as u32) && first_token + row < sizes.tokens) {
            let of_rest = comptime!(TOKENS as u32 * firsts) + row * rest + three;
            let from = select(first, of.half * own + at, of_rest);
            let sums = of_all(left + u64::cast_from(from) * 16, tag, once);
            if first {
                let (token, j) = (at / firsts, at % firsts * 3);
                #[unroll]
                for e in 0..3usize {
                    if j + comptime!(e as u32) <= n {
                        shared[(owned + token * comptime!(n + 1) + j) as usize + e] = sums[e];
                    }
                }
            } else {
                let j = n + three * 3;
                let to = (first_token + row) as usize * comptime!(rows as usize) + j as usize;
                #[unroll]
                for e in 0..3usize {
                    if j + comptime!(e as u32) < rows {
                        mix[to + e] = sums[e];
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
    let all = comptime!(HALF as u32 * n);
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
            shared[(owned + comptime!(HALF as u32 * (n + 1)) + at) as usize] = weight;
            let row = of.first() + row;
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

/// Writes h_in of one of this warp's rows of the stage, 16 bytes of each box a lane, with the weights at `weights_at`.
#[cube]
fn mixed(
    of: &Weighting,
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
    let row = of.first() + row;
    let from = stage_at + row * 128 + ((vector ^ (row % 8)) << 4);
    let token = first_token + row;
    let first = place.rank * comptime!((once.boxes * BOX) as u32) + vector * 8;
    let line = of.out + u64::cast_from(token) * u64::cast_from(sizes.width) * 2;
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

/// Says that this warp waits for no more; the last one of the group says which number was the last.
#[cube]
fn leave(workspace: &mut [Atomic<u32>], place: &Place, #[comptime] once: Once) {
    let group = 2 * place.group as usize;
    let done = workspace[group + 1].fetch_add(1u32) + 1;
    if done == comptime!((once.cubes * OWNERS) as u32) {
        workspace[group].store(place.first_number + (place.count - 1));
        workspace[group + 1].store(0u32);
    }
}
