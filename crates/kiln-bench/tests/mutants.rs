//! A product whose kernels are broken on purpose, each in one way. The gate must convict every one of these mutants in
//! every element type, by the check that is meant for it, and none of the others.

#![cfg(feature = "cube")]

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor,
};
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cubecl::prelude::*;
use kiln_bench::gate::{self, Check, Options, Report};
use kiln_bench::host::BoundedTensor;
use kiln_bench::registry::{
    Call, Case, Holds, HostCall, InputSpec, Operator, Output, OutputSpec, Scale, Spec, Work,
};
use kiln_ops::oracle::{Bounded, Number};
use kiln_ops::policy::{self, Implementation};
use kiln_ops::{OpError, launch};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How a kernel is broken.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mutant {
    /// It is not: the control.
    None,
    /// The last terms are left out where K is no multiple of 4.
    TailDropped,
    /// Terms come in chunks, and the last one takes the place of those before.
    LastChunk,
    /// Results are 1 % too large.
    OnePercent,
    /// The gradient of the weight is 2 % too large.
    GradientTwoPercent,
    /// An element of x is overwritten after it was read.
    InputOverwritten,
    /// The same of the cotangent.
    CotangentOverwritten,
    /// The same of what the forward has kept for the backward.
    SavedOverwritten,
    /// Rows of x are read as its columns.
    StridesSwapped,
    /// The number of terms is that of the first call.
    PlanOfAnotherShape,
    /// Only the first row is written.
    FirstRow,
    /// The same, in memory that no audit sees, which sees a smaller one instead.
    FirstRowUnseen,
    /// Zeros are written.
    Zeros,
    /// A row more than there are is written.
    PastTheEnd,
    /// A term more than there are is read, and multiplied by 0.
    PastTheRow,
    /// The result has another shape.
    Turned,
    /// It is flat.
    Flat,
    /// One of a hundred launches is wrong.
    OnceInAHundred,
}

impl Mutant {
    /// The broken ones, and the check that is meant for each.
    const BROKEN: [(Self, Check); 16] = [
        (Self::TailDropped, Check::Forward),
        (Self::LastChunk, Check::Forward),
        (Self::OnePercent, Check::Forward),
        (Self::GradientTwoPercent, Check::Gradients),
        (Self::InputOverwritten, Check::Inputs),
        (Self::CotangentOverwritten, Check::Inputs),
        (Self::SavedOverwritten, Check::Inputs),
        (Self::StridesSwapped, Check::Forward),
        (Self::PlanOfAnotherShape, Check::Forward),
        (Self::FirstRow, Check::Written),
        (Self::FirstRowUnseen, Check::Written),
        (Self::Zeros, Check::Order),
        (Self::PastTheEnd, Check::Guards),
        (Self::PastTheRow, Check::Forward),
        (Self::Turned, Check::Forward),
        (Self::Flat, Check::Forward),
    ];

    fn of(number: u32) -> Self {
        let broken = Self::BROKEN.map(|(mutant, _)| mutant);
        let all = broken.into_iter().chain([Self::OnceInAHundred]);
        all.into_iter().find(|mutant| *mutant as u32 == number).unwrap_or(Self::None)
    }
}

/// y = A·B for A of `sizes` M×K and B of K×N, of their terms from `begin` to `end`, times `factor`, and the first `written`
/// elements of it alone. `more`: as many terms more, times
/// `nothing`, which no compiler knows to be 0.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)] // what mutants change
fn product_kernel<E: Float>(
    a: &[E],
    b: &[E],
    y: &mut [E],
    n: usize,
    a_row: usize,
    a_term: usize,
    b_term: usize,
    b_column: usize,
    begin: usize,
    end: usize,
    more: usize,
    nothing: f32,
    written: usize,
    factor: f32,
    #[define(E)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < written {
        let row = ABSOLUTE_POS / n;
        let column = ABSOLUTE_POS % n;
        let mut sum = 0.0f32;
        for k in begin..end {
            let left = f32::cast_from(a[row * a_row + k * a_term]);
            sum += left * f32::cast_from(b[k * b_term + column * b_column]);
        }
        for k in end..end + more {
            sum += f32::cast_from(a[row * a_row + k * a_term]) * nothing;
        }
        y[ABSOLUTE_POS] = E::cast_from(sum * factor);
    }
}

