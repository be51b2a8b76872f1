//! `kiln op`: one operator on tensors from a safetensors file, outputs and gradients to another.

use crate::attributes::Attributes;
use crate::files;
use crate::gate::{self, Data};
use crate::host::{BoundedTensor, HostTensor, Layout};
use crate::registry::{Holds, Operator, OutputSpec, Spec, all};
use burn::tensor::{DType, TensorData};
use kiln_ops::device::Opened;
use kiln_ops::oracle::Number;
use kiln_ops::policy::{self, Implementation};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// What to run on what.
pub struct Request {
    /// Operator.
    pub op: &'static dyn Operator,
    /// File with the inputs.
    pub input: PathBuf,
    /// File to write.
    pub output: PathBuf,
    /// Device.
    pub opened: Opened,
    /// Implementation.
    pub kernel: Implementation,
    /// Attributes, `key=value`.
    pub set: Vec<String>,
}

/// The operators, each as [`describe`] has it.
pub fn list() -> String {
    all().iter().map(|op| describe(op.spec())).collect::<Vec<_>>().join("\n")
}

/// An operator: inputs with shapes, attributes with defaults, outputs; a line each.
pub fn describe(spec: &Spec) -> String {
    let shape = |shape: &[&str]| format!("[{}]", shape.join(", "));
    let mut lines = vec![format!("{}: {}", spec.name, spec.formula)];
    for input in spec.inputs {
        let holds = match input.holds {
            Holds::Float => "",
            Holds::Shares => ", 0 to 1",
            Holds::F32 => " F32",
            Holds::OptionalF32 => " F32, optional",
            Holds::Classes(_) | Holds::Rows(_) => " I64 or I32",
            Holds::RowsOrNone(_) => " I64 or I32, -1 for none",
            Holds::Codes(_) | Holds::MostlyLast(_) => " I64 or I32, codes",
            Holds::Ends(_) => " I64 or I32, optional",
        };
        lines.push(format!("  input      {} {}{holds}", input.name, shape(input.shape)));
    }
    for attribute in spec.attributes {
        let (name, default) = (attribute.name, attribute.default);
        lines.push(format!("  attribute  {name} ({default}): {}", attribute.expected()));
    }
    for output in spec.outputs {
        let f32 = if output.f32 { " F32" } else { "" };
        lines.push(format!("  output     {} {}{f32}", output.name, shape(output.shape)));
    }
    lines.join("\n")
}

