//! RMSNorm kernels.
//!
//! Forward: one row for a group of units, which hold it in registers between the sum and the
//! scaling, so that memory is read once. Backward: a fixed number of cubes walk over the rows; x
//! and dy of a row are read once and stay in registers, both sums are taken together, and each
//! unit adds up dweight for its columns over all rows of its cube. The cubes' partial sums are
//! added in a second kernel, in order: no atomics, so two runs agree bit for bit.
//!
//! Rows too wide for registers are read twice (the second time mostly from L2).

use crate::launch::{self, Rows};
use crate::reduce::{RowUnits, row_sum, vector_sum};
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// How a row is spread over units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Plan {
    row: RowUnits,
    /// Vectors of a row for each unit, rounded up.
    chunks: usize,
    /// Whether they are held in registers.
    resident: bool,
    /// Whether the units divide the row evenly.
    even: bool,
}

impl Plan {
    /// `chunks` vectors a unit at best, up to `most` in registers if the units run out.
    fn new(client: &Client, vectors: usize, chunks: usize, most: usize) -> Self {
        let widest = client.properties().hardware.max_units_per_cube.min(1024);
        let plane = launch::plane_size(client);
        let wanted = (vectors.div_ceil(chunks).next_power_of_two() as u32).min(widest);
        let units = if plane > 1 { wanted.max(plane.min(8)) } else { wanted };
        // Cubes of at least 128 units: four planes hide each other's latency.
        let rows = (128 / units).max(1);
        let chunks = vectors.div_ceil(units as usize);
        Self {
            row: RowUnits { units, rows, plane },
            chunks,
            resident: chunks <= most,
            even: vectors.is_multiple_of(units as usize),
        }
    }

    fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(self.row.units, self.row.rows)
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<E: Float, W: Float, N: Size>(
    x: &[Vector<E, N>],
    weight: &[Vector<W, N>],
    y: &mut [Vector<E, N>],
    rows: usize,
    vectors: usize,
    stride: usize,
    eps: f32,
    #[comptime] plan: Plan,
    #[define(E, W)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(plan.row.units as usize);
    let unit = UNIT_POS_X as usize;
    let at = CUBE_POS as usize * comptime!(plan.row.rows as usize) + UNIT_POS_Y as usize;
    // Rows past the end compute the last one again and write nothing: all units meet the barriers.
    let row = min(at, rows - 1);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.row.shared()));
    let mut held = Array::<Vector<E, N>>::new(comptime!(if plan.resident { plan.chunks } else { 1 }));

    let mut squares = Vector::<f32, N>::new(0.0f32);
    if comptime!(plan.resident) {
        #[unroll]
        for c in 0..comptime!(plan.chunks) {
            let i = unit + c * units;
            if comptime!(plan.even) || i < vectors {
                held[c] = x[row * stride + i];
                let v = Vector::<f32, N>::cast_from(held[c]);
                squares += v * v;
            }
        }
    } else {
        for i in range_stepped(unit, vectors, units) {
            let v = Vector::<f32, N>::cast_from(x[row * stride + i]);
            squares += v * v;
        }
    }
    let width = f32::cast_from((vectors * N::value()) as u32);
    let sum = row_sum(vector_sum::<N>(squares), &mut shared, plan.row);
    let r = Vector::<f32, N>::new(f32::inverse_sqrt(sum / width + eps));

    if at < rows {
        if comptime!(plan.resident) {
            #[unroll]
            for c in 0..comptime!(plan.chunks) {
                let i = unit + c * units;
                if comptime!(plan.even) || i < vectors {
                    let v = Vector::<f32, N>::cast_from(held[c]);
                    let w = Vector::<f32, N>::cast_from(weight[i]);
                    y[row * vectors + i] = Vector::cast_from(v * r * w);
                }
            }
        } else {
            for i in range_stepped(unit, vectors, units) {
                let v = Vector::<f32, N>::cast_from(x[row * stride + i]);
                let w = Vector::<f32, N>::cast_from(weight[i]);
                y[row * vectors + i] = Vector::cast_from(v * r * w);
            }
        }
    }
}

