//! Stress: one call again and again while other work shares the device, on CUDA at a size that fills it several times. What
//! depends on who comes first, a race that shows once in a hundred launches, differs somewhere.

#[cfg(feature = "cube")]
mod fingerprint;

use super::execute::{caught, quietly};
use super::plans::{Taken, family_of, heard, on_another_family};
use super::{Check, Report, Stressed, blank, candidate, fuzz, on_family, own_family};
use crate::attributes::Attributes;
use crate::bench::{Maker, parts};
use crate::host::{self, Input};
use crate::operator::with_saved;
use crate::registry::{Call, Case, Operator, Scale};
use burn::tensor::{DType, Device, Distribution, Tensor};
use kiln_ops::device;
use kiln_ops::policy::{self, Implementation};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

/// Side of the matrices whose product keeps a device busy: CUDA, and what may be a CPU.
const BUSY: [usize; 2] = [1024, 64];

/// Makes a call, forward and backward, `repeats` times on the same numbers. Everything it returns is the same every time,
/// bit for bit.
pub fn stress(
    op: &dyn Operator,
    dtype: DType,
    device: &Device,
    family: Option<&'static str>,
    repeats: usize,
) -> Report {
    let mut report = blank(op, dtype, device, family);
    for check in Check::ALL.into_iter().filter(|check| *check != Check::Repeat) {
        report.leave_out(check);
    }
    report.cases = 1;
    let case = case(op, device);
    let mut seen = Seen { repeats: 0, plans: BTreeSet::new() };
    let result = beside_other_work(device, || {
        let calls = || on_family(family, || repeated(op, &case, dtype, device, repeats, &mut seen));
        quietly(|| caught(calls))
    });
    for _ in 0..seen.repeats {
        report.ran(Check::Repeat);
    }
    report.stress = Some(Stressed { calls: repeats, case: case.to_string() });
    let on_its_family = result.and_then(|()| seen.expect_family(op, dtype, device, family));
    if let Err(error) = on_its_family {
        report.fail(Check::Repeat, &case.to_string(), error);
    }
    report.plans = seen.plans;
    report
}

/// What was seen of the calls.
struct Seen {
    /// How many were compared with the first.
    repeats: usize,
    /// Plans of the kernels of the first.
    plans: BTreeSet<String>,
}

impl Seen {
    /// That products, if there are some, ran on the family that was asked for, or on the fastest where none was.
    fn expect_family(
        &self,
        op: &dyn Operator,
        dtype: DType,
        device: &Device,
        family: Option<&str>,
    ) -> Result<(), String> {
        let Some(own) = own_family(op, dtype, device) else { return Ok(()) };
        let ran: Vec<(&str, &str)> = self.plans.iter().filter_map(|plan| family_of(plan)).collect();
        // A small case may be of products with a thin side alone, which are of no family, and the fastest kernels of an
        // operator need have no product.
        let some = device::is_cuda(device) && (family.is_some() || !ran.is_empty());
        on_another_family(family.unwrap_or(own), &ran, some).map_or(Ok(()), Err)
    }
}

/// On CUDA a layer of a 124M model, if that fills a device several times, elsewhere the largest case of the gate that is no burden.
fn case(op: &dyn Operator, device: &Device) -> Case {
    let large = if device::is_cuda(device) { large(op) } else { None };
    let small = || op.cases().into_iter().max_by_key(fuzz::moderate);
    large.or_else(small).expect("an operator has cases")
}

fn large(op: &dyn Operator) -> Option<Case> {
    let timed = || {
        op.shapes(Scale::Train).into_iter().find(|case| {
            let attributes = case.attributes(op.spec());
            attributes.is_ok_and(|attributes| op.kernels_take(&case.shapes, &attributes))
        })
    };
    op.stressed().or_else(timed)
}