/// Runs the request; the output file appears whole or not at all.
///
/// # Errors
///
/// One line that names the tensor or attribute and what was expected.
pub fn run(request: &Request) -> Result<(), String> {
    let spec = request.op.spec();
    let bytes = std::fs::read(&request.input)
        .map_err(|e| format!("cannot read {}: {e}", request.input.display()))?;
    let file = |e| format!("{}: not a whole safetensors file: {e}", request.input.display());
    let tensors = SafeTensors::deserialize(&bytes).map_err(file)?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(file)?;
    known_names(spec, &tensors)?;
    let mut attributes = attributes(spec, request, header.metadata().as_ref())?;
    let (mut inputs, dtype) = inputs(spec, &tensors)?;
    let shapes: Vec<_> = inputs.iter().map(|tensor| tensor.shape.clone()).collect();
    let dims = spec.dims(&shapes)?;
    for (number, (input, tensor)) in spec.inputs.iter().zip(&mut inputs).enumerate() {
        if tensor.values.is_empty() && !request.op.may_be_empty(number) {
            let shape = &tensor.shape;
            return Err(format!(
                "{}: `{}` has no elements, its shape is {shape:?}",
                spec.name, input.name
            ));
        }
        let allowed = match input.holds {
            Holds::Classes(dim) | Holds::Rows(dim) => Some(0..dims[dim][0] as i64),
            Holds::RowsOrNone(dim) => Some(-1..dims[dim][0] as i64),
            Holds::Codes(count) | Holds::MostlyLast(count) => Some(0..count as i64),
            _ => None,
        };
        if let Some(allowed) = allowed {
            let view = tensors.tensor(input.name).map_err(file)?;
            let ignores = matches!(input.holds, Holds::Classes(_));
            let ignored = ignores.then(|| attributes.integer("ignore_index"));
            tensor.values = integers(spec, input.name, &view, allowed, ignored)?;
            if ignores {
                attributes.set_integer("ignore_index", IGNORED);
            }
        }
    }
    request.op.refuse(&inputs)?;
    let cotangents = cotangents(request.op, &tensors, &dims, &attributes, dtype)?;

    let device = &request.opened.device;
    if !device.supports_dtype(dtype) {
        return Err(format!("{}: {} does not have {dtype:?}", spec.name, request.opened.name));
    }
    let fused = policy::force(request.kernel, || {
        policy::fused(&policy::Call {
            op: spec.name,
            elements: inputs[0].values.len(),
            dtype,
            device,
            has_kernel: spec.kernel,
        })
    })
    .map_err(|e| e.to_string())?;
    let takes = || request.op.kernels_take(&shapes, &attributes);
    let fused = fused && (request.kernel == Implementation::Fused || takes());
    let implementation = if fused { Implementation::Fused } else { Implementation::Reference };
    let placeholders = spec.outputs.iter().map(|output| {
        let shape = request.op.output_shape(output, &dims, &attributes)?;
        let n = shape.iter().product();
        Ok(BoundedTensor::new(shape, vec![Number::exact(0.0); n]))
    });
    let placeholders = placeholders.collect::<Result<_, String>>()?;
    let data = Data {
        inputs,
        attributes,
        special: None,
        empty: false,
        cotangents,
        outputs: placeholders,
        gradients: vec![],
    };
    // Some operators share the checks and the name of another.
    let names = |e: &str| all().iter().any(|op| e.starts_with(&format!("{}: ", op.spec().name)));
    let run = gate::execute(request.op, &data, dtype, Layout::Allocated, device, implementation)
        .map_err(|e| if names(&e) { e } else { format!("{}: {e}", spec.name) })?;

    let mut results = vec![];
    for (output, tensor) in spec.outputs.iter().zip(&run.outputs) {
        results.push((output.name.to_string(), encode(tensor, output.dtype(dtype))?));
    }
    for (index, tensor) in spec.float_inputs().zip(&run.gradients) {
        let input = &spec.inputs[index];
        // No gradient of what is missing.
        if input.holds.optional() && tensor.values.is_empty() {
            continue;
        }
        results.push((format!("grad.{}", input.name), encode(tensor, input.dtype(dtype))?));
    }
    let metadata = HashMap::from([
        ("op".to_string(), spec.name.to_string()),
        ("device".into(), request.opened.name.clone()),
        ("kernel".into(), implementation.to_string()),
        ("dtype".into(), format!("{dtype:?}").to_lowercase()),
    ]);
    write(&request.output, &results, metadata)
}

/// Refuses tensors that are neither an input nor the cotangent of an output.
fn known_names(spec: &Spec, tensors: &SafeTensors<'_>) -> Result<(), String> {
    let cotangent = |output: &OutputSpec| format!("grad.{}", output.name);
    let known = |name: &str| {
        spec.inputs.iter().any(|input| input.name == name)
            || spec.outputs.iter().any(|output| cotangent(output) == name)
    };
    let mut names = tensors.names();
    names.sort_unstable();
    match names.into_iter().find(|name| !known(name)) {
        Some(name) => {
            let taken = spec.outputs.iter().filter(|of| spec.differentiable && !of.constant);
            let inputs = spec.inputs.iter().map(|input| input.name.to_string());
            let expected: Vec<String> = inputs.chain(taken.map(cotangent)).collect();
            let expected = expected.join(", ");
            Err(format!("{}: unknown tensor `{name}`, expected {expected}", spec.name))
        }
        None => Ok(()),
    }
}

