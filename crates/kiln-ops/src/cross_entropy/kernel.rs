//! The loss in one pass over the logits.
//!
//! A group of units walks over a row. Each unit keeps the largest logit so far and the sum of
//! exponentials relative to it, and scales the sum when a larger logit comes; one extra exponential
//! for a whole group of vectors. The row's loss and log-sum-exp are left in f32, and a second kernel
//! of one cube adds the losses and counts the targets, in a fixed order. Rows that are ignored are not
//! read.

use super::CrossEntropyOptions;
use crate::exponential::{exponential, factor, has_ptx, unit_of_shifts};
use crate::launch::{self, Rows};
use crate::reduce::{self, Max, RowPlan, RowUnits, Sums};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Bytes that a unit loads before it uses the first. By arithmetic, not by a sweep: with the 64
/// registers that ptxas gives the forward, 1024 units of a multiprocessor have 64 KB in flight.
const BYTES: usize = 64;
/// Most loads for them, where an odd vocabulary leaves no vectors.
const LOADS: usize = 16;
/// Losses that a unit of the mean loads before it adds the first.
const LOSSES: usize = 8;
/// Most units of a row: several cubes share a multiprocessor, and while one adds up the others read.
const UNITS: usize = 256;

/// What is fixed when a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Plan {
    pub(super) row: RowUnits,
    /// Vectors that a unit loads before it uses the first.
    pub(super) chunks: usize,
    /// Exponentials by `ex2.approx`.
    pub(super) ptx: bool,
    /// Labels are smoothed: the forward needs the mean logit.
    smoothing: bool,
    /// Rows have elements behind their last vector.
    pub(super) more: bool,
}

impl Plan {
    /// For such rows in vectors of `size` elements.
    pub(super) fn new(
        client: &Client,
        logits: &Rows,
        size: usize,
        options: &CrossEntropyOptions,
    ) -> Self {
        let vectors = launch::limits::reckoned(logits.width) / size;
        let chunks = (BYTES / (size * logits.tensor.dtype.size())).min(LOADS);
        let share = chunks.max(vectors.div_ceil(UNITS));
        Self {
            row: RowPlan::new(client, vectors, share, 0, |_| 128).row,
            chunks,
            ptx: has_ptx(client),
            smoothing: options.label_smoothing > 0.0,
            more: !logits.width.is_multiple_of(size),
        }
    }

    /// A tensor as the argument for the elements behind the last vectors.
    pub(super) fn elements(&self, tensor: &CubeTensor) -> CubeTensor {
        // wgpu refuses memory that is two arguments.
        if self.ptx { tensor.clone() } else { launch::unused(tensor, tensor.dtype) }
    }

    /// Vectors of a row that its units have under way.
    pub(super) fn span(&self) -> usize {
        self.row.units as usize * self.chunks
    }

    pub(super) fn cubes(&self, rows: usize) -> usize {
        rows.div_ceil(self.row.rows as usize)
    }

    pub(super) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.row.units, self.row.rows)
    }
}

/// Takes a group of vectors of a row into the running maximum and sums of a unit.
#[cube]
fn take<E: Float, N: Size>(
    held: &Array<Vector<E, N>>,
    shift: &mut f32,
    sum: &mut Vector<f32, N>,
    total: &mut Vector<f32, N>,
    #[comptime] count: usize,
    #[comptime] plan: Plan,
) {
    let mut top = Vector::<f32, N>::cast_from(held[0]);
    #[unroll]
    for c in 1..count {
        top = max(top, Vector::<f32, N>::cast_from(held[c]));
    }
    let peak = reduce::vector::<Max, N>(top) * unit_of_shifts(plan.ptx);
    let mut exponentials = *sum;
    let mut logits = *total;
    if peak > *shift {
        exponentials *= Vector::new(factor(*shift - peak, plan.ptx));
        *shift = peak;
    }
    let shift = *shift;
    #[unroll]
    for c in 0..count {
        let x = Vector::<f32, N>::cast_from(held[c]);
        exponentials += exponential::<N>(x, shift, plan.ptx);
        if comptime!(plan.smoothing) {
            logits += x;
        }
    }
    *sum = exponentials;
    *total = logits;
}

