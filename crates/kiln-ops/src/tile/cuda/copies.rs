//! Blocks of K of an operand on their way to shared memory through cp.async: by 256 units, 16 bytes each at a time,
//! swizzled by 128 bytes as wgmma has them. 64 positions along the operand's other side, by 64 of K, are
//! [`PART`] bytes.

use super::ptx::*;
use super::schedule::{DEPTH, PART};
use cubecl::prelude::*;

/// Where a unit copies its 16 bytes from: of a block of K, lines `UNIT_POS / 8` + 32i of each part, where lines
/// are positions if K is contiguous, else K.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Source {
    /// Of the first chunk of the block at hand.
    from: u64,
    /// Bytes from one block to the next.
    block: u64,
    /// Bytes of 32 lines.
    lines: u64,
    /// Position and k of the first chunk.
    e: u32,
    k: u32,
    /// Where the operand ends.
    extent: u32,
    k_end: u32,
}

/// Of a matrix from `base` on of `extent` positions by `k_end`, from position `e0` and `k0` on.
#[cube]
pub(crate) fn source(
    base: u64,
    line_bytes: u64,
    e0: u32,
    k0: u32,
    extent: u32,
    k_end: u32,
    #[comptime] along_k: bool,
) -> Source {
    let (first, chunk) = (UNIT_POS / 8, UNIT_POS % 8 * 8);
    if comptime!(along_k) {
        let (e, k) = (e0 + first, k0 + chunk);
        let from = base + u64::cast_from(e) * line_bytes + u64::cast_from(k * 2);
        Source { from, block: u64::cast_from(128u32), lines: line_bytes * 32, e, k, extent, k_end }
    } else {
        let (e, k) = (e0 + chunk, k0 + first);
        let from = base + u64::cast_from(k) * line_bytes + u64::cast_from(e * 2);
        Source { from, block: line_bytes * 64, lines: line_bytes * 32, e, k, extent, k_end }
    }
}

#[cube]
impl Source {
    /// On to the next block of K.
    fn advance(&mut self) {
        self.from += self.block;
        self.k += comptime!(DEPTH as u32);
    }

    /// Copies what this unit copies of `positions` positions by a block of K into the stage at `dst`; zero
    /// outside the operand.
    fn copy(&self, dst: u32, #[comptime] positions: u32, #[comptime] along_k: bool) {
        let chunks =
            comptime!(if along_k { positions.div_ceil(32) } else { positions.div_ceil(64) * 2 });
        #[unroll]
        for i in 0..chunks {
            let (first, count) = comptime!(if along_k { (i * 32, 32) } else { (i / 2 * 64, 64) });
            if comptime!(first + count <= positions) {
                self.copy_chunk(dst, i, along_k);
            } else {
                let at = if comptime!(along_k) { UNIT_POS / 8 } else { UNIT_POS % 8 * 8 };
                if at + first < positions {
                    self.copy_chunk(dst, i, along_k);
                }
            }
        }
    }

    /// Copies chunk `i` of a unit to its place.
    fn copy_chunk(&self, dst: u32, #[comptime] i: u32, #[comptime] along_k: bool) {
        let line = UNIT_POS / 8;
        let to = dst + comptime!(i * PART / 2) + line * 128 + (((UNIT_POS % 8) ^ (line % 8)) << 4);
        if comptime!(along_k) {
            let left = min(self.k_end - min(self.k, self.k_end), 8u32) * 2;
            let bytes = select(self.e + comptime!(i * 32) < self.extent, left, 0u32);
            copy_16(to, self.from + self.lines * u64::cast_from(i), bytes);
        } else {
            // 64 lines for each 64 positions.
            let (part, half) = comptime!((i / 2, i % 2));
            let e = self.e + comptime!(part * 64);
            let left = min(self.extent - min(e, self.extent), 8u32) * 2;
            let bytes = select(self.k + comptime!(half * 32) < self.k_end, left, 0u32);
            let offset = self.lines * u64::cast_from(half) + u64::cast_from(comptime!(part * 128));
            copy_16(to, self.from + offset, bytes);
        }
    }
}

/// Begins to copy the next block of K of both operands, if there is one: the left one to `dst`, the right one behind
/// its positions.
#[cube]
pub(crate) fn copy_block(
    dst: u32,
    left: &mut Source,
    right: &mut Source,
    there: bool,
    #[comptime] positions: [u32; 2],
    #[comptime] along_k: [bool; 2],
) {
    if there {
        left.copy(dst, comptime!(positions[0]), comptime!(along_k[0]));
        let behind = dst + comptime!(positions[0] * 128);
        right.copy(behind, comptime!(positions[1]), comptime!(along_k[1]));
    }
    left.advance();
    right.advance();
    copy_commit();
}
