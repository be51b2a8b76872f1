//! The gate must convict kernels that do not do their work: one that writes only the first row of
//! its output, one that writes zeros everywhere, and one that writes past the end; whichever runs
//! first, kernel or reference.

#![cfg(feature = "cube")]

use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, kernel::into_contiguous};
use cubecl::prelude::*;
use kiln_bench::gate::{self, Check, Options, Report};
use kiln_bench::host::BoundedTensor;
use kiln_bench::registry::{
    Call, Case, Holds, HostCall, InputSpec, Operator, OutputSpec, Scale, Spec, Work,
};
use kiln_ops::oracle::Number;
use kiln_ops::policy::{self, Implementation};
use kiln_ops::{OpError, launch};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How the kernel cheats.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cheat {
    /// None: the control.
    Honest,
    /// Writes the first row and leaves the others as the allocator handed them out.
    FirstRow,
    /// The same, through Burn's allocator, where no audit sees it.
    FirstRowUnseen,
    /// Writes zeros.
    Zeros,
    /// Writes past the end.
    PastTheEnd,
}

/// y = 2x + 1 for the first `written` elements, scaled by `factor`.
#[cube(launch_unchecked)]
fn affine_kernel<E: Float>(
    x: &[E],
    y: &mut [E],
    elements: usize,
    written: usize,
    factor: f32,
    #[define(E)] _dtype: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i < written {
        let value = f32::cast_from(x[min(i, elements - 1)]);
        y[i] = E::cast_from(factor * (2.0f32 * value + 1.0f32));
    }
}

#[backend_extension(Cube, Fusion)]
trait CheatOps: Backend {
    #[fusion(meta = same)]
    fn affine(x: FloatTensor<Self>, cheat: u32) -> FloatTensor<Self>;
}

fn same(x: &TensorSpec, _cheat: &u32) -> TensorSpec {
    x.clone()
}

impl CheatOps for CubeBackend {
    fn affine(x: FloatTensor<Self>, cheat: u32) -> FloatTensor<Self> {
        let cheat = [
            Cheat::Honest,
            Cheat::FirstRow,
            Cheat::FirstRowUnseen,
            Cheat::Zeros,
            Cheat::PastTheEnd,
        ][cheat as usize];
        let x: CubeTensor = into_contiguous(x);
        let (shape, dtype) = (x.shape(), x.dtype);
        let y = if cheat == Cheat::FirstRowUnseen {
            empty_device_contiguous_dtype(x.client.clone(), x.device.clone(), shape.clone(), dtype)
        } else {
            launch::output(&x, "affine", "y", shape.clone(), dtype)
        };
        let elements = shape.num_elements();
        let width = shape[shape.num_dims() - 1];
        let written = match cheat {
            Cheat::FirstRow | Cheat::FirstRowUnseen => width,
            Cheat::PastTheEnd => elements + 3,
            Cheat::Honest | Cheat::Zeros => elements,
        };
        let client = x.client.clone();
        // SAFETY: reads are clamped; what `PastTheEnd` writes past the end is the guard band of the
        // audit, under which alone it runs.
        unsafe {
            affine_kernel::launch_unchecked(
                &client,
                CubeCount::Static(written.div_ceil(64) as u32, 1, 1),
                CubeDim::new_1d(64),
                x.into_buffer_arg(),
                y.clone().into_buffer_arg(),
                elements,
                written,
                if cheat == Cheat::Zeros { 0.0 } else { 1.0 },
                burn::backend::cubecl::dtype_to_elem_type(dtype),
            );
        }
        y
    }
}

/// A row of the registry whose kernel cheats.
struct Affine(Cheat);

const SPEC: Spec = Spec {
    name: "affine",
    formula: "y = 2x + 1",
    inputs: &[InputSpec {
        name: "x",
        shape: &["M", "N"],
        holds: Holds::Float,
        mean: 0.3,
        fan_in: None,
    }],
    attributes: &[],
    outputs: &[OutputSpec { name: "y", shape: &["M", "N"], f32: false, constant: false }],
    differentiable: false,
    kernel: true,
};

