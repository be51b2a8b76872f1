//! The kernel: elementwise, a vector of each tensor for a unit, all loads before the first result.

use super::backend::{Stepped, Steps};
use super::{AdamWOptions, OP};
use crate::autodiff::{List, MOST};
use crate::launch::{self, Kind, Rows};
use crate::swiglu::kernel::{flatten, place};
use burn::backend::cubecl::dtype_to_elem_type;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::untile;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;

/// The numbers of a step, corrected.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Numbers {
    beta1: f32,
    new1: f32,
    beta2: f32,
    new2: f32,
    rate: f32,
    root: f32,
    eps: f32,
    kept: f32,
}

/// A parameter as it is read. Sizes are in vectors: elements, those of a row, and the distances of rows.
#[derive(CubeType, CubeLaunch)]
struct Read<E: Float, N: Size> {
    value: Box<[Vector<f32, N>]>,
    grad: Box<[Vector<E, N>]>,
    first: Box<[Vector<f32, N>]>,
    second: Box<[Vector<f32, N>]>,
    vectors: usize,
    width: usize,
    value_stride: usize,
    grad_stride: usize,
    first_stride: usize,
    second_stride: usize,
    /// The first of its cubes, and the one behind the last.
    first_cube: usize,
    end_cube: usize,
}

/// The same as it is written.
#[derive(CubeType, CubeLaunch)]
struct Written<N: Size> {
    value: Box<[Vector<f32, N>]>,
    first: Box<[Vector<f32, N>]>,
    second: Box<[Vector<f32, N>]>,
}

/// What a kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    units: u32,
    /// Places for parameters: a power of two, so that few kernels are compiled.
    count: usize,
    /// Whether the tensors are rows at distances of their own.
    strided: bool,
    /// Whether gradients are scaled.
    scaled: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn adamw_kernel<E: Float, N: Size>(
    of: &Sequence<Read<E, N>>,
    scale: &[f32],
    new: &mut Sequence<Written<N>>,
    numbers: Numbers,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    // Each cube is one parameter's.
    #[unroll]
    for k in 0..plan.count {
        let of = &of[k];
        let i = (CUBE_POS - of.first_cube) * comptime!(plan.units as usize) + UNIT_POS_X as usize;
        if CUBE_POS >= of.first_cube && CUBE_POS < of.end_cube && i < of.vectors {
            let new = &mut new[k];
            let p = of.value[place(i, of.width, of.value_stride, plan.strided)];
            let g = of.grad[place(i, of.width, of.grad_stride, plan.strided)];
            let m = of.first[place(i, of.width, of.first_stride, plan.strided)];
            let v = of.second[place(i, of.width, of.second_stride, plan.strided)];
            let mut g = Vector::<f32, N>::cast_from(g);
            if comptime!(plan.scaled) {
                g *= Vector::new(scale[0]);
            }
            let m = m * Vector::new(numbers.beta1) + g * Vector::new(numbers.new1);
            let v = v * Vector::new(numbers.beta2) + g * g * Vector::new(numbers.new2);
            let divisor = v.sqrt() * Vector::new(numbers.root) + Vector::new(numbers.eps);
            let update = m * Vector::new(numbers.rate) / divisor;
            new.value[i] = p * Vector::new(numbers.kept) - update;
            new.first[i] = m;
            new.second[i] = v;
        }
    }
}

/// A parameter on the host.
struct Parameter {
    value: Rows,
    grad: Rows,
    first: Rows,
    second: Rows,
    /// Where p, m and v go.
    new: [CubeTensor; 3],
    /// They are all in their places.
    reused: bool,
    kind: Kind,
}

impl Parameter {
    fn new([value, grad, first, second]: [CubeTensor; 4]) -> Self {
        let (client, dtype) = (value.client.clone(), grad.dtype);
        let [value, first, second] = [value, first, second].map(untile);
        let mut reused = true;
        let mut out = |name: &'static str, of: &CubeTensor| {
            if launch::reusable(of) {
                return of.clone();
            }
            reused = false;
            launch::output(of, OP, name, of.meta.shape().clone(), of.dtype)
        };
        let new = [out("value", &value), out("first", &first), out("second", &second)];
        let mut rows = [value, grad, first, second].map(Rows::new);
        let strided = flatten(&mut rows);
        let [value, grad, first, second] = rows;
        let size = launch::vector_size(&client, value.tensor.dtype, &[&value, &first, &second])
            .min(launch::vector_size(&client, dtype, &[&grad]));
        let [all, of_grad, of_first, of_second] =
            [&value, &grad, &first, &second].map(|of| &of.tensor);
        let address = launch::address_type(&[all, of_grad, of_first, of_second, &new[0]]);
        let kind = Kind { dtype, size, strided, address };
        Self { value, grad, first, second, new, reused, kind }
    }

    fn vectors(&self) -> usize {
        self.new[0].meta.num_elements() / self.kind.size
    }

    /// With no cubes it is in nobody's place.
    fn read<E: Float, N: Size>(&self, [first_cube, end_cube]: [usize; 2]) -> ReadLaunch<E, N> {
        let size = self.kind.size;
        ReadLaunch::new(
            self.value.tensor.clone().into_buffer_arg(),
            self.grad.tensor.clone().into_buffer_arg(),
            self.first.tensor.clone().into_buffer_arg(),
            self.second.tensor.clone().into_buffer_arg(),
            self.vectors(),
            self.value.width / size,
            self.value.stride / size,
            self.grad.stride / size,
            self.first.stride / size,
            self.second.stride / size,
            first_cube,
            end_cube,
        )
    }

    fn written<N: Size>(&self) -> WrittenLaunch<N> {
        let [value, first, second] = self.new.clone().map(CubeTensor::into_buffer_arg);
        WrittenLaunch::new(value, first, second)
    }
}

