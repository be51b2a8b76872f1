//! The kernel: warps that multiply, one that [loads](super::load), and those that make the [numbers](super::numbers) of tokens.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::back::{Boxes, eight_of, take_back};
use super::load::{Maps, produce};
use super::numbers::{Exchange, leave_parts, make_numbers};
use super::plan::{BOX, TOKENS, Together};
use crate::tile::cuda::pipeline::{PipelineState, Ring, rings_ready};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

/// Eights of columns of dx that a warp makes at a time, half of its.
const BLOCKS: usize = BOX / 16;

#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    pub(super) tokens: u32,
    /// Columns of a stream.
    width: u32,
    /// Cubes that have other columns and the same tokens, which are a group, and groups.
    pub(super) across: u32,
    groups: u32,
}

#[derive(CubeType, CubeLaunch)]
pub(super) struct Inputs {
    phi: Box<[f32]>,
    /// With what ⟨dh_in, x[i]⟩ is multiplied in the first n rows.
    pub(super) dm: Box<[f32]>,
    /// The same of the factor of x: what there is without them, and of each of them, which the inverse root mean square is
    /// multiplied with, too.
    pub(super) along: Box<[f32]>,
    pub(super) along_dots: Box<[f32]>,
    pub(super) norm: Box<[f32]>,
    pub(super) weights: Box<[f32]>,
    /// h_post and h_res of the layer before.
    pub(super) post: Box<[f32]>,
    pub(super) res: Box<[f32]>,
}

/// What is left for sums over cubes: dφ, and, of the layer before, what each box has of dh_res and dh_post of a token, of whole
/// sixteens of tokens.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Partials {
    phi: Box<[f32]>,
    layer: Box<[f32]>,
}

/// Where a cube is, and what it goes through.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    /// The first column of its streams, and the first of its sixteens of tokens.
    pub(super) column: u32,
    pub(super) group: u32,
    /// Which cube of its group it is.
    pub(super) rank: u32,
    /// How many times sixteen tokens.
    pub(super) count: u32,
    /// Shared memory: the ring of x, and behind it the rest.
    pub(super) base: u32,
}

/// Where dx goes, or the gradient of the streams before the layer, and that of its output.
#[derive(CubeType, Clone, Copy)]
struct Stores {
    dx: u64,
    df: u64,
}

#[cube]
impl Place {
    /// The first of the tokens that come as number `number`.
    pub(super) fn token(&self, number: u32, sizes: &Sizes) -> u32 {
        (self.group + number * sizes.groups) * comptime!(TOKENS as u32)
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
    exchange: &mut Exchange,
    partials: &mut Partials,
    sizes: Sizes,
    #[comptime] together: Together,
    #[define(E)] _dtype: ElemType,
) {
    let warps = comptime!(together.warps() as u32);
    let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(together.shared()), 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    // A stage of x is full when its boxes have come, one of the rest when the numbers of its tokens have been written, too.
    let barriers = base + comptime!(together.barriers_of_x_at() as u32);
    let x_ring = Ring::new(barriers, comptime!(together.stages_of_x as u32), 1u32, warps);
    let barriers = base + comptime!(together.barriers_at() as u32);
    let loads = comptime!(if together.also() { 2u32 } else { 1u32 });
    let rest_ring = Ring::new(barriers, comptime!(together.stages as u32), loads, warps);
    let rings = Rings { x: x_ring, rest: rest_ring };
    let cube = CUBE_POS as u32;
    let (group, rank) = (cube / sizes.across, cube % sizes.across);
    let sixteens = (sizes.tokens + comptime!(TOKENS as u32 - 1)) / comptime!(TOKENS as u32);
    let count = (sixteens + (sizes.groups - 1) - group) / sizes.groups;
    let column = rank * comptime!((together.boxes * BOX) as u32);
    let place = Place { column, group, rank, count, base };
    rings_ready();
    // The same in all lanes, and known to be.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp < warps {
        let stores = Stores { dx: tensor_map_address(dx), df: tensor_map_address(df) };
        multiply(&inputs.phi, stores, &shared, partials, warp, &rings, &place, &sizes, together);
    } else if warp > warps + 1 {
        let maker = warp - (warps + 2);
        make_numbers(inputs, exchange, &mut shared, maker, &rings, &place, &sizes, together);
    } else if warp > warps {
        leave_parts(exchange, &rings, &place, &sizes, together);
    } else {
        let maps = Maps {
            x: tensor_map_address(x),
            dh_in: tensor_map_address(dh_in),
            also: tensor_map_address(also),
            before: tensor_map_address(before),
            f: tensor_map_address(f),
        };
        produce(&maps, &rings, &place, &sizes, together);
    }
}

