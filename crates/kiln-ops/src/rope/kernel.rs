//! The RoPE kernel: heads of one tensor, or of queries and keys together.
//!
//! A unit takes one position and one vector of pairs, loads their cosines and sines once, and turns
//! that place of several heads: the table, in f32 as many bytes as a head in bf16 moves, costs a
//! fraction of a read. Neighbouring units take neighbouring vectors. The input may have any
//! strides with its channels side by side; the output is contiguous, in the memory of a contiguous
//! input that nobody else holds.

use super::RopeLayout;
use crate::launch::{self, Rows};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{into_contiguous, untile};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: usize = 256;
/// Heads of a unit. By arithmetic, not by a sweep: with the 64 to 73 registers that ptxas gives the
/// kernel, 768 units of a multiprocessor have two vectors of four heads in flight: 96 KB.
const HEADS: usize = 4;

/// What a launch does, fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    /// Heads of a unit.
    heads: usize,
    /// Channels 2k and 2k + 1 form a pair, else k and k + D/2.
    interleaved: bool,
    /// There is a second tensor.
    keys: bool,
}

/// Every other of the 2·N channels in `a` and `b`, from `start` on.
#[cube]
fn every_other<N: Size>(
    a: Vector<f32, N>,
    b: Vector<f32, N>,
    #[comptime] start: usize,
) -> Vector<f32, N> {
    let size = N::value();
    let mut out = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for p in 0..size {
        let channel = comptime!(2 * p + start);
        if comptime!(channel < size) {
            out.insert(p, a.extract(channel));
        } else {
            out.insert(p, b.extract(comptime!(channel - size)));
        }
    }
    out
}

/// The lower (`half` 0) or upper (1) N of the 2·N channels that alternate between `a` and `b`.
#[cube]
fn alternate<N: Size>(
    a: Vector<f32, N>,
    b: Vector<f32, N>,
    #[comptime] half: usize,
) -> Vector<f32, N> {
    let size = N::value();
    let mut out = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..size {
        let channel = comptime!(half * size + i);
        let pair = comptime!(channel / 2);
        if comptime!(channel % 2 == 0) {
            out.insert(i, a.extract(pair));
        } else {
            out.insert(i, b.extract(pair));
        }
    }
    out
}