/// A result of one element, all of it written.
fn beside(like: &CubeTensor) {
    let one = launch::output(like, "mutant", "beside", Shape::new([1]), like.dtype);
    overwrite(one);
}

fn overwrite(x: CubeTensor) {
    let (client, elem) = (x.client.clone(), dtype_to_elem_type(x.dtype));
    // SAFETY: there is a first element.
    unsafe {
        overwrite_kernel::launch_unchecked(
            &client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            x.into_buffer_arg(),
            elem,
        );
    }
}

/// Overwrites the first element.
#[cube(launch_unchecked)]
fn overwrite_kernel<E: Float>(x: &mut [E], #[define(E)] _dtype: ElemType) {
    if ABSOLUTE_POS == 0 {
        x[0] = E::new(0.0);
    }
}

/// Which product: that of the forward, A·Bᵀ for the gradient of x, Aᵀ·B for that of w.
const FORWARD: u32 = 0;
const OF_X: u32 = 1;
const OF_W: u32 = 2;

#[backend_extension(Cube, Fusion, Autodiff)]
trait MutantOps: Backend {
    #[fusion(meta = result)]
    fn mutant(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        which: u32,
        mutant: u32,
    ) -> FloatTensor<Self>;
}

/// M, N and K.
fn sizes(a: &[usize], b: &[usize], which: u32) -> [usize; 3] {
    match which {
        OF_X => [a[0], b[0], a[1]],
        OF_W => [a[1], b[1], a[0]],
        _ => [a[0], b[1], a[1]],
    }
}

fn result(a: &TensorSpec, b: &TensorSpec, which: &u32, mutant: &u32) -> TensorSpec {
    let [m, n, _] = sizes(&a.shape, &b.shape, *which);
    TensorSpec::new(shape_of(m, n, *which, Mutant::of(*mutant)), a.dtype)
}

fn shape_of(m: usize, n: usize, which: u32, mutant: Mutant) -> Shape {
    Shape::new(if mutant == Mutant::Turned && which == FORWARD { [n, m] } else { [m, n] })
}

/// K of the first call since a report was begun.
static FIRST: AtomicUsize = AtomicUsize::new(0);
/// Launches of [`Mutant::OnceInAHundred`].
static LAUNCHES: AtomicUsize = AtomicUsize::new(0);

