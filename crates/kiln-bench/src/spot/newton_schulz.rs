//! newton_schulz: every block, beside the reference in f32.
//!
//! Bounds of one element of a large matrix would cost all of its iteration in numbers with bounds. How far roundings
//! carry does not hang on the size, but on what the steps multiply them with: the bounds are those of a corner of
//! the first matrix, iterated by itself, and relative to the size of elements.

use super::Spot;
use super::whole::{self, Typical};
use crate::operator::Operator;
use kiln_ops::newton_schulz::{NewtonSchulzOptions, oracle};

/// The lesser side of the corner.
const CORNER: usize = 48;

/// Checks y.
///
/// # Errors
///
/// One line if it is wrong or cannot be read.
pub(crate) fn check<O: Operator + ?Sized>(
    op: &O,
    spot: &Spot<'_>,
    options: NewtonSchulzOptions,
) -> Result<(), String> {
    let g = spot.input(0)?;
    let g = g.stack().matrix(0);
    let [m, n] = g.size();
    // Of the same form.
    let by = (m.min(n) as f64 / CORNER as f64).max(1.0);
    let sides = [m, n].map(|side| (side as f64 / by).round().max(1.0) as usize);
    let [rows, columns] = sides.map(|side| (0..side).collect::<Vec<_>>());
    let corner = spot.numbers(&g.part(&rows, &columns));
    let corner = Typical::of(&oracle::forward(&corner, [1, sides[0], sides[1]], options));
    // Rows of length near 1 have smaller elements, the more they are.
    let smaller = (sides[0].max(sides[1]) as f64 / m.max(n) as f64).sqrt();
    whole::check(op, spot, &[corner.times(smaller)])
}