/// The rings: of x and dh_in, and of the rest with the numbers of tokens.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Rings {
    pub(super) x: Ring,
    pub(super) rest: Ring,
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
    rings: &Rings,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let boxes = comptime!(together.boxes as u32);
    let eights = comptime!(together.eights());
    let (stages_of_x, stages) = comptime!((together.stages_of_x as u32, together.stages as u32));
    let (stream, number_of_box) = (warp / boxes, warp % boxes);
    let first = place.column + number_of_box * comptime!(BOX as u32);
    let held = hold_phi(phi, stream, first, sizes, together);
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(BOX / 16 * eights));
    #[unroll]
    for i in 0..comptime!(BOX / 16 * eights) {
        sums[i] = Vector::new(0.0f32);
    }
    let mut of_x = PipelineState::start();
    let mut of_rest = PipelineState::start();
    for number in 0..place.count {
        rings.x.wait(of_x.stage, of_x.phase);
        rings.rest.wait(of_rest.stage, of_rest.phase);
        let (x_at, rest_at) =
            (x_of(place, of_x.stage, together), rest_of(place, of_rest.stage, together));
        let of = Boxes { x_at, rest_at, stream, number: number_of_box };
        let x = of.x(stream, together);
        let words = words_of(of_rest.stage, together);
        let dm = place.base + 4 * words as u32;
        let factors = words + comptime!(2 * together.part());
        add_dphi(&mut sums, x + 0, dm + 0, together);
        // By halves: all of it takes more registers than there are.
        #[unroll]
        for half in 0..2usize {
            let mut out = direct_of_half(&of, shared, factors, half, together);
            add_through(&mut out, dm + 0, &held, half, together);
            // All lanes have read x.
            sync_plane();
            put_dx(x + 0, &out, half);
        }
        if lane == 0 && number > 0 {
            // What was stored of the stage before has been read: it may be filled while this one is used.
            tma_store_read(0u32);
            rings.x.release((of_x.stage + comptime!(stages_of_x - 1)) % stages_of_x);
            rings.rest.release((of_rest.stage + comptime!(stages - 1)) % stages);
        }
        let token = place.token(number, sizes);
        let mut to_store = x + 0;
        let left = left_at(place, number_of_box, together);
        if comptime!(together.takes_back()) {
            // dx of all streams of these columns.
            sync_units(1 + number_of_box, comptime!(32 * together.streams as u32));
            take_back(shared, words, &of, left, together);
            to_store = of.also(stream, together);
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
                tma_store(stores.df, of.dh_in(together), first + 0, token + 0, 0u32);
                let part = place.rank * boxes + number_of_box;
                let to = left_to(&*partials, part, token + 0, sizes, together);
                bulk_store(to, left, comptime!(together.left_bytes() as u32));
                tma_store_commit();
            }
        }
        sync_plane();
        of_x.advance(stages_of_x);
        of_rest.advance(stages);
    }
    if lane == 0 {
        tma_store_wait();
    }
    leave_dphi(&sums, &mut partials.phi, first, stream, place, sizes, together);
}

/// Where a stage of x is, and one of the rest.
#[cube]
pub(super) fn x_of(place: &Place, stage: u32, #[comptime] together: Together) -> u32 {
    place.base + stage * comptime!(together.x_bytes() as u32)
}

#[cube]
pub(super) fn rest_of(place: &Place, stage: u32, #[comptime] together: Together) -> u32 {
    place.base
        + comptime!(together.rest_at() as u32)
        + stage * comptime!(together.rest_bytes() as u32)
}

/// Where in shared memory a box leaves what it has of dh_res and dh_post of the tokens of a stage.
#[cube]
fn left_at(place: &Place, number_of_box: u32, #[comptime] together: Together) -> u32 {
    place.base
        + comptime!(together.left_at() as u32)
        + number_of_box * comptime!(together.left_bytes() as u32)
}

