//! MLPs through mma.sync: compute capability 8.0 and later, bf16 and f16.
//!
//! A warp has 16 rows of its chunk. The order of features along K is free as long as both operands have the same, so a
//! lane takes eight neighbouring ones of a row, 16 bytes, as what it multiplies in two steps of 16; outputs are spread
//! alike, so that it finds there what it has loaded. Sums of one product are operands of the next where they are. Weights
//! lie in shared memory in the order in which lanes take them.

mod backward;
mod forward;
mod weights;

pub(super) use backward::backward;
pub(super) use forward::forward;

use super::{CubeTensor, Rows, Sizes, part_of};
use crate::kasmina::kernel::{Garden, MlpSeed};
use crate::tile::cuda::ptx::*;
use crate::tile::{self, Family};
use cubecl::prelude::*;

/// Warps of a cube.
const WARPS: usize = 8;
const UNITS: usize = 32 * WARPS;
/// Rows of a cube at a time.
const ROWS: usize = 16 * WARPS;

/// What a launch is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    /// Features of a chunk, filled up to 32 or 64.
    width: usize,
    float: Float16,
    /// Chunks begin at multiples of 16 bytes and are as long: else numbers are read one by one.
    aligned: bool,
}

impl Plan {
    /// For chunks of up to `widest` features where this runs.
    pub(super) fn new(
        widest: usize,
        features: usize,
        seeds: usize,
        rows: &[&Rows],
        mlps: &CubeTensor,
    ) -> Option<Self> {
        let dtype = mlps.dtype;
        let width = if widest <= 32 { 32 } else { 64 };
        let most = mlps.client.properties().hardware.max_shared_memory_size;
        if tile::family(None, &mlps.client, dtype) == Family::Simt || backward::shared(width) > most
        {
            return None;
        }
        let chunks = widest.is_multiple_of(8) && features.is_multiple_of(seeds);
        let aligned = chunks && rows.iter().all(|rows| rows.begins(8));
        Some(Self { width, float: Float16::of(dtype), aligned })
    }

    /// Groups of 32 features.
    fn groups(&self) -> usize {
        self.width / 32
    }

    /// Tiles of 8 hidden units.
    fn tiles(&self) -> usize {
        self.width / 4
    }

    /// Words of a matrix of weights.
    fn words(&self) -> usize {
        self.width * self.width
    }
}

/// The numbers that stand at `first` and at `second` as a word, zero where they are none.
#[cube]
fn word_of<E: Float>(
    from: &[E],
    first: usize,
    second: usize,
    is_first: bool,
    is_second: bool,
    #[comptime] float: Float16,
) -> u32 {
    // An operand of an instruction that is a mutable variable would be passed by its address.
    let mut both = Array::<f32>::new(2usize);
    both[0] = 0.0f32;
    both[1] = 0.0f32;
    if is_first {
        both[0] = f32::cast_from(from[first]);
    }
    if is_second {
        both[1] = f32::cast_from(from[second]);
    }
    round_pair(both[0], both[1], float)
}

/// Puts 2·width rows of weights, of `wide` that there are, where lanes find what they multiply features with: tile by tile
/// of eight rows, group by group of 32 features, four words a lane.
#[cube]
fn pack_rows<E: Float>(
    mlps: &[E],
    base: usize,
    pitch: usize,
    wide: usize,
    size: usize,
    shared: &mut Shared<[u32]>,
    #[comptime] to: usize,
    #[comptime] plan: Plan,
) {
    let groups = comptime!(plan.groups());
    for at in range_stepped(UNIT_POS as usize, comptime!(plan.words()), UNITS) {
        let (word, lane, block) = (at % 4, at / 4 % 32, at / 128);
        let row = block / groups * 8 + lane / 4;
        let column = block % groups * 32 + lane % 4 * 8 + word * 2;
        let from = base + row * pitch + column;
        let there = row < wide && column < size;
        let also = row < wide && column + 1 < size;
        shared[comptime!(to) + at] = word_of::<E>(mlps, from, from + 1, there, also, plan.float);
    }
}

