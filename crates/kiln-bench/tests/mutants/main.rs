//! A product whose kernels are broken on purpose, each in one way. The gate must convict every one of these mutants in
//! every element type, by the check that is meant for it, and none of the others.

#![cfg(feature = "cube")]

mod mutant;
mod product;

use burn::tensor::{DType, Device, Tensor};
use kiln_bench::gate::{self, Check, Options, Report};
use kiln_bench::host::BoundedTensor;
use kiln_bench::registry::{
    Call, Case, Holds, HostCall, InputSpec, Operator, Output, OutputSpec, Scale, Spec, Work,
};
use kiln_ops::OpError;
use kiln_ops::device;
use kiln_ops::oracle::{Bounded, Number};
use kiln_ops::policy::{self, Implementation};
use mutant::Mutant;
use product::{FIRST, FORWARD, LAUNCHES, OF_W, OF_X, product, sizes};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// The same numbers in another element type.
fn other_type(y: Tensor<2>) -> Tensor<2> {
    let other = if y.dtype() == DType::F32 { DType::F16 } else { DType::F32 };
    y.cast(other)
}

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
        if w.dims().contains(&0) {
            let (found, expected) = (w.dims().to_vec(), "sizes of at least 1".into());
            return match self.0 {
                Mutant::NothingTaken => Ok(vec![x.into()]),
                _ => Err(OpError::Shape { op: SPEC.name, tensor: "w", found, expected }),
            };
        }
        let fused = policy::fused(&policy::Call {
            op: SPEC.name,
            elements: x.shape().num_elements(),
            dtype: x.dtype(),
            device: &x.device(),
            has_kernel: true,
        })?;
        let kernel = match self.0 {
            Mutant::UntrackedOnePercent if !x.is_tracked() && !w.is_tracked() => Mutant::OnePercent,
            other => other,
        };
        let y = if fused { product(x, w, FORWARD, kernel) } else { x.matmul(w) };
        Ok(vec![match self.0 {
            Mutant::Flat => y.flatten::<1>(0, 1).into(),
            Mutant::OtherType => other_type(y).into(),
            Mutant::OtherDevice => {
                let cpu = device::open("cpu").expect("the CPU is always there").device;
                y.inner().to_device(&cpu).into()
            }
            _ => y.into(),
        }])
    }

    fn saved(&self, call: &Call<'_>) -> Vec<Tensor<2>> {
        vec![call.rows(0).mul_scalar(1.0)]
    }

    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let (x, w) = (call.rows(0), call.rows(1));
        let dy = dy[0].clone().reshape([x.dims()[0], w.dims()[1]]);
        if self.0 == Mutant::SharedCotangentOverwritten {
            return None;
        }
        if self.0 == Mutant::SavedOverwritten {
            product(call.rows(2), w.clone().transpose(), OF_X, Mutant::CotangentOverwritten);
        }
        let dw = product(x, dy.clone(), OF_W, self.0);
        let dw = if self.0 == Mutant::GradientOtherType { other_type(dw) } else { dw };
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
        let mut dw = in_f64([k, n, m], x, &dy[0], |[i, j, t]| [t * k + i, t * n + j]);
        if self.0 == Mutant::OracleTwoPercent {
            let more = |of: Bounded| of * Bounded::exact(1.02);
            dw.values = dw.values.into_iter().map(more).collect();
        }
        vec![dx, dw]
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["M"]
    }

    fn in_place(&self) -> bool {
        self.0.says_in_place()
    }

    fn untracked(&self) -> bool {
        self.0 == Mutant::UntrackedOnePercent
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
    let opened = kiln_test::kernels(device::open, |opened| device::is_cube(&opened.device))?;
    Some((opened.device, alone))
}

#[test]
fn every_mutant_is_convicted_by_the_check_that_is_meant_for_it() {
    let Some((device, _alone)) = kernel_device() else { return };
    let mut free = vec![];
    for dtype in gate::dtypes(&device) {
        for right in [Mutant::None, Mutant::InPlace] {
            let report = verify(right, dtype, &device);
            assert!(report.green(), "{right:?} in {dtype:?}: {:?}", report.failures);
        }
        let broken = Mutant::BROKEN.into_iter().filter(|(one, ..)| one.in_type(dtype));
        for (mutant, meant, words) in broken {
            if mutant.on_cuda() && !kiln_ops::device::is_cuda(&device) {
                kiln_test::skip("cuda", format!("{mutant:?} on another device"));
                continue;
            }
            let report = verify(mutant, dtype, &device);
            let there = |(check, case, what): &&(Check, String, String)| {
                let says = format!("{case}: {what}");
                *check == meant && words.iter().all(|word| says.contains(word))
            };
            // What only the mean shows is no element's.
            let too_much = mutant == Mutant::Shifted && report.failed(Check::Forward) > 0;
            if too_much || report.failures.iter().filter(there).count() == 0 {
                free.push(format!(
                    "{mutant:?} in {dtype:?} by {meant:?}, {words:?}: {:?}",
                    report.failures
                ));
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
        // The same every time, and nothing.
        let report = stress(Mutant::NoNumber);
        let found: Vec<_> = report.failures.iter().map(|f| (f.0, f.2.as_str())).collect();
        assert_eq!(found, [(Check::Repeat, "`y` has no finite number")], "{dtype:?}");
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
        (
            Mutant::SharedCotangentOverwritten,
            "the cotangent of `y`, which another leaf has too, is not what it was before the call",
        ),
        (Mutant::Turned, "`y` has shape [6, 5], not [5, 6]"),
        (Mutant::SavedOverwritten, "number 0 of what the forward keeps is not what it was"),
        (Mutant::Flat, "`y` has shape [30], not [5, 6]"),
        (Mutant::BesideInput, "`x` had something written around it"),
        (Mutant::OtherType, "`y` is F16, not F32"),
        (
            Mutant::FirstRowUnseen,
            "5 results of [30, 65, 78, 65, 78] elements, but the audit saw [1, 78, 65, 78, 65]",
        ),
    ] {
        let report = verify(mutant, DType::F32, &device);
        assert!(report.failures.iter().any(|f| f.2.contains(what)), "{:?}", report.failures);
    }
}
