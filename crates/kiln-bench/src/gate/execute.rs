//! One run of an operator, forward and backward, on data whose answer is known.

use super::Check;
use super::data::Data;
use crate::host::{self, HostTensor, Input, Layout};
use crate::operator::{InputSpec, Output, OutputSpec, with_saved};
use crate::registry::{Call, Holds, Operator};
use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_ops::policy::{self, Implementation};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a run returned.
#[derive(Debug, Clone)]
pub struct Run {
    /// Outputs.
    pub outputs: Vec<HostTensor>,
    /// Gradients, one for each float input.
    pub gradients: Vec<HostTensor>,
    /// The same as the backward kernels make them past autodiff, where they were asked.
    pub kernels: Vec<HostTensor>,
    /// Inputs and cotangents that were not afterwards what they were before, or had something written around them.
    pub changed: Vec<String>,
}

impl Run {
    /// Outputs, then gradients, then those of the backward kernels.
    pub fn all(&self) -> impl Iterator<Item = &HostTensor> {
        self.outputs.iter().chain(&self.gradients).chain(&self.kernels)
    }

    /// Whether two runs agree bit for bit.
    pub fn same_bits(&self, other: &Self) -> bool {
        let mut pairs = self.all().zip(other.all());
        self.all().count() == other.all().count() && pairs.all(|(a, b)| same_bits(a, b))
    }
}

/// Whether two tensors have the same bits, but that one NaN is as good as another: IEEE 754 does not say which comes of two.
pub(super) fn same_bits(a: &HostTensor, b: &HostTensor) -> bool {
    let bits = |of: &HostTensor| -> Vec<u64> {
        of.values.iter().map(|v| if v.is_nan() { f64::NAN } else { *v }.to_bits()).collect()
    };
    a.shape == b.shape && bits(a) == bits(b)
}

/// Runs `op` forward and backward with one implementation.
///
/// # Errors
///
/// One line if the operator refuses the call or fails on the device.
pub fn execute(
    op: &dyn Operator,
    data: &Data,
    dtype: DType,
    layout: Layout,
    device: &Device,
    implementation: Implementation,
) -> Result<Run, String> {
    // What is made of nothing need not be part of a reference, whose gradient is none then.
    let unused = data.empty && implementation == Implementation::Reference;
    caught(|| policy::force(implementation, || run(op, data, dtype, layout, device, unused)))
}

/// The outputs of a call whose gradients nobody wants.
///
/// # Errors
///
/// As [`execute`].
pub(super) fn untracked(
    op: &dyn Operator,
    data: &Data,
    dtype: DType,
    layout: Layout,
    device: &Device,
) -> Result<Run, String> {
    let run = || {
        let inputs = upload(op, &data.inputs, dtype, layout, false, device);
        let call = Call { inputs: &inputs, attributes: &data.attributes };
        let (_, outputs) = outputs(op, &call, data, dtype, device)?;
        let changed = changed(op, data, &inputs, dtype, layout, device);
        Ok(Run { outputs, gradients: vec![], kernels: vec![], changed })
    };
    caught(|| policy::force(Implementation::Fused, run))
}