/// From `--set`, else the file's metadata, else the default.
fn attributes(
    spec: &Spec,
    request: &Request,
    metadata: Option<&HashMap<String, String>>,
) -> Result<Attributes, String> {
    let known = |key: &str| spec.attributes.iter().any(|a| a.name == key);
    let mut given = BTreeMap::new();
    let mut set = BTreeSet::new();
    for (key, value) in metadata.into_iter().flatten().filter(|(key, _)| known(key)) {
        given.insert(key.clone(), value.clone());
    }
    for text in &request.set {
        let (key, value) =
            text.split_once('=').ok_or_else(|| format!("--set {text}: expected key=value"))?;
        if !known(key) {
            let names: Vec<_> = spec.attributes.iter().map(|a| a.name).collect();
            let expected = if names.is_empty() { "none".into() } else { names.join(", ") };
            return Err(format!("{}: unknown attribute `{key}`, expected {expected}", spec.name));
        }
        if !set.insert(key) {
            return Err(format!(
                "{}: --set {text}: `{key}` is set before, expected once",
                spec.name
            ));
        }
        given.insert(key.to_string(), value.to_string());
    }
    Attributes::read(spec.name, spec.attributes, &given)
}

/// The inputs and the element type of the operation.
fn inputs(spec: &Spec, tensors: &SafeTensors<'_>) -> Result<(Vec<HostTensor>, DType), String> {
    let mut dtype = None;
    let mut inputs = vec![];
    for input in spec.inputs {
        let name = input.name;
        let missing = |_| {
            format!("{}: missing tensor `{name}`, expected [{}]", spec.name, input.shape.join(", "))
        };
        let view = match tensors.tensor(name) {
            Err(_) if input.holds.optional() => {
                inputs.push(HostTensor::new(vec![0; input.shape.len()], vec![]));
                continue;
            }
            Ok(view) if input.holds.optional() && view.shape().contains(&0) => {
                let found = view.shape();
                return Err(format!(
                    "{}: `{name}` has shape {found:?}, expected numbers, or that it is left out",
                    spec.name
                ));
            }
            view => view.map_err(missing)?,
        };
        let found = view.dtype();
        let wrong =
            |expected: &str| format!("{}: `{name}` is {found:?}, expected {expected}", spec.name);
        match input.holds {
            of if of.integers() && !matches!(found, Dtype::I64 | Dtype::I32) => {
                return Err(wrong("I64 or I32"));
            }
            of if of.integers() => {}
            of if of.is_f32() && found != Dtype::F32 => return Err(wrong("F32")),
            Holds::F32 | Holds::OptionalF32 => {}
            _ => {
                let float = float_dtype(found).ok_or_else(|| wrong("F32, BF16 or F16"))?;
                let first = *dtype.get_or_insert(float);
                if float != first {
                    return Err(wrong(&format!("{first:?} like the first input")));
                }
            }
        }
        let decoded = decode(&view);
        let large = |end: &&f64| i32::try_from(**end as i64).is_err();
        let ends = matches!(input.holds, Holds::Ends(_));
        if let Some(end) = decoded.values.iter().find(large).filter(|_| ends) {
            return Err(format!("{}: `{name}` has {end}, expected integers of 32 bits", spec.name));
        }
        inputs.push(decoded);
    }
    Ok((inputs, dtype.unwrap_or(DType::F32)))
}

/// One for each output if any is given, zero where it is not; none without a backward.
fn cotangents(
    op: &dyn Operator,
    tensors: &SafeTensors<'_>,
    dims: &crate::registry::Dims,
    attributes: &Attributes,
    dtype: DType,
) -> Result<Vec<HostTensor>, String> {
    let spec = op.spec();
    let names = spec.outputs.iter().map(|output| format!("grad.{}", output.name));
    let Some(given) = names.into_iter().find(|name| tensors.tensor(name).is_ok()) else {
        return Ok(vec![]);
    };
    if !spec.differentiable {
        return Err(format!("{}: unknown tensor `{given}`: there is no backward", spec.name));
    }
    let mut cotangents = vec![];
    for output in spec.outputs {
        let name = format!("grad.{}", output.name);
        let shape = op.output_shape(output, dims, attributes)?;
        let Ok(view) = tensors.tensor(&name) else {
            let n = shape.iter().product();
            cotangents.push(HostTensor::new(shape, vec![0.0; n]));
            continue;
        };
        if output.constant {
            let output = output.name;
            return Err(format!(
                "{}: `{output}` has no gradient, so it takes no cotangent",
                spec.name
            ));
        }
        if view.shape() != shape {
            let found = view.shape();
            return Err(format!("{}: `{name}` has shape {found:?}, expected {shape:?}", spec.name));
        }
        let own = output.dtype(dtype);
        if !matches!(float_dtype(view.dtype()), Some(d) if d == own || d == DType::F32) {
            let found = view.dtype();
            let expected = if own == DType::F32 { "F32".into() } else { format!("{own:?} or F32") };
            return Err(format!("{}: `{name}` is {found:?}, expected {expected}", spec.name));
        }
        cotangents.push(decode(&view));
    }
    Ok(cotangents)
}

