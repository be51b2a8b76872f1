//! Data whose answer is known.

use crate::attributes::Attributes;
use crate::host::{BoundedTensor, HostTensor};
use crate::operator::InputSpec;
use crate::registry::{Case, Holds, HostCall, Operator};
use crate::special::{Holder, Special};
use burn::tensor::DType;
use kiln_ops::oracle::{Format, Rounding};
use rand::{Rng, RngExt};

/// Inputs, cotangents, and what the oracle makes of them.
#[derive(Debug, Clone)]
pub struct Data {
    /// Inputs, as the element type holds them.
    pub inputs: Vec<HostTensor>,
    /// Attributes.
    pub attributes: Attributes,
    /// Whether an input or a cotangent holds what is no average number: roundings are alike then, of results that are.
    pub special: Option<Special>,
    /// Whether an input has no elements, and results hardly any then.
    pub empty: bool,
    /// Cotangents of the outputs; none if there is no backward.
    pub cotangents: Vec<HostTensor>,
    /// Outputs of the oracle.
    pub outputs: Vec<BoundedTensor>,
    /// Gradients of the oracle, one for each float input.
    pub gradients: Vec<BoundedTensor>,
}

impl Data {
    /// Random data for a case, and what results of an implementation that rounds like this should be.
    ///
    /// # Errors
    ///
    /// One line if the case does not fit the operator.
    pub fn random(
        op: &dyn Operator,
        case: &Case,
        dtype: DType,
        rounding: Rounding,
        rng: &mut impl Rng,
    ) -> Result<Self, String> {
        let spec = op.spec();
        let attributes = case.attributes(spec)?;
        let inputs = inputs(op, case, dtype, rounding.format, rng)?;
        let bounded = |tensors: &[HostTensor]| -> Vec<BoundedTensor> {
            tensors.iter().map(|tensor| tensor.bounded(rounding)).collect()
        };
        let exact = bounded(&inputs);
        let call = HostCall { inputs: &exact, attributes: &attributes };
        let outputs = op.oracle(&call);
        let mut cotangents = vec![];
        let mut gradients = vec![];
        if spec.differentiable {
            for (output, value) in spec.outputs.iter().zip(&outputs) {
                let dtype = output.dtype(dtype);
                let mut cotangent = HostTensor::normal(&value.shape, 0.1, rng);
                match case.special {
                    Some((Holder::Cotangent(name), special)) if name == output.name => {
                        let format = if output.f32 { Format::F32 } else { rounding.format };
                        special.put(&mut cotangent, format, rng);
                    }
                    _ if value.values.len() == 1 => {
                        // A mean over rows: scaled as losses are, or f16 gradients would be subnormal.
                        let rows = inputs[0].shape.first().copied().unwrap_or(1);
                        cotangent.values[0] *= rows as f64;
                    }
                    _ => {}
                }
                if output.constant {
                    cotangent.values.fill(0.0);
                }
                cotangents.push(cotangent.rounded(dtype));
            }
            gradients = op.oracle_backward(&call, &bounded(&cotangents));
        }
        let special = case.special.map(|(_, special)| special);
        let mut shapes = case.shapes.iter().enumerate();
        let empty = shapes.any(|(i, shape)| shape.contains(&0) && !op.may_be_empty(i));
        Ok(Self { inputs, attributes, special, empty, cotangents, outputs, gradients })
    }

    /// Outputs, then gradients.
    pub fn all(&self) -> impl Iterator<Item = &BoundedTensor> {
        self.outputs.iter().chain(&self.gradients)
    }
}

/// Random inputs of a case, as the element type holds them.
///
/// # Errors
///
/// One line if the case does not fit the operator.
pub(super) fn inputs(
    op: &dyn Operator,
    case: &Case,
    dtype: DType,
    format: Format,
    rng: &mut impl Rng,
) -> Result<Vec<HostTensor>, String> {
    let spec = op.spec();
    let dims = spec.dims(&case.shapes)?;
    let attributes = case.attributes(spec)?;
    let one = |(input, shape): (&InputSpec, &Vec<usize>)| match input.holds {
        Holds::Float | Holds::F32 | Holds::OptionalF32 => {
            let scale = input.scale(shape);
            let mut tensor = HostTensor::normal(shape, input.mean, rng);
            let format = if input.holds.is_f32() { Format::F32 } else { format };
            match case.special {
                Some((Holder::Input(name), special)) if name == input.name => {
                    special.put(&mut tensor, format, rng);
                }
                _ => {}
            }
            tensor.values.iter_mut().for_each(|v| *v *= scale);
            tensor.rounded(input.dtype(dtype))
        }
        Holds::Shares => {
            let shares = (0..shape.iter().product()).map(|_| rng.random::<f64>()).collect();
            HostTensor::new(shape.as_slice(), shares).rounded(dtype)
        }
        Holds::Codes(count) => {
            let n = shape.iter().product::<usize>();
            let codes = (0..n).map(|_| rng.random_range(0..count) as f64).collect();
            HostTensor::new(shape.as_slice(), codes)
        }
        Holds::MostlyLast(count) => {
            let n = shape.iter().product::<usize>();
            let one = |_| rng.random_range(0..2 * count - 1).min(count - 1) as f64;
            HostTensor::new(shape.as_slice(), (0..n).map(one).collect())
        }
        Holds::Classes(dim) => {
            let classes = dims[dim][0].max(1) as i64;
            let ignored = attributes.integer("ignore_index");
            let n = shape.iter().product();
            let class = |_| {
                if rng.random_bool(0.1) { ignored } else { rng.random_range(0..classes) }
            };
            HostTensor::new(shape.as_slice(), (0..n).map(class).map(|c| c as f64).collect())
        }
        Holds::Rows(dim) | Holds::RowsOrNone(dim) => {
            let (n, rows) = (shape.iter().product(), dims[dim][0].max(1));
            // One of them is named more often than others.
            let often = rng.random_range(0..rows);
            let row = |_| if rng.random_bool(0.3) { often } else { rng.random_range(0..rows) };
            HostTensor::new(shape.as_slice(), (0..n).map(row).map(|r| r as f64).collect())
        }
        Holds::Ends(dim) => {
            let (n, last) = (shape.iter().product::<usize>(), dims[dim][0]);
            let mut ends: Vec<usize> =
                (1..n).map(|_| rng.random_range(0..=last)).chain([0]).take(n).collect();
            ends.sort_unstable();
            if let Some(end) = ends.last_mut() {
                *end = last;
            }
            HostTensor::new(shape.as_slice(), ends.into_iter().map(|e| e as f64).collect())
        }
    };
    Ok(spec.inputs.iter().zip(&case.shapes).map(one).collect())
}
