//! The kernel: warps that multiply, and one that [loads](super::load).

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::back::{Boxes, eight_of, take_back};
use super::load::{Maps, produce};
use super::plan::{BOX, TOKENS, Together};
use crate::tile::cuda::pipeline::{PipelineState, Ring, rings_ready};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    pub(super) tokens: u32,
    /// Columns of a stream.
    width: u32,
    /// Cubes that have other columns, and such that have other tokens.
    across: u32,
    groups: u32,
}

#[derive(CubeType, CubeLaunch)]
pub(super) struct Inputs {
    phi: Box<[f32]>,
    pub(super) dm: Box<[f32]>,
    pub(super) along: Box<[f32]>,
    pub(super) weights: Box<[f32]>,
    /// h_post and h_res of the layer before.
    pub(super) post: Box<[f32]>,
    pub(super) res: Box<[f32]>,
}

/// What is left for sums over cubes: dφ, and, of the layer before, what each box has of dh_res and dh_post of a token.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Partials {
    phi: Box<[f32]>,
    dots: Box<[f32]>,
}

/// Where a cube is, and what it goes through.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    /// The first column of its streams, and the first of its sixteens of tokens, counted from the last one.
    pub(super) column: u32,
    group: u32,
    /// How many times sixteen tokens there are, and how many are this cube's.
    sixteens: u32,
    pub(super) count: u32,
    /// The ring, in shared memory.
    pub(super) base: u32,
    /// The number of its first box.
    first_box: u32,
}

/// Where dx goes, or the gradient of the streams before the layer, and that of its output.
#[derive(CubeType, Clone, Copy)]
struct Stores {
    dx: u64,
    df: u64,
}