impl MutantOps for CubeBackend {
    fn mutant(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        which: u32,
        mutant: u32,
    ) -> FloatTensor<Self> {
        let mutant = Mutant::of(mutant);
        let mutant = match (mutant, which) {
            (Mutant::GradientTwoPercent, OF_W) | (_, FORWARD) => mutant,
            (Mutant::CotangentOverwritten, OF_X) => mutant,
            _ => Mutant::None,
        };
        let [m, n, k] = sizes(&a.shape(), &b.shape(), which);
        let (a_strides, b_strides) = (a.meta.strides().to_vec(), b.meta.strides().to_vec());
        let (mut a_row, mut a_term) = (a_strides[0], a_strides[1]);
        let (mut b_term, mut b_column) = (b_strides[0], b_strides[1]);
        match which {
            OF_X => (b_term, b_column) = (b_column, b_term),
            OF_W => (a_row, a_term) = (a_term, a_row),
            _ => {}
        }
        if mutant == Mutant::StridesSwapped {
            (a_row, a_term) = (1, m);
        }
        let _ = FIRST.compare_exchange(0, k, Ordering::Relaxed, Ordering::Relaxed);
        let (begin, end) = match mutant {
            Mutant::TailDropped => (0, k / 4 * 4),
            Mutant::LastChunk => (k.saturating_sub(1) / 8 * 8, k),
            Mutant::PlanOfAnotherShape => (0, k.min(FIRST.load(Ordering::Relaxed))),
            _ => (0, k),
        };
        let (shape, dtype) = (shape_of(m, n, which, mutant), a.dtype);
        let y = if mutant == Mutant::FirstRowUnseen {
            beside(&a);
            empty_device_contiguous_dtype(a.client.clone(), a.device.clone(), shape, dtype)
        } else {
            launch::output(&a, "mutant", "y", shape, dtype)
        };
        let written = match mutant {
            Mutant::FirstRow | Mutant::FirstRowUnseen => n,
            Mutant::PastTheEnd => (m + 1) * n,
            _ => m * n,
        };
        let factor = match mutant {
            Mutant::OnePercent => 1.01,
            Mutant::GradientTwoPercent if which == OF_W => 1.02,
            Mutant::Zeros => 0.0,
            Mutant::OnceInAHundred if LAUNCHES.fetch_add(1, Ordering::Relaxed) % 100 == 60 => 1.01,
            _ => 1.0,
        };
        let client = a.client.clone();
        let elem = dtype_to_elem_type(dtype);
        // SAFETY: what is read and written of a row more than there are lies in the guard bands of an audit, and without one
        // in what the allocator rounds so few bytes up to; a term more is read where rows are cut out of wider ones.
        unsafe {
            product_kernel::launch_unchecked(
                &client,
                CubeCount::Static(written.div_ceil(64) as u32, 1, 1),
                CubeDim::new_1d(64),
                a.clone().into_buffer_arg(),
                b.into_buffer_arg(),
                y.clone().into_buffer_arg(),
                n,
                a_row,
                a_term,
                b_term,
                b_column,
                begin,
                end,
                usize::from(mutant == Mutant::PastTheRow && a_row > k),
                0.0,
                written,
                factor,
                elem,
            );
        }
        if matches!(mutant, Mutant::InputOverwritten | Mutant::CotangentOverwritten) {
            overwrite(a);
        }
        y
    }
}

/// The node of the product in a graph.
#[derive(Debug)]
struct Product;

impl<B: MutantOps> Backward<B, 2> for Product {
    type State = (FloatTensor<B>, FloatTensor<B>, u32);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let (x, w, mutant) = ops.state;
        let [of_x, of_w] = ops.parents;
        if let Some(node) = of_w {
            grads.register::<B>(node.id, B::mutant(x, dy.clone(), OF_W, mutant));
        }
        if let Some(node) = of_x {
            grads.register::<B>(node.id, B::mutant(dy, w, OF_X, mutant));
        }
    }
}

