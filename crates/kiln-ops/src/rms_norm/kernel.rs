//! RMSNorm kernels, with or without a sum in front.
//!
//! Forward: one row for a group of units, which hold it in registers between the sum and the
//! scaling, so that memory is read once. Backward: a fixed number of cubes walk over the rows; x
//! and dy of a row are read once and stay in registers, both sums are taken together, and each
//! unit adds up dweight for its columns over all rows of its cube. The cubes' partial sums are
//! added in a second kernel, in order: no atomics, so two runs agree bit for bit.
//!
//! Rows too wide for registers are read twice (the second time mostly from L2).

mod backward;

use crate::autodiff::Maybe;
use crate::launch::{self, Rows};
use crate::reduce::{self, RowPlan, Sums, column_sum};
use backward::{BackwardInputsLaunch, BackwardOutputsLaunch, BackwardPlan, backward_kernel};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

// Settings, by sweeps of 1, 2, 3, 4 and 8 chunks, cubes of 128 to 1024 units and 1 to 16 cubes a multiprocessor on an
// H200 (bf16, 16384×4096, 32768×768, 8192×8192, 4096×16384, 131072×128). Walking over rows and loading the next row ahead
// won nothing forward.

/// Vectors of a row for each unit: 4 is within 1 % of the best width by width, 1 loses up to 30 %.
const FORWARD_CHUNKS: usize = 4;
/// Vectors that a unit can hold when the units of a cube run out.
const FORWARD_RESIDENT: usize = 8;
/// As forward. If the units of a cube run out, rows are read twice instead.
const BACKWARD_CHUNKS: usize = 4;
/// Units of a row up to which the next row is loaded ahead.
const AHEAD_UNITS: usize = 128;

/// Units of a backward cube, by the sweep: several narrow rows share a cube and so one partial sum;
/// a row of 128 units is fastest alone, wider ones in cubes of 512 (presumably because the bound
/// makes the compiler keep to 128 registers; registers were not looked at).
fn backward_cube(units: u32) -> u32 {
    match units {
        0..=32 => 256,
        33..=128 => 128,
        _ => 512,
    }
}

/// How a backward goes over rows.
struct Walk {
    plan: RowPlan,
    /// Cubes a multiprocessor, the fastest of 1 to 16 in the sweep: each walks over an equal share of the rows, so a
    /// second wave would run alone.
    cubes: usize,
    /// The next row is loaded while one is worked on.
    ahead: bool,
}

impl Walk {
    fn new(client: &Client, vectors: usize, add: bool) -> Self {
        let of =
            |chunks, cube: &dyn Fn(u32) -> u32| RowPlan::new(client, vectors, chunks, chunks, cube);
        match vectors {
            // With a third tensor to wait for, rows ahead win 2 to 40 % (128 to 4096 wide, bf16).
            _ if add && vectors <= AHEAD_UNITS * BACKWARD_CHUNKS => {
                let plan = of(BACKWARD_CHUNKS, &|_| 256);
                let cubes = if plan.chunks <= 2 { 3 } else { 1 };
                Self { plan, cubes, ahead: true }
            }
            // A quarter faster than 256 units of 4 vectors; of 640 vectors 96 units would be half as fast as 160.
            _ if add && vectors == 2 * AHEAD_UNITS * BACKWARD_CHUNKS => {
                Self { plan: of(2 * BACKWARD_CHUNKS, &|_| 128), cubes: 2, ahead: false }
            }
            _ => {
                let plan = of(BACKWARD_CHUNKS, &backward_cube);
                let cubes = match plan.cube_dim().num_elems() {
                    0..=128 => 3,
                    129..=256 if plan.chunks <= 2 => 3,
                    129..=256 => 2,
                    _ => 1,
                };
                Self { plan, cubes, ahead: false }
            }
        }
    }
}