/// y, contiguous.
pub(crate) fn forward(x: CubeTensor, weight: CubeTensor, eps: f64) -> CubeTensor {
    let shape = x.meta.shape().clone();
    let y = launch::output(&x, "rms_norm", "y", shape.clone(), x.dtype);
    if shape.num_elements() == 0 {
        return y;
    }
    let (x, weight) = (Rows::new(x), Rows::new(weight));
    let client = x.tensor.client.clone();
    let size = launch::vector_size(&client, x.tensor.dtype, &[&x, &weight]);
    let vectors = x.width / size;
    let plan = Plan::new(&client, vectors, 4, 8);
    let cubes = x.rows.div_ceil(plan.row.rows as usize);
    // SAFETY: every index is below rows · stride or rows · vectors, which the tensors hold.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            plan.cube_dim(),
            launch::address_type(&[&x.tensor, &y]),
            size,
            x.tensor.clone().into_buffer_arg(),
            weight.tensor.clone().into_buffer_arg(),
            y.clone().into_buffer_arg(),
            x.rows,
            vectors,
            x.stride / size,
            eps as f32,
            plan,
            [x.tensor.dtype, weight.tensor.dtype].map(burn::backend::cubecl::dtype_to_elem_type),
        );
    }
    y
}

/// Which gradients a backward launch makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wanted {
    /// dx.
    pub(crate) x: bool,
    /// dweight.
    pub(crate) weight: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<E: Float, W: Float, N: Size>(
    x: &[Vector<E, N>],
    dy: &[Vector<E, N>],
    weight: &[Vector<W, N>],
    dx: &mut [Vector<E, N>],
    partial: &mut [Vector<f32, N>],
    rows: usize,
    vectors: usize,
    x_stride: usize,
    dy_stride: usize,
    eps: f32,
    #[comptime] plan: Plan,
    #[comptime] wanted: Wanted,
    #[define(E, W)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(plan.row.units as usize);
    let rows_here = comptime!(plan.row.rows as usize);
    let held = comptime!(if plan.resident { plan.chunks } else { 1 });
    let unit = UNIT_POS_X as usize;
    let width = f32::cast_from((vectors * N::value()) as u32);
    let part = comptime!(plan.row.shared());
    let mut shared = Shared::<[f32]>::new_slice(comptime!(4 * plan.row.shared()));
    let mut x_held = Array::<Vector<E, N>>::new(held);
    let mut dy_held = Array::<Vector<E, N>>::new(held);
    let mut dw = Array::<Vector<f32, N>>::new(held);
    #[unroll]
    for c in 0..held {
        dw[c] = Vector::new(0.0f32);
    }
    let mut turn = 0usize;

    let first = CUBE_POS as usize * rows_here;
    for start in range_stepped(first, rows, CUBE_COUNT as usize * rows_here) {
        let at = start + UNIT_POS_Y as usize;
        let row = min(at, rows - 1);
        let mut squares = Vector::<f32, N>::new(0.0f32);
        let mut dots = Vector::<f32, N>::new(0.0f32);
        if comptime!(plan.resident) {
            #[unroll]
            for c in 0..comptime!(plan.chunks) {
                let i = unit + c * units;
                if comptime!(plan.even) || i < vectors {
                    x_held[c] = x[row * x_stride + i];
                    dy_held[c] = dy[row * dy_stride + i];
                }
            }
            #[unroll]
            for c in 0..comptime!(plan.chunks) {
                let i = unit + c * units;
                if comptime!(plan.even) || i < vectors {
                    let v = Vector::<f32, N>::cast_from(x_held[c]);
                    let g = Vector::<f32, N>::cast_from(dy_held[c]);
                    squares += v * v;
                    if comptime!(wanted.x) {
                        dots += v * g * Vector::<f32, N>::cast_from(weight[i]);
                    }
                }
            }
        } else {
            for i in range_stepped(unit, vectors, units) {
                let v = Vector::<f32, N>::cast_from(x[row * x_stride + i]);
                squares += v * v;
                if comptime!(wanted.x) {
                    let g = Vector::<f32, N>::cast_from(dy[row * dy_stride + i]);
                    dots += v * g * Vector::<f32, N>::cast_from(weight[i]);
                }
            }
        }

        // Sums alternate between two parts of shared memory: one barrier a sum is enough.
        let base = turn * comptime!(2 * part);
        let squares = row_sum(
            vector_sum::<N>(squares),
            &mut shared[base..base + part],
            plan.row,
        );
        let scale = f32::inverse_sqrt(squares / width + eps);
        let r = Vector::<f32, N>::new(scale);
        let mut back = Vector::<f32, N>::new(0.0f32);
        if comptime!(wanted.x) {
            let dot = row_sum(
                vector_sum::<N>(dots),
                &mut shared[base + part..base + comptime!(2 * part)],
                plan.row,
            );
            back = Vector::new(scale * scale * scale * dot / width);
        }
        turn = 1 - turn;

        if at < rows {
            if comptime!(plan.resident) {
                #[unroll]
                for c in 0..comptime!(plan.chunks) {
                    let i = unit + c * units;
                    if comptime!(plan.even) || i < vectors {
                        let v = Vector::<f32, N>::cast_from(x_held[c]);
                        let g = Vector::<f32, N>::cast_from(dy_held[c]);
                        if comptime!(wanted.x) {
                            let w = Vector::<f32, N>::cast_from(weight[i]);
                            dx[row * vectors + i] = Vector::cast_from(r * w * g - back * v);
                        }
                        if comptime!(wanted.weight) {
                            dw[c] += r * v * g;
                        }
                    }
                }
            } else {
                for i in range_stepped(unit, vectors, units) {
                    let v = Vector::<f32, N>::cast_from(x[row * x_stride + i]);
                    let g = Vector::<f32, N>::cast_from(dy[row * dy_stride + i]);
                    if comptime!(wanted.x) {
                        let w = Vector::<f32, N>::cast_from(weight[i]);
                        dx[row * vectors + i] = Vector::cast_from(r * w * g - back * v);
                    }
                    if comptime!(wanted.weight) {
                        // A unit adds only to columns of its own in the partial sums of its cube.
                        let slot = CUBE_POS as usize * vectors + i;
                        let term = r * v * g;
                        if start == first {
                            partial[slot] = term;
                        } else {
                            partial[slot] += term;
                        }
                    }
                }
            }
        }
    }

    if comptime!(wanted.weight && plan.resident) {
        if comptime!(plan.row.rows == 1) {
            #[unroll]
            for c in 0..comptime!(plan.chunks) {
                let i = unit + c * units;
                if comptime!(plan.even) || i < vectors {
                    partial[CUBE_POS as usize * vectors + i] = dw[c];
                }
            }
        } else {
            // The rows of a cube add up one after another.
            let mut sums = Shared::<[Vector<f32, N>]>::new_slice(comptime!(plan.chunks * units));
            #[unroll]
            for y in 0..comptime!(plan.row.rows) {
                if UNIT_POS_Y == y {
                    #[unroll]
                    for c in 0..comptime!(plan.chunks) {
                        let i = unit + c * units;
                        if comptime!(y == 0) {
                            sums[i] = dw[c];
                        } else {
                            sums[i] += dw[c];
                        }
                        if comptime!(y + 1 == plan.row.rows) {
                            if comptime!(plan.even) || i < vectors {
                                partial[CUBE_POS as usize * vectors + i] = sums[i];
                            }
                        }
                    }
                }
                sync_cube();
            }
        }
    }
}

