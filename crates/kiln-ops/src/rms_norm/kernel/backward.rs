//! The backward kernel: a cube walks over rows, makes dx and adds up dweight for its columns.

use super::Wanted;
use crate::reduce::{self, RowPlan, Sums};
use cubecl::prelude::*;

/// What a backward kernel reads; distances of rows in vectors.
#[derive(CubeType, CubeLaunch)]
pub(super) struct BackwardInputs<E: Float, W: Float, N: Size> {
    x: Box<[Vector<E, N>]>,
    dy: Box<[Vector<E, N>]>,
    dsum: Box<[Vector<E, N>]>,
    weight: Box<[Vector<W, N>]>,
    rows: usize,
    vectors: usize,
    x_stride: usize,
    dy_stride: usize,
    dsum_stride: usize,
    eps: f32,
}

/// What it writes: dx, and the partial sums of dweight, one row for each cube.
#[derive(CubeType, CubeLaunch)]
pub(super) struct BackwardOutputs<E: Float, N: Size> {
    dx: Box<[Vector<E, N>]>,
    partial: Box<[Vector<f32, N>]>,
}

/// What is fixed when it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BackwardPlan {
    pub(super) rows: RowPlan,
    pub(super) wanted: Wanted,
    /// There is a `dsum`, which dx takes in.
    pub(super) add: bool,
    /// Only with `add`: the next row is on its way while one is worked on, and weights come from the cache, row by
    /// row. Else a unit holds its weights, and `dsum` is read where it is added.
    pub(super) ahead: bool,
}

impl BackwardPlan {
    /// f32 of shared memory for the sums of a row.
    fn shared(&self) -> usize {
        2 * self.rows.row.shared()
    }
}

/// What a row multiplies by, once its sums are known.
#[derive(CubeType)]
struct Factors<N: Size> {
    /// 1 / rms.
    r: Vector<f32, N>,
    /// Σ x·dy·weight / (width · rms³).
    back: Vector<f32, N>,
}

/// From the sums of squares and of x·dy·weight of each unit of the row.
#[cube]
fn factors<N: Size>(
    squares: Vector<f32, N>,
    dots: Vector<f32, N>,
    shared: &mut [f32],
    vectors: usize,
    eps: f32,
    #[comptime] plan: BackwardPlan,
) -> Factors<N> {
    let width = f32::cast_from((vectors * N::value()) as u32);
    let mut sums = Array::<f32>::new(2usize);
    sums[0] = reduce::vector::<Sums<1>, N>(squares);
    sums[1] = reduce::vector::<Sums<1>, N>(dots);
    if comptime!(plan.wanted.x) {
        reduce::rows::<Sums<2>>(&mut sums, shared, plan.rows.row);
    } else {
        reduce::rows::<Sums<1>>(&mut sums, shared, plan.rows.row);
    }
    let r = f32::inverse_sqrt(sums[0] / width + eps);
    Factors::<N> { r: Vector::new(r), back: Vector::new(r * r * r * sums[1] / width) }
}