/// The element at `i` of a row of x, or of x + residual as the element type rounds it.
#[cube]
fn load<E: Float, N: Size>(
    x: &[Vector<E, N>],
    residual: &[Vector<E, N>],
    x_at: usize,
    residual_at: usize,
    #[comptime] add: bool,
) -> Vector<E, N> {
    let mut value = x[x_at];
    if comptime!(add) {
        let sum =
            Vector::<f32, N>::cast_from(value) + Vector::<f32, N>::cast_from(residual[residual_at]);
        value = Vector::cast_from(sum);
    }
    value
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<E: Float, W: Float, N: Size>(
    x: &[Vector<E, N>],
    residual: &[Vector<E, N>],
    weight: &[Vector<W, N>],
    y: &mut [Vector<E, N>],
    sum: &mut [Vector<E, N>],
    rows: usize,
    vectors: usize,
    x_stride: usize,
    residual_stride: usize,
    eps: f32,
    #[comptime] plan: RowPlan,
    #[comptime] add: bool,
    #[define(E, W)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(plan.row.units as usize);
    let unit = UNIT_POS_X as usize;
    let at = CUBE_POS * comptime!(plan.row.rows as usize) + UNIT_POS_Y as usize;
    // Rows past the end compute the last one again and write nothing: all units meet the barriers.
    let row = min(at, rows - 1);
    let (x_row, residual_row) = (row * x_stride, row * residual_stride);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.row.shared()));
    let mut held = Array::<Vector<E, N>>::new(comptime!(plan.held()));

    let mut squares = Vector::<f32, N>::new(0.0f32);
    if comptime!(plan.resident) {
        #[unroll]
        for c in 0..comptime!(plan.chunks) {
            let i = unit + c * units;
            if comptime!(plan.even) || i < vectors {
                held[c] = load::<E, N>(x, residual, x_row + i, residual_row + i, add);
                let v = Vector::<f32, N>::cast_from(held[c]);
                squares += v * v;
            }
        }
    } else {
        for i in range_stepped(unit, vectors, units) {
            let value = load::<E, N>(x, residual, x_row + i, residual_row + i, add);
            let v = Vector::<f32, N>::cast_from(value);
            squares += v * v;
        }
    }
    let width = f32::cast_from((vectors * N::value()) as u32);
    let mut sums = Array::<f32>::new(1usize);
    sums[0] = reduce::vector::<Sums<1>, N>(squares);
    reduce::rows::<Sums<1>>(&mut sums, &mut shared, plan.row);
    let r = Vector::<f32, N>::new(f32::inverse_sqrt(sums[0] / width + eps));

    if at < rows {
        if comptime!(plan.resident) {
            #[unroll]
            for c in 0..comptime!(plan.chunks) {
                let i = unit + c * units;
                if comptime!(plan.even) || i < vectors {
                    let v = Vector::<f32, N>::cast_from(held[c]);
                    let w = Vector::<f32, N>::cast_from(weight[i]);
                    if comptime!(add) {
                        sum[row * vectors + i] = held[c];
                    }
                    y[row * vectors + i] = Vector::cast_from(v * r * w);
                }
            }
        } else {
            for i in range_stepped(unit, vectors, units) {
                let value = load::<E, N>(x, residual, x_row + i, residual_row + i, add);
                let v = Vector::<f32, N>::cast_from(value);
                let w = Vector::<f32, N>::cast_from(weight[i]);
                if comptime!(add) {
                    sum[row * vectors + i] = value;
                }
                y[row * vectors + i] = Vector::cast_from(v * r * w);
            }
        }
    }
}

/// What the norm is taken of.
pub(crate) struct Forward {
    /// Operator, for the audit.
    pub(crate) op: &'static str,
    pub(crate) x: CubeTensor,
    /// Added to `x` before.
    pub(crate) residual: Option<CubeTensor>,
    pub(crate) weight: CubeTensor,
    pub(crate) eps: f64,
}

/// y, and x + residual if there is a residual; contiguous.
pub(crate) fn forward(request: Forward) -> (CubeTensor, Option<CubeTensor>) {
    let Forward { op, x, residual, weight, eps } = request;
    let shape = x.meta.shape().clone();
    let y = launch::output(&x, op, "y", shape.clone(), x.dtype);
    let sum = residual.is_some().then(|| launch::output(&x, op, "sum", shape.clone(), x.dtype));
    if shape.num_elements() == 0 {
        return (y, sum);
    }
    let (x, weight, residual) = (Rows::new(x), Rows::new(weight), residual.map(Rows::new));
    let client = x.tensor.client.clone();
    let size = match &residual {
        Some(residual) => launch::vector_size(&client, x.tensor.dtype, &[&x, residual, &weight]),
        None => launch::vector_size(&client, x.tensor.dtype, &[&x, &weight]),
    };
    let vectors = x.width / size;
    let plan = RowPlan::new(&client, vectors, FORWARD_CHUNKS, FORWARD_RESIDENT, |_| 128);
    let cubes = x.rows.div_ceil(plan.row.rows as usize);
    let elements = shape.num_elements();
    let add = residual.is_some();
    let residual_stride = residual.as_ref().map_or(0, |residual| residual.stride / size);
    let address =
        launch::address_type(&[&x.tensor, &y, residual.as_ref().map_or(&y, |r| &r.tensor)]);
    launch::plans::note("rms_norm forward", &(&plan, size, address, add), &[]);
    // SAFETY: every index is below rows · stride or rows · vectors, which the tensors hold; without
    // a residual the buffers that stand in for it and the sum are not touched.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            plan.cube_dim(),
            address,
            size,
            x.tensor.clone().into_buffer_arg(),
            residual.map_or_else(|| BufferArg::alias(0, elements), |r| r.tensor.into_buffer_arg()),
            weight.tensor.clone().into_buffer_arg(),
            y.clone().into_buffer_arg(),
            // Positions count the buffers that are bound: x, weight, y.
            sum.clone().map_or_else(|| BufferArg::alias(2, elements), CubeTensor::into_buffer_arg),
            x.rows,
            vectors,
            x.stride / size,
            residual_stride,
            eps as f32,
            plan,
            add,
            [x.tensor.dtype, weight.tensor.dtype].map(dtype_to_elem_type),
        );
    }
    (y, sum)
}