impl Operator for Affine {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Tensor<1>>, OpError> {
        let x = call.rows(0);
        let fused = policy::fused(&policy::Call {
            op: "affine",
            elements: x.shape().num_elements(),
            dtype: x.dtype(),
            device: &x.device(),
            has_kernel: true,
        })?;
        let y = if fused {
            let y = <Dispatch as CheatOps>::affine(x.into_dispatch(), self.0 as u32);
            Tensor::<2>::from_dispatch(y)
        } else {
            x.mul_scalar(2.0).add_scalar(1.0)
        };
        Ok(vec![y.flatten(0, 1)])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let x = &call.inputs[0];
        let y = x.values.iter().map(|x| (*x * 2.0 + 1.0).stored()).collect();
        vec![BoundedTensor::new(x.shape.clone(), y)]
    }

    fn oracle_backward(&self, _: &HostCall<'_>, _: &[BoundedTensor]) -> Vec<BoundedTensor> {
        vec![]
    }

    fn cases(&self) -> Vec<Case> {
        vec![Case::new([&[7, 33]])]
    }

    fn shapes(&self, _: Scale) -> Vec<Case> {
        vec![]
    }

    fn work(&self, _: &Case, _: DType) -> (Work, Work) {
        Default::default()
    }
}

fn verify(cheat: Cheat, device: &Device) -> Report {
    let options = Options { seed: 3, fuzz: 0, family: None };
    gate::verify(&Affine(cheat), DType::F32, device, options)
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
fn an_honest_kernel_is_green() {
    let Some((device, _alone)) = kernel_device() else { return };
    let report = verify(Cheat::Honest, &device);
    assert!(report.green(), "{:?}", report.failures);
}

#[test]
fn a_kernel_that_writes_one_row_is_convicted_with_what_it_left() {
    let Some((device, _alone)) = kernel_device() else { return };
    let report = verify(Cheat::FirstRow, &device);
    let written: Vec<_> = report.failures.iter().filter(|f| f.0 == Check::Written).collect();
    assert!(
        written.iter().any(|f| f.2.contains("198 elements never written, from [1, 0] to [6, 32]")),
        "{written:?}"
    );
    assert!(report.failed(Check::Forward) > 0, "its values are wrong too");
}

/// Without an audit: memory of a reference that ran before, with other data, or poison.
#[test]
fn stale_memory_convicts_it_in_every_order() {
    let Some((device, _alone)) = kernel_device() else { return };
    for cheat in [Cheat::FirstRow, Cheat::FirstRowUnseen, Cheat::Zeros] {
        let report = verify(cheat, &device);
        assert!(report.failed(Check::Forward) > 0, "{cheat:?} alone");
        for first in [Implementation::Fused, Implementation::Reference] {
            let order = format!("of {first} first");
            assert!(
                report.failures.iter().any(|f| f.0 == Check::Order && f.1.contains(&order)),
                "{cheat:?} {order}: {:?}",
                report.failures
            );
        }
    }
}

#[test]
fn a_kernel_that_writes_past_the_end_is_convicted() {
    let Some((device, _alone)) = kernel_device() else { return };
    let audit = launch::audit::Audit::begin();
    let x = Tensor::<2>::ones([7, 33], &device);
    let y = <Dispatch as CheatOps>::affine(x.into_dispatch(), Cheat::PastTheEnd as u32);
    let _ = Tensor::<2>::from_dispatch(y).into_data();
    let findings = audit.finish();
    // WebGPU itself drops writes outside a binding; CUDA does not.
    let outside = if kiln_ops::device::name(&device) == "wgpu" { 0 } else { 12 };
    assert!(findings.iter().any(|f| f.guard_bytes == outside && f.unwritten == 0), "{findings:?}");
}