/// Turns the two vectors at `first` and `second` in some heads of `x`.
#[cube]
fn turn<E: Float, N: Size>(
    x: &[Vector<E, N>],
    y: &mut [Vector<E, N>],
    cos: Vector<f32, N>,
    sin: Vector<f32, N>,
    x_at: usize,
    y_at: usize,
    x_head: usize,
    y_head: usize,
    head: usize,
    heads: usize,
    first: usize,
    second: usize,
    #[comptime] plan: Plan,
) {
    let mut a_held = Array::<Vector<E, N>>::new(comptime!(plan.heads));
    let mut b_held = Array::<Vector<E, N>>::new(comptime!(plan.heads));
    #[unroll]
    for c in 0..comptime!(plan.heads) {
        // Past the last head that one again: a load under a condition would cost registers.
        let h = min(head + c, heads - 1);
        a_held[c] = x[x_at + h * x_head + first];
        b_held[c] = x[x_at + h * x_head + second];
    }
    #[unroll]
    for c in 0..comptime!(plan.heads) {
        let h = head + c;
        if h < heads {
            let a = Vector::<f32, N>::cast_from(a_held[c]);
            let b = Vector::<f32, N>::cast_from(b_held[c]);
            let at = y_at + h * y_head;
            if comptime!(plan.interleaved) {
                let x1 = every_other::<N>(a, b, 0usize);
                let x2 = every_other::<N>(a, b, 1usize);
                let y1 = x1 * cos + x2 * sin;
                let y2 = x2 * cos - x1 * sin;
                y[at + first] = Vector::cast_from(alternate::<N>(y1, y2, 0usize));
                y[at + second] = Vector::cast_from(alternate::<N>(y1, y2, 1usize));
            } else {
                y[at + first] = Vector::cast_from(a * cos + b * sin);
                y[at + second] = Vector::cast_from(b * cos - a * sin);
            }
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn rope_kernel<E: Float, N: Size>(
    q: &[Vector<E, N>],
    k: &[Vector<E, N>],
    cos: &[Vector<f32, N>],
    sin: &[Vector<f32, N>],
    q_out: &mut [Vector<E, N>],
    k_out: &mut [Vector<E, N>],
    cubes: usize,
    blocks: usize,
    q_groups: usize,
    k_groups: usize,
    length: usize,
    vectors: usize,
    q_heads: usize,
    k_heads: usize,
    q_batch: usize,
    q_head: usize,
    q_time: usize,
    k_batch: usize,
    k_head: usize,
    k_time: usize,
    table_stride: usize,
    offset: usize,
    sign: f32,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    // A cube: a block of positions and pairs, in a group of heads of one tensor, of one batch.
    let per = comptime!(plan.heads);
    let units = CUBE_DIM as usize;
    let places = length * vectors;
    let groups = q_groups + k_groups;
    let set = CUBE_POS / blocks;
    let place = (CUBE_POS - set * blocks) * units + UNIT_POS as usize;
    let b = set / groups;
    let group = set - b * groups;
    if CUBE_POS < cubes && place < places {
        let t = place / vectors;
        let pair = place - t * vectors;
        let table = (offset + t) * table_stride + pair;
        let c = cos[table];
        let s = sin[table] * Vector::<f32, N>::new(sign);
        let mut first = pair;
        let mut second = pair + vectors;
        if comptime!(plan.interleaved) {
            first = 2 * pair;
            second = 2 * pair + 1;
        }
        let row = 2 * vectors;
        if comptime!(!plan.keys) || group < q_groups {
            let at = b * q_batch + t * q_time;
            let out = (b * q_heads * length + t) * row;
            let head = group * per;
            turn::<E, N>(
                q,
                q_out,
                c,
                s,
                at,
                out,
                q_head,
                length * row,
                head,
                q_heads,
                first,
                second,
                plan,
            );
        } else {
            let at = b * k_batch + t * k_time;
            let out = (b * k_heads * length + t) * row;
            let head = (group - q_groups) * per;
            turn::<E, N>(
                k,
                k_out,
                c,
                s,
                at,
                out,
                k_head,
                length * row,
                head,
                k_heads,
                first,
                second,
                plan,
            );
        }
    }
}

/// A `[B, H, T, D]` tensor whose channels stand side by side.
struct Heads {
    tensor: CubeTensor,
    dims: [usize; 4],
    /// Of B, H and T; 0 where there is only one.
    strides: [usize; 3],
}

impl Heads {
    /// Copies only where the channels are apart.
    fn new(tensor: CubeTensor) -> Self {
        let tensor = untile(tensor);
        let tensor = if tensor.meta.strides()[3] == 1 { tensor } else { into_contiguous(tensor) };
        let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
        let dims = [shape[0], shape[1], shape[2], shape[3]];
        let stride = |i: usize| if dims[i] > 1 { strides[i] } else { 0 };
        let strides = [stride(0), stride(1), stride(2)];
        Self { tensor, dims, strides }
    }

    /// Half-heads as rows: every stride is a multiple of the distance of these.
    fn halves(&self) -> Rows {
        let width = self.dims[3] / 2;
        let stride = self.strides.iter().fold(width, |a, b| greatest_common_divisor(a, *b));
        Rows { tensor: self.tensor.clone(), rows: 2, width, stride }
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// The table, and which way to turn.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Rotation<B: Backend> {
    /// cos of every position and pair.
    pub cos: FloatTensor<B>,
    /// sin of every position and pair.
    pub sin: FloatTensor<B>,
    /// Which channels form a pair.
    pub layout: RopeLayout,
    /// The first position.
    pub offset: usize,
    /// Back.
    pub inverse: bool,
}

/// `q`, and `k` if there is one, turned; contiguous.
pub(crate) fn rope(
    op: &'static str,
    q: CubeTensor,
    k: Option<CubeTensor>,
    rotation: Rotation<CubeBackend>,
) -> (CubeTensor, Option<CubeTensor>) {
    let Rotation { cos, sin, layout, offset, inverse } = rotation;
    // Over the input where nobody needs it again: what a unit writes it alone has read, before.
    let output = |x: &CubeTensor, name: &'static str| match launch::reusable(x) {
        true => x.clone(),
        false => launch::output(x, op, name, x.meta.shape().clone(), x.dtype),
    };
    let (q_out, k_out) = match &k {
        None => (output(&q, "y"), None),
        Some(k) => (output(&q, "q"), Some(output(k, "k"))),
    };
    let (q, k) = (Heads::new(q), k.map(Heads::new));
    let [batch, q_heads, length, width] = q.dims;
    let k_heads = k.as_ref().map_or(0, |k| k.dims[1]);
    if batch * (q_heads + k_heads) * length == 0 {
        return (q_out, k_out);
    }
    let client = q.tensor.client.clone();
    let (cos, sin) = (Rows::new(cos), Rows::new(sin));
    let mut rows = vec![q.halves()];
    rows.extend(k.as_ref().map(Heads::halves));
    let all: Vec<&Rows> = rows.iter().chain([&cos, &sin]).collect();
    let size = launch::vector_size(&client, q.tensor.dtype, &all);
    let vectors = width / 2 / size;
    let plan = Plan {
        heads: q_heads.max(k_heads).next_power_of_two().min(HEADS),
        interleaved: layout == RopeLayout::Interleaved,
        keys: k.is_some(),
    };
    let places = length * vectors;
    let most = UNITS.min(client.properties().hardware.max_units_per_cube as usize);
    let units = places.next_power_of_two().clamp(32, most);
    let (q_groups, k_groups) = (q_heads.div_ceil(plan.heads), k_heads.div_ceil(plan.heads));
    let blocks = places.div_ceil(units);
    let cubes = batch * (q_groups + k_groups) * blocks;
    let mut large = vec![&q.tensor, &q_out, &cos.tensor];
    large.extend(k.as_ref().map(|k| &k.tensor));
    large.extend(&k_out);
    let address = launch::address_type(&large);
    let elements = q.tensor.meta.num_elements();
    let strides = |x: &Heads| x.strides.map(|stride| stride / size);
    let [q_batch, q_head, q_time] = strides(&q);
    let [k_batch, k_head, k_time] = k.as_ref().map_or([0; 3], strides);
    let dtype = dtype_to_elem_type(q.tensor.dtype);
    // SAFETY: places, heads and batches are checked against their numbers; the table has
    // offset + T positions; without keys the buffers that stand in for them are not touched.
    unsafe {
        rope_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            CubeDim::new_1d(units as u32),
            address,
            size,
            q.tensor.into_buffer_arg(),
            k.map_or_else(|| BufferArg::alias(0, elements), |k| k.tensor.into_buffer_arg()),
            cos.tensor.into_buffer_arg(),
            sin.tensor.into_buffer_arg(),
            q_out.clone().into_buffer_arg(),
            // Positions count the buffers that are bound: q, cos, sin, q_out.
            k_out
                .clone()
                .map_or_else(|| BufferArg::alias(3, elements), CubeTensor::into_buffer_arg),
            cubes,
            blocks,
            q_groups,
            k_groups,
            length,
            vectors,
            q_heads,
            k_heads,
            q_batch,
            q_head,
            q_time,
            k_batch,
            k_head,
            k_time,
            cos.stride / size,
            offset,
            if inverse { -1.0 } else { 1.0 },
            plan,
            dtype,
        );
    }
    (q_out, k_out)
}
