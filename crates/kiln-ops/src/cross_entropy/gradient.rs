//! The gradient of the logits in one pass: elementwise, with the log-sum-exp of the row that the
//! forward left. Rows that are ignored are not read.

use super::CrossEntropyOptions;
use super::kernel::{Plan, scalar};
use crate::exponential::{exponential, unit_of_shifts};
use crate::launch::{self, Rows};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// What the backward needs to know of a row.
#[derive(CubeType)]
struct RowState {
    /// The log-sum-exp as a shift.
    shift: f32,
    /// Factor of the softmax.
    softmax: f32,
    /// What smoothing takes from every class.
    every: f32,
    /// What the target takes from its class.
    target: f32,
    /// Vector of the target, and its place there.
    vector: usize,
    place: usize,
}

#[cube]
fn gradient<E: Float, N: Size>(
    x: Vector<E, N>,
    i: usize,
    row: &RowState,
    #[comptime] plan: Plan,
) -> Vector<E, N> {
    let p = exponential::<N>(Vector::cast_from(x), row.shift, plan.ptx);
    let mut d = p * Vector::new(row.softmax) - Vector::new(row.every);
    if i == row.vector {
        #[unroll]
        for k in 0..N::value() {
            if k == row.place {
                d.insert(k, d.extract(k) - row.target);
            }
        }
    }
    Vector::cast_from(d)
}

/// Vectors from one row to the next.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Strides {
    logits: usize,
    dlogits: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<E: Float, I: Int, N: Size>(
    logits: &[Vector<E, N>],
    elements: &[E],
    targets: &[I],
    lse: &[f32],
    dloss: &[f32],
    scale: &[f32],
    dlogits: &mut [Vector<E, N>],
    delements: &mut [E],
    rows: usize,
    vectors: usize,
    more: usize,
    strides: Strides,
    ignore_index: InputScalar,
    classes: InputScalar,
    label_smoothing: f32,
    z_loss: f32,
    #[comptime] plan: Plan,
    #[define(E, I)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(plan.row.units as usize);
    let unit = UNIT_POS_X as usize;
    let row = CUBE_POS * comptime!(plan.row.rows as usize) + UNIT_POS_Y as usize;
    if row < rows {
        let target = targets[row];
        let base = row * strides.logits;
        let out = row * strides.dlogits;
        let size = N::value();
        if target != ignore_index.get::<I>() {
            let factor = dloss[0] * scale[0];
            let width = f32::cast_from((vectors * size + more) as u32);
            let log_sum_exp = lse[row];
            let mut state = RowState {
                shift: log_sum_exp * unit_of_shifts(plan.ptx),
                softmax: factor * (1.0f32 + 2.0f32 * z_loss * log_sum_exp),
                every: factor * label_smoothing / width,
                target: factor * (1.0f32 - label_smoothing),
                vector: vectors,
                place: 0usize,
            };
            // One past the last, unless it is one of them.
            let mut class = vectors * size + more;
            if target >= I::new(0) && target < classes.get::<I>() {
                class = usize::cast_from(target);
                state.vector = class / size;
                state.place = class % size;
            }
            let mut held = Array::<Vector<E, N>>::new(comptime!(plan.chunks));
            let span = units * comptime!(plan.chunks);
            let groups = vectors / span;
            for group in 0..groups {
                let first = group * span + unit;
                #[unroll]
                for c in 0..comptime!(plan.chunks) {
                    held[c] = logits[base + first + c * units];
                }
                #[unroll]
                for c in 0..comptime!(plan.chunks) {
                    let i = first + c * units;
                    dlogits[out + i] = gradient::<E, N>(held[c], i, &state, plan);
                }
            }
            for i in range_stepped(groups * span + unit, vectors, units) {
                dlogits[out + i] = gradient::<E, N>(logits[base + i], i, &state, plan);
            }
            if comptime!(plan.more) {
                state.vector = class;
                state.place = 0usize;
                for i in range_stepped(vectors * size + unit, vectors * size + more, units) {
                    let x = Vector::<E, Const<1>>::new(elements[base * size + i]);
                    let d = gradient::<E, Const<1>>(x, i, &state, plan);
                    delements[out * size + i] = d.extract(0usize);
                }
            }
        } else {
            // Whatever stands in the row, infinities included.
            for i in range_stepped(unit, vectors, units) {
                dlogits[out + i] = Vector::new(E::new(0.0));
            }
            if comptime!(plan.more) {
                for i in range_stepped(vectors * size + unit, vectors * size + more, units) {
                    delements[out * size + i] = E::new(0.0);
                }
            }
        }
    }
}

/// What the gradient is made of.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// Operator, for the audit.
    pub op: &'static str,
    /// The gradient of the loss.
    pub dloss: FloatTensor<B>,
    /// The logits.
    pub logits: FloatTensor<B>,
    /// The targets, i32 or i64.
    pub targets: IntTensor<B>,
    /// The log-sum-exp of each row.
    pub lse: FloatTensor<B>,
    /// One over the number of targets that count.
    pub scale: FloatTensor<B>,
    /// Options.
    pub options: CrossEntropyOptions,
}

/// The gradient of the logits: contiguous, unless the rows of the logits are apart, as products leave them so that
/// others can read them.
pub(crate) fn backward(request: Backward<CubeBackend>) -> CubeTensor {
    let Backward { op, dloss, logits, targets, lse, scale, options } = request;
    let (mut logits, targets) = (Rows::new(logits), Rows::new(targets));
    // Every element is read and written by one unit: over the logits where nobody needs them again.
    let dlogits = if logits.in_place(op, "grad.logits") {
        logits.tensor.clone()
    } else {
        let (shape, dtype) = (logits.tensor.meta.shape().clone(), logits.tensor.dtype);
        let apart = logits.stride > logits.width;
        let output = if apart { launch::output_aligned } else { launch::output };
        output(&logits.tensor, op, "grad.logits", shape, dtype)
    };
    let out = Rows::new(dlogits.clone());
    let client = logits.tensor.client.clone();
    let dtypes = [logits.tensor.dtype, targets.tensor.dtype];
    let size = launch::vector_size_and_more(&client, dtypes[0], &[&logits, &out]);
    let vectors = logits.width / size;
    let plan = Plan::new(&client, &logits, size, &options);
    let [elements, delements] = [&logits, &out].map(|of| plan.elements(&of.tensor));
    let address = launch::address_type(&[&logits.tensor, &dlogits]);
    let groups = [("whole groups", vectors >= plan.span())];
    launch::plans::note("cross_entropy backward", &(&plan, size, address), &groups);
    let strides = StridesLaunch::new(logits.stride / size, out.stride / size);
    // SAFETY: as forward.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, plan.cubes(logits.rows)),
            plan.cube_dim(),
            address,
            size,
            logits.tensor.into_buffer_arg(),
            elements.into_buffer_arg(),
            targets.tensor.into_buffer_arg(),
            lse.into_buffer_arg(),
            dloss.into_buffer_arg(),
            scale.into_buffer_arg(),
            out.tensor.into_buffer_arg(),
            delements.into_buffer_arg(),
            logits.rows,
            vectors,
            logits.width % size,
            strides,
            scalar(options.ignore_index, dtypes[1]),
            scalar(logits.width as i64, dtypes[1]),
            options.label_smoothing as f32,
            options.z_loss as f32,
            plan,
            dtypes.map(dtype_to_elem_type),
        );
    }
    dlogits
}
