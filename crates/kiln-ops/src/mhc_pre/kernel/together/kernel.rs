//! The kernel: warps that multiply, and one that [loads](super::load).

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

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
}

/// Where a cube is, and what it goes through.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    /// The first column of its streams, and the first of its sixteens of tokens.
    pub(super) column: u32,
    group: u32,
    /// How many times sixteen tokens.
    pub(super) count: u32,
    /// The ring, in shared memory.
    pub(super) base: u32,
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
    dx: &TensorMap<E, Tiled>,
    inputs: &Inputs,
    dphi: &mut [f32],
    sizes: Sizes,
    #[comptime] together: Together,
    #[define(E)] _dtype: ElemType,
) {
    let warps = comptime!(together.warps() as u32);
    let mut shared = Shared::<[u32]>::new_aligned_slice(comptime!(together.shared()), 1024usize);
    let base = generic_to_shared::<u32>(shared.as_ptr());
    let barriers = base + comptime!(together.barriers_at() as u32);
    // A stage is full when its boxes have come and when its dm has been written.
    let ring = Ring::new(barriers, comptime!(together.stages as u32), 2u32, warps);
    let cube = CUBE_POS as u32;
    let (group, slice) = (cube / sizes.across, cube % sizes.across);
    let sixteens = (sizes.tokens + comptime!(TOKENS as u32 - 1)) / comptime!(TOKENS as u32);
    let count = (sixteens + (sizes.groups - 1) - group) / sizes.groups;
    let column = slice * comptime!((together.boxes * BOX) as u32);
    let place = Place { column, group, count, base };
    rings_ready();
    // The same in all lanes, and known to be.
    let warp = plane_broadcast(UNIT_POS / 32, 0u32);
    if warp < warps {
        let map = tensor_map_address(dx);
        multiply(&inputs.phi, map, &shared, dphi, warp, &ring, &place, &sizes, together);
    } else {
        let maps = Maps {
            x: tensor_map_address(x),
            dh_in: tensor_map_address(dh_in),
            also: tensor_map_address(also),
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

/// The fragments of a stage's dm that a warp takes for dx: a token a row, in steps of two eights of what is added up,
/// first the first parts, then the second ones, twice.
#[cube]
fn for_dx(dm: u32, #[comptime] together: Together) -> Array<Vector<u32, Const<4>>> {
    let eights = comptime!(together.eights() as u32);
    let lane = UNIT_POS % 32;
    // A lane names a row of one of four matrices: the upper tokens or the lower, the step's first eight or the second.
    let token = lane % 16;
    let mut fragments = Array::<Vector<u32, Const<4>>>::new(comptime!(together.eights()));
    #[unroll]
    for step in 0..comptime!(together.eights()) {
        let eight = comptime!(2 * step as u32) + lane / 16;
        let (part, eight) = (eight / eights, eight % eights);
        let at = part * comptime!(4 * together.part() as u32)
            + token * comptime!(16 * eights)
            + eight * 16;
        fragments[step] = load_matrices(dm + at, false);
    }
    fragments
}

/// Those that it takes for dφ: a row of φ a row; sixteen rows after the other, of the first parts or of the second.
#[cube]
fn for_dphi(dm: u32, #[comptime] together: Together) -> Array<Vector<u32, Const<4>>> {
    let eights = comptime!(together.eights() as u32);
    let lane = UNIT_POS % 32;
    let token = lane / 16 * 8 + lane % 8;
    let mut fragments = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * together.sixteens()));
    #[unroll]
    for part in 0..2usize {
        #[unroll]
        for sixteen in 0..comptime!(together.sixteens()) {
            // Where there are no more rows, some again, which nobody reads.
            let eight = min(comptime!(2 * sixteen as u32) + lane / 8 % 2, comptime!(eights - 1));
            let from = dm + comptime!((4 * part * together.part()) as u32);
            let at = from + token * comptime!(16 * eights) + eight * 16;
            fragments[comptime!(part * together.sixteens() + sixteen)] = load_matrices(at, true);
        }
    }
    fragments
}

/// Makes dx and dφ of 64 columns of a stream; a warp.
#[cube]
fn multiply(
    phi: &[f32],
    dx: u64,
    shared: &Shared<[u32]>,
    dphi: &mut [f32],
    warp: u32,
    ring: &Ring,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let boxes = comptime!(together.boxes as u32);
    let sixteens = comptime!(together.sixteens());
    let float = comptime!(Float16::Bf16);
    let (stages, box_bytes) = comptime!((together.stages as u32, together.box_bytes() as u32));
    let (stream, number_of_box) = (warp / boxes, warp % boxes);
    let first = place.column + number_of_box * comptime!(BOX as u32);
    let held = hold_phi(phi, stream, first, sizes, together);
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(BOX / 8 * sixteens));
    #[unroll]
    for i in 0..comptime!(BOX / 8 * sixteens) {
        sums[i] = Vector::new(0.0f32);
    }
    let row = lane / 4;
    let mut state = PipelineState::start();
    for number in 0..place.count {
        ring.wait(state.stage, state.phase);
        let stage = place.base + state.stage * comptime!(together.stage_bytes() as u32);
        let of_x = stage + warp * box_bytes;
        let of_dy = stage + (number_of_box + comptime!(together.warps() as u32)) * box_bytes;
        let of_also = of_x + comptime!(together.also_at() as u32) * box_bytes;
        let words =
            comptime!(together.words_at()) + (state.stage as usize) * comptime!(together.words());
        let dm = place.base + 4 * words as u32;
        let left = for_dx(dm + 0, together);
        let transposed = for_dphi(dm + 0, together);
        // Of the two rows of this lane.
        let words = words + comptime!(2 * together.part());
        let mut along = Array::<f32>::new(2usize);
        let mut weights = Array::<f32>::new(2usize);
        #[unroll]
        for half in 0..2usize {
            let token = row as usize + comptime!(8 * half);
            along[half] = f32::reinterpret(shared[words + token]);
            let at =
                words + comptime!(TOKENS) + token * comptime!(together.streams) + stream as usize;
            weights[half] = f32::reinterpret(shared[at]);
        }
        #[unroll]
        for pair in 0..comptime!(BOX / 16) {
            let chunk = comptime!(2 * pair as u32) + lane / 16;
            let token = lane % 16;
            let mut right = Array::<Vector<u32, Const<4>>>::new(1usize);
            right[0] = load_matrices(of_x + token * 128 + ((chunk ^ (token % 8)) << 4), true);
            #[unroll]
            for half in 0..2usize {
                let block = comptime!(2 * pair + half);
                let (b0, b1) = comptime!((2 * half, 2 * half + 1));
                #[unroll]
                for part in 0..2usize {
                    #[unroll]
                    for sixteen in 0..sixteens {
                        let at = comptime!(block * sixteens + sixteen);
                        sums[at] = mma_16x8x16(
                            transposed[comptime!(part * sixteens + sixteen)],
                            right[0].extract(b0),
                            right[0].extract(b1),
                            sums[at],
                            float,
                        );
                    }
                }
            }
        }
        #[unroll]
        for group in 0..comptime!(BOX / 8 / BLOCKS) {
            let first = comptime!(group * BLOCKS);
            make_dx(of_x, of_dy, of_also, &left, &held, &along, &weights, first, together);
        }
        async_proxy_fence();
        sync_plane();
        if lane == 0 {
            let token = place.token(number, sizes);
            tma_store(dx, of_x + 0, first + 0, token, stream + 0);
            // The one before has read its stage.
            tma_store_read(1u32);
            if number > 0 {
                ring.release((state.stage + comptime!(stages - 1)) % stages);
            }
        }
        sync_plane();
        state.advance(stages);
    }
    if lane == 0 {
        tma_store_wait();
    }
    leave_dphi(&sums, dphi, first, stream, place, sizes, together);
}

