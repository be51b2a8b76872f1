//! The oracle's gradients against finite differences of the oracle.

use super::{Check, Data, Gate, fuzz};
use crate::attributes::Attribute;
use crate::host::{BoundedTensor, HostTensor};
use crate::registry::{Case, HostCall, Operator};
use burn::tensor::DType;
use kiln_ops::oracle::{Format, Number, Rounding};
use rand::{Rng, RngExt};

/// Elements of each input that are moved.
const PROBES: usize = 24;
/// Relative size of a step. A difference over four steps is off by h⁴, which is little even where a norm of
/// numbers near 0 bends fast.
const STEP: f64 = 1e-5;
/// A part of it, for where a cap or a guard bends the result less than a step away.
const NEARER: f64 = 1.0 / 32.0;
/// What truncation and cancellation leave.
const TOLERANCE: f64 = 1e-6;
/// Of an input's gradients, which they are compared to the largest of, what it is at least.
const SMALL: f64 = 1e-3;

impl Gate<'_> {
    /// Of small cases, of `case`, and of one for every attribute with a value that is not the default.
    pub(super) fn finite_differences(&mut self, case: &Case) {
        if !self.op.spec().differentiable || self.family.is_some() {
            return;
        }
        let cases: Vec<Case> = self.op.cases().into_iter().filter(small).collect();
        let mut chosen: Vec<Case> = cases.iter().take(2).chain([case]).cloned().collect();
        for attribute in self.op.spec().attributes {
            if chosen.iter().any(|case| varies(case, attribute)) {
                continue;
            }
            let found = cases.iter().find(|case| varies(case, attribute)).cloned();
            let found = found.or_else(|| {
                let mut random = (0..200).map(|_| fuzz::case(self.op, &mut self.rng));
                random.find(|case| small(case) && varies(case, attribute))
            });
            match found {
                Some(case) => chosen.push(case),
                None => {
                    let error = format!("no small case has another `{}`", attribute.name);
                    self.report.fail(Check::FiniteDifferences, "cases", error);
                }
            }
        }
        for case in &chosen {
            self.report.ran(Check::FiniteDifferences);
            if let Err(error) = check(self.op, case, &mut self.rng) {
                self.report.fail(Check::FiniteDifferences, &case.to_string(), error);
            }
        }
    }
}

/// Whether a case gives an attribute a value that is not the default, nor 0, of which often nothing depends on anything.
fn varies(case: &Case, attribute: &Attribute) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    let other = |value: &str| match (number(value), number(attribute.default)) {
        (Some(value), Some(default)) => value != default && value != 0.0,
        (Some(value), None) => value != 0.0,
        _ => value != attribute.default,
    };
    case.attributes.iter().any(|(name, value)| *name == attribute.name && other(value))
}

/// Whether the oracle is cheap here.
fn small(case: &Case) -> bool {
    let elements: usize = case.shapes.iter().map(|s| s.iter().product::<usize>()).sum();
    (2..3000).contains(&elements)
}

/// Compares the gradients at random elements of every float input.
fn check(op: &dyn Operator, case: &Case, rng: &mut impl Rng) -> Result<(), String> {
    let spec = op.spec();
    let data = Data::random(op, case, DType::F64, Rounding::fused(Format::F32), rng)?;
    let pulled = |inputs: &[HostTensor]| -> f64 {
        let inputs: Vec<BoundedTensor> = inputs.iter().map(HostTensor::exact).collect();
        let outputs = op.oracle(&HostCall { inputs: &inputs, attributes: &data.attributes });
        let terms = outputs.iter().zip(&data.cotangents);
        let products = |(y, dy): (&BoundedTensor, &HostTensor)| -> f64 {
            y.values.iter().zip(&dy.values).map(|(y, dy)| y.value() * dy).sum()
        };
        terms.map(products).sum()
    };
    let floats = spec.inputs.iter().enumerate().filter(|(_, input)| !input.holds.integers());
    for ((index, input), gradient) in floats.zip(&data.gradients) {
        let n = data.inputs[index].values.len();
        let scale = gradient.values.iter().fold(0.0f64, |a, g| a.max(g.value().abs()));
        for _ in 0..PROBES.min(n) {
            let at = rng.random_range(0..n);
            if op.frozen(&data.inputs, index, at) {
                continue;
            }
            let value = data.inputs[index].values[at];
            let moved = |by: f64| {
                let mut inputs = data.inputs.clone();
                inputs[index].values[at] = value + by;
                pulled(&inputs)
            };
            let difference = |by: f64| moved(by) - moved(-by);
            let slope = |part: f64| {
                let step = part * STEP * value.abs().max(1.0);
                (8.0 * difference(step) - difference(2.0 * step)) / (12.0 * step)
            };
            let found = gradient.values[at].value();
            // What is no number is none that agrees.
            let is_close = |slope: f64| (slope - found).abs() <= TOLERANCE * scale.max(SMALL);
            let slope_there = slope(1.0);
            let close = is_close(slope_there) || is_close(slope(NEARER));
            if !close {
                return Err(format!(
                    "`grad.{}` at {at} is {found:.6e}, the slope there {slope_there:.6e}",
                    input.name
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    /// Repeats that the cases of the gate leave to chance.
    #[test]
    fn sinkhorn_goes_back_after_any_number_of_repeats() {
        let op = registry::find("mhc_pre").expect("an operator");
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for (n, sinkhorn) in [(2, 0), (3, 1), (2, 1), (4, 10), (3, 20), (8, 20), (2, 32)] {
            let rows = n * n + 2 * n;
            let case = Case::new([&[1, 2, n, 5][..], &[rows, 5 * n], &[3], &[rows], &[n, 5]]);
            let case = case.with("sinkhorn", sinkhorn);
            check(op, &case, &mut rng).unwrap_or_else(|error| panic!("{case}: {error}"));
        }
    }
}
