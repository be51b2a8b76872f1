//! Every block of what several products in a row make, beside the operator's reference in f32.
//!
//! The reference is no oracle: rows and columns are compared with that. This looks for what is lost between
//! them. A block is off by the root mean square of its elements, which for right results is that of their
//! deviations: at most the largest sizes of their roundings, which elements that have bounds show.

use super::blocks::{BLOCK, span};
use super::{Spot, width};
use crate::host::{self, Input};
use crate::operator::{Call, Operator};
use burn::tensor::{DType, Tensor};
use kiln_ops::oracle::{Bounded, LAMBDA, Number};
use kiln_ops::policy::{self, Implementation};

/// Room for two implementations, each with its roundings, and for the mean over a block.
const ROOM: f64 = 2.0;

/// Elements that are compared at a time.
const TOGETHER: usize = 1 << 26;

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

    /// Of what the reference makes in the element type of the inputs, beside what it makes in f32.
    ///
    /// # Errors
    ///
    /// One line if the reference fails or the sums cannot be read.
    pub(super) fn of_reference<O: Operator + ?Sized>(
        op: &O,
        spot: &Spot<'_>,
        dtype: DType,
    ) -> Result<Vec<Self>, String> {
        let rounded = reference(op, spot, dtype)?;
        let plain = reference(op, spot, DType::F32)?;
        let mean = |of: Tensor<1>| Ok::<_, String>(host::download(&of.square().mean())?[0].sqrt());
        let of = |(rounded, plain): (Tensor<1>, Tensor<1>)| {
            let off = mean(rounded.cast(DType::F32) - plain.clone())?;
            Ok(Self { off, size: mean(plain)? })
        };
        rounded.into_iter().zip(plain).map(of).collect()
    }

    /// Off so many times as far.
    pub(super) fn off_by(self, factor: f64) -> Self {
        Self { off: self.off * factor, ..self }
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
    for (result, (wanted, typical)) in
        reference(op, spot, DType::F32)?.iter().zip(typical).enumerate()
    {
        let width = width(&spot.shape(result));
        // Beyond half of the largest number f16 may be infinite.
        let largest = spot.rounding.format.overflow() / 2.0;
        let checked = blocks(&spot.results[result], wanted, width, largest, *typical);
        spot.named(result, checked?)?;
    }
    Ok(())
}

/// Compares all blocks. Squares are added up over the rows of a block on the device, which holds the numbers.
///
/// # Errors
///
/// One line if the sums cannot be read; in it, one if a block is wrong.
fn blocks(
    found: &Tensor<1>,
    wanted: &Tensor<1>,
    width: usize,
    largest: f64,
    typical: Typical,
) -> Result<Result<(), String>, String> {
    let rows = found.dims()[0] / width.max(1);
    // Squares of small and of large numbers leave f32.
    let scale = if typical.size > 0.0 { typical.size } else { 1.0 };
    let together = (TOGETHER / (width.max(1) * BLOCK)).max(1) * BLOCK;
    let mut first = 0;
    while first < rows {
        // Blocks that are whole, or the one that is not.
        let left = rows - first;
        let count = if left < BLOCK { left } else { together.min(left / BLOCK * BLOCK) };
        let high = count.min(BLOCK);
        let cut = |of: &Tensor<1>| -> Tensor<3> {
            let part = of.clone().narrow(0, first * width, count * width);
            part.cast(DType::F32).reshape([count / high, high, width])
        };
        let (found, wanted) = (cut(found), cut(wanted));
        let beyond = wanted.clone().abs().greater_equal_elem(largest);
        let squares = |of: Tensor<3>| {
            let of = of.mask_fill(beyond.clone(), 0.0) / scale;
            host::download(&(of.clone() * of).sum_dim(1))
        };
        let (errors, sizes) = (squares(found - wanted.clone())?, squares(wanted)?);
        for (block, (errors, sizes)) in errors.chunks(width).zip(sizes.chunks(width)).enumerate() {
            for across in 0..width.div_ceil(BLOCK) {
                let columns = span(across, width);
                let mean = |of: &[f64]| {
                    let squares: f64 = of[columns.clone()].iter().sum();
                    scale * (squares / (high * columns.len()) as f64).sqrt()
                };
                let (error, size) = (mean(errors), mean(sizes));
                // Of few rows or columns the mean is that of few roundings.
                let room = ROOM + LAMBDA / (high.min(columns.len()) as f64).sqrt();
                let larger = (size / scale).max(1.0);
                let allowed = room * typical.off * larger;
                // Also where it is not a number, which is within nothing.
                if error <= allowed && error.is_finite() {
                    continue;
                }
                let from = first + block * high;
                return Ok(Err(format!(
                    "{error:.2e} off in the mean over rows {from} to {}, columns {} to {} where \
                     {allowed:.2e} is allowed",
                    from + high - 1,
                    columns.start,
                    columns.end - 1,
                )));
            }
        }
        first += count;
    }
    Ok(Ok(()))
}

/// What the reference makes of the same inputs in an element type.
fn reference<O: Operator + ?Sized>(
    op: &O,
    spot: &Spot<'_>,
    dtype: DType,
) -> Result<Vec<Tensor<1>>, String> {
    let backward = spot.backward();
    let cast = |input: &Input| {
        let mut input = input.clone();
        if let Input::Float { leaf, rows, .. } = &mut input {
            *rows = rows.clone().cast(dtype);
            *leaf = rows.clone();
        }
        if backward { input.tracked() } else { input }
    };
    let inputs: Vec<Input> = spot.call.inputs.iter().map(cast).collect();
    let call = Call { inputs: &inputs, attributes: spot.call.attributes };
    let outputs = policy::force(Implementation::Reference, || op.run(&call));
    let outputs = outputs.map_err(|e| e.to_string())?.into_iter().map(|output| output.flat);
    if !backward {
        return Ok(outputs.collect());
    }
    let pulls =
        outputs.zip(spot.cotangents).map(|(y, dy)| host::weighted(y, dy.clone().autodiff()));
    let loss = pulls.reduce(|a, b| a + b).ok_or("the operator has no output")?;
    let gradients = host::gradients(&inputs, &loss.backward())?;
    Ok(gradients.into_iter().map(|gradient| gradient.flatten(0, 1)).collect())
}