/// The gradients as the backward kernels make them past autodiff, which is what `kiln bench` times, and inputs and
/// cotangents that were changed. Where an operator has no such way there are no gradients, and autodiff calls the backward.
///
/// # Errors
///
/// One line if they fail on the device.
pub(super) fn kernels(
    op: &dyn Operator,
    data: &Data,
    dtype: DType,
    layout: Layout,
    device: &Device,
) -> Result<(Vec<HostTensor>, Vec<String>), String> {
    let run = || {
        let inputs = upload(op, &data.inputs, dtype, layout, false, device);
        // A cotangent is contiguous, as a backward gets it.
        let outputs = op.spec().outputs.iter().zip(&data.cotangents);
        let uploaded: Vec<(String, HostTensor, DType, Input)> = outputs
            .map(|(output, cotangent)| {
                let dtype = output.dtype(dtype);
                let flat = HostTensor::new([cotangent.values.len()], cotangent.values.clone());
                let input = Input::float(&flat, dtype, Layout::Allocated, false, device);
                (format!("the cotangent of `{}`", output.name), flat, dtype, input)
            })
            .collect();
        if uploaded.is_empty() {
            return Ok((vec![], vec![]));
        }
        let flat = |(.., input): &(String, HostTensor, DType, Input)| match input {
            Input::Float { rows, .. } => rows.clone().flatten(0, 1),
            Input::Int { .. } => unreachable!("cotangents are float"),
        };
        let cotangents: Vec<Tensor<1>> = uploaded.iter().map(flat).collect();
        let inputs = with_saved(op, inputs, &data.attributes);
        let saved = || inputs[data.inputs.len()..].iter().map(Input::bytes);
        let before: Vec<Vec<u8>> = saved().collect::<Result<_, _>>()?;
        let call = Call { inputs: &inputs, attributes: &data.attributes };
        let Some(kernels) = op.backward_kernels(&call, &cotangents) else {
            return Ok((vec![], shared_cotangents(op, data, dtype, layout, device)?));
        };
        let gradients = op.gradients(&call, &cotangents, kernels);
        if gradients.len() != data.gradients.len() {
            let (found, expected) = (gradients.len(), data.gradients.len());
            return Err(format!("the backward kernels return {found} gradients, not {expected}"));
        }
        let spec = op.spec();
        let pairs = spec.float_inputs().zip(gradients.iter().zip(&data.gradients));
        let found: Result<Vec<HostTensor>, String> = pairs
            .map(|(i, (gradient, expected))| {
                let input = &spec.inputs[i];
                let name = format!("grad.{} of the backward kernels", input.name);
                expect(&name, gradient, input.dtype(dtype), device)?;
                read(gradient, &expected.shape)
            })
            .collect();
        let mut changed = changed(op, data, &inputs, dtype, layout, device);
        changed.extend(uploaded.iter().filter_map(|(name, host, dtype, input)| {
            let kept = input.unchanged(host, *dtype, Layout::Allocated, device);
            kept.err().map(|what| format!("{name} {what}"))
        }));
        for (i, (before, after)) in before.into_iter().zip(saved()).enumerate() {
            if before != after? {
                changed.push(format!("number {i} of what the forward keeps is not what it was"));
            }
        }
        Ok((found?, changed))
    };
    caught(|| policy::force(Implementation::Fused, run))
}

/// Cotangents that are not afterwards what they were, where a sum hands each to another leaf, too.
fn shared_cotangents(
    op: &dyn Operator,
    data: &Data,
    dtype: DType,
    layout: Layout,
    device: &Device,
) -> Result<Vec<String>, String> {
    let inputs = upload(op, &data.inputs, dtype, layout, true, device);
    let call = Call { inputs: &inputs, attributes: &data.attributes };
    let outputs = op.run(&call).map_err(|e| e.to_string())?;
    let mut leaves = vec![];
    let pulls = outputs.into_iter().zip(&data.cotangents).map(|(output, cotangent)| {
        let Output { flat, .. } = output;
        let zeros = Tensor::<1>::zeros([flat.dims()[0]], (device, flat.dtype()));
        let cotangent = self::cotangent(&cotangent.values, device);
        let [shared, alone] = [(); 2].map(|()| zeros.clone().autodiff().require_grad());
        leaves.push([shared.clone(), alone.clone()]);
        host::weighted(flat + shared, cotangent.clone()) + host::weighted(alone, cotangent)
    });
    let loss = pulls.reduce(|a, b| a + b).ok_or("the operator has no output")?;
    let grads = loss.backward();
    let mut changed = vec![];
    for (leaves, spec) in leaves.iter().zip(op.spec().outputs) {
        let held = |leaf: &Tensor<1>| -> Result<HostTensor, String> {
            let held = host::download(&leaf.grad(&grads).ok_or("a sum has no gradient")?)?;
            Ok(HostTensor::new([held.len()], held))
        };
        if !same_bits(&held(&leaves[0])?, &held(&leaves[1])?) {
            changed.push(format!(
                "the cotangent of `{}`, which another leaf has too, is not what it was before the call",
                spec.name
            ));
        }
    }
    Ok(changed)
}

