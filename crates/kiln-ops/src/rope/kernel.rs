//! The RoPE kernel: heads of one tensor, of queries and keys together, or the first of a packed tensor.
//!
//! A unit takes one position and one vector of pairs, loads their cosines and sines once, and rotates
//! that place of several heads: the table, in f32 as many bytes as a head in bf16 moves, costs a
//! fraction of a read. Neighbouring units take neighbouring vectors. The input may have any
//! strides with its channels side by side; the output is contiguous, in the memory of a contiguous
//! input that nobody else holds. The values of a packed tensor that is rotated where it is are not touched;
//! elsewhere they are copied.

use super::RopeLayout;
use super::heads::Heads;
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
    /// The last heads are copied.
    copies: bool,
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

/// Distances of batches, heads and positions, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Strides {
    batch: usize,
    head: usize,
    time: usize,
}

/// Heads to rotate, and where the rotated ones go.
#[derive(CubeType, CubeLaunch)]
struct Rotated<E: Float, N: Size> {
    x: Box<[Vector<E, N>]>,
    y: Box<[Vector<E, N>]>,
    heads: usize,
    /// Those that are rotated, the first.
    rotated: usize,
    /// Groups of heads, one for a unit.
    groups: usize,
    from: Strides,
    to: Strides,
}

/// Cosines and sines by position.
#[derive(CubeType, CubeLaunch)]
struct Angles<N: Size> {
    cos: Box<[Vector<f32, N>]>,
    sin: Box<[Vector<f32, N>]>,
    stride: usize,
    /// The first position.
    offset: usize,
    /// −1 rotates back.
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
    first: usize,
    second: usize,
    cos: Vector<f32, N>,
    sin: Vector<f32, N>,
}

/// Rotates a place in the heads of a group.
#[cube]
fn rotate<E: Float, N: Size>(
    all: &mut Rotated<E, N>,
    place: &Place<N>,
    group: usize,
    #[comptime] plan: Plan,
) {
    let head = group * comptime!(plan.heads);
    let x_at = place.batch * all.from.batch + place.time * all.from.time;
    let y_at = place.batch * all.to.batch + place.time * all.to.time;
    let mut a_held = Array::<Vector<E, N>>::new(comptime!(plan.heads));
    let mut b_held = Array::<Vector<E, N>>::new(comptime!(plan.heads));
    #[unroll]
    for c in 0..comptime!(plan.heads) {
        // Past the last head that one again: a load under a condition would cost registers.
        let h = min(head + c, all.heads - 1);
        a_held[c] = all.x[x_at + h * all.from.head + place.first];
        b_held[c] = all.x[x_at + h * all.from.head + place.second];
    }
    #[unroll]
    for c in 0..comptime!(plan.heads) {
        let h = head + c;
        if h < all.heads {
            let a = Vector::<f32, N>::cast_from(a_held[c]);
            let b = Vector::<f32, N>::cast_from(b_held[c]);
            let at = y_at + h * all.to.head;
            if comptime!(plan.copies) && h >= all.rotated {
                all.y[at + place.first] = a_held[c];
                all.y[at + place.second] = b_held[c];
            } else if comptime!(plan.interleaved) {
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
    q: &mut Rotated<E, N>,
    k: &mut Rotated<E, N>,
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
            first,
            second,
            cos: angles.cos[at],
            sin: angles.sin[at] * Vector::<f32, N>::new(angles.sign),
        };
        if comptime!(!plan.keys) || group < q.groups {
            rotate::<E, N>(q, &place, group, plan);
        } else {
            rotate::<E, N>(k, &place, group - q.groups, plan);
        }
    }
}

/// The table, and which way to rotate.
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

/// `q`, and `k` if there is one, rotated; contiguous.
pub(crate) fn rope(
    op: &'static str,
    q: CubeTensor,
    k: Option<CubeTensor>,
    rotation: Rotation<CubeBackend>,
) -> (CubeTensor, Option<CubeTensor>) {
    // Over the input where nobody needs it again: what a unit writes it alone has read, before.
    let job = |mut x: CubeTensor, name: &'static str| {
        let y = match launch::in_place(&mut x, op, name) {
            true => x.clone(),
            false => launch::output(&x, op, name, x.meta.shape().clone(), x.dtype),
        };
        let from = Heads::new(x);
        let rotated = from.dims[1];
        Job { from, to: Heads::new(y.clone()), rotated, y }
    };
    let (q, k) = match k {
        None => (job(q, "y"), None),
        Some(k) => (job(q, "q"), Some(job(k, "k"))),
    };
    let outputs = (q.y.clone(), k.as_ref().map(|k| k.y.clone()));
    rotated(q, k, rotation);
    outputs
}

