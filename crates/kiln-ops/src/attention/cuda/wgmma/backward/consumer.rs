//! What a warpgroup does: dK and dV of 64 keys, block of queries by block, and its part of each block's dQ.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::block::{Operands, Reading, step};
use super::places::key_tile;
use super::plan::{Gradient, KEYS, PART};
use super::rings::{READ, Rings, Tiles, hand_over};
use crate::attention::cuda::wgmma::places::{NONE, Places};
use crate::tile::cuda::fragment::{origin, scale_rows};
use crate::tile::cuda::pipeline::PipelineState;
use crate::tile::cuda::ptx::*;
use crate::tile::cuda::store::{ChunkAddresses, Stored, chunk_addresses, store_parts};
use cubecl::prelude::*;

/// Makes the gradients of all tiles of this cube, those of queries and keys times `scale`; for the units of a warpgroup.
#[cube]
pub(super) fn consume(
    shared: &Shared<[u32]>,
    base: u32,
    warp: u32,
    rings: &Rings,
    places: &Places,
    scale: f32,
    #[comptime] gradient: Gradient,
) {
    let size!(Keys) = comptime!(gradient.held());
    let number = warp / 4;
    let unit = UNIT_POS % 128;
    let (row, col) = origin(unit);
    let me = Operands::new(base, number, unit, gradient);
    let stored = comptime!(Stored::Float16(gradient.float));
    let out = base + comptime!(gradient.out_at()) + number * PART;
    let out_at = chunk_addresses(out, unit, stored);
    arrive_units(1 - number + READ, 256u32);

    let mut reading = Reading {
        q: PipelineState::start(),
        out: PipelineState::start(),
        others: PipelineState::start(),
    };
    let mut kv_phase = 0u32;
    let mut tiles = Tiles::start(shared, rings, gradient);
    while tiles.number != NONE {
        let tile = key_tile(tiles.number, places);
        let key = tile.index * KEYS + number * 64 + row;
        sums_clear(gradient.dk());
        sums_clear(gradient.dv());
        let steps = (tiles.end - tiles.begin) * places.group;
        if steps > 0u32 {
            rings.k.wait(0u32, kv_phase);
            rings.v.wait(0u32, kv_phase);
            kv_phase ^= 1;
            for _i in 0..steps {
                step(
                    shared,
                    base + col * 4,
                    &me,
                    rings,
                    &mut reading,
                    &out_at,
                    key,
                    places,
                    scale,
                    gradient,
                );
            }
            if unit == 0u32 {
                rings.k.release(0u32);
                rings.v.release(0u32);
            }
        }
        write_tile::<Keys>(&me, rings, &mut reading, &out_at, scale, gradient);
        tiles.next(shared, rings, gradient);
    }
}

/// Hands a tile's dK and dV of this warpgroup to the warp that stores.
#[cube]
fn write_tile<O: Size>(
    me: &Operands,
    rings: &Rings,
    reading: &mut Reading,
    out_at: &ChunkAddresses,
    scale: f32,
    #[comptime] gradient: Gradient,
) {
    let stored = comptime!(Stored::Float16(gradient.float));
    rings.out.vacant(0u32, reading.out.phase);
    sync_plane();
    // All warps have read the sums of other tiles in the place of dK.
    sync_units(me.number + 1, 128u32);
    let mut dk = Array::<Vector<f32, O>>::new(1usize);
    let mut dv = Array::<Vector<f32, O>>::new(1usize);
    dv[0] = sums_read::<O>(gradient.dv());
    dk[0] = sums_read::<O>(gradient.dk());
    dk[0] = scale_rows::<O>(dk[0], Vector::new(scale));
    let to_others = comptime!(gradient.others_at() - gradient.out_at());
    #[unroll]
    for c in 0..gradient.chunks() {
        let chunk = comptime!(c as usize);
        let parts = comptime!((gradient.width - 64 * chunk).div_ceil(16).min(4));
        let at = comptime!(c * 8192);
        store_parts::<O>(dv[0], out_at, at, chunk, parts, stored, false);
        store_parts::<O>(dk[0], out_at, comptime!(at + to_others), chunk, parts, stored, false);
    }
    hand_over(rings);
    reading.out.advance(1u32);
}