/// Writes vector `i` of dx of a row, from that of x, dy and the weight.
#[cube]
fn write_dx<E: Float, W: Float, N: Size>(
    inputs: &BackwardInputs<E, W, N>,
    outputs: &mut BackwardOutputs<E, N>,
    factors: &Factors<N>,
    row: usize,
    i: usize,
    x: Vector<f32, N>,
    dy: Vector<f32, N>,
    weight: Vector<W, N>,
    dsum: Vector<E, N>,
    #[comptime] plan: BackwardPlan,
) {
    let mut d = factors.r * Vector::<f32, N>::cast_from(weight) * dy - factors.back * x;
    if comptime!(plan.add) {
        d += Vector::<f32, N>::cast_from(dsum);
    }
    outputs.dx[row * inputs.vectors + i] = Vector::cast_from(d);
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn backward_kernel<E: Float, W: Float, N: Size>(
    inputs: &BackwardInputs<E, W, N>,
    outputs: &mut BackwardOutputs<E, N>,
    #[comptime] plan: BackwardPlan,
    #[define(E, W)] _dtypes: [ElemType; 2],
) {
    if comptime!(plan.rows.resident) {
        backward_resident::<E, W, N>(inputs, outputs, plan);
    } else {
        backward_twice::<E, W, N>(inputs, outputs, plan);
    }
}

/// Rows that stay in registers between the sums and dx, and with them dweight of the cube's rows.
#[cube]
fn backward_resident<E: Float, W: Float, N: Size>(
    inputs: &BackwardInputs<E, W, N>,
    outputs: &mut BackwardOutputs<E, N>,
    #[comptime] plan: BackwardPlan,
) {
    let units = comptime!(plan.rows.row.units as usize);
    let rows_here = comptime!(plan.rows.row.rows as usize);
    let chunks = comptime!(plan.rows.chunks);
    let unit = UNIT_POS_X as usize;
    let vectors = inputs.vectors;
    let part = comptime!(plan.shared());
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * part));
    let mut held = Held::<E, N>::new(chunks);
    let mut next = Held::<E, N>::new(chunks);
    let mut dw = Array::<Vector<f32, N>>::new(chunks);
    #[unroll]
    for c in 0..chunks {
        dw[c] = Vector::new(0.0f32);
    }
    // A unit has the same columns in every row: its weights stay in registers too.
    let mut w_held = Array::<Vector<W, N>>::new(chunks);
    if comptime!(plan.wanted.x && !plan.ahead) {
        #[unroll]
        for c in 0..chunks {
            let i = unit + c * units;
            if comptime!(plan.rows.even) || i < vectors {
                w_held[c] = inputs.weight[i];
            }
        }
    }
    let mut buffer = 0usize;
    let first = CUBE_POS * rows_here;
    if comptime!(plan.ahead) {
        next.load::<W>(inputs, min(first + UNIT_POS_Y as usize, inputs.rows - 1), plan);
    }
    for start in range_stepped(first, inputs.rows, CUBE_COUNT * rows_here) {
        let at = start + UNIT_POS_Y as usize;
        let row = min(at, inputs.rows - 1);
        let mut squares = Vector::<f32, N>::new(0.0f32);
        let mut dots = Vector::<f32, N>::new(0.0f32);
        if comptime!(plan.ahead) {
            #[unroll]
            for c in 0..chunks {
                held.x[c] = next.x[c];
                held.dy[c] = next.dy[c];
                held.dsum[c] = next.dsum[c];
            }
            next.load::<W>(inputs, min(at + CUBE_COUNT * rows_here, inputs.rows - 1), plan);
        } else {
            held.load::<W>(inputs, row, plan);
        }
        #[unroll]
        for c in 0..chunks {
            let i = unit + c * units;
            if comptime!(plan.rows.even) || i < vectors {
                let x = Vector::<f32, N>::cast_from(held.x[c]);
                let dy = Vector::<f32, N>::cast_from(held.dy[c]);
                squares += x * x;
                if comptime!(plan.wanted.x) {
                    let mut w = w_held[c];
                    if comptime!(plan.ahead) {
                        w = inputs.weight[i];
                    }
                    dots += x * dy * Vector::<f32, N>::cast_from(w);
                }
            }
        }
        // Sums alternate between two parts of shared memory: one barrier a row is enough.
        let base = buffer * part;
        let memory = &mut shared[base..base + part];
        let factors = factors::<N>(squares, dots, memory, vectors, inputs.eps, plan);
        buffer = 1 - buffer;
        if at < inputs.rows {
            #[unroll]
            for c in 0..chunks {
                let i = unit + c * units;
                if comptime!(plan.rows.even) || i < vectors {
                    let x = Vector::<f32, N>::cast_from(held.x[c]);
                    let dy = Vector::<f32, N>::cast_from(held.dy[c]);
                    if comptime!(plan.wanted.x) {
                        let mut w = w_held[c];
                        if comptime!(plan.ahead) {
                            w = inputs.weight[i];
                        }
                        let mut dsum = held.dsum[c];
                        if comptime!(plan.add && !plan.ahead) {
                            dsum = inputs.dsum[row * inputs.dsum_stride + i];
                        }
                        write_dx::<E, W, N>(
                            inputs, outputs, &factors, row, i, x, dy, w, dsum, plan,
                        );
                    }
                    if comptime!(plan.wanted.weight) {
                        dw[c] += factors.r * x * dy;
                    }
                }
            }
        }
    }
    if comptime!(plan.wanted.weight) {
        write_partial::<E, N>(&mut dw, outputs, vectors, comptime!(plan.rows));
    }
}

/// What a unit holds of a row.
#[derive(CubeType)]
struct Held<E: Float, N: Size> {
    x: Array<Vector<E, N>>,
    dy: Array<Vector<E, N>>,
    dsum: Array<Vector<E, N>>,
}

#[cube]
impl<E: Float, N: Size> Held<E, N> {
    fn new(#[comptime] chunks: usize) -> Self {
        Held::<E, N> { x: Array::new(chunks), dy: Array::new(chunks), dsum: Array::new(chunks) }
    }

