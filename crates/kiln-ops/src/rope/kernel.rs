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

/// Heads to turn, and where the turned ones go, contiguous. Strides in vectors.
#[derive(CubeType, CubeLaunch)]
struct Turned<E: Float, N: Size> {
    x: Box<[Vector<E, N>]>,
    y: Box<[Vector<E, N>]>,
    heads: usize,
    /// Groups of heads, one for a unit.
    groups: usize,
    batch_stride: usize,
    head_stride: usize,
    time_stride: usize,
}

/// Cosines and sines by position.
#[derive(CubeType, CubeLaunch)]
struct Angles<N: Size> {
    cos: Box<[Vector<f32, N>]>,
    sin: Box<[Vector<f32, N>]>,
    stride: usize,
    /// The first position.
    offset: usize,
    /// −1 turns back.
    sign: f32,
}

/// Positions and vectors of half a head, and the cubes for them.
#[derive(CubeType, CubeLaunch)]
struct Places {
    /// Cubes of the launch.
    cubes: usize,
    /// Cubes of a group of heads.
    blocks: usize,
    length: usize,
    vectors: usize,
}

/// The place of a unit: two vectors of a head whose channels are pairs, and their angles.
#[derive(CubeType)]
struct Place<N: Size> {
    batch: usize,
    time: usize,
    length: usize,
    first: usize,
    second: usize,
    /// Vectors of a head.
    width: usize,
    cos: Vector<f32, N>,
    sin: Vector<f32, N>,
}

/// Turns a place in the heads of a group.
#[cube]
fn turn<E: Float, N: Size>(
    all: &mut Turned<E, N>,
    place: &Place<N>,
    group: usize,
    #[comptime] plan: Plan,
) {
    let head = group * comptime!(plan.heads);
    let x_at = place.batch * all.batch_stride + place.time * all.time_stride;
    let y_at = (place.batch * all.heads * place.length + place.time) * place.width;
    let mut a_held = Array::<Vector<E, N>>::new(comptime!(plan.heads));
    let mut b_held = Array::<Vector<E, N>>::new(comptime!(plan.heads));
    #[unroll]
    for c in 0..comptime!(plan.heads) {
        // Past the last head that one again: a load under a condition would cost registers.
        let h = min(head + c, all.heads - 1);
        a_held[c] = all.x[x_at + h * all.head_stride + place.first];
        b_held[c] = all.x[x_at + h * all.head_stride + place.second];
    }
    #[unroll]
    for c in 0..comptime!(plan.heads) {
        let h = head + c;
        if h < all.heads {
            let a = Vector::<f32, N>::cast_from(a_held[c]);
            let b = Vector::<f32, N>::cast_from(b_held[c]);
            let at = y_at + h * (place.length * place.width);
            if comptime!(plan.interleaved) {
                let x1 = every_other::<N>(a, b, 0usize);
                let x2 = every_other::<N>(a, b, 1usize);
                let y1 = x1 * place.cos + x2 * place.sin;
                let y2 = x2 * place.cos - x1 * place.sin;
                all.y[at + place.first] = Vector::cast_from(alternate::<N>(y1, y2, 0usize));
                all.y[at + place.second] = Vector::cast_from(alternate::<N>(y1, y2, 1usize));
            } else {
                all.y[at + place.first] = Vector::cast_from(a * place.cos + b * place.sin);
                all.y[at + place.second] = Vector::cast_from(b * place.cos - a * place.sin);
            }
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn rope_kernel<E: Float, N: Size>(
    q: &mut Turned<E, N>,
    k: &mut Turned<E, N>,
    angles: &Angles<N>,
    places: &Places,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    // A cube: a block of positions and pairs, in a group of heads of one tensor, of one batch.
    let vectors = places.vectors;
    let groups = q.groups + k.groups;
    let set = CUBE_POS / places.blocks;
    let number = (CUBE_POS - set * places.blocks) * CUBE_DIM as usize + UNIT_POS as usize;
    let batch = set / groups;
    let group = set - batch * groups;
    if CUBE_POS < places.cubes && number < places.length * vectors {
        let time = number / vectors;
        let pair = number - time * vectors;
        let at = (angles.offset + time) * angles.stride + pair;
        let mut first = pair;
        let mut second = pair + vectors;
        if comptime!(plan.interleaved) {
            first = 2 * pair;
            second = 2 * pair + 1;
        }
        let place = Place::<N> {
            batch,
            time,
            length: places.length,
            first,
            second,
            width: 2 * vectors,
            cos: angles.cos[at],
            sin: angles.sin[at] * Vector::<f32, N>::new(angles.sign),
        };
        if comptime!(!plan.keys) || group < q.groups {
            turn::<E, N>(q, &place, group, plan);
        } else {
            turn::<E, N>(k, &place, group - q.groups, plan);
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
    let [batch_stride, head_stride, time_stride] = strides(&q);
    let k_strides = k.as_ref().map_or([0; 3], strides);
    let dtype = dtype_to_elem_type(q.tensor.dtype);
    launch::plans::note("rope", &(&plan, size, address), &[]);
    // SAFETY: places, heads and batches are checked against their numbers; the table has
    // offset + T positions; without keys the buffers that stand in for them are not touched.
    unsafe {
        rope_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            CubeDim::new_1d(units as u32),
            address,
            size,
            TurnedLaunch::new(
                q.tensor.into_buffer_arg(),
                q_out.clone().into_buffer_arg(),
                q_heads,
                q_groups,
                batch_stride,
                head_stride,
                time_stride,
            ),
            // Positions count the buffers that are bound: q, q_out.
            TurnedLaunch::new(
                k.map_or_else(|| BufferArg::alias(0, elements), |k| k.tensor.into_buffer_arg()),
                k_out
                    .clone()
                    .map_or_else(|| BufferArg::alias(1, elements), CubeTensor::into_buffer_arg),
                k_heads,
                k_groups,
                k_strides[0],
                k_strides[1],
                k_strides[2],
            ),
            AnglesLaunch::new(
                cos.tensor.into_buffer_arg(),
                sin.tensor.into_buffer_arg(),
                cos.stride / size,
                offset,
                if inverse { -1.0 } else { 1.0 },
            ),
            PlacesLaunch::new(cubes, blocks, length, vectors),
            plan,
            dtype,
        );
    }
    (q_out, k_out)
}