/// These numbers, for the gradient of a result.
fn cotangent(values: &[f64], device: &Device) -> Tensor<1> {
    let f32 = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(DType::F32);
    Tensor::from_data(f32, (device, DType::F32)).autodiff()
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`, of whose panics nobody is told but who catches them.
pub(super) fn quietly<T>(f: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            QUIET.set(self.0);
        }
    }
    let _restore = Restore(QUIET.replace(true));
    f()
}

/// Whether a panic of this thread is caught and told by who catches it: for a hook that ends the process.
pub fn quiet() -> bool {
    QUIET.get()
}

/// A kernel that fails to compile or launch shows as a panic of the read in Burn's backward.
pub(super) fn caught<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
        Err(host::one_line(&text.unwrap_or_else(|| "it panicked".into())))
    })
}

/// The inputs on the device; `gradient` asks for their gradients.
pub(super) fn upload(
    op: &dyn Operator,
    inputs: &[HostTensor],
    dtype: DType,
    layout: Layout,
    gradient: bool,
    device: &Device,
) -> Vec<Input> {
    let inputs = op.spec().inputs.iter().zip(inputs);
    let one = |(input, host): (&InputSpec, &HostTensor)| match input.holds {
        Holds::Float | Holds::Shares => Input::float(host, dtype, layout, gradient, device),
        Holds::F32 | Holds::OptionalF32 => Input::float(host, DType::F32, layout, gradient, device),
        _ => Input::int(host, gradient, device),
    };
    inputs.map(one).collect()
}

/// Which inputs are not what was uploaded.
fn changed(
    op: &dyn Operator,
    data: &Data,
    inputs: &[Input],
    dtype: DType,
    layout: Layout,
    device: &Device,
) -> Vec<String> {
    let all = op.spec().inputs.iter().zip(&data.inputs).zip(inputs);
    all.filter_map(|((spec, host), input)| {
        let kept = input.unchanged(host, spec.dtype(dtype), layout, device);
        kept.err().map(|what| format!("`{}` {what}", spec.name))
    })
    .collect()
}

/// The outputs of a call, on the device and read, if they are what the spec says.
fn outputs(
    op: &dyn Operator,
    call: &Call<'_>,
    data: &Data,
    dtype: DType,
    device: &Device,
) -> Result<(Vec<Tensor<1>>, Vec<HostTensor>), String> {
    let outputs = op.run(call).map_err(|e| e.to_string())?;
    if outputs.len() != data.outputs.len() {
        return Err(format!("{} outputs, not {}", outputs.len(), data.outputs.len()));
    }
    let mut found = vec![];
    for ((Output { flat, shape }, expected), spec) in
        outputs.iter().zip(&data.outputs).zip(op.spec().outputs)
    {
        if expected.shape != *shape && !merged(spec, &expected.shape).eq(shape.iter().copied()) {
            let (name, expected) = (spec.name, &expected.shape);
            return Err(format!("`{name}` has shape {shape:?}, not {expected:?}"));
        }
        expect(spec.name, flat, spec.dtype(dtype), device)?;
        let mut values = read(flat, &expected.shape)?;
        // Of nothing the sum was read.
        if expected.shape.contains(&0) {
            values = HostTensor::new(expected.shape.as_slice(), vec![]);
        }
        found.push(values);
    }
    Ok((outputs.into_iter().map(|output| output.flat).collect(), found))
}

/// That a result has an element type and is on a device.
fn expect<const D: usize>(
    name: &str,
    result: &Tensor<D>,
    dtype: DType,
    device: &Device,
) -> Result<(), String> {
    if result.dtype() != dtype {
        return Err(format!("`{name}` is {:?}, not {dtype:?}", result.dtype()));
    }
    let at = result.clone().inner().device();
    if at != *device {
        return Err(format!("`{name}` is on {at:?}, not on {device:?}"));
    }
    Ok(())
}

/// The shape of an output with the dimensions that have no name as one.
fn merged(spec: &OutputSpec, shape: &[usize]) -> impl Iterator<Item = usize> {
    let named = spec.shape.iter().filter(|dim| **dim != "...").count();
    let (leading, last) = shape.split_at(shape.len() - named);
    let leading = (named < spec.shape.len()).then(|| leading.iter().product());
    leading.into_iter().chain(last.iter().copied())
}

/// Reads what should have the shape of `expected`; flat if it cannot have it.
fn read<const D: usize>(tensor: &Tensor<D>, expected: &[usize]) -> Result<HostTensor, String> {
    let values = host::download(tensor)?;
    let fits = values.len() == expected.iter().product::<usize>();
    let shape = if fits { expected.to_vec() } else { vec![values.len()] };
    Ok(HostTensor::new(shape, values))
}

/// `unused`: inputs may have no gradient.
fn run(
    op: &dyn Operator,
    data: &Data,
    dtype: DType,
    layout: Layout,
    device: &Device,
    unused: bool,
) -> Result<Run, String> {
    let backward = !data.cotangents.is_empty();
    let inputs = upload(op, &data.inputs, dtype, layout, backward, device);
    let call = Call { inputs: &inputs, attributes: &data.attributes };
    let (outputs, found) = outputs(op, &call, data, dtype, device)?;
    let mut gradients = vec![];
    if backward {
        let pulls = outputs.into_iter().zip(&data.cotangents).map(|(output, cotangent)| {
            // No elements stand there as their sum.
            let values = match cotangent.values.as_slice() {
                [] => &[1.0],
                values => values,
            };
            host::weighted(output, self::cotangent(values, device))
        });
        let loss = pulls.reduce(|a, b| a + b).ok_or("the operator has no output")?;
        // A result of nothing may hang on nothing. Burn has no gradients without a loss.
        let untracked = data.empty && !loss.is_tracked();
        let grads = match untracked {
            true => Tensor::<1>::zeros([1], device).autodiff().require_grad().backward(),
            false => loss.backward(),
        };
        for input in &inputs {
            if let Input::Float { leaf, shape, .. } = input {
                gradients.push(match host::gradient(leaf, shape, &grads)? {
                    Some(gradient) => gradient,
                    // Burn keeps none for the leaf of an empty slice.
                    None if untracked || unused || shape.contains(&0) => {
                        HostTensor::new(shape.as_slice(), vec![0.0; shape.iter().product()])
                    }
                    None => return Err("an input has no gradient".into()),
                });
            }
        }
    }
    let changed = changed(op, data, &inputs, dtype, layout, device);
    Ok(Run { outputs: found, gradients, kernels: vec![], changed })
}

/// What an audit saw.
pub(crate) struct Audited {
    /// Elements of each buffer that kernels were handed to write whole.
    pub(crate) buffers: Vec<usize>,
    /// How often a kernel could write its result in the place of an input.
    pub(crate) places: usize,
    /// What was never written, or written outside.
    pub(crate) errors: Vec<(Check, String)>,
}

/// Runs `f` on a device under an audit of kernel outputs; `in_place`: with those that can be in the places of inputs.
#[cfg(feature = "cube")]
pub(crate) fn audited<T>(device: &Device, in_place: bool, f: impl FnOnce() -> T) -> (T, Audited) {
    use kiln_ops::launch::audit::Audit;
    // Burn may still have put off what was called before. A device that is lost is found by `f`.
    let _ = device.sync();
    let audit = if in_place { Audit::begin_in_place() } else { Audit::begin() };
    let result = f();
    let places = audit.places();
    let mut errors = vec![];
    let findings = audit.finish();
    let whole = findings.iter().filter(|finding| finding.full);
    let buffers = whole.map(|finding| finding.shape.iter().product()).collect();
    for finding in findings {
        if finding.unwritten > 0 || finding.error.is_some() {
            errors.push((Check::Written, finding.to_string()));
        }
        if finding.guard_bytes > 0 {
            errors.push((Check::Guards, finding.to_string()));
        }
    }
    (result, Audited { buffers, places, errors })
}

/// Runs `f`: without a CubeCL device there are no kernels to audit.
#[cfg(not(feature = "cube"))]
pub(crate) fn audited<T>(_: &Device, _in_place: bool, f: impl FnOnce() -> T) -> (T, Audited) {
    (f(), Audited { buffers: vec![], places: 0, errors: vec![] })
}

/// Fills memory of the sizes that the operator is going to ask for with NaN and frees it.
pub fn poison(data: &Data, dtype: DType, device: &Device) {
    let poisoned: Vec<Tensor<1>> = data
        .all()
        .filter(|tensor| !tensor.values.is_empty())
        .flat_map(|tensor| [(tensor.values.len(), dtype), (tensor.values.len(), DType::F32)])
        .map(|(n, dtype)| Tensor::<1>::full([n], f32::NAN, (device, dtype)))
        .collect();
    for tensor in poisoned {
        let _ = tensor.into_data(); // the fill has run before the memory is free
    }
}