/// Units of a column group and groups of rows in the kernel that adds the partial sums.
const COLUMNS: u32 = 32;

#[cube(launch_unchecked, address_type = "dynamic")]
fn column_sum_kernel<W: Float>(
    partial: &[f32],
    out: &mut [W],
    rows: usize,
    width: usize,
    #[comptime] groups: u32,
    #[define(W)] _dtype: ElemType,
) {
    let column = CUBE_POS as usize * comptime!(COLUMNS as usize) + UNIT_POS_X as usize;
    let mut shared = Shared::<[f32]>::new_slice(comptime!((COLUMNS * groups) as usize));
    let mut sum = 0.0f32;
    if column < width {
        for row in range_stepped(UNIT_POS_Y as usize, rows, comptime!(groups as usize)) {
            sum += partial[row * width + column];
        }
    }
    shared[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS_Y == 0 && column < width {
        let mut total = shared[UNIT_POS_X as usize];
        #[unroll]
        for group in 1..groups {
            total += shared[(group * COLUMNS) as usize + UNIT_POS_X as usize];
        }
        out[column] = W::cast_from(total);
    }
}

/// dx and dweight, those that are wanted; contiguous.
pub(crate) fn backward(
    dy: CubeTensor,
    x: CubeTensor,
    weight: CubeTensor,
    eps: f64,
    wanted: Wanted,
) -> (Option<CubeTensor>, Option<CubeTensor>) {
    const OP: &str = "rms_norm";
    let shape = x.meta.shape().clone();
    let weight_shape = weight.meta.shape().clone();
    if shape.num_elements() == 0 {
        let dx = wanted.x.then(|| launch::zeros(&x, shape, x.dtype));
        let dw = wanted.weight.then(|| launch::zeros(&x, weight_shape, weight.dtype));
        return (dx, dw);
    }
    let dx = wanted.x.then(|| launch::output(&x, OP, "grad.x", shape, x.dtype));
    let (x, dy, weight) = (Rows::new(x), Rows::new(dy), Rows::new(weight));
    let client = x.tensor.client.clone();
    let size = launch::vector_size(&client, x.tensor.dtype, &[&x, &dy, &weight]);
    let vectors = x.width / size;
    let plan = Plan::new(&client, vectors, 2, 4);
    let groups = x.rows.div_ceil(plan.row.rows as usize);
    // Enough cubes to fill the GPU a few times over, few enough for short partial sums.
    let filled = launch::multiprocessors(&client) * (2048 / plan.cube_dim().num_elems() as usize).clamp(1, 8);
    let cubes = if wanted.weight { groups.min(filled) } else { groups };
    let partial = if wanted.weight {
        let shape = Shape::new([cubes, x.width]);
        launch::output(&x.tensor, OP, "partial sums of grad.weight", shape, DType::F32)
    } else {
        launch::unused(&x.tensor, DType::F32)
    };
    let dx_arg = dx.clone().unwrap_or_else(|| launch::unused(&x.tensor, x.tensor.dtype));
    let dtypes = [x.tensor.dtype, weight.tensor.dtype].map(burn::backend::cubecl::dtype_to_elem_type);
    // SAFETY: every index is below rows · stride, rows · vectors or cubes · vectors.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            plan.cube_dim(),
            launch::address_type(&[&x.tensor, &dy.tensor]),
            size,
            x.tensor.clone().into_buffer_arg(),
            dy.tensor.clone().into_buffer_arg(),
            weight.tensor.clone().into_buffer_arg(),
            dx_arg.into_buffer_arg(),
            partial.clone().into_buffer_arg(),
            x.rows,
            vectors,
            x.stride / size,
            dy.stride / size,
            eps as f32,
            plan,
            wanted,
            dtypes,
        );
    }
    let dw = wanted.weight.then(|| {
        let dw = launch::output(&weight.tensor, OP, "grad.weight", weight_shape, weight.tensor.dtype);
        let groups = (client.properties().hardware.max_units_per_cube / COLUMNS).min(16);
        // SAFETY: columns are checked against the width, rows against the partial sums.
        unsafe {
            column_sum_kernel::launch_unchecked(
                &client,
                launch::grid(&client, x.width.div_ceil(COLUMNS as usize)),
                CubeDim::new_2d(COLUMNS, groups),
                launch::address_type(&[&partial, &dw]),
                partial.into_buffer_arg(),
                dw.clone().into_buffer_arg(),
                cubes,
                x.width,
                groups,
                burn::backend::cubecl::dtype_to_elem_type(dw.dtype),
            );
        }
        dw
    });
    (dx, dw)
}