    fn load<W: Float>(
        &mut self,
        inputs: &BackwardInputs<E, W, N>,
        row: usize,
        #[comptime] plan: BackwardPlan,
    ) {
        let units = comptime!(plan.rows.row.units as usize);
        #[unroll]
        for c in 0..comptime!(plan.rows.chunks) {
            let i = UNIT_POS_X as usize + c * units;
            if comptime!(plan.rows.even) || i < inputs.vectors {
                self.x[c] = inputs.x[row * inputs.x_stride + i];
                self.dy[c] = inputs.dy[row * inputs.dy_stride + i];
                if comptime!(plan.ahead) {
                    self.dsum[c] = inputs.dsum[row * inputs.dsum_stride + i];
                }
            }
        }
    }
}

/// Adds up `dw` over the rows of the cube, one after another, into its row of the partial sums.
#[cube]
fn write_partial<E: Float, N: Size>(
    dw: &mut Array<Vector<f32, N>>,
    outputs: &mut BackwardOutputs<E, N>,
    vectors: usize,
    #[comptime] plan: RowPlan,
) {
    let units = comptime!(plan.row.units as usize);
    let unit = UNIT_POS_X as usize;
    if comptime!(plan.row.rows == 1) {
        #[unroll]
        for c in 0..comptime!(plan.chunks) {
            let i = unit + c * units;
            if comptime!(plan.even) || i < vectors {
                outputs.partial[CUBE_POS * vectors + i] = dw[c];
            }
        }
    } else {
        let mut sums = Shared::<[Vector<f32, N>]>::new_slice(comptime!(plan.chunks * units));
        for y in 0..comptime!(plan.row.rows).runtime() {
            if UNIT_POS_Y == y {
                #[unroll]
                for c in 0..comptime!(plan.chunks) {
                    let i = unit + c * units;
                    if y > 0 {
                        dw[c] += sums[i];
                    }
                    sums[i] = dw[c];
                    let last = y + 1 == comptime!(plan.row.rows);
                    if last && (comptime!(plan.even) || i < vectors) {
                        outputs.partial[CUBE_POS * vectors + i] = dw[c];
                    }
                }
            }
            sync_cube();
        }
    }
}

/// Rows too wide for registers: read for the sums, and again for dx and dweight.
#[cube]
fn backward_twice<E: Float, W: Float, N: Size>(
    inputs: &BackwardInputs<E, W, N>,
    outputs: &mut BackwardOutputs<E, N>,
    #[comptime] plan: BackwardPlan,
) {
    let units = comptime!(plan.rows.row.units as usize);
    let rows_here = comptime!(plan.rows.row.rows as usize);
    let unit = UNIT_POS_X as usize;
    let vectors = inputs.vectors;
    let part = comptime!(plan.shared());
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * part));
    let mut buffer = 0usize;
    let first = CUBE_POS * rows_here;
    for start in range_stepped(first, inputs.rows, CUBE_COUNT * rows_here) {
        let at = start + UNIT_POS_Y as usize;
        let row = min(at, inputs.rows - 1);
        let mut squares = Vector::<f32, N>::new(0.0f32);
        let mut dots = Vector::<f32, N>::new(0.0f32);
        for i in range_stepped(unit, vectors, units) {
            let x = Vector::<f32, N>::cast_from(inputs.x[row * inputs.x_stride + i]);
            squares += x * x;
            if comptime!(plan.wanted.x) {
                let dy = Vector::<f32, N>::cast_from(inputs.dy[row * inputs.dy_stride + i]);
                dots += x * dy * Vector::<f32, N>::cast_from(inputs.weight[i]);
            }
        }
        let base = buffer * part;
        let memory = &mut shared[base..base + part];
        let factors = factors::<N>(squares, dots, memory, vectors, inputs.eps, plan);
        buffer = 1 - buffer;
        if at < inputs.rows {
            for i in range_stepped(unit, vectors, units) {
                let x = Vector::<f32, N>::cast_from(inputs.x[row * inputs.x_stride + i]);
                let dy = Vector::<f32, N>::cast_from(inputs.dy[row * inputs.dy_stride + i]);
                if comptime!(plan.wanted.x) {
                    let weight = inputs.weight[i];
                    let mut dsum = Vector::<E, N>::empty();
                    if comptime!(plan.add) {
                        dsum = inputs.dsum[row * inputs.dsum_stride + i];
                    }
                    write_dx::<E, W, N>(
                        inputs, outputs, &factors, row, i, x, dy, weight, dsum, plan,
                    );
                }
                if comptime!(plan.wanted.weight) {
                    // A unit adds only to columns of its own in the partial sums of its cube.
                    let slot = CUBE_POS * vectors + i;
                    let term = factors.r * x * dy;
                    if start == first {
                        outputs.partial[slot] = term;
                    } else {
                        outputs.partial[slot] += term;
                    }
                }
            }
        }
    }
}
