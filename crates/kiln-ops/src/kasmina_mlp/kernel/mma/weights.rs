//! The gradients of weights: what a cube has found of 128 rows goes through shared memory once more, since they are sums over
//! rows: x, dy, the hidden units and their cotangents, of which each warp makes 32 rows of dW₁ or dW₂ᵀ. Of narrow chunks
//! those are fewer than there are warps, so that half of the warps has the other half of the 128 rows.

use super::super::weights;
use super::*;

/// Where things stand in shared memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Layout {
    pub(super) width: usize,
}

impl Layout {
    /// W₁ by rows, W₂ᵀ by rows, W₁ by columns; then hidden units, their cotangents, x and dy.
    pub(super) fn weights(self, which: usize) -> usize {
        which * 4 * self.width * self.width
    }

    /// From one row of hidden units to the next: eight rows lie in different banks.
    pub(super) fn wide_pitch(self) -> usize {
        4 * self.width + 16
    }

    /// From one row of features to the next.
    fn pitch(self) -> usize {
        2 * self.width
    }

    pub(super) fn hidden(self, which: usize) -> usize {
        self.weights(3) + which * ROWS * self.wide_pitch()
    }

    pub(super) fn features(self, which: usize) -> usize {
        self.hidden(2) + which * ROWS * self.pitch()
    }

    pub(super) fn bytes(self, train: bool) -> usize {
        if train { self.features(2) } else { self.weights(3) }
    }

    /// Warps that make both gradients of weights of the same rows.
    fn sharers(self) -> usize {
        2 * 2 * self.width / (16 * PARTS)
    }

    /// Parts that the 128 rows are in, each of as many warps.
    pub(super) fn halves(self) -> usize {
        WARPS / self.sharers()
    }
}

/// Groups of 16 rows of a gradient of weights that a warp has.
pub(super) const PARTS: usize = 2;

/// Puts a lane's features of the row `own` and of that eight further down where gradients of weights are made of them.
#[cube]
fn keep_features(
    words: &Array<u32>,
    to: u32,
    own: u32,
    #[comptime] layout: Layout,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for i in 0..comptime!(2 * plan.groups()) {
        let (row, eight) = (own + comptime!(i as u32 % 2 * 8), comptime!(i as u32 / 2 * 4));
        let at = to + eight_at(row, eight + UNIT_POS % 4, layout);
        store_16_shared(at, four_of(words, comptime!(4 * i)));
    }
}

/// Puts a lane's x and dy there.
#[cube]
pub(super) fn keep_both(
    x: &Array<u32>,
    dy: &Array<u32>,
    base: u32,
    own: u32,
    #[comptime] layout: Layout,
    #[comptime] plan: Plan,
) {
    keep_features(x, base + comptime!(layout.features(0) as u32), own, layout, plan);
    keep_features(dy, base + comptime!(layout.features(1) as u32), own, layout, plan);
}

/// Where eight features of a row lie: those that eight rows have at one place are in different banks, and those that two
/// neighbouring rows have in one group of 32.
#[cube]
fn eight_at(row: u32, eight: u32, #[comptime] layout: Layout) -> u32 {
    let lines = comptime!((128 / layout.pitch()) as u32);
    row / lines * 128 + (eight ^ (row % 2 * 4 + row / 2 % 4)) * 16
}

/// Adds 128 rows to a warp's part of the gradients of weights: what hidden units are times features.
#[cube]
pub(super) fn add_weights(
    of_weights: &mut Array<Vector<f32, Const<4>>>,
    of_biases: &mut Array<Vector<f32, Const<4>>>,
    base: u32,
    of: &WarpRows,
    #[comptime] layout: Layout,
    #[comptime] float: Float16,
) {
    let lane = UNIT_POS % 32;
    let (low, quarter) = (lane % 8, lane / 8);
    // dW₁ is of the cotangents and x, dW₂ᵀ of the hidden units and dy.
    let hidden = base
        + select(
            of.first,
            comptime!(layout.hidden(1) as u32).runtime(),
            comptime!(layout.hidden(0) as u32).runtime(),
        );
    let features = base
        + select(
            of.first,
            comptime!(layout.features(0) as u32).runtime(),
            comptime!(layout.features(1) as u32).runtime(),
        );
    let wide_pitch = comptime!(layout.wide_pitch() as u32);
    let mut ones = Array::<u32>::new(1usize);
    ones[0] =
        comptime!(if float == Float16::Bf16 { 0x3F80_3F80u32 } else { 0x3C00_3C00u32 }).runtime();
    let steps = comptime!((ROWS / 16 / layout.halves()) as u32);
    for step in 0..steps {
        let step = of.half * steps + step;
        let row = step * 16 + quarter / 2 * 8 + low;
        let mut left = Array::<Vector<u32, Const<4>>>::new(PARTS);
        #[unroll]
        for part in 0..PARTS {
            let column = of.row + comptime!(part as u32 * 16) + quarter % 2 * 8;
            left[part] = load_matrices(hidden + row * wide_pitch + column * 2, true);
            of_biases[part] = mma_16x8x16(left[part], ones[0], ones[0], of_biases[part], float);
        }
        let row = step * 16 + quarter % 2 * 8 + low;
        #[unroll]
        for pair in 0..comptime!(layout.width / 16) {
            let eight = comptime!((pair * 2) as u32) + quarter / 2;
            let right = load_matrices(features + eight_at(row, eight, layout), true);
            #[unroll]
            for part in 0..PARTS {
                #[unroll]
                for i in 0..2usize {
                    let at = comptime!(part * layout.width / 8 + 2 * pair + i);
                    let (b0, b1) =
                        (right.extract(comptime!(2 * i)), right.extract(comptime!(2 * i + 1)));
                    of_weights[at] = mma_16x8x16(left[part], b0, b1, of_weights[at], float);
                }
            }
        }
    }
}