/// Blocks of eight columns of dx that are made beside each other: products of one wait for each other.
const BLOCKS: usize = 4;
const _: () = assert!((BOX / 8).is_multiple_of(BLOCKS));

/// Makes dx of some blocks of eight columns from `first` on: dm·φ, what x and dh_in add, and what there is from elsewhere,
/// in the place of x.
#[cube]
fn make_dx(
    of_x: u32,
    of_dy: u32,
    of_also: u32,
    left: &Array<Vector<u32, Const<4>>>,
    held: &Array<Vector<u32, Const<2>>>,
    along: &Array<f32>,
    weights: &Array<f32>,
    #[comptime] first: usize,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let row = lane / 4;
    let eights = comptime!(together.eights());
    let float = comptime!(Float16::Bf16);
    // Two rows of each block, loaded before the first product.
    let mut x = Array::<u32>::new(comptime!(2 * BLOCKS));
    let mut dy = Array::<u32>::new(comptime!(2 * BLOCKS));
    let mut also = Array::<u32>::new(comptime!(2 * BLOCKS));
    #[unroll]
    for i in 0..comptime!(2 * BLOCKS) {
        let at = place_of(row, comptime!(first + i / 2), comptime!(i % 2));
        x[i] = load_word(of_x + at);
        dy[i] = load_word(of_dy + at);
        if comptime!(together.also) {
            also[i] = load_word(of_also + at);
        }
    }
    let mut out = Array::<Vector<f32, Const<4>>>::new(comptime!(BLOCKS));
    #[unroll]
    for i in 0..BLOCKS {
        out[i] = Vector::new(0.0f32);
    }
    #[unroll]
    for part in 0..2usize {
        #[unroll]
        for step in 0..eights {
            let e = comptime!([2 * step % eights, (2 * step + 1) % eights]);
            #[unroll]
            for i in 0..BLOCKS {
                let of = comptime!((first + i) * eights);
                out[i] = mma_16x8x16(
                    left[step],
                    held[comptime!(of + e[0])].extract(part),
                    held[comptime!(of + e[1])].extract(part),
                    out[i],
                    float,
                );
            }
        }
    }
    #[unroll]
    for i in 0..comptime!(2 * BLOCKS) {
        let below = comptime!(i % 2);
        let (x0, x1) = bf16_pair(x[i]);
        let (y0, y1) = bf16_pair(dy[i]);
        let (c0, c1) = comptime!((2 * below, 2 * below + 1));
        let product = out[comptime!(i / 2)];
        let mut sums = Array::<f32>::new(2usize);
        sums[0] = product.extract(c0) + along[below] * x0 + weights[below] * y0;
        sums[1] = product.extract(c1) + along[below] * x1 + weights[below] * y1;
        if comptime!(together.also) {
            let (also0, also1) = bf16_pair(also[i]);
            sums[0] += also0;
            sums[1] += also1;
        }
        let at = place_of(row, comptime!(first + i / 2), below);
        store_pair(of_x + at, sums[0], sums[1], float);
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
    let row = lane / 4;
    let sixteens = comptime!(together.sixteens());
    let columns = sizes.width as usize * comptime!(together.streams);
    let from = place.group as usize * comptime!(together.rows) * columns;
    #[unroll]
    for block in 0..comptime!(BOX / 8) {
        let column = first + comptime!(8 * block as u32) + lane % 4 * 2;
        #[unroll]
        for sixteen in 0..sixteens {
            #[unroll]
            for below in 0..2usize {
                let j = row + comptime!((16 * sixteen + 8 * below) as u32);
                if j < comptime!(together.rows as u32) && column < sizes.width {
                    let sum = sums[comptime!(block * sixteens + sixteen)];
                    let to = from + j as usize * columns + (stream * sizes.width + column) as usize;
                    dphi[to] = sum.extract(comptime!(2 * below));
                    dphi[to + 1] = sum.extract(comptime!(2 * below + 1));
                }
            }
        }
    }
}