/// Buffers of a parameter.
const BUFFERS: u32 = 7;

/// Parameters of a launch. A kernel's arguments are at most 4 KiB everywhere: with 32-bit numbers 32 parameters take 3760
/// bytes, with 64-bit ones 16 take 2856.
fn most(client: &Client, address: AddressType) -> usize {
    let bound = (client.properties().hardware.max_bindings.saturating_sub(1) / BUFFERS).max(1);
    let fits = if address == AddressType::U32 { MOST } else { MOST / 2 };
    fits.min(bound as usize)
}

/// p, m and v after a step: a launch for as many parameters as are of one [`Kind`].
///
/// # Panics
///
/// If there are none, or not of all as many.
pub(super) fn adamw(of: Steps<CubeBackend>) -> Stepped<CubeBackend> {
    let Steps { values, grads, firsts, seconds, scale, options } = of;
    let [values, grads, firsts, seconds] = [values, grads, firsts, seconds].map(List::into_vec);
    let count = values.len();
    assert!([&grads, &firsts, &seconds].iter().all(|of| of.len() == count), "{count} parameters");
    let client = values[0].client.clone();
    let tensors = values.into_iter().zip(grads).zip(firsts).zip(seconds);
    let all: Vec<Parameter> = tensors
        .map(|(((value, grad), first), second)| Parameter::new([value, grad, first, second]))
        .collect();
    let new: Vec<[CubeTensor; 3]> = all.iter().map(|of| of.new.clone()).collect();
    let addresses = all.iter().map(|of| most(&client, of.kind.address));
    let most = addresses.min().unwrap_or(1);
    let scale = scale.option();
    for some in launch::alike(all, |of| of.kind, most) {
        step(&some, scale.clone(), options);
    }
    let of = |k: usize| new.iter().map(|new| new[k].clone()).collect();
    Stepped { values: of(0), firsts: of(1), seconds: of(2) }
}

/// One launch.
fn step(all: &[Parameter], scale: Option<CubeTensor>, options: AdamWOptions) {
    let kind = all[0].kind;
    let Kind { dtype, size, strided, address } = kind;
    let like = &all[0].new[0];
    let client = like.client.clone();
    let units = UNITS.min(client.properties().hardware.max_units_per_cube);
    let count = all.len().next_power_of_two();
    let plan = Plan { units, count, strided, scaled: scale.is_some() };
    let scale = scale.unwrap_or_else(|| launch::unused(like, like.dtype));
    let ways = [("in place", all.iter().all(|of| of.reused)), ("several", all.len() > 1)];
    launch::plans::note("adamw", &(&plan, size, address), &ways);
    let numbers = NumbersLaunch::new(
        options.beta1 as f32,
        (1.0 - options.beta1) as f32,
        options.beta2 as f32,
        (1.0 - options.beta2) as f32,
        options.rate() as f32,
        options.root() as f32,
        options.eps as f32,
        options.kept() as f32,
    );
    let (mut read, mut written) = (SequenceArg::new(), SequenceArg::new());
    let mut cubes = 0;
    for of in all {
        let first = cubes;
        cubes += of.vectors().div_ceil(units as usize);
        read.push(of.read([first, cubes]));
        written.push(of.written());
    }
    for _ in all.len()..count {
        read.push(all[0].read([cubes, cubes]));
        written.push(all[0].written());
    }
    // SAFETY: a unit keeps to vectors below their number, which all tensors of its parameter hold; of a tensor that is
    // written in its place it has read what it writes.
    unsafe {
        adamw_kernel::launch_unchecked(
            &client,
            launch::grid(&client, cubes),
            CubeDim::new_1d(units),
            address,
            size,
            read,
            scale.into_buffer_arg(),
            written,
            numbers,
            plan,
            dtype_to_elem_type(dtype),
        );
    }
}
