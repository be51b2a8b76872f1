//! The kernels before and behind the iteration: momentum, what is iterated and the sums of its squares; and the step.
//!
//! Both go through the columns of one matrix of each weight: of weights that have several side by side there is a launch
//! for each, and matrices of one width are iterated together.

use super::backend::{Stepped, Steps};
use super::{MuonOptions, OP};
use crate::autodiff::{List, MOST};
use crate::device::Hardware;
use crate::launch::{self, Rows};
use crate::newton_schulz::kernel::{Matrices, parts, units};
use crate::reduce::{self, RowUnits, Sums};
use crate::tile::Family;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::untile;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// A weight as it is read. Distances of rows are in vectors.
#[derive(CubeType, CubeLaunch)]
struct Gradient<E: Float, N: Size> {
    grad: Box<[Vector<E, N>]>,
    momentum: Box<[Vector<f32, N>]>,
    grad_stride: usize,
    momentum_stride: usize,
}

/// Likewise.
#[derive(CubeType, CubeLaunch)]
struct Value<N: Size> {
    value: Box<[Vector<f32, N>]>,
    stride: usize,
}

/// What is written of it, contiguous.
#[derive(CubeType, CubeLaunch)]
struct Written<N: Size> {
    of: Box<[Vector<f32, N>]>,
}

/// The same in 16 bits.
#[derive(CubeType, CubeLaunch)]
struct Copied<C: Float, N: Size> {
    of: Box<[Vector<C, N>]>,
}

/// The columns of one matrix of each weight, and how cubes go through them. Widths are in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Part {
    /// Of a matrix.
    rows: usize,
    /// Of a weight, and of the matrix, which begins at `start`.
    whole: usize,
    width: usize,
    start: usize,
    /// Matrices of a weight, cubes of a matrix, cubes that have one.
    matrices: usize,
    chunks: usize,
    cubes: usize,
    /// The first one of the stack that is iterated, and the distance of its rows.
    first: usize,
    stride: usize,
}

/// What a kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    row: RowUnits,
    /// Places for weights: a power of two, so that few kernels are compiled.
    count: usize,
    nesterov: bool,
    /// Whether gradients are scaled.
    scaled: bool,
    /// Whether there are copies.
    copied: bool,
}

