//! What the layer before takes back of dx, whose streams the warps of a box have made one each and share out here by tokens.
//!
//! dh_res and dh_post of tokens are products of few rows and many columns: on tensor cores, sixteen rows of dx, the streams of
//! some tokens, times the rows before the layer of the same ones, of which what belongs to two tokens is left. The gradients
//! of the streams are sums of n, which nothing else can reach: what is infinite in one token stays there.

use super::plan::{BOX, TOKENS, Together};
use crate::tile::cuda::ptx::*;
use cubecl::prelude::*;

/// Rows of a matrix.
const ROWS: usize = 16;
/// Tokens that are given back together: eight lanes have one, eight columns each.
const BACK: usize = 4;

/// A warp's boxes of its columns, of its stream and others: where their stages are.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Boxes {
    pub(super) x_at: u32,
    pub(super) rest_at: u32,
    pub(super) stream: u32,
    /// Of the columns.
    pub(super) number: u32,
}

#[cube]
impl Boxes {
    /// That of a stream behind `at` boxes of a stage.
    fn of(&self, stage: u32, at: u32, stream: u32, #[comptime] together: Together) -> u32 {
        let number = at + stream * comptime!(together.boxes as u32) + self.number;
        stage + number * comptime!(together.box_bytes() as u32)
    }

    pub(super) fn x(&self, stream: u32, #[comptime] together: Together) -> u32 {
        self.of(self.x_at, 0u32, stream, together)
    }

    pub(super) fn dh_in(&self, #[comptime] together: Together) -> u32 {
        self.of(self.x_at, comptime!(together.dh_in_at() as u32), 0u32, together)
    }

    /// What dx has from elsewhere, or, if it has nothing, the place for what takes its place.
    pub(super) fn also(&self, stream: u32, #[comptime] together: Together) -> u32 {
        self.of(self.rest_at, 0u32, stream, together)
    }

    /// The streams of the layer before.
    fn before(&self, stream: u32, #[comptime] together: Together) -> u32 {
        self.of(self.rest_at, comptime!(together.before_at() as u32), stream, together)
    }

    /// Its output.
    fn f(&self, #[comptime] together: Together) -> u32 {
        self.of(self.rest_at, comptime!(together.f_at() as u32), 0u32, together)
    }
}

/// Tokens whose streams are a matrix.
fn per_matrix(n: usize) -> usize {
    ROWS / n
}

fn matrices(n: usize) -> usize {
    TOKENS.div_ceil(per_matrix(n))
}

/// Eights of rows that the tokens of a matrix are.
fn eights_of_tokens(n: usize) -> usize {
    per_matrix(n).div_ceil(8)
}

/// Where eight columns of a token, swizzled, lie in a box.
#[cube]
pub(super) fn eight_of(token: u32, eight: u32) -> u32 {
    token * 128 + ((eight ^ (token % 8)) << 4)
}

/// Takes dx of all streams back: leaves what these columns have of dh_res and dh_post of each token at `left`, the gradients
/// of the streams in the place of what dx had from elsewhere, and that of the layer's output where dh_in was.
#[cube]
pub(super) fn take_back(
    shared: &Shared<[u32]>,
    words: usize,
    boxes: &Boxes,
    left: u32,
    #[comptime] together: Together,
) {
    let n = comptime!(together.streams);
    // Turns are the same for all lanes.
    #[unroll]
    for turn in 0..comptime!(matrices(n).div_ceil(n)) {
        let matrix = boxes.stream + comptime!((turn * n) as u32);
        if comptime!((turn + 1) * n <= matrices(n)) || matrix < comptime!(matrices(n) as u32) {
            let own = matrix * comptime!(per_matrix(n) as u32);
            make_dots(boxes, own, left, together);
        }
    }
    let fours = comptime!(TOKENS / BACK);
    #[unroll]
    for turn in 0..comptime!(fours.div_ceil(n)) {
        let four = boxes.stream + comptime!((turn * n) as u32);
        if comptime!((turn + 1) * n <= fours) || four < comptime!(fours as u32) {
            let token = four * comptime!(BACK as u32) + UNIT_POS % 32 / 8;
            give_back(shared, words, boxes, token, together);
        }
    }
}

/// Makes dh_res and dh_post, from these columns, of the tokens of a matrix from `own` on.
#[cube]
fn make_dots(boxes: &Boxes, own: u32, left: u32, #[comptime] together: Together) {
    let lane = UNIT_POS % 32;
    let n = comptime!(together.streams);
    let last = comptime!(TOKENS as u32 - 1);
    let float = comptime!(Float16::Bf16);
    let of_f = comptime!(eights_of_tokens(n));
    // A lane names a row, of the first eight columns of two or of the second ones. Rows are of tokens first, which lie in
    // different banks. What is behind the last token, or the last stream, is a row, too, and is not written.
    let per = comptime!(per_matrix(n) as u32);
    let token = min(own + lane % 16 % per, last);
    let stream = min(lane % 16 / per, comptime!(n as u32 - 1));
    let at = eight_of(token, lane / 16);
    let rows = boxes.x(stream, together) + at;
    let rows_before = boxes.before(stream, together) + at;
    let mut rows_of_f = Array::<u32>::new(of_f);
    let mut of_res = Array::<Vector<f32, Const<4>>>::new(2usize);
    let mut of_post = Array::<Vector<f32, Const<4>>>::new(of_f);
    let mut f = Array::<Vector<u32, Const<4>>>::new(of_f);
    #[unroll]
    for eight in 0..of_f {
        let token = min(own + comptime!(8 * eight as u32) + lane % 8, last);
        rows_of_f[eight] = boxes.f(together) + eight_of(token, lane / 8);
        of_post[eight] = Vector::new(0.0f32);
    }
    #[unroll]
    for eight in 0..2usize {
        of_res[eight] = Vector::new(0.0f32);
    }
    #[unroll]
    for pair in 0..comptime!(BOX / 16) {
        let further = comptime!(32 * pair as u32);
        // A variable itself would be handed over by its address.
        let mut dx = Array::<Vector<u32, Const<4>>>::new(1usize);
        dx[0] = load_matrices(rows ^ further, false);
        let x = load_matrices(rows_before ^ further, false);
        #[unroll]
        for eight in 0..2usize {
            let (b0, b1) = (x.extract(eight), x.extract(comptime!(2 + eight)));
            of_res[eight] = mma_16x8x16(dx[0], b0, b1, of_res[eight], float);
        }
        let (b0, b1) = comptime!((pair % 2 * 2, pair % 2 * 2 + 1));
        #[unroll]
        for eight in 0..of_f {
            if comptime!(pair % 2 == 0) {
                f[eight] = load_matrices(rows_of_f[eight] ^ comptime!(32 * pair as u32), false);
            }
            let (b0, b1) = (f[eight].extract(b0), f[eight].extract(b1));
            of_post[eight] = mma_16x8x16(dx[0], b0, b1, of_post[eight], float);
        }
    }
    leave_dots(&of_res, &of_post, own, left, together);
}

