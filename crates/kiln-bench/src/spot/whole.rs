//! Every block of what several products in a row make, beside the operator's reference in f32.
//!
//! The reference is no oracle: rows and columns are compared with that. This looks for what is lost between
//! them. A block is off by the root mean square of its elements, which for right results is that of their
//! deviations: at most the largest sizes of their roundings, which elements that have bounds show.

use super::blocks::{BLOCK, span};
use super::stored::{Stored, Values};
use super::{Spot, width};
use crate::host::{self, Input};
use crate::operator::{Call, Operator};
use burn::tensor::{DType, Tensor};
use kiln_ops::oracle::{Bounded, LAMBDA, Number};
use kiln_ops::policy::{self, Implementation};
use rayon::prelude::*;

/// Room for two implementations, each with its roundings, and for the mean over a block.
const ROOM: f64 = 2.0;

/// How far elements of a result may be off, and their size: root mean squares.
#[derive(Debug, Clone, Copy)]
pub(super) struct Typical {
    off: f64,
    size: f64,
}

impl Typical {
    /// Of elements that have bounds.
    pub(super) fn of(expected: &[Bounded]) -> Self {
        let mean = |of: fn(&Bounded) -> f64| {
            let squares = expected.iter().map(|x| of(x).powi(2)).filter(|x| x.is_finite());
            (squares.sum::<f64>() / expected.len().max(1) as f64).sqrt()
        };
        let (bias, deviation) = (mean(|x| x.errors().bias), mean(|x| x.errors().deviation()));
        Self { off: bias + deviation, size: mean(|x| x.value()) }
    }
}

/// Checks every block of every result.
///
/// # Errors
///
/// One line if one is wrong or the reference fails.
pub(super) fn check<O: Operator + ?Sized>(
    op: &O,
    spot: &Spot<'_>,
    typical: &[Typical],
) -> Result<(), String> {
    for (result, (wanted, typical)) in reference(op, spot)?.iter().zip(typical).enumerate() {
        let found = spot.result(result)?;
        let wanted = Stored::read(wanted, &spot.shape(result))?;
        let width = width(&spot.shape(result));
        // Beyond half of the largest number f16 may be infinite.
        let largest = spot.rounding.format.overflow() / 2.0;
        let checked = blocks(found.values(), wanted.values(), width, largest, *typical);
        spot.named(result, checked)?;
    }
    Ok(())
}

fn blocks(
    found: Values<'_>,
    wanted: Values<'_>,
    width: usize,
    largest: f64,
    typical: Typical,
) -> Result<(), String> {
    let rows = found.len() / width.max(1);
    let across = width.div_ceil(BLOCK);
    let block = |i: usize| {
        let (rows, columns) = (span(i / across, rows), span(i % across, width));
        let (mut error, mut size) = (0.0, 0.0);
        for at in rows.clone().flat_map(|row| columns.clone().map(move |j| row * width + j)) {
            let x = wanted.at(at);
            // Also where it is not a number, which is within nothing.
            if x.is_nan() || x.abs() < largest {
                error += (found.at(at) - x).powi(2);
                size += x * x;
            }
        }
        let count = (rows.len() * columns.len()) as f64;
        let [error, size] = [error, size].map(|squares: f64| (squares / count).sqrt());
        // Of few rows or columns the mean is that of few roundings.
        let room = ROOM + LAMBDA / (rows.len().min(columns.len()) as f64).sqrt();
        let larger = if size > typical.size { size / typical.size } else { 1.0 };
        (rows, columns, error, room * typical.off * larger)
    };
    let blocks = (0..rows.div_ceil(BLOCK) * across).into_par_iter().map(block);
    // NaN is not within anything.
    let within = |error: f64, allowed: f64| error <= allowed;
    match blocks.find_first(|(_, _, error, allowed)| !within(*error, *allowed)) {
        None => Ok(()),
        Some((rows, columns, error, allowed)) => Err(format!(
            "{error:.2e} off in the mean over rows {} to {}, columns {} to {} where {allowed:.2e} \
             is allowed",
            rows.start,
            rows.end - 1,
            columns.start,
            columns.end - 1,
        )),
    }
}

/// What the reference makes of the same inputs in f32.
fn reference<O: Operator + ?Sized>(op: &O, spot: &Spot<'_>) -> Result<Vec<Tensor<1>>, String> {
    let backward = spot.backward();
    let in_f32 = |input: &Input| {
        let mut input = input.clone();
        if let Input::Float { leaf, rows, .. } = &mut input {
            *rows = rows.clone().cast(DType::F32);
            *leaf = rows.clone();
        }
        if backward { input.tracked() } else { input }
    };
    let inputs: Vec<Input> = spot.call.inputs.iter().map(in_f32).collect();
    let call = Call { inputs: &inputs, attributes: spot.call.attributes };
    let outputs = policy::force(Implementation::Reference, || op.run(&call));
    let outputs = outputs.map_err(|e| e.to_string())?;
    if !backward {
        return Ok(outputs);
    }
    let pulls = outputs
        .into_iter()
        .zip(spot.cotangents)
        .map(|(y, dy)| host::weighted(y, dy.clone().autodiff()));
    let loss = pulls.reduce(|a, b| a + b).ok_or("the operator has no output")?;
    let gradients = host::gradients(&inputs, &loss.backward())?;
    Ok(gradients.into_iter().map(|gradient| gradient.flatten(0, 1)).collect())
}
