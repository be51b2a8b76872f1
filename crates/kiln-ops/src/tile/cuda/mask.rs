//! Triangles: what is outside is replaced by zeros in shared memory, before wgmma reads it.

use crate::tile::problem::Keep;
use cubecl::prelude::*;

/// Whether a block of 64 of K, from `k0`, has elements to mask for positions `e0 .. e0 + extent` along
/// M or N.
#[cube]
pub(super) fn crossed(k0: u32, e0: u32, extent: u32, #[comptime] keep: Keep) -> bool {
    if comptime!(keep == Keep::UpTo) {
        k0 + 63 > e0
    } else if comptime!(keep == Keep::From) {
        k0 + 1 < e0 + extent
    } else {
        false.runtime()
    }
}

/// Masks 64 positions from `e0` of a block of 64 of K from `k0`, by `units` units: 8 KiB of 16-bit elements at
/// byte `at`, in lines of 128 swizzled bytes along K or along the positions.
#[cube]
pub(super) fn mask_block(
    shared: &mut Shared<[u32]>,
    at: u32,
    e0: u32,
    k0: u32,
    unit: u32,
    #[comptime] units: u32,
    #[comptime] along_k: bool,
    #[comptime] keep: Keep,
) {
    if comptime!(keep != Keep::All) && crossed(k0, e0, 64u32, keep) {
        #[unroll]
        for i in 0..comptime!(2048 / units) {
            let word = unit + comptime!(i * units);
            let (line, inside) = (word / 32, word % 32);
            let along = ((inside / 4) ^ (line % 8)) * 8 + inside % 4 * 2;
            let mut mask = 0u32;
            #[unroll]
            for half in 0..2u32 {
                let (e, k) = if comptime!(along_k) {
                    (e0 + line, k0 + along + half)
                } else {
                    (e0 + along + half, k0 + line)
                };
                let kept = if comptime!(keep == Keep::UpTo) { k <= e } else { k >= e };
                if kept {
                    mask |= comptime!(0xFFFFu32 << (16 * half));
                }
            }
            let index = (at / 4 + word) as usize;
            shared[index] &= mask;
        }
    }
}