#[cube]
impl Place {
    /// The first of the tokens that come as number `number`. The last ones come first: the pass before ended with them, and
    /// some of what it read is still in the cache.
    pub(super) fn token(&self, number: u32, sizes: &Sizes) -> u32 {
        let behind = self.group + number * sizes.groups;
        (self.sixteens - 1 - behind) * comptime!(TOKENS as u32)
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn together_kernel<E: Float>(
    x: &TensorMap<E, Tiled>,
    dh_in: &TensorMap<E, Tiled>,
    also: &TensorMap<E, Tiled>,
    before: &TensorMap<E, Tiled>,
    f: &TensorMap<E, Tiled>,
    dx: &TensorMap<E, Tiled>,
    df: &TensorMap<E, Tiled>,
    inputs: &Inputs,
    partials: &mut Partials,
    sizes: Sizes,
    #[comptime] together: Together,
    #[define(E)] _dtype: ElemType,
) {
    let warps = comptime!(together.warps() as u32);
    let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(together.shared()), 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let barriers = base + comptime!(together.barriers_at() as u32);
    // A stage is full when its boxes have come and when the numbers of its tokens have been written.
    let ring = Ring::new(barriers, comptime!(together.stages as u32), 2u32, warps);
    let cube = CUBE_POS as u32;
    let (group, slice) = (cube / sizes.across, cube % sizes.across);
    let sixteens = (sizes.tokens + comptime!(TOKENS as u32 - 1)) / comptime!(TOKENS as u32);
    let count = (sixteens + (sizes.groups - 1) - group) / sizes.groups;
    let column = slice * comptime!((together.boxes * BOX) as u32);
    let first_box = slice * comptime!(together.boxes as u32);
    let place = Place { column, group, sixteens, count, base, first_box };
    rings_ready();
    // The same in all lanes, and known to be.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp < warps {
        let stores = Stores { dx: tensor_map_address(dx), df: tensor_map_address(df) };
        multiply(&inputs.phi, stores, &shared, partials, warp, &ring, &place, &sizes, together);
    } else {
        let maps = Maps {
            x: tensor_map_address(x),
            dh_in: tensor_map_address(dh_in),
            also: tensor_map_address(also),
            before: tensor_map_address(before),
            f: tensor_map_address(f),
        };
        produce(&maps, inputs, &mut shared, &ring, &place, &sizes, together);
    }
}

/// φ of this lane: of each eight columns and each eight rows, two rows of its column, as the sum of two bf16.
#[cube]
fn hold_phi(
    phi: &[f32],
    stream: u32,
    first: u32,
    sizes: &Sizes,
    #[comptime] together: Together,
) -> Array<Vector<u32, Const<2>>> {
    let (rows, eights) = comptime!((together.rows as u32, together.eights()));
    let lane = UNIT_POS % 32;
    let width = sizes.width as usize;
    let mut held = Array::<Vector<u32, Const<2>>>::new(comptime!(BOX / 8 * eights));
    #[unroll]
    for block in 0..comptime!(BOX / 8) {
        let column = first + comptime!(8 * block as u32) + lane / 4;
        #[unroll]
        for e in 0..eights {
            let mut pair = Array::<f32>::new(2usize);
            #[unroll]
            for k in 0..2usize {
                let row = lane % 4 * 2 + comptime!((8 * e + k) as u32);
                let there = row < rows && column < sizes.width;
                let from = row as usize * width * comptime!(together.streams)
                    + stream as usize * width
                    + column as usize;
                pair[k] = select(there, phi[select(there, from, 0usize)], 0.0);
            }
            let (high, low) = two_bf16(pair[0], pair[1]);
            let mut both = Vector::<u32, Const<2>>::new(0u32);
            both.insert(0usize, high);
            both.insert(1usize, low);
            held[comptime!(block * eights + e)] = both;
        }
    }
    held
}

/// The fragments of a stage's dm: as it stands for dx, a token a row, transposed for dφ. Of the first parts come two eights
/// after the other, then of the second ones; and last, if their number is odd, the eights that are left, of both.
#[cube]
fn fragments_of_dm(
    dm: u32,
    #[comptime] transposed: bool,
    #[comptime] together: Together,
) -> Array<Vector<u32, Const<4>>> {
    let eights = comptime!(together.eights());
    let lane = UNIT_POS % 32;
    // A lane names a row of one of four matrices: the upper tokens or the lower, of the one eight or the other.
    let token = lane % 16 * comptime!(16 * eights as u32);
    let mut fragments = Array::<Vector<u32, Const<4>>>::new(eights);
    #[unroll]
    for i in 0..eights {
        let pairs = comptime!(eights / 2);
        let at = if comptime!(i < 2 * pairs) {
            let (part, pair) = comptime!((i / pairs, i % pairs));
            comptime!((4 * part * together.part() + 32 * pair) as u32) + lane / 16 * 16
        } else {
            comptime!(32 * pairs as u32) + lane / 16 * comptime!(4 * together.part() as u32)
        };
        fragments[i] = load_matrices(dm + token + at, transposed);
    }
    fragments
}

/// Where an eight of a part is among them: which fragment, and whether it is the second half.
fn place_of_eight(part: usize, eight: usize, eights: usize) -> (usize, usize) {
    let pairs = eights / 2;
    if eight < 2 * pairs { (part * pairs + eight / 2, eight % 2) } else { (2 * pairs, part) }
}

/// Makes dx and dφ of 64 columns of a stream, and has the layer before take dx back; a warp.
#[cube]
fn multiply(
    phi: &[f32],
    stores: Stores,
    shared: &Shared<[u32]>,
    partials: &mut Partials,
    warp: u32,
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let boxes = comptime!(together.boxes as u32);
    let eights = comptime!(together.eights());
    let stages = comptime!(together.stages as u32);
    let (stream, number_of_box) = (warp / boxes, warp % boxes);
    let first = place.column + number_of_box * comptime!(BOX as u32);
    let held = hold_phi(phi, stream, first, sizes, together);
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(BOX / 16 * eights));
    #[unroll]
    for i in 0..comptime!(BOX / 16 * eights) {
        sums[i] = Vector::new(0.0f32);
    }
    let mut state = PipelineState::start();
    for number in 0..place.count {
        ring.wait(state.stage, state.phase);
        let stage = place.base + state.stage * comptime!(together.stage_bytes() as u32);
        let of = Boxes { stage, stream, number: number_of_box };
        let of_x = of.own(0usize, together);
        let of_dy = of.only(comptime!(together.dh_in_at()), together);
        let of_also = of.own(comptime!(together.also_at()), together);
        let words = words_of(state.stage, together);
        let dm = place.base + 4 * words as u32;
        let factors = words + comptime!(2 * together.part());
        add_dphi(&mut sums, of_x + 0, dm + 0, together);
        let mut out = all_direct(&of, shared, factors, together);
        add_through(&mut out, dm + 0, &held, together);
        if lane == 0 && number > 0 {
            // What was stored of the stage before has been read: it may be filled while this one is used.
            tma_store_read(0u32);
            ring.release((state.stage + comptime!(stages - 1)) % stages);
        }
        // All lanes have read x.
        sync_plane();
        put_dx(of_x + 0, &out);
        let token = place.token(number, sizes);
        let mut to_store = of_x + 0;
        if comptime!(together.takes_back()) {
            // dx of all streams of these columns.
            sync_units(1 + number_of_box, comptime!(32 * together.streams as u32));
            let part = place.first_box + number_of_box;
            take_back(shared, words, &of, &mut partials.dots, part, token + 0, sizes, together);
            to_store = of_also + 0;
        }
        async_proxy_fence();
        if comptime!(together.takes_back()) {
            // A box of dx is of all these warps.
            sync_units(1 + number_of_box, comptime!(32 * together.streams as u32));
        } else {
            sync_plane();
        }
        if lane == 0 {
            tma_store(stores.dx, to_store + 0, first + 0, token + 0, stream + 0);
            if comptime!(together.takes_back()) && stream == 0 {
                tma_store(stores.df, of_dy + 0, first + 0, token + 0, 0u32);
            }
        }
        sync_plane();
        state.advance(stages);
    }
    if lane == 0 {
        tma_store_wait();
    }
    leave_dphi(&sums, &mut partials.phi, first, stream, place, sizes, together);
}