impl<B: MutantOps, C: CheckpointStrategy> MutantOps for Autodiff<B, C> {
    fn mutant(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        which: u32,
        mutant: u32,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), w.node()];
        let [x, w] = [x, w].map(|tensor| tensor.into_primitive());
        let y = B::mutant(x.clone(), w.clone(), which, mutant);
        match Product.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((x, w, mutant), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

fn product(a: Tensor<2>, b: Tensor<2>, which: u32, mutant: Mutant) -> Tensor<2> {
    let [a, b] = [a, b].map(Tensor::into_dispatch);
    Tensor::from_dispatch(<Dispatch as MutantOps>::mutant(a, b, which, mutant as u32))
}

/// The product as an operator of the registry.
struct Broken(Mutant);

const fn input(name: &'static str, shape: &'static [&'static str]) -> InputSpec {
    InputSpec { name, shape, holds: Holds::Float, mean: 0.3, fan_in: None }
}

const SPEC: Spec = Spec {
    name: "product",
    formula: "y = x·w",
    inputs: &[input("x", &["M", "K"]), input("w", &["K", "N"])],
    attributes: &[],
    outputs: &[OutputSpec { name: "y", shape: &["M", "N"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

/// A·B in float64; `at` gives the places of a term in A and B.
fn in_f64(
    [m, n, k]: [usize; 3],
    a: &BoundedTensor,
    b: &BoundedTensor,
    at: impl Fn([usize; 3]) -> [usize; 2],
) -> BoundedTensor {
    let element = |i: usize| {
        let factors = |k: usize| {
            let [left, right] = at([i / n, i % n, k]);
            (a.values[left], b.values[right])
        };
        Bounded::dot((0..k).map(factors)).stored()
    };
    BoundedTensor::new([m, n], (0..m * n).map(element).collect())
}

impl Operator for Broken {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let (x, w) = (call.rows(0), call.rows(1));
        let fused = policy::fused(&policy::Call {
            op: SPEC.name,
            elements: x.shape().num_elements(),
            dtype: x.dtype(),
            device: &x.device(),
            has_kernel: true,
        })?;
        let y = if fused { product(x, w, FORWARD, self.0) } else { x.matmul(w) };
        Ok(vec![if self.0 == Mutant::Flat { y.flatten::<1>(0, 1).into() } else { y.into() }])
    }

    fn saved(&self, call: &Call<'_>) -> Vec<Tensor<2>> {
        vec![call.rows(0).mul_scalar(1.0)]
    }

    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let (x, w) = (call.rows(0), call.rows(1));
        let dy = dy[0].clone().reshape([x.dims()[0], w.dims()[1]]);
        if self.0 == Mutant::SavedOverwritten {
            product(call.rows(2), w.clone().transpose(), OF_X, Mutant::CotangentOverwritten);
        }
        let dw = product(x, dy.clone(), OF_W, self.0);
        Some(vec![product(dy, w, OF_X, self.0), dw])
    }

    fn tf32_reference(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [x, w] = [&call.inputs[0], &call.inputs[1]];
        let [m, n, k] = sizes(&x.shape, &w.shape, FORWARD);
        vec![in_f64([m, n, k], x, w, |[i, j, t]| [i * k + t, t * n + j])]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [x, w] = [&call.inputs[0], &call.inputs[1]];
        let [m, n, k] = sizes(&x.shape, &w.shape, FORWARD);
        let dx = in_f64([m, k, n], &dy[0], w, |[i, j, t]| [i * n + t, j * n + t]);
        let dw = in_f64([k, n, m], x, &dy[0], |[i, j, t]| [t * k + i, t * n + j]);
        vec![dx, dw]
    }

    fn cases(&self) -> Vec<Case> {
        vec![Case::new([&[5, 13], &[13, 6]]), Case::new([&[7, 33], &[33, 10]])]
    }

    fn shapes(&self, _: Scale) -> Vec<Case> {
        vec![]
    }

    fn work(&self, _: &Case, _: DType) -> (Work, Work) {
        Default::default()
    }
}

fn verify(mutant: Mutant, dtype: DType, device: &Device) -> Report {
    FIRST.store(0, Ordering::Relaxed);
    let options = Options { seed: 3, fuzz: 0, family: None };
    gate::verify(&Broken(mutant), dtype, device, options)
}

/// A device that runs kernels, and the right to use it alone: an audit sees every kernel output of
/// the process.
fn kernel_device() -> Option<(Device, MutexGuard<'static, ()>)> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = kiln_test::device(kiln_ops::device::open)?;
    let found = kiln_ops::device::is_cube(&opened.device);
    if !found {
        kiln_test::skip("kernels", opened.name);
    }
    found.then_some((opened.device, alone))
}

#[test]
fn every_mutant_is_convicted_by_the_check_that_is_meant_for_it() {
    let Some((device, _alone)) = kernel_device() else { return };
    let mut free = vec![];
    for dtype in gate::dtypes(&device) {
        let right = verify(Mutant::None, dtype, &device);
        assert!(right.green(), "{dtype:?}: {:?}", right.failures);
        for (mutant, meant) in Mutant::BROKEN {
            // WebGPU itself drops writes outside a binding; CUDA does not.
            if mutant == Mutant::PastTheEnd && !kiln_ops::device::is_cuda(&device) {
                kiln_test::skip("cuda", format!("{mutant:?} on another device"));
                continue;
            }
            let report = verify(mutant, dtype, &device);
            if report.failed(meant) == 0 {
                free.push(format!("{mutant:?} in {dtype:?} by {meant:?}: {:?}", report.failures));
            }
        }
    }
    assert!(free.is_empty(), "not convicted:\n{}", free.join("\n"));
}

#[test]
fn what_is_wrong_once_in_a_hundred_launches_is_convicted_by_stress() {
    let Some((device, _alone)) = kernel_device() else { return };
    for dtype in gate::dtypes(&device) {
        let stress = |mutant| gate::stress(&Broken(mutant), dtype, &device, None, 100);
        let right = stress(Mutant::None);
        assert!(right.green(), "{dtype:?}: {:?}", right.failures);
        assert_eq!(right.checked(Check::Repeat).runs, 100);
        LAUNCHES.store(0, Ordering::Relaxed);
        let report = stress(Mutant::OnceInAHundred);
        let found: Vec<_> = report.failures.iter().map(|f| (f.0, f.2.as_str())).collect();
        let what = "`y` is another in call 60 of 100 than before";
        assert_eq!(found, [(Check::Repeat, what)], "{dtype:?}");
    }
}

#[test]
fn a_kernel_that_writes_one_row_is_convicted_with_what_it_left() {
    let Some((device, _alone)) = kernel_device() else { return };
    let report = verify(Mutant::FirstRow, DType::F32, &device);
    let written: Vec<_> = report.failures.iter().filter(|f| f.0 == Check::Written).collect();
    assert!(
        written.iter().any(|f| f.2.contains("24 elements never written, from [1, 0] to [4, 5]")),
        "{written:?}"
    );
    assert!(report.failed(Check::Forward) > 0, "its values are wrong too");
}

/// Without an audit: memory of a reference that ran before, with other data, or poison.
#[test]
fn stale_memory_convicts_in_every_order() {
    let Some((device, _alone)) = kernel_device() else { return };
    for mutant in [Mutant::FirstRow, Mutant::FirstRowUnseen, Mutant::Zeros] {
        let report = verify(mutant, DType::F32, &device);
        assert!(report.failed(Check::Forward) > 0, "{mutant:?} alone");
        for first in [Implementation::Fused, Implementation::Reference] {
            let order = format!("of {first} first");
            assert!(
                report.failures.iter().any(|f| f.0 == Check::Order && f.1.contains(&order)),
                "{mutant:?} {order}: {:?}",
                report.failures
            );
        }
    }
}

#[test]
fn findings_name_what_was_changed() {
    let Some((device, _alone)) = kernel_device() else { return };
    for (mutant, what) in [
        (Mutant::InputOverwritten, "`x` is not what it was before the call"),
        (Mutant::CotangentOverwritten, "the cotangent of `y` is not what it was before the call"),
        (Mutant::Turned, "`y` has shape [6, 5], not [5, 6]"),
        (Mutant::SavedOverwritten, "number 0 of what the forward keeps is not what it was"),
        (Mutant::Flat, "`y` has shape [30], not [5, 6]"),
        (
            Mutant::FirstRowUnseen,
            "5 results of [78, 78, 65, 65, 30] elements, but the audit saw [78, 78, 65, 65, 1]",
        ),
    ] {
        let report = verify(mutant, DType::F32, &device);
        assert!(report.failures.iter().any(|f| f.2.contains(what)), "{:?}", report.failures);
    }
}