/// What ignored targets become: devices have no 64-bit integers to compare them in.
const IGNORED: i64 = -1;

/// Integers in range, or [`IGNORED`].
fn integers(
    spec: &Spec,
    name: &str,
    view: &TensorView<'_>,
    allowed: std::ops::Range<i64>,
    ignored: Option<i64>,
) -> Result<Vec<f64>, String> {
    let bytes = view.data();
    let found: Vec<i64> = match view.dtype() {
        Dtype::I64 => bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
    };
    let class = |(at, found): (usize, i64)| {
        if Some(found) == ignored {
            return Ok(IGNORED as f64);
        }
        if allowed.contains(&found) {
            return Ok(found as f64);
        }
        let or = ignored.map(|ignored| format!(" or {ignored} (ignored)")).unwrap_or_default();
        let (first, last) = (allowed.start, allowed.end - 1);
        Err(format!(
            "{}: `{name}` is {found} at position {at}, expected {first} to {last}{or}",
            spec.name
        ))
    };
    found.into_iter().enumerate().map(class).collect()
}

fn float_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F16 => Some(DType::F16),
        _ => None,
    }
}

fn decode(view: &TensorView<'_>) -> HostTensor {
    let bytes = view.data();
    let half = |convert: fn(u16) -> f32| -> Vec<f64> {
        bytes
            .chunks_exact(2)
            .map(|b| f64::from(convert(u16::from_le_bytes([b[0], b[1]]))))
            .collect()
    };
    let values = match view.dtype() {
        Dtype::BF16 => half(|bits| half::bf16::from_bits(bits).to_f32()),
        Dtype::F16 => half(|bits| half::f16::from_bits(bits).to_f32()),
        Dtype::I64 => {
            bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect()
        }
        Dtype::I32 => {
            bytes.as_chunks::<4>().0.iter().map(|b| f64::from(i32::from_le_bytes(*b))).collect()
        }
        _ => bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
    };
    HostTensor::new(view.shape(), values)
}

/// Element type, shape and bytes of a tensor in a file.
pub(crate) type Encoded = (Dtype, Vec<usize>, Vec<u8>);

fn encode(tensor: &HostTensor, dtype: DType) -> Result<Encoded, String> {
    let data = TensorData::new(tensor.values.clone(), tensor.shape.clone()).convert_dtype(dtype);
    let kind = match dtype {
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        _ => Dtype::F32,
    };
    Ok((kind, tensor.shape.clone(), data.as_bytes().to_vec()))
}

/// To a temporary file beside it first.
pub(crate) fn write(
    path: &Path,
    results: &[(String, Encoded)],
    metadata: HashMap<String, String>,
) -> Result<(), String> {
    let failed = |e: &dyn std::fmt::Display| format!("cannot write {}: {e}", path.display());
    let mut views = vec![];
    for (name, (dtype, shape, bytes)) in results {
        let view = TensorView::new(*dtype, shape.clone(), bytes).map_err(|e| failed(&e))?;
        views.push((name.clone(), view));
    }
    let bytes = safetensors::serialize(views, Some(metadata)).map_err(|e| failed(&e))?;
    files::write(path, &bytes)
}
