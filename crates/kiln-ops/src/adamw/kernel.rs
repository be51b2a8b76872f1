//! The kernel: elementwise, a vector of each tensor for a unit, all loads before the first result.

use super::backend::{Stepped, Steps};
use super::{AdamWOptions, OP};
use crate::autodiff::{List, MOST};
use crate::launch::{self, Kind, Rows};
use crate::swiglu::kernel::{flatten, place};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::tensor::DType;
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
    /// The first of its cubes: they end where the next parameter's begin.
    first_cube: usize,
}

/// The same as it is written.
#[derive(CubeType, CubeLaunch)]
struct Written<N: Size> {
    value: Box<[Vector<f32, N>]>,
    first: Box<[Vector<f32, N>]>,
    second: Box<[Vector<f32, N>]>,
}

/// And once more, in 16 bits.
#[derive(CubeType, CubeLaunch)]
struct Copied<C: Float, N: Size> {
    value: Box<[Vector<C, N>]>,
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
    /// Whether there are copies.
    copied: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn adamw_kernel<E: Float, C: Float, N: Size>(
    all: &Sequence<Read<E, N>>,
    scale: &[f32],
    new: &mut Sequence<Written<N>>,
    copies: &mut Sequence<Copied<C, N>>,
    numbers: Numbers,
    #[comptime] plan: Plan,
    #[define(E, C)] _dtypes: [ElemType; 2],
) {
    // Each cube is one parameter's.
    #[unroll]
    for k in 0..plan.count {
        let of = &all[k];
        let i = (CUBE_POS - of.first_cube) * comptime!(plan.units as usize) + UNIT_POS_X as usize;
        let mut own = CUBE_POS >= of.first_cube && i < of.vectors;
        if comptime!(k + 1 < plan.count) {
            let next = &all[k + 1];
            own = own && CUBE_POS < next.first_cube;
        }
        if own {
            let new = &mut new[k];
            let p = of.value[place(i, of.width, of.value_stride, plan.strided)];
            let g = of.grad[place(i, of.width, of.grad_stride, plan.strided)];
            let m = of.first[place(i, of.width, of.first_stride, plan.strided)];
            let v = of.second[place(i, of.width, of.second_stride, plan.strided)];
            let mut g = Vector::<f32, N>::cast_from(g);
            if comptime!(plan.scaled) {
                g *= Vector::new(scale[0]);
            }
            // A compiler that fuses either product would do so as it likes, and another in kernels of other element types.
            let m = fma(m, Vector::new(numbers.beta1), g * Vector::new(numbers.new1));
            let v = fma(v, Vector::new(numbers.beta2), g * g * Vector::new(numbers.new2));
            let divisor = v.sqrt() * Vector::new(numbers.root) + Vector::new(numbers.eps);
            let update = m * Vector::new(numbers.rate) / divisor;
            let p = p * Vector::new(numbers.kept) - update;
            new.value[i] = p;
            if comptime!(plan.copied) {
                let copy = &mut copies[k];
                copy.value[i] = Vector::cast_from(p);
            }
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
    /// Where p goes in 16 bits.
    copy: Option<CubeTensor>,
    /// They are all in their places.
    reused: bool,
    kind: Kind,
}

impl Parameter {
    fn new([value, grad, first, second]: [CubeTensor; 4], copy: Option<CubeTensor>) -> Self {
        let (client, dtype) = (value.client.clone(), grad.dtype);
        let [mut value, mut first, mut second] = [value, first, second].map(untile);
        let mut reused = true;
        let mut out = |name: &'static str, of: &mut CubeTensor| {
            if launch::in_place(of, OP, name) {
                return of.clone();
            }
            reused = false;
            launch::output(of, OP, name, of.meta.shape().clone(), of.dtype)
        };
        let new = [out("value", &mut value), out("first", &mut first), out("second", &mut second)];
        let copy = copy.map(|mut copy| out("copy", &mut copy));
        let mut rows = [value, grad, first, second].map(Rows::new);
        let strided = flatten(&mut rows);
        let [value, grad, first, second] = rows;
        let mut size = launch::vector_size(&client, value.tensor.dtype, &[&value, &first, &second])
            .min(launch::vector_size(&client, dtype, &[&grad]));
        if let Some(copy) = &copy {
            let mut rows = [Rows::new(copy.clone())];
            flatten(&mut rows);
            size = size.min(launch::vector_size(&client, copy.dtype, &[&rows[0]]));
        }
        let [all, of_grad, of_first, of_second] =
            [&value, &grad, &first, &second].map(|of| &of.tensor);
        let address = launch::address_type(&[all, of_grad, of_first, of_second, &new[0]]);
        let kind = Kind { dtype, size, strided, address };
        Self { value, grad, first, second, new, copy, reused, kind }
    }

    fn vectors(&self) -> usize {
        self.new[0].meta.num_elements() / self.kind.size
    }

    fn read<E: Float, N: Size>(&self, first_cube: usize) -> ReadLaunch<E, N> {
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
        )
    }

    fn written<N: Size>(&self) -> WrittenLaunch<N> {
        let [value, first, second] = self.new.clone().map(CubeTensor::into_buffer_arg);
        WrittenLaunch::new(value, first, second)
    }

    fn copied<C: Float, N: Size>(&self) -> Option<CopiedLaunch<C, N>> {
        Some(CopiedLaunch::new(self.copy.clone()?.into_buffer_arg()))
    }

    /// Parameters of one launch have it in common.
    fn kind(&self) -> (Kind, Option<DType>) {
        (self.kind, self.copy.as_ref().map(|copy| copy.dtype))
    }
}

/// The first cube of a place that is left.
const NONE: usize = u32::MAX as usize;

/// Buffers of a parameter.
const BUFFERS: u32 = 8;

/// Parameters of a launch. A kernel's arguments are at most 4 KiB everywhere: with 32-bit numbers 32 parameters take 4020
/// bytes, with 64-bit ones 16 take 2984.
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
    let Steps { values, grads, firsts, seconds, copies, scale, options } = of;
    let [values, grads, firsts, seconds] = [values, grads, firsts, seconds].map(List::into_vec);
    let count = values.len();
    assert!([&grads, &firsts, &seconds].iter().all(|of| of.len() == count), "{count} parameters");
    let copies = copies.into_vec();
    assert!(copies.is_empty() || copies.len() == count, "copies of all {count} parameters or none");
    let client = values[0].client.clone();
    let tensors = values.into_iter().zip(grads).zip(firsts).zip(seconds);
    let mut copies = copies.into_iter();
    let all: Vec<Parameter> = tensors
        .map(|(((value, grad), first), second)| {
            Parameter::new([value, grad, first, second], copies.next())
        })
        .collect();
    let new: Vec<[CubeTensor; 3]> = all.iter().map(|of| of.new.clone()).collect();
    let copies = all.iter().filter_map(|of| of.copy.clone()).collect();
    let addresses = all.iter().map(|of| most(&client, of.kind.address));
    let most = addresses.min().unwrap_or(1);
    let scale = scale.option();
    for some in launch::alike(all, Parameter::kind, most) {
        step(&some, scale.clone(), options);
    }
    let of = |k: usize| new.iter().map(|new| new[k].clone()).collect();
    Stepped { values: of(0), firsts: of(1), seconds: of(2), copies }
}