/// Takes one logit in.
#[cube]
fn take_one<N: Size>(
    x: f32,
    shift: &mut f32,
    sum: &mut Vector<f32, N>,
    total: &mut Vector<f32, N>,
    #[comptime] plan: Plan,
) {
    let (mut exponentials, mut logits) = (*sum, *total);
    let peak = x * unit_of_shifts(plan.ptx);
    if peak > *shift {
        exponentials *= Vector::new(factor(*shift - peak, plan.ptx));
        *shift = peak;
    }
    let one = exponential::<N>(Vector::new(x), *shift, plan.ptx).extract(0usize);
    exponentials.insert(0usize, exponentials.extract(0usize) + one);
    if comptime!(plan.smoothing) {
        logits.insert(0usize, logits.extract(0usize) + x);
    }
    *sum = exponentials;
    *total = logits;
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<E: Float, I: Int, N: Size>(
    logits: &[Vector<E, N>],
    elements: &[E],
    targets: &[I],
    losses: &mut [f32],
    lse: &mut [f32],
    rows: usize,
    vectors: usize,
    more: usize,
    stride: usize,
    ignore_index: InputScalar,
    classes: InputScalar,
    not_a_number: f32,
    label_smoothing: f32,
    z_loss: f32,
    #[comptime] plan: Plan,
    #[define(E, I)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(plan.row.units as usize);
    let unit = UNIT_POS_X as usize;
    let at = CUBE_POS * comptime!(plan.row.rows as usize) + UNIT_POS_Y as usize;
    // Rows past the end compute the last one again and write nothing: all units meet the barriers.
    let row = min(at, rows - 1);
    let target = targets[row];
    let counts = target != ignore_index.get::<I>();
    let valid = target >= I::new(0) && target < classes.get::<I>();
    let size = N::value();
    let base = row * stride;

    // The lowest finite number: from −∞ a difference of maxima would be NaN.
    let mut shift = f32::new(-3.0e38);
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut total = Vector::<f32, N>::new(0.0f32);
    let mut chosen = 0.0f32;
    if counts {
        if unit == 0 && valid {
            let class = usize::cast_from(target);
            if comptime!(plan.more) {
                chosen = f32::cast_from(elements[base * size + class]);
            } else {
                let vector = Vector::<f32, N>::cast_from(logits[base + class / size]);
                #[unroll]
                for i in 0..size {
                    if class % size == i {
                        chosen = vector.extract(i);
                    }
                }
            }
        }
        let mut held = Array::<Vector<E, N>>::new(comptime!(plan.chunks));
        let span = units * comptime!(plan.chunks);
        let groups = vectors / span;
        for group in 0..groups {
            let first = base + group * span + unit;
            #[unroll]
            for c in 0..comptime!(plan.chunks) {
                held[c] = logits[first + c * units];
            }
            take::<E, N>(&held, &mut shift, &mut sum, &mut total, comptime!(plan.chunks), plan);
        }
        for i in range_stepped(groups * span + unit, vectors, units) {
            held[0] = logits[base + i];
            take::<E, N>(&held, &mut shift, &mut sum, &mut total, 1usize, plan);
        }
        if comptime!(plan.more) {
            for i in range_stepped(unit, more, units) {
                let x = f32::cast_from(elements[(base + vectors) * size + i]);
                take_one::<N>(x, &mut shift, &mut sum, &mut total, plan);
            }
        }
    }

    let part = comptime!(plan.row.shared());
    let mut shared = Shared::<[f32]>::new_slice(comptime!(3 * plan.row.shared()));
    let mut top = Array::<f32>::new(1usize);
    top[0] = shift;
    reduce::rows::<Max>(&mut top, &mut shared[0..part], plan.row);
    let largest = top[0];
    let mut sums = Array::<f32>::new(2usize);
    sums[0] = reduce::vector::<Sums<1>, N>(sum) * factor(shift - largest, plan.ptx);
    sums[1] = reduce::vector::<Sums<1>, N>(total);
    if comptime!(plan.smoothing) {
        reduce::rows::<Sums<2>>(&mut sums, &mut shared[part..3 * part], plan.row);
    } else {
        reduce::rows::<Sums<1>>(&mut sums, &mut shared[part..3 * part], plan.row);
    }

    if unit == 0 && at < rows {
        let mut loss = 0.0f32;
        let mut log_sum_exp = 0.0f32;
        if counts {
            let e = unit_of_shifts(plan.ptx);
            let log = f32::ln(sums[0]);
            log_sum_exp = largest / e + log;
            // Relative to the largest logit, so that a common offset of all does not cancel.
            loss = log - fma(chosen, e, -largest) / e;
            if comptime!(plan.smoothing) {
                let width = f32::cast_from((vectors * size + more) as u32);
                let mean = log - (sums[1] / width - largest / e);
                // No difference of the two: a target that is masked out makes both infinite.
                loss = (1.0f32 - label_smoothing) * loss + label_smoothing * mean;
            }
            // The square may overflow where it does not count.
            if z_loss > 0.0f32 {
                loss += z_loss * log_sum_exp * log_sum_exp;
            }
            if !valid {
                loss = not_a_number;
                log_sum_exp = not_a_number;
            }
        }
        losses[row] = loss;
        lse[row] = log_sum_exp;
    }
}

#[cube(launch_unchecked)]
fn mean_kernel<I: Int>(
    losses: &[f32],
    targets: &[I],
    loss: &mut [f32],
    scale: &mut [f32],
    rows: usize,
    ignore_index: InputScalar,
    #[comptime] row: RowUnits,
    #[define(I)] _dtype: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(comptime!(2 * row.shared()));
    let mut sums = Array::<f32>::new(2usize);
    sums[0] = 0.0f32;
    sums[1] = 0.0f32;
    let units = comptime!(row.units as usize);
    let unit = UNIT_POS_X as usize;
    let ignored = ignore_index.get::<I>();
    let mut held = Array::<f32>::new(comptime!(LOSSES));
    let mut held_targets = Array::<I>::new(comptime!(LOSSES));
    let span = units * comptime!(LOSSES);
    let groups = rows / span;
    for group in 0..groups {
        #[unroll]
        for c in 0..comptime!(LOSSES) {
            held[c] = losses[group * span + c * units + unit];
            held_targets[c] = targets[group * span + c * units + unit];
        }
        #[unroll]
        for c in 0..comptime!(LOSSES) {
            sums[0] += held[c];
            if held_targets[c] != ignored {
                sums[1] += 1.0f32;
            }
        }
    }
    for i in range_stepped(groups * span + unit, rows, units) {
        sums[0] += losses[i];
        if targets[i] != ignored {
            sums[1] += 1.0f32;
        }
    }
    reduce::rows::<Sums<2>>(&mut sums, &mut shared, row);
    if CUBE_POS == 0 && UNIT_POS == 0 {
        let count = max(sums[1], f32::new(1.0));
        loss[0] = sums[0] / count;
        scale[0] = 1.0f32 / count;
    }
}

/// A number as a scalar of the targets' type; one beyond it becomes its nearest, which no target
/// that was checked has.
pub(super) fn scalar(value: i64, dtype: DType) -> InputScalar {
    let value = match dtype {
        DType::I32 => value.clamp(i32::MIN.into(), i32::MAX.into()),
        _ => value,
    };
    InputScalar::new(value, dtype_to_elem_type(dtype))
}

/// What the loss is taken of.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Forward<B: Backend> {
    /// Operator, for the audit.
    pub op: &'static str,
    /// The logits.
    pub logits: FloatTensor<B>,
    /// The targets, i32 or i64.
    pub targets: IntTensor<B>,
    /// Options.
    pub options: CrossEntropyOptions,
}