/// Where in shared memory the numbers of a stage's tokens are.
#[cube]
pub(super) fn words_of(stage: u32, #[comptime] together: Together) -> usize {
    comptime!(together.words_at()) + stage as usize * comptime!(together.words())
}

/// Adds what a stage has of dφ: xᵀ·dm, sixteen columns at a time.
#[cube]
fn add_dphi(
    sums: &mut Array<Vector<f32, Const<4>>>,
    of_x: u32,
    dm: u32,
    #[comptime] together: Together,
) {
    let eights = comptime!(together.eights());
    let lane = UNIT_POS % 32;
    let dm = fragments_of_dm(dm, true, together);
    // A lane names a row of eight columns: of the upper tokens the one eight, then the other, then of the lower ones.
    let token = lane / 16 * 8 + lane % 8;
    #[unroll]
    for pair in 0..comptime!(BOX / 16) {
        let eight = comptime!(2 * pair as u32) + lane / 8 % 2;
        // A variable itself would be handed over by its address.
        let mut x = Array::<Vector<u32, Const<4>>>::new(1usize);
        x[0] = load_matrices(of_x + eight_of(token, eight), true);
        #[unroll]
        for part in 0..2usize {
            #[unroll]
            for eight in 0..eights {
                let at = comptime!(pair * eights + eight);
                let (i, half) = comptime!(place_of_eight(part, eight, eights));
                let (b0, b1) = comptime!((2 * half, 2 * half + 1));
                let (b0, b1) = (dm[i].extract(b0), dm[i].extract(b1));
                sums[at] = mma_16x8x16(x[0], b0, b1, sums[at], Float16::Bf16);
            }
        }
    }
}

/// What x, dh_in and what there is from elsewhere have of dx: of each eight columns, as products leave their sums.
#[cube]
fn all_direct(
    of: &Boxes,
    shared: &Shared<[u32]>,
    factors: usize,
    #[comptime] together: Together,
) -> Array<Vector<f32, Const<4>>> {
    let lane = UNIT_POS % 32;
    let of_x = of.own(0usize, together);
    let of_dy = of.only(comptime!(together.dh_in_at()), together);
    let of_also = of.own(comptime!(together.also_at()), together);
    // Of the two rows of this lane.
    let mut along = Array::<f32>::new(2usize);
    let mut weights = Array::<f32>::new(2usize);
    #[unroll]
    for below in 0..2usize {
        let token = lane as usize / 4 + comptime!(8 * below);
        along[below] = f32::reinterpret(shared[factors + token]);
        let at = comptime!(TOKENS) + token * comptime!(together.streams) + of.stream as usize;
        weights[below] = f32::reinterpret(shared[factors + at]);
    }
    let mut out = Array::<Vector<f32, Const<4>>>::new(comptime!(BOX / 8));
    #[unroll]
    for pair in 0..comptime!(BOX / 16) {
        // A lane names a row: of the one eight the upper tokens, then the lower, then of the other.
        let (token, eight) = (lane % 16, comptime!(2 * pair as u32) + lane / 16);
        let at = eight_of(token, eight);
        let x = load_matrices(of_x + at, false);
        let dy = load_matrices(of_dy + at, false);
        let (first, second) = comptime!((2 * pair, 2 * pair + 1));
        if comptime!(together.also()) {
            let also = load_matrices(of_also + at, false);
            out[first] = direct(x, dy, also, &along, &weights, 0usize, together);
            out[second] = direct(x, dy, also, &along, &weights, 1usize, together);
        } else {
            out[first] = direct(x, dy, x, &along, &weights, 0usize, together);
            out[second] = direct(x, dy, x, &along, &weights, 1usize, together);
        }
    }
    out
}