/// Where vector `i` of a matrix of a weight stands: its row among those of the weight, its column, and its place in the
/// stack.
#[cube]
fn places(part: &Part, weight: usize, i: usize) -> (usize, usize, usize) {
    let matrix = CUBE_POS / part.chunks % part.matrices;
    let (row, col) = (i / part.width, i % part.width);
    let number = part.first + weight * part.matrices + matrix;
    let at = (number * part.rows + row) * part.stride + col;
    (matrix * part.rows + row, part.start + col, at)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn momentum_kernel<E: Float, U: Float, N: Size>(
    of: &Sequence<Gradient<E, N>>,
    scale: &[f32],
    new: &mut Sequence<Written<N>>,
    updates: &mut [Vector<U, N>],
    sums: &mut [f32],
    part: Part,
    rate: f32,
    fresh: f32,
    #[comptime] plan: Plan,
    #[define(E, U)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(plan.row.units as usize);
    let weight = CUBE_POS / (part.matrices * part.chunks);
    let first = CUBE_POS % part.chunks * units + UNIT_POS_X as usize;
    let mut squares = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for k in 0..plan.count {
        if CUBE_POS < part.cubes && weight == k {
            let (of, new) = (&of[k], &mut new[k]);
            for i in range_stepped(first, part.rows * part.width, part.chunks * units) {
                let (row, col, at) = places(&part, weight, i);
                let mut g = Vector::<f32, N>::cast_from(of.grad[row * of.grad_stride + col]);
                if comptime!(plan.scaled) {
                    g *= Vector::new(scale[0]);
                }
                let g = g * Vector::new(fresh);
                // A compiler that fuses either product would do so as it likes, and another in kernels of other types.
                let m = fma(of.momentum[row * of.momentum_stride + col], Vector::new(rate), g);
                new.of[row * part.whole + col] = m;
                let mut u = m;
                if comptime!(plan.nesterov) {
                    u = fma(m, Vector::new(rate), g);
                }
                let stored = Vector::<U, N>::cast_from(u);
                updates[at] = stored;
                let stored = Vector::<f32, N>::cast_from(stored);
                squares += stored * stored;
            }
        }
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.row.shared()));
    let mut sum = Array::<f32>::new(1usize);
    sum[0] = reduce::vector::<Sums<1>, N>(squares);
    reduce::rows::<Sums<1>>(&mut sum, &mut shared, plan.row);
    if CUBE_POS < part.cubes && UNIT_POS_X == 0 {
        sums[part.first * part.chunks + CUBE_POS] = sum[0];
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn step_kernel<U: Float, C: Float, N: Size>(
    of: &Sequence<Value<N>>,
    updates: &[Vector<U, N>],
    new: &mut Sequence<Written<N>>,
    copies: &mut Sequence<Copied<C, N>>,
    part: Part,
    kept: f32,
    rate: f32,
    #[comptime] plan: Plan,
    #[define(U, C)] _dtypes: [ElemType; 2],
) {
    let units = comptime!(plan.row.units as usize);
    let weight = CUBE_POS / (part.matrices * part.chunks);
    let first = CUBE_POS % part.chunks * units + UNIT_POS_X as usize;
    #[unroll]
    for k in 0..plan.count {
        if CUBE_POS < part.cubes && weight == k {
            let (of, new) = (&of[k], &mut new[k]);
            for i in range_stepped(first, part.rows * part.width, part.chunks * units) {
                let (row, col, at) = places(&part, weight, i);
                let update = Vector::<f32, N>::cast_from(updates[at]) * Vector::new(-rate);
                let value = fma(of.value[row * of.stride + col], Vector::new(kept), update);
                new.of[row * part.whole + col] = value;
                if comptime!(plan.copied) {
                    let copy = &mut copies[k];
                    copy.of[row * part.whole + col] = Vector::cast_from(value);
                }
            }
        }
    }
}

/// A weight on the host.
struct Weight {
    value: Rows,
    grad: Rows,
    momentum: Rows,
    /// Where p and m go.
    new: [CubeTensor; 2],
    /// Where p goes in 16 bits.
    copy: Option<CubeTensor>,
    /// They are in their places.
    reused: bool,
    kind: Kind,
}

/// What weights of one launch have in common.
#[derive(Clone, Copy, PartialEq)]
struct Kind {
    grad: DType,
    copy: Option<DType>,
    /// Elements of a vector.
    size: usize,
    address: AddressType,
}

impl Weight {
    fn new(
        [value, grad, momentum]: [CubeTensor; 3],
        copy: Option<CubeTensor>,
        widths: &[usize],
    ) -> Self {
        let (client, dtype) = (value.client.clone(), grad.dtype);
        let [mut value, mut momentum] = [value, momentum].map(untile);
        let mut reused = true;
        let mut out = |name: &'static str, of: &mut CubeTensor| {
            if launch::in_place(of, OP, name) {
                return of.clone();
            }
            reused = false;
            launch::output(of, OP, name, of.meta.shape().clone(), of.dtype)
        };
        let new = [out("value", &mut value), out("momentum", &mut momentum)];
        let copy = copy.map(|mut copy| out("copy", &mut copy));
        let [value, grad, momentum] = [value, grad, momentum].map(Rows::new);
        let mut size = launch::vector_size(&client, DType::F32, &[&value, &momentum])
            .min(launch::vector_size(&client, dtype, &[&grad]));
        if let Some(copy) = &copy {
            size = size.min(launch::vector_size(&client, copy.dtype, &[&Rows::new(copy.clone())]));
        }
        while !widths.iter().all(|width| width.is_multiple_of(size)) {
            size /= 2;
        }
        let all = [&value, &grad, &momentum].map(|of| &of.tensor);
        let address = launch::address_type(&[all[0], all[1], all[2], &new[0]]);
        let of_copy = copy.as_ref().map(|copy| copy.dtype);
        let kind = Kind { grad: dtype, copy: of_copy, size, address };
        Self { value, grad, momentum, new, copy, reused, kind }
    }
}

/// p and m after a step of weights of one shape.
///
/// # Panics
///
/// If there are none, or not of all as many.
pub(super) fn muon(of: Steps<CubeBackend>) -> Stepped<CubeBackend> {
    let Steps { values, grads, momenta, copies, scale, options, family } = of;
    let [values, grads, momenta] = [values, grads, momenta].map(List::into_vec);
    let count = values.len();
    assert!([&grads, &momenta].iter().all(|of| of.len() == count), "{count} weights");
    let copies = copies.into_vec();
    assert!(copies.is_empty() || copies.len() == count, "copies of all {count} weights or none");
    let client = values[0].client.clone();
    let shape = values[0].meta.shape().clone();
    let last = shape.num_dims() - 2;
    let (rows, columns) = (shape[last], shape[last + 1]);
    let widths = options.parts(columns);
    let tensors = values.into_iter().zip(grads).zip(momenta);
    let mut copies = copies.into_iter();
    let all: Vec<Weight> = tensors
        .map(|((value, grad), momentum)| {
            Weight::new([value, grad, momentum], copies.next(), &widths)
        })
        .collect();
    let new: Vec<[CubeTensor; 2]> = all.iter().map(|of| of.new.clone()).collect();
    let copies = all.iter().filter_map(|of| of.copy.clone()).collect();
    // Elsewhere buffers are few, and none may be written twice in a launch, as one that stands for a missing one would be.
    let most = if Hardware::of(&client).ptx { MOST } else { 1 };
    let step = Step {
        groups: launch::alike(all, |of| of.kind, most),
        scale: scale.option(),
        options: &options,
        client,
        rows,
        columns,
        matrices: shape[..last].iter().product(),
        count,
    };
    let mut begun: Vec<(usize, Vec<usize>)> = vec![];
    let mut start = 0;
    for width in widths {
        match begun.iter_mut().find(|(of, _)| *of == width) {
            Some((_, starts)) => starts.push(start),
            None => begun.push((width, vec![start])),
        }
        start += width;
    }
    for (width, starts) in begun {
        step.of_width(width, &starts, family);
    }
    let of = |k: usize| new.iter().map(|new| new[k].clone()).collect();
    Stepped { values: of(0), momenta: of(1), copies }
}

/// A step of weights of one shape.
struct Step<'a> {
    /// Those that share launches.
    groups: Vec<Vec<Weight>>,
    scale: Option<CubeTensor>,
    options: &'a MuonOptions,
    client: Client,
    /// Of a weight, with so many matrices on top of each other.
    rows: usize,
    columns: usize,
    matrices: usize,
    /// Weights.
    count: usize,
}