/// The loss, and what the backward needs: the log-sum-exp of each row and one over the number of
/// targets that count, all in f32.
pub(crate) fn forward(request: Forward<CubeBackend>) -> (CubeTensor, CubeTensor, CubeTensor) {
    let Forward { op, logits, targets, options } = request;
    let output = |name: &'static str, size: usize| {
        launch::output(&logits, op, name, Shape::new([size]), DType::F32)
    };
    let rows = logits.meta.shape()[0];
    let (loss, lse, scale) = (output("loss", 1), output("lse", rows), output("scale", 1));
    let losses = output("losses of the rows", rows);
    let (logits, targets) = (Rows::new(logits), Rows::new(targets));
    let client = logits.tensor.client.clone();
    let dtypes = [logits.tensor.dtype, targets.tensor.dtype];
    let size = launch::vector_size_and_more(&client, dtypes[0], &[&logits]);
    let vectors = logits.width / size;
    let plan = Plan::new(&client, &logits, size, &options);
    let elements = plan.elements(&logits.tensor);
    let sums = RowPlan::new(&client, launch::limits::reckoned(rows), 1, 0, |_| 1).row;
    let address = launch::address_type(&[&logits.tensor]);
    let groups = [("whole groups", vectors >= plan.span())];
    launch::plans::note("cross_entropy forward", &(&plan, size, address), &groups);
    let several = ("several rounds", rows > sums.units as usize);
    let groups = ("whole groups", rows >= sums.units as usize * LOSSES);
    launch::plans::note("cross_entropy mean", &sums, &[several, groups]);
    // SAFETY: every index is below rows · stride of the logits or below rows; a target is checked
    // against the classes before it becomes an index.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, plan.cubes(rows)),
            plan.cube_dim(),
            address,
            size,
            logits.tensor.into_buffer_arg(),
            elements.into_buffer_arg(),
            targets.tensor.clone().into_buffer_arg(),
            losses.clone().into_buffer_arg(),
            lse.clone().into_buffer_arg(),
            rows,
            vectors,
            logits.width % size,
            logits.stride / size,
            scalar(options.ignore_index, dtypes[1]),
            scalar(logits.width as i64, dtypes[1]),
            f32::NAN,
            options.label_smoothing as f32,
            options.z_loss as f32,
            plan,
            dtypes.map(dtype_to_elem_type),
        );
        mean_kernel::launch_unchecked(
            &client,
            launch::grid(&client, 1),
            CubeDim::new_1d(sums.units),
            losses.into_buffer_arg(),
            targets.tensor.into_buffer_arg(),
            loss.clone().into_buffer_arg(),
            scale.clone().into_buffer_arg(),
            rows,
            scalar(options.ignore_index, dtypes[1]),
            sums,
            dtype_to_elem_type(dtypes[1]),
        );
    }
    (loss, lse, scale)
}
