//! Operators whose rows stand for themselves: a call of some rows is a smaller call.

use super::{ROWS, Spot};
use crate::host::{BoundedTensor, HostTensor};
use crate::operator::{HostCall, Operator};

/// Compares some rows of the results with the oracle's of these rows alone. An input that begins with the
/// dimension of the first one is cut, others are taken whole; results that `others` names the caller checks.
///
/// # Errors
///
/// One line if a result is wrong, has no rows, or cannot be read.
pub(crate) fn check<O: Operator + ?Sized>(
    op: &O,
    spot: &Spot<'_>,
    others: &[usize],
) -> Result<(), String> {
    let spec = op.spec();
    let by_rows = |shape: &[&str]| shape.first() == spec.inputs[0].shape.first();
    let count = spot.call.rows(0).dims()[0];
    let rows = spot.sample(count, ROWS);
    let cut = |values: Vec<f64>| {
        HostTensor::new([rows.len(), values.len() / rows.len().max(1)], values)
            .bounded(spot.rounding)
    };

    let mut inputs = vec![];
    for (i, input) in spec.inputs.iter().enumerate() {
        let shape = spot.call.inputs[i].shape();
        inputs.push(match (input.holds, by_rows(input.shape)) {
            (of, true) if of.integers() => {
                let all = spot.integers(i)?;
                cut(rows.iter().map(|row| all[*row] as f64).collect())
            }
            (of, false) if of.integers() => {
                let all = spot.integers(i)?.into_iter().map(|class| class as f64).collect();
                HostTensor::new(shape, all).bounded(spot.rounding)
            }
            (_, true) => cut(spot.input_rows(i, &rows)?),
            (_, false) => {
                HostTensor::new(shape, spot.input(i)?.values().to_vec()).bounded(spot.rounding)
            }
        });
    }
    let call = HostCall { inputs: &inputs, attributes: spot.call.attributes };
    let expected = match spot.backward() {
        false => op.oracle(&call),
        true => {
            let cotangents: Result<Vec<BoundedTensor>, String> = (0..spec.outputs.len())
                .map(|i| match by_rows(spec.outputs[i].shape) {
                    true => Ok(cut(spot.cotangent_rows(i, &rows)?)),
                    false => {
                        let all = spot.cotangent(i)?;
                        Ok(HostTensor::new(all.shape(), all.values().to_vec())
                            .bounded(spot.rounding))
                    }
                })
                .collect();
            op.oracle_backward(&call, &cotangents?)
        }
    };
    for (i, expected) in expected.iter().enumerate().filter(|(i, _)| !others.contains(i)) {
        let shape = match spot.backward() {
            true => spec.inputs[spot.input_of(i)].shape,
            false => spec.outputs[i].shape,
        };
        if !by_rows(shape) {
            return Err(format!("not checked: `{}` has no rows", spot.name(i)));
        }
        spot.compare_rows(i, &rows, &expected.values)?;
    }
    Ok(())
}
