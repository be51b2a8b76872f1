//! Errors through an iteration, along which running bounds would grow and errors do not.
//!
//! To first order a result is off by its slope along each input times what that is off, and by its slope along each
//! rounding on the way times the rounding. The slopes are finite differences of float64: an input, or one number on the
//! way, is moved, and the whole is computed again.

use super::bounded::{Bounded, Errors, LAMBDA, TINY, UNIT};
use super::number::Number;

/// Of the moves. What bends within them is far below the hundredth that is added for the second order.
const STEP: f64 = 1e-6;
/// Of the second order, for inputs that are off by a hundredth or less; of others more.
const MORE: f64 = 1.01;

/// What is called with a number on the way that f32 rounds, and in how many units more it may be off in one direction.
pub type Step<'a> = &'a mut dyn FnMut(f64, f64) -> f64;

/// f of the inputs.
pub(super) fn through(
    inputs: &[Bounded],
    f: impl Fn(&[f64], Step<'_>) -> Vec<f64>,
) -> Vec<Bounded> {
    let values: Vec<f64> = inputs.iter().map(|input| input.value()).collect();
    let mut units = vec![];
    let plain = f(&values, &mut |x, off_by| {
        units.push(off_by);
        x
    });
    let Some(rounding) = inputs.iter().find_map(Bounded::rounding) else {
        // Nobody asks for errors.
        return plain.into_iter().map(Bounded::exact).collect();
    };
    let slopes = |moved: Vec<f64>, by: f64| -> Vec<f64> {
        moved.iter().zip(&plain).map(|(moved, plain)| (moved - plain) / by).collect()
    };
    let mut errors = vec![Errors::default(); plain.len()];
    for (i, input) in inputs.iter().enumerate().filter(|(_, of)| of.bound() > 0.0) {
        let by = STEP * values[i].abs().max(1.0);
        let mut moved = values.clone();
        moved[i] += by;
        for (errors, slope) in errors.iter_mut().zip(slopes(f(&moved, &mut |x, _| x), by)) {
            *errors = errors.plus(input.errors().scaled(slope));
        }
    }
    // Σ|c| and Σc² of the roundings c.
    let mut roundings = vec![[0.0; 2]; plain.len()];
    for (at, units) in units.iter().enumerate() {
        let mut number = 0;
        let moved = f(&values, &mut |x, _| {
            number += 1;
            if number == at + 1 { x * (1.0 + STEP) } else { x }
        });
        let each = errors.iter_mut().zip(&mut roundings).zip(slopes(moved, STEP));
        for ((errors, [sum, squares]), slope) in each {
            let rounding = UNIT * slope.abs();
            *sum += rounding;
            *squares += rounding * rounding;
            errors.bias += rounding * units;
        }
    }
    let largest = inputs.iter().map(Bounded::bound).fold(0.0, f64::max);
    let more = MORE.max((2.0 * largest).exp());
    let all = plain.iter().zip(errors).zip(roundings);
    all.map(|((value, mut errors), [sum, squares])| {
        let many = squares.sqrt();
        if sum <= LAMBDA * many {
            errors.hard += sum;
        } else {
            errors.noise += many;
        }
        Bounded::new(*value, errors.scaled(more).biased(TINY), Some(rounding))
    })
    .collect()
}