fn repeated(
    op: &dyn Operator,
    case: &Case,
    dtype: DType,
    device: &Device,
    repeats: usize,
    seen: &mut Seen,
) -> Result<(), String> {
    let spec = op.spec();
    let attributes = case.attributes(spec)?;
    let parts = parts(op, case)?;
    let (inputs, outputs) = parts.split_at(spec.inputs.len());
    let mut maker = Maker::new(None, dtype, device, 1);
    let inputs: Vec<Input> = inputs.iter().map(|part| maker.input(part, 0)).collect();
    let cotangents: Vec<_> = outputs.iter().map(|part| maker.cotangent(part)).collect();
    let call = || -> Result<Vec<Tensor<1>>, String> {
        policy::force(candidate(op, device), || {
            let call = Call { inputs: &inputs, attributes: &attributes };
            let mut results: Vec<Tensor<1>> = vec![];
            let outputs = op.run(&call).map_err(|e| e.to_string())?;
            results.extend(outputs.into_iter().map(|output| output.flat));
            if !cotangents.is_empty() {
                match past_autodiff(op, &inputs, &attributes, &cotangents, device) {
                    Some(those) => results.extend(those),
                    None => results.extend(by_autodiff(op, &inputs, case, &cotangents)?),
                }
            }
            Ok(results)
        })
    };
    let prints = |results: Vec<Tensor<1>>| -> Result<Vec<_>, String> {
        results.into_iter().map(fingerprint).collect()
    };
    let name = |at: usize| {
        let names = spec.outputs.iter().map(|output| output.name.to_string());
        let gradients = spec.float_inputs().map(|i| format!("grad.{}", spec.inputs[i].name));
        let name = names.chain(gradients).nth(at).map(|name| format!("`{name}`"));
        name.unwrap_or_else(|| "what the forward keeps".into())
    };
    let (first, plans) = heard(&Taken::default(), || {
        let first = call()?;
        // Burn may put off what was called.
        device.sync().map_err(|e| host::one_line(&format!("{e:?}")))?;
        Ok::<_, String>(first)
    });
    seen.plans = plans;
    let first = first?;
    // What is NaN everywhere is the same every time.
    for (at, result) in first.iter().enumerate() {
        if !some_finite(result)? {
            return Err(format!("{} has no finite number", name(at)));
        }
    }
    let first = prints(first)?;
    for repeat in 1..=repeats {
        seen.repeats += 1;
        let again = prints(call()?)?;
        if let Some(at) = first.iter().zip(&again).position(|(a, b)| a != b) {
            let name = name(at);
            return Err(format!("{name} is another in call {repeat} of {repeats} than before"));
        }
    }
    Ok(())
}

/// Whether a tensor has a finite number, or nothing at all.
fn some_finite(tensor: &Tensor<1>) -> Result<bool, String> {
    if tensor.dims()[0] == 0 {
        return Ok(true);
    }
    // Not x - x, which WGSL may take for 0.
    let finite = tensor.clone().abs().lower_elem(f32::MAX).any();
    let data = finite.try_to_data().map_err(|e| host::one_line(&format!("{e:?}")))?;
    Ok(data.iter::<bool>().any(|some| some))
}

/// The gradients by the backward kernels, and what the forward keeps for them, where there are such kernels.
fn past_autodiff(
    op: &dyn Operator,
    inputs: &[Input],
    attributes: &Attributes,
    cotangents: &[Tensor<1>],
    device: &Device,
) -> Option<Vec<Tensor<1>>> {
    if candidate(op, device) != Implementation::Fused {
        return None;
    }
    let saved = with_saved(op, inputs.to_vec(), attributes);
    let call = Call { inputs: &saved, attributes };
    let kernels = op.backward_kernels(&call, cotangents)?;
    let mut all = op.gradients(&call, cotangents, kernels);
    all.extend(saved[inputs.len()..].iter().filter_map(|saved| match saved {
        Input::Float { rows, .. } => Some(rows.clone().flatten(0, 1)),
        Input::Int { .. } => None,
    }));
    Some(all)
}

/// The gradients of the float inputs, flat.
fn by_autodiff(
    op: &dyn Operator,
    inputs: &[Input],
    case: &Case,
    cotangents: &[Tensor<1>],
) -> Result<Vec<Tensor<1>>, String> {
    let leaves: Vec<Input> = inputs.iter().map(Input::tracked).collect();
    let attributes = case.attributes(op.spec())?;
    let call = Call { inputs: &leaves, attributes: &attributes };
    let outputs = op.run(&call).map_err(|e| e.to_string())?;
    // Outputs without a gradient have no cotangent.
    let outputs = outputs.into_iter().zip(op.spec().outputs).filter(|(_, spec)| !spec.constant);
    let pulls = outputs
        .zip(cotangents)
        .map(|((output, _), dy)| host::weighted(output.flat, dy.clone().autodiff()));
    let loss = pulls.reduce(|a, b| a + b).ok_or("the operator has no output")?;
    let gradients = host::gradients(&leaves, &loss.backward())?;
    Ok(gradients.into_iter().map(|gradient| gradient.flatten(0, 1)).collect())
}

