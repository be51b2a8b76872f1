//! The kernel: elementwise, a vector of each tensor for a unit, all loads before the first result.

use super::OP;
use super::backend::Step;
use crate::launch::{self, Rows};
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

/// Sizes in vectors: elements, those of a row, and the distances of rows.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    vectors: usize,
    width: usize,
    value: usize,
    grad: usize,
    first: usize,
    second: usize,
}

/// What a kernel is specialised on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    units: u32,
    /// Whether the tensors are rows at distances of their own.
    strided: bool,
    /// Whether gradients are scaled.
    scaled: bool,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn adamw_kernel<E: Float, N: Size>(
    value: &[Vector<f32, N>],
    grad: &[Vector<E, N>],
    first: &[Vector<f32, N>],
    second: &[Vector<f32, N>],
    scale: &[f32],
    new_value: &mut [Vector<f32, N>],
    new_first: &mut [Vector<f32, N>],
    new_second: &mut [Vector<f32, N>],
    numbers: Numbers,
    sizes: Sizes,
    #[comptime] plan: Plan,
    #[define(E)] _dtype: ElemType,
) {
    let i = CUBE_POS * comptime!(plan.units as usize) + UNIT_POS_X as usize;
    if i < sizes.vectors {
        let p = value[place(i, sizes.width, sizes.value, plan.strided)];
        let g = Vector::<f32, N>::cast_from(grad[place(i, sizes.width, sizes.grad, plan.strided)]);
        let m = first[place(i, sizes.width, sizes.first, plan.strided)];
        let v = second[place(i, sizes.width, sizes.second, plan.strided)];
        let mut g = g;
        if comptime!(plan.scaled) {
            g *= Vector::new(scale[0]);
        }
        let m = m * Vector::new(numbers.beta1) + g * Vector::new(numbers.new1);
        let v = v * Vector::new(numbers.beta2) + g * g * Vector::new(numbers.new2);
        let divisor = v.sqrt() * Vector::new(numbers.root) + Vector::new(numbers.eps);
        let update = m * Vector::new(numbers.rate) / divisor;
        new_value[i] = p * Vector::new(numbers.kept) - update;
        new_first[i] = m;
        new_second[i] = v;
    }
}

/// p, m and v after a step.
pub(super) fn adamw(of: Step<CubeBackend>) -> (CubeTensor, CubeTensor, CubeTensor) {
    let Step { value, grad, first, second, scale, options } = of;
    let (client, dtype, scale) = (value.client.clone(), grad.dtype, scale.option());
    let elements = value.meta.num_elements();
    let [value, first, second] = [value, first, second].map(untile);
    let mut reused = 0;
    let mut out = |name: &'static str, of: &CubeTensor| {
        if launch::reusable(of) {
            reused += 1;
            return of.clone();
        }
        launch::output(of, OP, name, of.meta.shape().clone(), of.dtype)
    };
    let new = [out("value", &value), out("first", &first), out("second", &second)];
    let mut rows = [value, grad, first, second].map(Rows::new);
    let strided = flatten(&mut rows);
    let [value, grad, first, second] = rows;
    let size = launch::vector_size(&client, value.tensor.dtype, &[&value, &first, &second])
        .min(launch::vector_size(&client, dtype, &[&grad]));
    let units = UNITS.min(client.properties().hardware.max_units_per_cube);
    let plan = Plan { units, strided, scaled: scale.is_some() };
    let scale = scale.unwrap_or_else(|| launch::unused(&value.tensor, value.tensor.dtype));
    let address = launch::address_type(&[
        &value.tensor,
        &grad.tensor,
        &first.tensor,
        &second.tensor,
        &new[0],
    ]);
    launch::plans::note("adamw", &(&plan, size, address), &[("in place", reused > 0)]);
    let vectors = elements / size;
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
    let sizes = SizesLaunch::new(
        vectors,
        value.width / size,
        value.stride / size,
        grad.stride / size,
        first.stride / size,
        second.stride / size,
    );
    let [new_value, new_first, new_second] = new.clone();
    // SAFETY: a unit keeps to vectors below their number, which all tensors hold; of a tensor that is written in its
    // place it has read what it writes.
    unsafe {
        adamw_kernel::launch_unchecked(
            &client,
            launch::grid(&client, vectors.div_ceil(units as usize)),
            CubeDim::new_1d(units),
            address,
            size,
            value.tensor.into_buffer_arg(),
            grad.tensor.into_buffer_arg(),
            first.tensor.into_buffer_arg(),
            second.tensor.into_buffer_arg(),
            scale.into_buffer_arg(),
            new_value.into_buffer_arg(),
            new_first.into_buffer_arg(),
            new_second.into_buffer_arg(),
            numbers,
            sizes,
            plan,
            dtype_to_elem_type(dtype),
        );
    }
    let [value, first, second] = new;
    (value, first, second)
}