/// What x, dh_in and what there is from elsewhere have of a block of dx.
#[cube]
fn direct(
    x: Vector<u32, Const<4>>,
    dy: Vector<u32, Const<4>>,
    also: Vector<u32, Const<4>>,
    along: &Array<f32>,
    weights: &Array<f32>,
    #[comptime] half: usize,
    #[comptime] together: Together,
) -> Vector<f32, Const<4>> {
    let mut out = Vector::<f32, Const<4>>::new(0.0f32);
    #[unroll]
    for below in 0..2usize {
        let (c0, c1) = comptime!((2 * below, 2 * below + 1));
        let word = comptime!(2 * half + below);
        let (x0, x1) = bf16_pair(x.extract(word));
        let (y0, y1) = bf16_pair(dy.extract(word));
        let (mut s0, mut s1) = (weights[below] * y0, weights[below] * y1);
        if comptime!(together.also()) {
            let (also0, also1) = bf16_pair(also.extract(word));
            s0 += also0;
            s1 += also1;
        }
        s0 += along[below] * x0;
        s1 += along[below] * x1;
        out.insert(c0, s0);
        out.insert(c1, s1);
    }
    out
}

/// Adds dm·φ: all products of the parts of dm with those of φ.
#[cube]
fn add_through(
    out: &mut Array<Vector<f32, Const<4>>>,
    dm: u32,
    held: &Array<Vector<u32, Const<2>>>,
    #[comptime] together: Together,
) {
    let eights = comptime!(together.eights());
    let pairs = comptime!(eights / 2);
    let float = comptime!(Float16::Bf16);
    let left = fragments_of_dm(dm, false, together);
    // Products of one block wait for each other: those of all blocks are beside each other.
    #[unroll]
    for part in 0..2usize {
        #[unroll]
        for i in 0..comptime!(2 * pairs) {
            #[unroll]
            for block in 0..comptime!(BOX / 8) {
                let at = comptime!(block * eights + i % pairs * 2);
                let (b0, b1) = (held[at].extract(part), held[comptime!(at + 1)].extract(part));
                out[block] = mma_16x8x16(left[i], b0, b1, out[block], float);
            }
        }
        if comptime!(eights % 2 == 1) {
            let rest = left[comptime!(2 * pairs)];
            #[unroll]
            for i in 0..2usize {
                let (c0, c1) = comptime!((2 * i, 2 * i + 1));
                #[unroll]
                for block in 0..comptime!(BOX / 8) {
                    let b = held[comptime!((block + 1) * eights - 1)].extract(part);
                    out[block] =
                        mma_16x8x8(rest.extract(c0), rest.extract(c1), b, out[block], float);
                }
            }
        }
    }
}

/// Stores dx in the place of x.
#[cube]
fn put_dx(of_x: u32, dx: &Array<Vector<f32, Const<4>>>) {
    let row = UNIT_POS % 32 / 4;
    #[unroll]
    for i in 0..comptime!(BOX / 4) {
        let (block, below) = comptime!((i / 2, i % 2));
        let (c0, c1) = comptime!((2 * below, 2 * below + 1));
        let to = of_x + place_of(row, block, below);
        store_pair(to, dx[block].extract(c0), dx[block].extract(c1), Float16::Bf16);
    }
}

/// Where this lane's two columns of a block lie in a box, in its upper row or its lower one: swizzled by the row, which 8
/// more do not change.
#[cube]
fn place_of(row: u32, #[comptime] block: usize, #[comptime] below: usize) -> u32 {
    let column = ((comptime!(block as u32) ^ row) << 4) + UNIT_POS % 4 * 4;
    (row + comptime!(8 * below as u32)) * 128 + column
}

/// Writes the sums of dφ of a warp: 64 columns from `first` on.
#[cube]
fn leave_dphi(
    sums: &Array<Vector<f32, Const<4>>>,
    dphi: &mut [f32],
    first: u32,
    stream: u32,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let eights = comptime!(together.eights());
    let columns = sizes.width as usize * comptime!(together.streams);
    let from = place.group as usize * comptime!(together.rows) * columns;
    #[unroll]
    for i in 0..comptime!(BOX / 8 * eights) {
        // Of each sum the upper columns and the lower.
        let (pair, below, eight) = comptime!((i / 2 / eights, i % 2, i / 2 % eights));
        let column = first + comptime!((16 * pair + 8 * below) as u32) + lane / 4;
        let sum = sums[comptime!(pair * eights + eight)];
        #[unroll]
        for k in 0..2usize {
            let j = comptime!((8 * eight + k) as u32) + lane % 4 * 2;
            if j < comptime!(together.rows as u32) && column < sizes.width {
                let at = from + j as usize * columns + (stream * sizes.width + column) as usize;
                dphi[at] = sum.extract(comptime!(2 * below + k));
            }
        }
    }
}