/// What a backward launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wanted {
    /// Make dx.
    pub(crate) x: bool,
    /// Make dweight.
    pub(crate) weight: bool,
}

/// What the gradients are made of.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// Operator, for the audit.
    pub op: &'static str,
    /// The gradient of y.
    pub dy: FloatTensor<B>,
    /// What is added to dx.
    #[extension_type]
    pub dsum: Maybe<B>,
    /// What was normalised.
    pub x: FloatTensor<B>,
    /// The weight.
    pub weight: FloatTensor<B>,
    /// eps.
    pub eps: f64,
    /// Whether somebody needs dx and dweight.
    pub wanted: [bool; 2],
}

/// dx (plus `dsum`, if it is given) and dweight, those that are wanted; contiguous.
pub(crate) fn backward(request: Backward<CubeBackend>) -> (Option<CubeTensor>, Option<CubeTensor>) {
    let Backward { op, dy, dsum, x, weight, eps, wanted: [of_x, of_weight] } = request;
    let wanted = Wanted { x: of_x, weight: of_weight };
    let dsum = dsum.option().filter(|_| of_x);
    let shape = x.meta.shape().clone();
    let weight_shape = weight.meta.shape().clone();
    if shape.num_elements() == 0 {
        let dx = wanted.x.then(|| launch::zeros(&x, shape, x.dtype));
        let dw = wanted.weight.then(|| launch::zeros(&x, weight_shape, weight.dtype));
        return (dx, dw);
    }
    let dx = wanted.x.then(|| launch::output(&x, op, "grad.x", shape.clone(), x.dtype));
    let (x, dy, weight, dsum) =
        (Rows::new(x), Rows::new(dy), Rows::new(weight), dsum.map(Rows::new));
    let client = x.tensor.client.clone();
    let size = match &dsum {
        Some(dsum) => launch::vector_size(&client, x.tensor.dtype, &[&x, &dy, dsum, &weight]),
        None => launch::vector_size(&client, x.tensor.dtype, &[&x, &dy, &weight]),
    };
    let vectors = x.width / size;
    // Without sums of the weight's gradient a cube has one group of rows, and none ahead.
    let Walk { plan, cubes, ahead } = Walk::new(&client, vectors, dsum.is_some() && wanted.weight);
    let groups = x.rows.div_ceil(plan.row.rows as usize);
    let filled = launch::multiprocessors(&client) * cubes;
    let cubes = if wanted.weight { groups.min(filled) } else { groups };
    let partial = if wanted.weight {
        let shape = Shape::new([cubes, x.width]);
        launch::output(&x.tensor, op, "partial sums of grad.weight", shape, DType::F32)
    } else {
        launch::unused(&x.tensor, DType::F32)
    };
    let dx_arg = dx.clone().unwrap_or_else(|| launch::unused(&x.tensor, x.tensor.dtype));
    let add = dsum.is_some();
    let dsum_stride = dsum.as_ref().map_or(0, |dsum| dsum.stride / size);
    let address = launch::address_type(&[
        &x.tensor,
        &dy.tensor,
        dsum.as_ref().map_or(&dy.tensor, |d| &d.tensor),
    ]);
    let backward = BackwardPlan { rows: plan, wanted, add, ahead };
    let ways = [("several rounds", groups > cubes)];
    launch::plans::note("rms_norm backward", &(&backward, size, address), &ways);
    // SAFETY: every index is below rows · stride, rows · vectors or cubes · vectors; buffers that
    // stand in for what is not wanted are not touched.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            plan.cube_dim(),
            address,
            size,
            BackwardInputsLaunch::new(
                x.tensor.clone().into_buffer_arg(),
                dy.tensor.clone().into_buffer_arg(),
                dsum.map_or_else(
                    || BufferArg::alias(1, shape.num_elements()),
                    |dsum| dsum.tensor.into_buffer_arg(),
                ),
                weight.tensor.clone().into_buffer_arg(),
                x.rows,
                vectors,
                x.stride / size,
                dy.stride / size,
                dsum_stride,
                eps as f32,
            ),
            BackwardOutputsLaunch::new(dx_arg.into_buffer_arg(), partial.clone().into_buffer_arg()),
            backward,
            [x.tensor.dtype, weight.tensor.dtype].map(dtype_to_elem_type),
        );
    }
    let dw = wanted.weight.then(|| {
        let dw =
            launch::output(&weight.tensor, op, "grad.weight", weight_shape, weight.tensor.dtype);
        column_sum(partial, cubes, &dw);
        dw
    });
    (dx, dw)
}