/// Where that of tokens from `token` on goes.
#[cube]
fn left_to(
    partials: &Partials,
    part: u32,
    token: u32,
    sizes: &Sizes,
    #[comptime] together: Together,
) -> u64 {
    let sixteens = (sizes.tokens + comptime!(TOKENS as u32 - 1)) / comptime!(TOKENS as u32);
    let sixteens = part * sixteens + token / comptime!(TOKENS as u32);
    global_address::<f32>(partials.layer.as_ptr())
        + u64::cast_from(sixteens) * comptime!(together.left_bytes() as u64)
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
    let rows = of_x + eight_of(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    #[unroll]
    for pair in 0..comptime!(BOX / 16) {
        // A variable itself would be handed over by its address.
        let mut x = Array::<Vector<u32, Const<4>>>::new(1usize);
        x[0] = load_matrices(rows ^ comptime!(32 * pair as u32), true);
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

/// What x, dh_in and what there is from elsewhere have of half the columns of dx: of each eight, as products leave their sums.
#[cube]
fn direct_of_half(
    of: &Boxes,
    shared: &Shared<[u32]>,
    factors: usize,
    #[comptime] half: usize,
    #[comptime] together: Together,
) -> Array<Vector<f32, Const<4>>> {
    let lane = UNIT_POS % 32;
    let of_x = of.x(of.stream, together);
    let of_dy = of.dh_in(together);
    let of_also = of.also(of.stream, together);
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
    let mut out = Array::<Vector<f32, Const<4>>>::new(BLOCKS);
    let row = row_of_half(half);
    #[unroll]
    for pair in 0..comptime!(BLOCKS / 2) {
        let at = row ^ comptime!(32 * pair as u32);
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

/// Adds dm·φ of half the columns. The product of the two second parts is left out: it is as little as what two bf16 leave out
/// of a number.
#[cube]
fn add_through(
    out: &mut Array<Vector<f32, Const<4>>>,
    dm: u32,
    held: &Array<Vector<u32, Const<2>>>,
    #[comptime] half: usize,
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
        for i in 0..comptime!((2 - part) * pairs) {
            #[unroll]
            for block in 0..BLOCKS {
                let at = comptime!((half * BLOCKS + block) * eights + i % pairs * 2);
                let (b0, b1) = (held[at].extract(part), held[comptime!(at + 1)].extract(part));
                out[block] = mma_16x8x16(left[i], b0, b1, out[block], float);
            }
        }
        if comptime!(eights % 2 == 1) {
            let rest = left[comptime!(2 * pairs)];
            #[unroll]
            for block in 0..BLOCKS {
                let at = comptime!((half * BLOCKS + block + 1) * eights - 1);
                let b = held[at].extract(part);
                if comptime!(part == 0) {
                    out[block] = mma_16x8x16(rest, b, b, out[block], float);
                } else {
                    let (first, second) = (rest.extract(0usize), rest.extract(1usize));
                    out[block] = mma_16x8x8(first, second, b, out[block], float);
                }
            }
        }
    }
}

/// The row of a box that a lane names for the first two eights of half its columns: of the one the upper tokens, then the
/// lower, then of the other. Further ones differ in bits of their own.
#[cube]
fn row_of_half(#[comptime] half: usize) -> u32 {
    let lane = UNIT_POS % 32;
    eight_of(lane % 16, lane / 16) ^ comptime!((16 * BLOCKS * half) as u32)
}

/// Stores half the columns of dx in the place of x.
#[cube]
fn put_dx(of_x: u32, dx: &Array<Vector<f32, Const<4>>>, #[comptime] half: usize) {
    let row = row_of_half(half);
    #[unroll]
    for pair in 0..comptime!(BLOCKS / 2) {
        let mut quad = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..4usize {
            let block = comptime!(2 * pair + i / 2);
            let (c0, c1) = comptime!((2 * (i % 2), 2 * (i % 2) + 1));
            let (first, second) = (dx[block].extract(c0), dx[block].extract(c1));
            quad.insert(i, round_pair(first, second, Float16::Bf16));
        }
        store_matrices(of_x + (row ^ comptime!(32 * pair as u32)), quad);
    }
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
