//! The warp that loads boxes, by TMA.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]
// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use super::kernel::{Place, Rings, Sizes, rest_of, x_of};
use super::plan::{BOX, Together};
use crate::tile::cuda::pipeline::{PipelineState, Ring};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// What is loaded, and where from.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Maps {
    pub(super) x: u64,
    pub(super) dh_in: u64,
    pub(super) also: u64,
    pub(super) before: u64,
    pub(super) f: u64,
}

/// Loads what the cube goes through, the rest later than x: nobody wants it as early.
#[cube]
pub(super) fn produce(
    maps: &Maps,
    rings: &Rings,
    place: &Place,
    sizes: &Sizes,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let ahead = comptime!((together.stages_of_x - together.stages) as u32);
    let mut of_x = PipelineState::start();
    let mut of_rest = PipelineState::start();
    for step in 0..place.count + ahead {
        if step < place.count {
            let to = x_of(place, of_x.stage, together);
            let bytes = comptime!(together.x_bytes() as u32);
            expect(&rings.x, &of_x, bytes);
            // Boxes of x come first.
            let behind = lane >= comptime!(together.dh_in_at() as u32);
            let map = select(behind, maps.dh_in, maps.x);
            let at = select(behind, lane - comptime!(together.dh_in_at() as u32), lane);
            if lane < comptime!(together.boxes_of_x() as u32) {
                let bar = rings.x.filling(of_x.stage);
                load_box(
                    to + 0,
                    map + 0,
                    bar + 0,
                    at + 0,
                    place.token(step, sizes),
                    place,
                    together,
                );
            }
            of_x.advance(comptime!(together.stages_of_x as u32));
        }
        if comptime!(together.has_rest()) && step >= ahead {
            let to = rest_of(place, of_rest.stage, together);
            let first = comptime!(together.first_of_rest() as u32);
            let boxes = comptime!(together.boxes_of_rest() as u32);
            let bytes = comptime!((boxes - first) * together.box_bytes() as u32);
            expect(&rings.rest, &of_rest, bytes);
            let mut from = Array::<u64>::new(1usize);
            let mut at = lane + 0;
            from[0] = maps.also;
            if comptime!(together.takes_back()) && lane >= comptime!(together.before_at() as u32) {
                from[0] = maps.before;
                at = lane - comptime!(together.before_at() as u32);
            }
            if comptime!(together.takes_back()) && lane >= comptime!(together.f_at() as u32) {
                from[0] = maps.f;
                at = lane - comptime!(together.f_at() as u32);
            }
            if lane >= first && lane < boxes {
                let bar = rings.rest.filling(of_rest.stage);
                let token = place.token(step - ahead, sizes);
                load_box(to + 0, from[0], bar + 0, at + 0, token, place, together);
            }
            of_rest.advance(comptime!(together.stages as u32));
        }
    }
}

/// Waits until a stage may be filled, and has it wait for so many bytes.
#[cube]
fn expect(ring: &Ring, state: &PipelineState, #[comptime] bytes: u32) {
    ring.vacant(state.stage, state.phase);
    if UNIT_POS % 32 == 0 {
        ring.expect(state.stage, bytes);
    }
    sync_plane();
}

/// Loads this lane's box of a stage, number `at` of what is loaded.
#[cube]
fn load_box(
    stage: u32,
    map: u64,
    bar: u32,
    at: u32,
    token: u32,
    place: &Place,
    #[comptime] together: Together,
) {
    let boxes = comptime!(together.boxes as u32);
    let to = stage + UNIT_POS % 32 * comptime!(together.box_bytes() as u32);
    let column = place.column + at % boxes * comptime!(BOX as u32);
    tma_load(to + 0, map + 0, bar + 0, column, token, at / boxes);
}
