//! The oracle's gradients against finite differences of the oracle.

use super::Data;
use crate::registry::{Case, Holds, HostCall, Operator};
use burn::tensor::DType;
use rand::{Rng, RngExt};

/// Elements of each input that are moved.
const PROBES: usize = 24;
/// Relative size of a step: the error of a central difference is smallest near ε^⅓.
const STEP: f64 = 1e-5;
/// What truncation and cancellation leave.
const TOLERANCE: f64 = 1e-6;

/// Whether the oracle is cheap here.
pub(super) fn small(case: &Case) -> bool {
    let elements: usize = case.shapes.iter().map(|s| s.iter().product::<usize>()).sum();
    (2..3000).contains(&elements)
}

/// Compares the gradients at random elements of every float input.
pub(super) fn check(op: &dyn Operator, case: &Case, rng: &mut impl Rng) -> Result<(), String> {
    let spec = op.spec();
    let data = Data::random(op, case, DType::F64, rng)?;
    let pulled = |inputs: &[crate::host::HostTensor]| -> f64 {
        let outputs = op.oracle(&HostCall { inputs, attributes: &data.attributes });
        let terms = outputs.iter().zip(&data.cotangents);
        terms.flat_map(|(y, dy)| y.values.iter().zip(&dy.values).map(|(y, dy)| y * dy)).sum()
    };
    let floats =
        spec.inputs.iter().enumerate().filter(|(_, i)| !matches!(i.holds, Holds::Classes(_)));
    for ((index, input), gradient) in floats.zip(&data.gradients) {
        let n = data.inputs[index].values.len();
        let scale = gradient.values.iter().fold(0.0f64, |a, g| a.max(g.abs()));
        for _ in 0..PROBES.min(n) {
            let at = rng.random_range(0..n);
            let value = data.inputs[index].values[at];
            let step = STEP * value.abs().max(1.0);
            let moved = |by: f64| {
                let mut inputs = data.inputs.clone();
                inputs[index].values[at] = value + by;
                pulled(&inputs)
            };
            let slope = (moved(step) - moved(-step)) / (2.0 * step);
            let error = (slope - gradient.values[at]).abs();
            if error > TOLERANCE * scale.max(1.0) {
                return Err(format!(
                    "`grad.{}` at {at} is {:.6e}, the slope there {slope:.6e}",
                    input.name, gradient.values[at]
                ));
            }
        }
    }
    Ok(())
}