/// Few bytes that hang on every bit of a tensor.
fn fingerprint(tensor: Tensor<1>) -> Result<Vec<u8>, String> {
    #[cfg(feature = "cube")]
    if device::is_cube(&tensor.device()) {
        return fingerprint::of(tensor);
    }
    let data = tensor.try_to_data().map_err(|e| host::one_line(&format!("{e:?}")))?;
    Ok(data.as_bytes().to_vec())
}

/// Runs `work` while another thread, with a stream of its own, keeps the device busy; it has begun to, and does until the
/// end, or there is an error.
fn beside_other_work(
    device: &Device,
    work: impl FnOnce() -> Result<(), String>,
) -> Result<(), String> {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    if !device::is_cube(device) {
        return work();
    }
    let stopped = AtomicBool::new(false);
    let stop = &stopped;
    let (begun, begins) = mpsc::channel();
    std::thread::scope(|scope| {
        // The channel goes with it.
        let busy = move || -> Result<(), String> {
            let random = || Distribution::Uniform(-1.0, 1.0);
            let side = BUSY[usize::from(!device::is_cuda(device))];
            let a = Tensor::<2>::random([side, side], random(), device);
            while !stop.load(Ordering::Relaxed) {
                // Several before a read, which lets the device idle.
                let product = |b: Tensor<2>, _| a.clone().matmul(b).mul_scalar(1.0 / side as f32);
                let sum = (0..8).fold(a.clone(), product).sum().try_to_data();
                sum.map_err(|e| host::one_line(&format!("{e:?}")))?;
                // Nobody may listen any more.
                let _ = begun.send(());
            }
            Ok(())
        };
        let other = scope.spawn(move || quietly(|| caught(busy)));
        let worked = {
            let _stop = Stop(stop);
            // Where it ends before it begins, its error is what there is.
            begins.recv().map_or(Ok(()), |()| work())
        };
        let other = other.join().unwrap_or_else(|_| Err("it panicked".into()));
        worked.and(other.map_err(|error| format!("the work beside it failed: {error}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry;

    #[test]
    fn every_operator_has_a_large_case() {
        for op in registry::all() {
            let case = large(*op);
            let elements = |case: &Case| -> usize {
                case.shapes.iter().map(|shape| shape.iter().product::<usize>()).sum()
            };
            let name = op.spec().name;
            assert!(
                case.as_ref().is_some_and(|case| elements(case) >= 1 << 20),
                "{name}: {case:?}"
            );
        }
    }

    /// On the CPU, which has references alone, and where there are kernels.
    #[test]
    fn every_operator_is_called_again() {
        let cpu = device::open("cpu").expect("the CPU is always there").device;
        let kernels = kiln_test::kernels(device::open, |opened| device::is_cube(&opened.device));
        let kernels = kernels.map(|opened| opened.device);
        for device in [Some(cpu), kernels].into_iter().flatten() {
            for op in registry::all() {
                let report = stress(*op, DType::F32, &device, None, 1);
                let name = op.spec().name;
                assert!(report.green(), "{name} on {device:?}: {:?}", report.failures);
                assert_eq!(report.checked(Check::Repeat).runs, 1, "{name}");
                let seen = !device::is_cube(&device) || !report.plans.is_empty();
                assert!(seen, "{name} on {device:?}: no kernel");
            }
        }
    }

    #[test]
    fn a_faster_family_than_was_asked_for_is_seen() {
        let kernels = kiln_test::kernels(device::open, |opened| device::is_cube(&opened.device));
        let Some(device) = kernels.map(|opened| opened.device) else { return };
        let op = registry::find("matmul").unwrap();
        let ran = |plan: &str| {
            let seen = Seen { repeats: 1, plans: [plan.to_string()].into() };
            seen.expect_family(op, DType::F32, &device, Some("simt"))
        };
        let wrong = "`product on wgmma` ran, of wgmma and not simt";
        assert_eq!(ran("product on wgmma: 1"), Err(wrong.to_string()));
        assert_eq!(ran("product on plain units: 1"), Ok(()));
    }
}
