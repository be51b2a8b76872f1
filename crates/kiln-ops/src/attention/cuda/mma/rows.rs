//! Rows of heads on their way to shared memory and back.
//!
//! In shared memory each row is 16 bytes longer than its chunks of 16 bytes, of which there is an even number: eight
//! rows of a matrix that is loaded at once are in different banks, and every address is a constant away from one
//! of the lane.

use super::product::Product;
use crate::tile::cuda::fragment::origin;
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// How rows stand in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Rows {
    /// Elements.
    pub(super) width: u32,
    /// Elements with the zeros behind them: a multiple of 16.
    pub(super) padded: u32,
    /// Units that load them together.
    pub(super) units: u32,
}

impl Rows {
    /// Bytes from one to the next.
    pub(super) fn pitch(&self) -> u32 {
        self.padded * 2 + 16
    }

    /// Chunks of 16 bytes.
    fn chunks(&self) -> u32 {
        self.padded / 8
    }
}

/// Lanes side by side that go through a row of so many chunks together.
fn abreast(chunks: u32) -> u32 {
    1 << chunks.trailing_zeros().min(5)
}

/// The rows of a head in memory: their address, the bytes from one to the next, and how many there are.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Head {
    pub(super) address: u64,
    pub(super) row_bytes: u64,
    pub(super) end: u32,
}

#[cube]
impl Head {
    /// Begins to copy rows `first .. first + count` to shared memory; zeros behind the last one, and behind the
    /// width.
    pub(super) fn load(
        &self,
        dst: u32,
        first: u32,
        #[comptime] count: u32,
        #[comptime] rows: Rows,
    ) {
        load_rows(dst, self, first, count, rows);
    }

    /// The head that is so many bytes further on.
    pub(super) fn after(&self, bytes: u64) -> Head {
        Head { address: self.address + bytes, row_bytes: self.row_bytes, end: self.end }
    }
}

#[cube]
fn load_rows(dst: u32, head: &Head, first: u32, #[comptime] count: u32, #[comptime] rows: Rows) {
    let across = comptime!(abreast(rows.chunks()));
    let at_once = comptime!(rows.units / across);
    let pitch = comptime!(rows.pitch());
    let (own, chunk) = (UNIT_POS / across, UNIT_POS % across);
    let to = dst + own * pitch + chunk * 16;
    // A chain of sums: products of the distance would all stand in registers, kept from block to block.
    let mut from = Array::<u64>::new(1usize);
    from[0] =
        head.address + u64::cast_from(first + own) * head.row_bytes + u64::cast_from(chunk * 16);
    let step = head.row_bytes * u64::cast_from(at_once);
    let left = head.end - min(head.end, first + own);
    #[unroll]
    for i in 0..comptime!(count.div_ceil(at_once)) {
        let row = own + comptime!(i * at_once);
        let to = to + comptime!(i * at_once * pitch);
        let bytes = select(left > comptime!(i * at_once), 16u32, 0u32);
        if comptime!((i + 1) * at_once <= count) || row < count {
            load_row(to, from[0], chunk, bytes, rows);
        }
        from[0] += step;
    }
}

/// This unit's chunks of one row.
#[cube]
fn load_row(to: u32, from: u64, chunk: u32, bytes: u32, #[comptime] rows: Rows) {
    let across = comptime!(abreast(rows.chunks()));
    #[unroll]
    for j in 0..comptime!(rows.chunks() / across) {
        let first = comptime!(j * across);
        let source = from + u64::cast_from(comptime!(first * 16));
        if comptime!((first + across) * 8 <= rows.width) {
            copy_16(to + comptime!(first * 16), source, bytes);
        } else {
            let inside = chunk + first < comptime!(rows.width / 8);
            copy_16(to + comptime!(first * 16), source, select(inside, bytes, 0u32));
        }
    }
}

/// Rounds a warp's sums, each row times its factor, into shared memory: `at` is the address of their first.
#[cube]
pub(super) fn stage_sums(
    sums: &Array<Vector<f32, Const<4>>>,
    factors: &Array<f32>,
    at: u32,
    #[comptime] product: Product,
) {
    let pitch = comptime!(product.pitch);
    let (row, col) = origin(UNIT_POS % 32);
    let at = at + row * pitch + col * 2;
    let across = comptime!(2 * product.cols);
    #[unroll]
    for i in 0..comptime!(product.rows) {
        #[unroll]
        for c in 0..across {
            let sum = sums[comptime!(i * across + c)];
            #[unroll]
            for r in 0..2usize {
                let factor = factors[comptime!(2 * i + r)];
                let (first, second) =
                    (sum.extract(comptime!(2 * r)), sum.extract(comptime!(2 * r + 1)));
                let at = at + comptime!((i as u32 * 16 + r as u32 * 8) * pitch + c as u32 * 16);
                store_pair(at, first * factor, second * factor, product.float);
            }
        }
    }
}

/// Where a warp's rows go.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Place {
    /// Element of the first column of row 0.
    pub(super) base: usize,
    /// Elements from one row to the next.
    pub(super) row: usize,
    /// The first row, and one past the last that there is.
    pub(super) first: u32,
    pub(super) end: u32,
    /// The first column, in chunks.
    pub(super) chunk: u32,
}

/// Stores what a warp has [staged](stage_sums) at byte `at` of shared memory: all its rows and 16·`cols` columns.
#[cube]
pub(super) fn store_rows<E: Float, C: Size>(
    shared: &Shared<[Vector<E, C>]>,
    out: &mut [Vector<E, C>],
    at: u32,
    place: &Place,
    #[comptime] product: Product,
    #[comptime] rows: Rows,
) {
    let chunks = comptime!(2 * product.cols as u32);
    let across = comptime!(abreast(chunks));
    let at_once = comptime!(32 / across);
    let lane = UNIT_POS % 32;
    let (own, chunk) = (lane / across, lane % across);
    let pitch = comptime!(product.pitch / 16);
    sync_plane();
    #[unroll]
    for i in 0..comptime!(product.rows as u32 * 16 / at_once) {
        let row = own + comptime!(i * at_once);
        if place.first + row < place.end {
            let to = place.base + (place.first + row) as usize * place.row;
            #[unroll]
            for j in 0..comptime!(chunks / across) {
                let column = chunk + comptime!(j * across);
                if place.chunk + column < comptime!(rows.width / 8) {
                    let held = shared[(at / 16 + row * pitch + column) as usize];
                    out[to / 8 + (place.chunk + column) as usize] = held;
                }
            }
        }
    }
}
