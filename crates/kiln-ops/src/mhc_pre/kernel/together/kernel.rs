//! The kernel: warps that multiply, one that [loads](super::load), and those that make the [numbers](super::numbers) of tokens.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::back::{Boxes, take_back};
use super::exchange::{Exchange, leave_parts};
use super::load::{Maps, produce};
use super::numbers::make_numbers;
use super::plan::{BOX, TOKENS, Together};
use super::products::{add_dphi, add_through, direct_of_half, hold_phi, leave_dphi, put_dx};
use crate::tile::cuda::pipeline::{PipelineState, Ring, rings_ready};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sizes {
    pub(super) tokens: u32,
    /// Columns of a stream.
    pub(super) width: u32,
    /// Cubes that have other columns and the same tokens, which are a group, and groups.
    pub(super) across: u32,
    groups: u32,
}

#[derive(CubeType, CubeLaunch)]
pub(super) struct Inputs {
    phi: Box<[f32]>,
    /// With what ⟨dh_in, x[i]⟩ is multiplied in the first n rows.
    pub(super) dm: Box<[f32]>,
    /// The factor of x without them.
    pub(super) along: Box<[f32]>,
    /// The slopes of the sigmoids of these rows, and y.
    pub(super) slopes: Box<[f32]>,
    pub(super) y: Box<[f32]>,
    pub(super) alpha: Box<[f32]>,
    pub(super) norm: Box<[f32]>,
    pub(super) weights: Box<[f32]>,
    /// h_post and h_res of the layer before.
    pub(super) post: Box<[f32]>,
    pub(super) res: Box<[f32]>,
}

/// What is left for sums over cubes: dφ; of the layer before, what each box has of dh_res and dh_post of a token, of whole
/// sixteens of tokens; and what ⟨dh_in, x[i]⟩ give dbias and the first dα, a row for each warp of a group that makes numbers.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Partials {
    phi: Box<[f32]>,
    layer: Box<[f32]>,
    pub(super) dots: Box<[f32]>,
}

/// Where a cube is, and what it goes through.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    /// The first column of its streams.
    pub(super) column: u32,
    /// Its group, and the first of its sixteens of tokens.
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
    let loads = comptime!(if together.has_rest() { 2u32 } else { 1u32 });
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
        make_numbers(
            inputs,
            exchange,
            &mut shared,
            partials,
            maker,
            &rings,
            &place,
            &sizes,
            together,
        );
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