impl Step<'_> {
    /// Of the matrices of this width, which begin at these columns.
    fn of_width(&self, width: usize, starts: &[usize], family: Option<Family>) {
        let Self { client, options, rows, matrices, .. } = self;
        let like = &self.groups[0][0].new[0];
        let stack = starts.len() * self.count * matrices;
        let shape = Shape::new([stack, *rows, width]);
        let updates = launch::scratch(like, OP, "update", shape, options.dtype);
        // One number of sums for all, whatever vectors a launch has.
        let chunks = parts(client, rows * width / self.widest());
        let sums = Shape::new([stack, chunks]);
        let sums = launch::scratch(like, OP, "sums of squares", sums, DType::F32);
        self.each(width, starts, chunks, width, |part, weights, kind| {
            self.momentum(part, weights, kind, [&updates, &sums]);
        });
        let made = Matrices::new(updates).iterated(sums, options.newton_schulz, family);
        let made = Rows::new(made);
        let rate = options.rate(*rows, width) as f32;
        self.each(width, starts, chunks, made.stride, |part, weights, kind| {
            self.step(part, weights, kind, &made.tensor, rate);
        });
    }

    /// The largest vectors of a launch.
    fn widest(&self) -> usize {
        self.groups.iter().map(|of| of[0].kind.size).max().unwrap_or(1)
    }

    /// Each launch: of the matrices that begin at a column, of the weights of a group.
    fn each(
        &self,
        width: usize,
        starts: &[usize],
        chunks: usize,
        stride: usize,
        launch: impl Fn(PartLaunch, &[Weight], Kind),
    ) {
        let mut first = 0;
        for start in starts {
            for weights in &self.groups {
                let kind = weights[0].kind;
                let size = kind.size;
                let matrices = weights.len() * self.matrices;
                let part = PartLaunch::new(
                    self.rows,
                    self.columns / size,
                    width / size,
                    start / size,
                    self.matrices,
                    chunks,
                    matrices * chunks,
                    first,
                    stride / size,
                );
                launch(part, weights, kind);
                first += matrices;
            }
        }
    }

    fn plan(&self, weights: &[Weight]) -> Plan {
        Plan {
            row: RowUnits::new(&self.client, units(&self.client), 1),
            count: weights.len().next_power_of_two(),
            nesterov: self.options.nesterov,
            scaled: self.scale.is_some(),
            copied: false,
        }
    }

    /// Cubes of a launch.
    fn grid(&self, weights: &[Weight], chunks: usize) -> CubeCount {
        launch::grid(&self.client, weights.len() * self.matrices * chunks)
    }

    fn momentum(
        &self,
        part: PartLaunch,
        weights: &[Weight],
        kind: Kind,
        [updates, sums]: [&CubeTensor; 2],
    ) {
        let plan = self.plan(weights);
        let unused = || launch::unused(updates, DType::F32);
        let scale = self.scale.clone().unwrap_or_else(unused);
        let (mut of, mut new) = (SequenceArg::new(), SequenceArg::new());
        for weight in padded(weights, plan.count) {
            of.push(GradientLaunch::new(
                weight.grad.tensor.clone().into_buffer_arg(),
                weight.momentum.tensor.clone().into_buffer_arg(),
                weight.grad.stride / kind.size,
                weight.momentum.stride / kind.size,
            ));
            new.push(WrittenLaunch::new(weight.new[1].clone().into_buffer_arg()));
        }
        let address = kind.address.max(launch::address_type(&[updates]));
        let ways =
            [("in place", weights.iter().all(|of| of.reused)), ("several", weights.len() > 1)];
        let dtypes = [kind.grad, updates.dtype].map(dtype_to_elem_type);
        launch::plans::note("momentum", &(&plan, kind.size, address, dtypes), &ways);
        let rate = self.options.momentum;
        // SAFETY: cubes beyond those that have a matrix do nothing, a unit keeps to the vectors of its matrix; what is
        // written in its place it has read.
        unsafe {
            momentum_kernel::launch_unchecked(
                &self.client,
                self.grid(weights, sums.meta.shape()[1]),
                plan.row.cube_dim(),
                address,
                kind.size,
                of,
                scale.into_buffer_arg(),
                new,
                updates.clone().into_buffer_arg(),
                sums.clone().into_buffer_arg(),
                part,
                rate as f32,
                (1.0 - rate) as f32,
                plan,
                dtypes,
            );
        }
    }

    fn step(
        &self,
        part: PartLaunch,
        weights: &[Weight],
        kind: Kind,
        updates: &CubeTensor,
        rate: f32,
    ) {
        let copied = kind.copy.is_some();
        let plan = Plan { nesterov: false, scaled: false, copied, ..self.plan(weights) };
        let (mut of, mut new) = (SequenceArg::new(), SequenceArg::new());
        let mut copies = SequenceArg::new();
        for weight in padded(weights, plan.count) {
            let stride = weight.value.stride / kind.size;
            of.push(ValueLaunch::new(weight.value.tensor.clone().into_buffer_arg(), stride));
            new.push(WrittenLaunch::new(weight.new[0].clone().into_buffer_arg()));
            if let Some(copy) = &weight.copy {
                copies.push(CopiedLaunch::new(copy.clone().into_buffer_arg()));
            }
        }
        let address = kind.address.max(launch::address_type(&[updates]));
        let dtypes = [updates.dtype, kind.copy.unwrap_or(DType::F32)].map(dtype_to_elem_type);
        launch::plans::note("step of Muon", &(&plan, kind.size, address, dtypes), &[]);
        let chunks = part.chunks;
        // SAFETY: as above.
        unsafe {
            step_kernel::launch_unchecked(
                &self.client,
                self.grid(weights, chunks),
                plan.row.cube_dim(),
                address,
                kind.size,
                of,
                updates.clone().into_buffer_arg(),
                new,
                copies,
                part,
                self.options.kept() as f32,
                rate,
                plan,
                dtypes,
            );
        }
    }
}

/// The weights, and the first again in the places that are left, where no cube looks.
fn padded(weights: &[Weight], count: usize) -> impl Iterator<Item = &Weight> {
    weights.iter().chain(std::iter::repeat(&weights[0])).take(count)
}