/// The first `rotated` heads of a `[B, T, …·D]` tensor rotated, the others as they are.
pub(crate) fn packed(
    op: &'static str,
    x: CubeTensor,
    rotated_heads: usize,
    rotation: Rotation<CubeBackend>,
) -> CubeTensor {
    let width = 2 * rotation.cos.meta.shape()[1];
    let x = untile(x);
    let mut x = if x.meta.strides()[2] == 1 { x } else { into_contiguous(x) };
    let reused = launch::in_place(&mut x, op, "y");
    let y = match reused {
        true => x.clone(),
        false => launch::output(&x, op, "y", x.meta.shape().clone(), x.dtype),
    };
    // Where they are the others stay as they are.
    let heads = if reused { rotated_heads } else { x.meta.shape()[2] / width };
    let view = |tensor: CubeTensor| Heads::packed(tensor, heads, width);
    rotated(
        Job { from: view(x), to: view(y.clone()), rotated: rotated_heads, y: y.clone() },
        None,
        rotation,
    );
    y
}

/// What is rotated, and where it goes.
struct Job {
    from: Heads,
    to: Heads,
    /// Heads that are rotated; the rest is copied.
    rotated: usize,
    y: CubeTensor,
}

impl Job {
    /// As the kernel takes it, in vectors of `size` elements, a unit `heads` heads.
    fn argument<E: Float, N: Size>(&self, size: usize, heads: usize) -> RotatedLaunch<E, N> {
        let strides = |of: &Heads| {
            let [batch, head, time] = of.strides.map(|stride| stride / size);
            StridesLaunch::new(batch, head, time)
        };
        RotatedLaunch::new(
            self.from.tensor.clone().into_buffer_arg(),
            self.y.clone().into_buffer_arg(),
            self.from.dims[1],
            self.rotated,
            self.from.dims[1].div_ceil(heads),
            strides(&self.from),
            strides(&self.to),
        )
    }
}

/// No second tensor.
fn none<E: Float, N: Size>(elements: usize) -> RotatedLaunch<E, N> {
    // Positions count the buffers that are bound: q, its output.
    let buffer = |position| BufferArg::alias(position, elements);
    let strides = || StridesLaunch::new(0, 0, 0);
    RotatedLaunch::new(buffer(0), buffer(1), 0, 0, 0, strides(), strides())
}

fn rotated(q: Job, k: Option<Job>, rotation: Rotation<CubeBackend>) {
    let Rotation { cos, sin, layout, offset, inverse } = rotation;
    let [batch, q_heads, length, width] = q.from.dims;
    let k_heads = k.as_ref().map_or(0, |k| k.from.dims[1]);
    if batch * (q_heads + k_heads) * length == 0 {
        return;
    }
    let client = q.y.client.clone();
    let (cos, sin) = (Rows::new(cos), Rows::new(sin));
    let jobs: Vec<&Job> = [&q].into_iter().chain(&k).collect();
    let halves: Vec<Rows> =
        jobs.iter().flat_map(|job| [&job.from, &job.to]).map(Heads::halves).collect();
    let all: Vec<&Rows> = halves.iter().chain([&cos, &sin]).collect();
    let size = launch::vector_size(&client, q.y.dtype, &all);
    let vectors = width / 2 / size;
    let plan = Plan {
        heads: q_heads.max(k_heads).next_power_of_two().min(HEADS),
        interleaved: layout == RopeLayout::Interleaved,
        keys: k.is_some(),
        copies: q.rotated < q_heads,
    };
    let places = length * vectors;
    let most = UNITS.min(client.properties().hardware.max_units_per_cube as usize);
    let units = places.next_power_of_two().clamp(32, most);
    let groups = q_heads.div_ceil(plan.heads) + k_heads.div_ceil(plan.heads);
    let blocks = places.div_ceil(units);
    let cubes = batch * groups * blocks;
    let tensors = jobs.iter().flat_map(|job| [&job.from.tensor, &job.y]);
    let large: Vec<&CubeTensor> = tensors.chain([&cos.tensor]).collect();
    let address = launch::address_type(&large);
    let elements = q.y.meta.num_elements();
    let dtype = dtype_to_elem_type(q.y.dtype);
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
            q.argument(size, plan.heads),
            match &k {
                Some(k) => k.argument(size, plan.heads),
                None => none(elements),
            },
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
}