/// The same where they are multiplied with hidden units: of 16 rows at a time, and of pairs of tiles of outputs.
#[cube]
fn pack_columns<E: Float>(
    mlps: &[E],
    base: usize,
    pitch: usize,
    wide: usize,
    size: usize,
    shared: &mut Shared<[u32]>,
    #[comptime] to: usize,
    #[comptime] plan: Plan,
) {
    let pairs = comptime!(2 * plan.groups());
    for at in range_stepped(UNIT_POS as usize, comptime!(plan.words()), UNITS) {
        let (word, lane, block) = (at % 4, at / 4 % 32, at / 128);
        let pair = block % pairs;
        let row = block / pairs * 16 + lane % 4 * 2 + word % 2 * 8;
        let tile = pair % 2 * 2 + word / 2;
        let n = lane / 4;
        let column = pair / 2 * 32 + n / 2 * 8 + tile * 2 + n % 2;
        let from = base + row * pitch + column;
        let there = row < wide && column < size;
        let also = row + 1 < wide && column < size;
        shared[comptime!(to) + at] =
            word_of::<E>(mlps, from, from + pitch, there, also, plan.float);
    }
}

/// Biases as f32, zero where there are none.
#[cube]
fn pack_bias<E: Float>(
    mlps: &[E],
    base: usize,
    count: usize,
    bias: &mut Shared<[f32]>,
    #[comptime] to: usize,
    #[comptime] most: usize,
) {
    for at in range_stepped(UNIT_POS as usize, most, UNITS) {
        let mut value = f32::new(0.0);
        if at < count {
            value = f32::cast_from(mlps[base + at]);
        }
        bias[comptime!(to) + at] = value;
    }
}

/// Eight words a group: four of a lane's features in its first row, and four in the row eight further down.
#[cube]
fn load_rows<E: Float>(
    from: &[E],
    stride: usize,
    row: usize,
    end: usize,
    of: &MlpSeed,
    #[comptime] plan: Plan,
) -> Array<u32> {
    let lane = UNIT_POS as usize % 32;
    let mut words = Array::<u32>::new(comptime!(8 * plan.groups()));
    #[unroll]
    for group in 0..plan.groups() {
        #[unroll]
        for half in 0..2usize {
            let row = row + lane / 4 + comptime!(half * 8);
            let column = comptime!(group * 32) + lane % 4 * 8;
            let at = row * stride + of.begin + column;
            let first = comptime!(group * 8 + half * 4);
            #[unroll]
            for i in 0..4usize {
                words[comptime!(first + i)] = 0u32;
            }
            if comptime!(plan.aligned) {
                if row < end && column < of.size {
                    let address = global_address::<E>(from.as_ptr()) + u64::cast_from(at) * 2;
                    let four = load_16(address, 0u32);
                    #[unroll]
                    for i in 0..4usize {
                        words[comptime!(first + i)] = four.extract(i);
                    }
                }
            } else if row < end {
                #[unroll]
                for i in 0..4usize {
                    let column = column + comptime!(2 * i);
                    let (here, next) = (column < of.size, column + 1 < of.size);
                    let at = at + comptime!(2 * i);
                    words[comptime!(first + i)] =
                        word_of::<E>(from, at, at + 1, here, next, plan.float);
                }
            }
        }
    }
    words
}

/// What a lane multiplies, two steps a group. An operand has to lie in registers that follow each other: with `zero`, which
/// is [`unknown`], words are moved there once, and not before every product.
#[cube]
fn operands(words: &Array<u32>, zero: u32, #[comptime] plan: Plan) -> Array<Vector<u32, Const<4>>> {
    let mut operands = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * plan.groups()));
    #[unroll]
    for step in 0..comptime!(2 * plan.groups()) {
        let first = comptime!(step / 2 * 8 + step % 2 * 2);
        operands[step] = four(
            words[first] | zero,
            words[first + 4] | zero,
            words[first + 1] | zero,
            words[first + 5] | zero,
        );
    }
    operands
}

/// Four words as an operand, which a mutable variable cannot be.
#[cube]
fn four(a: u32, b: u32, c: u32, d: u32) -> Vector<u32, Const<4>> {
    let mut held = Array::<Vector<u32, Const<4>>>::new(1usize);
    let mut four = Vector::<u32, Const<4>>::empty();
    four.insert(0usize, a);
    four.insert(1usize, b);
    four.insert(2usize, c);
    four.insert(3usize, d);
    held[0] = four;
    held[0]
}

/// Four words from `first` on.
#[cube]
fn four_of(words: &Array<u32>, #[comptime] first: usize) -> Vector<u32, Const<4>> {
    four(
        words[first],
        words[comptime!(first + 1)],
        words[comptime!(first + 2)],
        words[comptime!(first + 3)],
    )
}