/// One launch.
fn step(all: &[Parameter], scale: Option<CubeTensor>, options: AdamWOptions) {
    let (Kind { dtype, size, strided, address }, copy) = all[0].kind();
    let like = &all[0].new[0];
    let client = like.client.clone();
    let units = UNITS.min(client.properties().hardware.max_units_per_cube);
    let count = all.len().next_power_of_two();
    let plan = Plan { units, count, strided, scaled: scale.is_some(), copied: copy.is_some() };
    let scale = scale.unwrap_or_else(|| launch::unused(like, like.dtype));
    let ways = [("in place", all.iter().all(|of| of.reused)), ("several", all.len() > 1)];
    launch::plans::note("adamw", &(&plan, size, address, copy), &ways);
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
    let mut copies = SequenceArg::new();
    let mut cubes = 0;
    for of in all {
        let first = cubes;
        cubes += of.vectors().div_ceil(units as usize);
        read.push(of.read(first));
        written.push(of.written());
        of.copied().into_iter().for_each(|copy| copies.push(copy));
    }
    for _ in all.len()..count {
        read.push(all[0].read(NONE));
        written.push(all[0].written());
        all[0].copied().into_iter().for_each(|copy| copies.push(copy));
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
            copies,
            numbers,
            plan,
            [dtype, copy.unwrap_or(DType::F32)].map(dtype_to_elem_type),
        );
    }
}
