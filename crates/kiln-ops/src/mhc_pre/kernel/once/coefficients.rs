//! h_post and h_res of the tokens whose sums a warp has added up, a lane a token, while others pass.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use super::super::sinkhorn;
use super::super::token::sigmoid;
use super::kernel::{Place, Sizes};
use super::plan::{OWNERS, Once, TOKENS};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// What a lane has in hand of Sinkhorn: a token's matrix, which is that of no token if `token` is beyond all.
#[derive(CubeType)]
pub(super) struct InHand {
    matrix: Array<f32>,
    token: u32,
    /// Repeats to come.
    left: u32,
}

#[cube]
impl InHand {
    pub(super) fn none(sizes: &Sizes, #[comptime] once: Once) -> InHand {
        let mut matrix = Array::<f32>::new(comptime!(once.streams * once.streams));
        #[unroll]
        for i in 0..comptime!(once.streams * once.streams) {
            matrix[i] = f32::new(0.0);
        }
        InHand { matrix, token: sizes.tokens + 0, left: 0u32.runtime() }
    }

    /// Repeats at most so many times.
    pub(super) fn go_on(&mut self, times: u32, sizes: &Sizes, #[comptime] once: Once) {
        if comptime!(once.sinkhorn) {
            let some = min(self.left, times);
            sinkhorn::repeat(&mut self.matrix, some, sizes.hc_eps, once.streams, true);
            self.left -= some;
        }
    }

    /// Writes h_res, after all repeats.
    pub(super) fn end(&self, h_res: &mut [f32], sizes: &Sizes, #[comptime] once: Once) {
        if self.token < sizes.tokens {
            write(h_res, self.token as usize, &self.matrix, comptime!(once.streams * once.streams));
        }
    }

    /// Begins with the tokens of a batch of a warp's turns, the first of which came as number `first`, the last as number
    /// `last`; and writes their h_post.
    pub(super) fn begin(
        &mut self,
        mix: &[f32],
        norm: &[f32],
        alpha: &[f32],
        bias: &[f32],
        h_post: &mut [f32],
        first: u32,
        last: u32,
        place: &Place,
        sizes: &Sizes,
        #[comptime] once: Once,
    ) {
        let (n, rows) = comptime!((once.streams, once.rows));
        let (own, cubes) = comptime!((once.own_tokens() as u32, once.cubes as u32));
        let lane = UNIT_POS % 32;
        let number = first + lane / own * comptime!(OWNERS as u32);
        let row = place.rank + lane % own * cubes;
        let token = place.token(number, sizes) + row;
        self.token = sizes.tokens + 0;
        if number <= last && row < comptime!(TOKENS as u32) && token < sizes.tokens {
            self.token = token + 0;
            let (token, r) = (token as usize, norm[token as usize]);
            let y = read(mix, token, rows);
            let mut post = Array::<f32>::new(n);
            #[unroll]
            for i in 0..n {
                let j = comptime!(n + i);
                post[i] = 2.0 * sigmoid(alpha[1] * (y[j] * r) + bias[j], true);
            }
            write(h_post, token, &post, n);
            #[unroll]
            for i in 0..comptime!(n * n) {
                let j = comptime!(2 * n + i);
                self.matrix[i] = alpha[2] * (y[j] * r) + bias[j];
            }
        }
        if comptime!(once.sinkhorn) {
            sinkhorn::begin(&mut self.matrix, sizes.hc_eps, n, true);
            self.left = sizes.repeats - 1;
        }
    }
}

/// A row of so many columns; four at a time where all rows begin at a multiple of 16 bytes.
#[cube]
fn read(from: &[f32], row: usize, #[comptime] columns: usize) -> Array<f32> {
    let mut all = Array::<f32>::new(columns);
    if comptime!(columns.is_multiple_of(4)) {
        let at = global_address::<f32>(from.as_ptr()) + (row * comptime!(4 * columns)) as u64;
        #[unroll]
        for four in 0..comptime!(columns / 4) {
            let quad = load_quad(at + comptime!(16 * four as u64));
            #[unroll]
            for e in 0..4usize {
                all[comptime!(4 * four + e)] = quad.extract(e);
            }
        }
    } else {
        #[unroll]
        for i in 0..columns {
            all[i] = from[row * columns + i];
        }
    }
    all
}

/// The same to write one.
#[cube]
fn write(to: &mut [f32], row: usize, all: &Array<f32>, #[comptime] columns: usize) {
    if comptime!(columns.is_multiple_of(4)) {
        let at = global_address::<f32>(to.as_ptr()) + (row * comptime!(4 * columns)) as u64;
        #[unroll]
        for four in 0..comptime!(columns / 4) {
            let mut quad = Vector::<f32, Const<4>>::new(0.0f32);
            #[unroll]
            for e in 0..4usize {
                quad.insert(e, all[comptime!(4 * four + e)]);
            }
            store_quad(at + comptime!(16 * four as u64), &quad);
        }
    } else {
        #[unroll]
        for i in 0..columns {
            to[row * columns + i] = all[i];
        }
    }
}