/// Eight hidden units of 16 rows: features times packed rows of weights.
#[cube]
fn multiply_rows(
    operands: &Array<Vector<u32, Const<4>>>,
    base: u32,
    tile: u32,
    #[comptime] plan: Plan,
) -> Vector<f32, Const<4>> {
    let lane = UNIT_POS % 32;
    let mut sums = Array::<Vector<f32, Const<4>>>::new(1usize);
    sums[0] = Vector::new(0.0f32);
    #[unroll]
    for group in 0..plan.groups() {
        let block = (tile * comptime!(plan.groups() as u32) + group as u32) * 512;
        let weights = load_16_shared(base + block + lane * 16);
        #[unroll]
        for step in 0..2usize {
            let (b0, b1) =
                (weights.extract(comptime!(2 * step)), weights.extract(comptime!(2 * step + 1)));
            let at = comptime!(2 * group + step);
            sums[0] = mma_16x8x16(operands[at], b0, b1, sums[0], plan.float);
        }
    }
    sums[0]
}

/// Adds 16 hidden units times packed columns of weights to the outputs: four tiles a group.
#[cube]
fn add_columns(
    sums: &mut Array<Vector<f32, Const<4>>>,
    hidden: Vector<u32, Const<4>>,
    base: u32,
    step: u32,
    #[comptime] plan: Plan,
) {
    let lane = UNIT_POS % 32;
    let pairs = comptime!(2 * plan.groups());
    #[unroll]
    for pair in 0..pairs {
        let block = (step * comptime!(pairs as u32) + pair as u32) * 512;
        let weights = load_16_shared(base + block + lane * 16);
        #[unroll]
        for i in 0..2usize {
            let (b0, b1) =
                (weights.extract(comptime!(2 * i)), weights.extract(comptime!(2 * i + 1)));
            let at = comptime!(2 * pair + i);
            sums[at] = mma_16x8x16(hidden, b0, b1, sums[at], plan.float);
        }
    }
}

/// Whether a hidden unit is off: below 0, or none of the `wide` that there are, unless `all` are. Where there is none, an
/// infinite feature times zero would be no number.
#[cube]
fn off(sum: f32, unit: u32, wide: usize, #[comptime] all: bool) -> bool {
    if comptime!(all) { sum <= 0.0 } else { unit >= wide as u32 || sum <= 0.0 }
}

/// (1 − alpha)·x + alpha·out of 16 rows.
#[cube]
fn store_rows<E: Float>(
    to: &mut [E],
    stride: usize,
    row: usize,
    end: usize,
    of: &MlpSeed,
    operands: &Array<Vector<u32, Const<4>>>,
    out: &Array<Vector<f32, Const<4>>>,
    bias: &Shared<[f32]>,
    // Where the outputs' bias stands, if there is one.
    #[comptime] from: Option<usize>,
    #[comptime] plan: Plan,
) {
    let lane = UNIT_POS as usize % 32;
    #[unroll]
    for group in 0..plan.groups() {
        #[unroll]
        for half in 0..2usize {
            let row = row + lane / 4 + comptime!(half * 8);
            let column = comptime!(group * 32) + lane % 4 * 8;
            let mut eight = Array::<f32>::new(8usize);
            #[unroll]
            for i in 0..8usize {
                let sums = out[comptime!(group * 4 + i / 2)];
                let mut out = sums.extract(comptime!(half * 2 + i % 2));
                if comptime!(from.is_some()) {
                    out += bias[comptime!(from.unwrap_or(0) + i) + column];
                }
                let operand = operands[comptime!(group * 2 + i / 4)];
                let word = operand.extract(comptime!(i / 2 % 2 * 2 + half));
                let x = half_of(word, comptime!(i % 2 == 1), plan.float);
                eight[i] = (1.0 - of.alpha) * x + of.alpha * out;
            }
            let at = row * stride + of.begin + column;
            if comptime!(plan.aligned) {
                let there = row < end && column < of.size;
                let address = global_address::<E>(to.as_ptr()) + u64::cast_from(at) * 2;
                store_eight_if(there, address, &eight, plan.float);
            } else if row < end {
                #[unroll]
                for i in 0..8usize {
                    if column + i < of.size {
                        to[at + i] = E::cast_from(eight[i]);
                    }
                }
            }
        }
    }
}

/// The seed of a cube and its rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Place {
    seed: usize,
    part: usize,
    /// The first row, and the one after the last.
    first: usize,
    end: usize,
}

#[cube]
fn place_of<W: Float, I: Int>(garden: &Garden<W, I>, sizes: &Sizes) -> Place {
    let part = CUBE_POS / garden.seeds;
    let (first, end) = part_of(sizes, part);
    Place { seed: CUBE_POS - part * garden.seeds, part, first, end }
}
