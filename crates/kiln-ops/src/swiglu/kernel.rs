//! SwiGLU kernels: elementwise, so a unit loads vectors of 16 bytes, computes and stores.
//!
//! Neighbouring units take neighbouring vectors, and every load of a unit is issued before the
//! first of them is used. Units past the end load the last vector again and write nothing: a load
//! under a condition would cost registers. gate and up may be rows of wider tensors: only then is a vector's row
//! computed, by one division.

use crate::exponential::{has_ptx, sigmoid};
use crate::launch::{self, Rows};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;
/// Vectors of each tensor for a unit. By arithmetic, not by a sweep: with the 32 registers that
/// ptxas gives both kernels, 2048 units of a multiprocessor have two vectors of two tensors, or one
/// of three, in flight: 128 and 96 KB.
const FORWARD_CHUNKS: usize = 2;
/// As forward, with three tensors.
const BACKWARD_CHUNKS: usize = 1;

/// What a backward launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Wanted {
    /// Make dgate.
    gate: bool,
    /// Make dup.
    up: bool,
    /// Make y again.
    y: bool,
}

/// What a backward launch writes: contiguous tensors of the shape of gate.
#[derive(Default)]
pub(crate) struct Gradients {
    pub(crate) gate: Option<CubeTensor>,
    pub(crate) up: Option<CubeTensor>,
    /// May stand in the memory of dy.
    pub(crate) y: Option<CubeTensor>,
}

/// Units of a cube and what they do, fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    units: u32,
    /// Vectors of each tensor for a unit.
    chunks: usize,
    /// Whether the tensors are rows at distances of their own.
    strided: bool,
    /// Sigmoids in PTX.
    ptx: bool,
}

impl Plan {
    fn new(client: &Client, chunks: usize, strided: bool) -> Self {
        let units = UNITS.min(client.properties().hardware.max_units_per_cube);
        Self { units, chunks, strided, ptx: has_ptx(client) }
    }

    fn cubes(&self, vectors: usize) -> usize {
        vectors.div_ceil(self.units as usize * self.chunks)
    }
}