/// Leaves what the columns have of dh_res of the tokens of a matrix, and of dh_post behind it.
#[cube]
fn leave_dots(
    of_res: &Array<Vector<f32, Const<4>>>,
    of_post: &Array<Vector<f32, Const<4>>>,
    own: u32,
    left: u32,
    #[comptime] together: Together,
) {
    let lane = UNIT_POS % 32;
    let n = comptime!(together.streams);
    let (streams, per) = comptime!((n as u32, per_matrix(n) as u32));
    // Where a token's rows are all odd or all even, one column of two is of it.
    let even = comptime!(per % 2 == 0);
    #[unroll]
    for below in 0..2usize {
        let row = lane / 4 + comptime!(8 * below as u32);
        let (of, o) = (row % per, row / per);
        let token = own + of;
        let there = row < comptime!(per * streams) && token < comptime!(TOKENS as u32);
        let all = left + token * comptime!(4 * streams * (streams + 1));
        #[unroll]
        for eight in 0..2usize {
            #[unroll]
            for k in 0..comptime!(if even { 1usize } else { 2usize }) {
                let pair = of_res[eight];
                let mut dot = pair.extract(comptime!(2 * below + k));
                let mut column = lane % 4 * 2 + comptime!((8 * eight + k) as u32);
                if comptime!(even) {
                    dot = select(of % 2 == 0, dot, pair.extract(comptime!(2 * below + 1)));
                    column += of % 2;
                }
                if there && column < comptime!(per * streams) && column % per == of {
                    let to = all + (o * streams + column / per) * 4;
                    store_word(to, u32::reinterpret(dot));
                }
            }
        }
        #[unroll]
        for eight in 0..comptime!(eights_of_tokens(n)) {
            let pair = comptime!(4 * eight as u32) + lane % 4;
            if there && pair == of / 2 {
                let even = of_post[eight].extract(comptime!(2 * below));
                let odd = of_post[eight].extract(comptime!(2 * below + 1));
                let dot = select(of % 2 == 0, even, odd);
                let to = all + comptime!(4 * streams * streams) + o * 4;
                store_word(to, u32::reinterpret(dot));
            }
        }
    }
}

/// Writes the gradients of the layer before of eight columns of a token.
#[cube]
fn give_back(
    shared: &Shared<[u32]>,
    words: usize,
    boxes: &Boxes,
    token: u32,
    #[comptime] together: Together,
) {
    let n = comptime!(together.streams);
    let at = eight_of(token, UNIT_POS % 8);
    let mut dx = Array::<f32>::new(comptime!(8 * n));
    #[unroll]
    for o in 0..n {
        let of = boxes.x(comptime!(o as u32).runtime(), together);
        let words = load_16_shared(of + at);
        #[unroll]
        for w in 0..4usize {
            let (low, high) = bf16_pair(words.extract(w));
            dx[comptime!(8 * o + 2 * w)] = low;
            dx[comptime!(8 * o + 2 * w + 1)] = high;
        }
    }
    // Of each result its columns of h_res, or h_post; all of them before the first is stored.
    let mut factors = Array::<f32>::new(comptime!(n * (n + 1)));
    #[unroll]
    for i in 0..comptime!(n + 1) {
        let (first, step, numbers) = comptime!(if i < n {
            (together.res_at() + i, n, n * n)
        } else {
            (together.post_at(), 1, n)
        });
        let of_token = words + comptime!(first) + token as usize * numbers;
        #[unroll]
        for o in 0..n {
            factors[comptime!(i * n + o)] =
                f32::reinterpret(shared[of_token + comptime!(o * step)]);
        }
    }
    #[unroll]
    for i in 0..comptime!(n + 1) {
        let mut back = Array::<f32>::new(8usize);
        #[unroll]
        for o in 0..n {
            #[unroll]
            for k in 0..8usize {
                let product = factors[comptime!(i * n + o)] * dx[comptime!(8 * o + k)];
                if comptime!(o == 0) {
                    back[k] = product;
                } else {
                    back[k] += product;
                }
            }
        }
        let mut to = boxes.dh_in(together);
        if comptime!(i < n) {
            to = boxes.also(comptime!(i as u32).runtime(), together);
        }
        let mut quad = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for w in 0..4usize {
            let (low, high) = comptime!((2 * w, 2 * w + 1));
            quad.insert(w, round_pair(back[low], back[high], Float16::Bf16));
        }
        store_16_shared(to + at, quad);
    }
}