/// What a warp makes of the gradients of weights.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WarpRows {
    /// Of dW₁, else of dW₂ᵀ.
    first: bool,
    /// The first of its 32 rows there.
    row: u32,
    /// Which part of the rows of x it adds.
    pub(super) half: u32,
}

#[cube]
pub(super) fn rows_of_warp(warp: usize, #[comptime] layout: Layout) -> WarpRows {
    let sharers = comptime!(layout.sharers() as u32);
    let warp = warp as u32;
    let of_matrix = comptime!(layout.sharers() as u32 / 2);
    WarpRows {
        first: warp % sharers < of_matrix,
        row: warp % of_matrix * comptime!(PARTS as u32 * 16),
        half: warp / sharers,
    }
}

/// Adds to what the first warps have what the others have of the second half of the rows, through the memory of hidden
/// units.
#[cube]
fn add_halves(
    of_weights: &mut Array<Vector<f32, Const<4>>>,
    of_biases: &mut Array<Vector<f32, Const<4>>>,
    shared: &mut Shared<[u32]>,
    own: &WarpRows,
    #[comptime] layout: Layout,
) {
    let units = comptime!(layout.sharers() * 32);
    let at = comptime!(layout.hidden(0) / 4) + UNIT_POS as usize % units;
    let sums = comptime!(PARTS * layout.width / 8);
    if own.half == 1 {
        #[unroll]
        for i in 0..comptime!(4 * sums) {
            let sum = of_weights[comptime!(i / 4)].extract(comptime!(i % 4));
            shared[at + comptime!(i * units)] = u32::reinterpret(sum);
        }
        #[unroll]
        for i in 0..comptime!(4 * PARTS) {
            let sum = of_biases[comptime!(i / 4)].extract(comptime!(i % 4));
            shared[at + comptime!((4 * sums + i) * units)] = u32::reinterpret(sum);
        }
    }
    sync_cube();
    if own.half == 0 {
        #[unroll]
        for i in 0..sums {
            of_weights[i] += four_sums(shared, at + comptime!(4 * i * units), units);
        }
        #[unroll]
        for i in 0..PARTS {
            of_biases[i] += four_sums(shared, at + comptime!(4 * (sums + i) * units), units);
        }
    }
}

#[cube]
fn four_sums(
    shared: &mut Shared<[u32]>,
    at: usize,
    #[comptime] step: usize,
) -> Vector<f32, Const<4>> {
    let mut sums = Vector::<f32, Const<4>>::empty();
    #[unroll]
    for i in 0..4usize {
        sums.insert(i, f32::reinterpret(shared[at + comptime!(i * step)]));
    }
    sums
}

/// Writes a warp's part of the gradients of weights, and of the hidden units' biases.
#[cube]
#[allow(clippy::manual_is_multiple_of)] // kernels have no such method
fn write_weights(
    of_weights: &Array<Vector<f32, Const<4>>>,
    of_biases: &Array<Vector<f32, Const<4>>>,
    left: &mut [f32],
    to: usize,
    of: &MlpSeed,
    widest: usize,
    own: &WarpRows,
    #[comptime] layout: Layout,
) {
    let lane = UNIT_POS as usize % 32;
    let wide = 2 * of.size;
    let base = weights(0usize, widest);
    let matrix = to + select(own.first, base.first, base.second);
    #[unroll]
    for part in 0..PARTS {
        #[unroll]
        for half in 0..2usize {
            let row = own.row as usize + comptime!(part * 16 + half * 8) + lane / 4;
            if row < wide {
                #[unroll]
                for tile in 0..comptime!(layout.width / 8) {
                    let sums = of_weights[comptime!(part * layout.width / 8 + tile)];
                    let column = comptime!(tile * 8) + lane % 4 * 2;
                    #[unroll]
                    for e in 0..2usize {
                        if column + e < of.size {
                            let sum = sums.extract(comptime!(half * 2 + e));
                            left[matrix + row * widest + column + e] = of.alpha * sum;
                        }
                    }
                }
                if own.first && lane % 4 == 0 {
                    let sum = of_biases[part].extract(comptime!(half * 2));
                    left[to + base.first_bias + row] = of.alpha * sum;
                }
            }
        }
    }
}

/// Writes what the warps of a cube have of the gradients of weights, and of the hidden units' biases.
#[cube]
pub(super) fn write_sums(
    of_weights: &mut Array<Vector<f32, Const<4>>>,
    of_biases: &mut Array<Vector<f32, Const<4>>>,
    shared: &mut Shared<[u32]>,
    left: &mut [f32],
    to: usize,
    of: &MlpSeed,
    widest: usize,
    own: &WarpRows,
    #[comptime] layout: Layout,
) {
    if comptime!(layout.halves() > 1) {
        add_halves(of_weights, of_biases, shared, own, layout);
    }
    if own.half == 0 {
        write_weights(&*of_weights, &*of_biases, left, to, of, widest, own, layout);
    }
}