/// Where vector `i` of the output stands in a tensor whose rows are `stride` vectors apart.
#[cube]
pub(crate) fn place(i: usize, width: usize, stride: usize, #[comptime] strided: bool) -> usize {
    let mut at = i;
    if comptime!(strided) {
        let row = i / width;
        at = row * stride + (i - row * width);
    }
    at
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<E: Float, N: Size>(
    gate: &[Vector<E, N>],
    up: &[Vector<E, N>],
    y: &mut [Vector<E, N>],
    vectors: usize,
    width: usize,
    gate_stride: usize,
    up_stride: usize,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    let units = comptime!(plan.units as usize);
    let first = CUBE_POS * comptime!(plan.units as usize * plan.chunks) + UNIT_POS_X as usize;
    let mut g_held = Array::<Vector<E, N>>::new(comptime!(plan.chunks));
    let mut u_held = Array::<Vector<E, N>>::new(comptime!(plan.chunks));
    #[unroll]
    for c in 0..comptime!(plan.chunks) {
        let i = min(first + c * units, vectors - 1);
        g_held[c] = gate[place(i, width, gate_stride, plan.strided)];
        u_held[c] = up[place(i, width, up_stride, plan.strided)];
    }
    #[unroll]
    for c in 0..comptime!(plan.chunks) {
        let i = first + c * units;
        if i < vectors {
            let g = Vector::<f32, N>::cast_from(g_held[c]);
            let u = Vector::<f32, N>::cast_from(u_held[c]);
            y[i] = Vector::cast_from(g * sigmoid::<N>(g, plan.ptx) * u);
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<E: Float, N: Size>(
    dy: &[Vector<E, N>],
    gate: &[Vector<E, N>],
    up: &[Vector<E, N>],
    dgate: &mut [Vector<E, N>],
    dup: &mut [Vector<E, N>],
    y: &mut [Vector<E, N>],
    vectors: usize,
    width: usize,
    dy_stride: usize,
    gate_stride: usize,
    up_stride: usize,
    #[comptime] plan: Plan,
    #[comptime] wanted: Wanted,
    #[define(E)] _dtype: ElemType,
) {
    let units = comptime!(plan.units as usize);
    let first = CUBE_POS * comptime!(plan.units as usize * plan.chunks) + UNIT_POS_X as usize;
    let mut d_held = Array::<Vector<E, N>>::new(comptime!(plan.chunks));
    let mut g_held = Array::<Vector<E, N>>::new(comptime!(plan.chunks));
    let mut u_held = Array::<Vector<E, N>>::new(comptime!(plan.chunks));
    #[unroll]
    for c in 0..comptime!(plan.chunks) {
        let i = min(first + c * units, vectors - 1);
        d_held[c] = dy[place(i, width, dy_stride, plan.strided)];
        g_held[c] = gate[place(i, width, gate_stride, plan.strided)];
        if comptime!(wanted.gate || wanted.y) {
            u_held[c] = up[place(i, width, up_stride, plan.strided)];
        }
    }
    #[unroll]
    for c in 0..comptime!(plan.chunks) {
        let i = first + c * units;
        if i < vectors {
            let d = Vector::<f32, N>::cast_from(d_held[c]);
            let g = Vector::<f32, N>::cast_from(g_held[c]);
            let s = sigmoid::<N>(g, plan.ptx);
            if comptime!(wanted.gate) {
                let u = Vector::<f32, N>::cast_from(u_held[c]);
                let one = Vector::<f32, N>::new(1.0f32);
                dgate[i] = Vector::cast_from(d * u * s * (one + g * (one - s)));
            }
            if comptime!(wanted.up) {
                dup[i] = Vector::cast_from(d * g * s);
            }
            if comptime!(wanted.y) {
                y[i] = Vector::cast_from(g * s * Vector::<f32, N>::cast_from(u_held[c]));
            }
        }
    }
}

/// Takes tensors whose rows stand side by side as one row each, so that vectors need not fit into
/// a row; returns whether any of them does not.
pub(crate) fn flatten<const K: usize>(tensors: &mut [Rows; K]) -> bool {
    if tensors.iter().any(|t| t.rows > 1 && t.stride != t.width) {
        return true;
    }
    for tensor in tensors {
        let elements = tensor.rows * tensor.width;
        (tensor.rows, tensor.width, tensor.stride) = (1, elements, elements);
    }
    false
}

/// silu(gate) · up, contiguous.
pub(crate) fn forward(op: &'static str, gate: CubeTensor, up: CubeTensor) -> CubeTensor {
    let shape = gate.meta.shape().clone();
    let y = launch::output(&gate, op, "y", shape.clone(), gate.dtype);
    if shape.num_elements() == 0 {
        return y;
    }
    let client = gate.client.clone();
    let mut rows = [Rows::new(gate), Rows::new(up)];
    let strided = flatten(&mut rows);
    let [gate, up] = rows;
    let size = launch::vector_size(&client, y.dtype, &[&gate, &up]);
    let vectors = shape.num_elements() / size;
    let plan = Plan::new(&client, FORWARD_CHUNKS, strided);
    let address = launch::address_type(&[&gate.tensor, &up.tensor, &y]);
    launch::plans::note("swiglu forward", &(&plan, size, address), &[]);
    // SAFETY: a unit keeps to vectors below their number, which y holds; in gate and up they stand
    // in rows below the number of rows.
    unsafe {
        forward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, plan.cubes(vectors)),
            CubeDim::new_1d(plan.units),
            address,
            size,
            gate.tensor.into_buffer_arg(),
            up.tensor.into_buffer_arg(),
            y.clone().into_buffer_arg(),
            vectors,
            gate.width / size,
            gate.stride / size,
            up.stride / size,
            plan,
            dtype_to_elem_type(y.dtype),
        );
    }
    y
}

/// What the gradients are made of.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// Operator, for the audit.
    pub op: &'static str,
    /// The gradient of y.
    pub dy: FloatTensor<B>,
    /// The gate.
    pub gate: FloatTensor<B>,
    /// What it gates.
    pub up: FloatTensor<B>,
    /// Whether somebody needs dgate and dup.
    pub wanted: [bool; 2],
}

/// dgate and dup, those that are wanted; contiguous.
pub(crate) fn backward(request: Backward<CubeBackend>) -> (Option<CubeTensor>, Option<CubeTensor>) {
    let Backward { op, dy, gate, up, wanted } = request;
    let (shape, dtype) = (gate.meta.shape().clone(), gate.dtype);
    let gradient = |name: &'static str| launch::output(&gate, op, name, shape.clone(), dtype);
    let dgate = wanted[0].then(|| gradient("grad.gate"));
    let dup = wanted[1].then(|| gradient("grad.up"));
    let gradients = Gradients { gate: dgate.clone(), up: dup.clone(), y: None };
    backward_into([dy, gate, up], gradients);
    (dgate, dup)
}

/// Writes those that are there.
pub(crate) fn backward_into([dy, gate, up]: [CubeTensor; 3], gradients: Gradients) {
    let (shape, dtype) = (gate.meta.shape().clone(), gate.dtype);
    let Gradients { gate: dgate, up: dup, y } = gradients;
    if shape.num_elements() == 0 {
        return;
    }
    let wanted = Wanted { gate: dgate.is_some(), up: dup.is_some(), y: y.is_some() };
    let [dgate, dup, y] =
        [dgate, dup, y].map(|out| out.unwrap_or_else(|| launch::unused(&gate, dtype)));
    let client = gate.client.clone();
    let mut rows = [Rows::new(dy), Rows::new(gate), Rows::new(up)];
    let strided = flatten(&mut rows);
    let [dy, gate, up] = rows;
    let size = launch::vector_size(&client, dtype, &[&dy, &gate, &up]);
    let vectors = shape.num_elements() / size;
    let plan = Plan::new(&client, BACKWARD_CHUNKS, strided);
    let address = launch::address_type(&[&dy.tensor, &gate.tensor, &up.tensor, &dgate, &dup, &y]);
    launch::plans::note("swiglu backward", &(&plan, &wanted, size, address), &[]);
    // SAFETY: as forward; gradients that are not wanted are not touched. Where y stands in the memory of
    // dy, a unit writes a vector that it has read for the gradients stored before; units past the end
    // may read the last one late, and use nothing of it.
    unsafe {
        backward_kernel::launch_unchecked(
            &client,
            launch::grid(&client, plan.cubes(vectors)),
            CubeDim::new_1d(plan.units),
            address,
            size,
            dy.tensor.into_buffer_arg(),
            gate.tensor.into_buffer_arg(),
            up.tensor.into_buffer_arg(),
            dgate.into_buffer_arg(),
            dup.into_buffer_arg(),
            y.into_buffer_arg(),
            vectors,
            gate.width / size,
            dy.stride / size,
            gate.stride / size,
            up.stride / size,
            plan,
            wanted,
            dtype_to_elem_type(dtype),
        );
    }
}
