//! newton_schulz: every block, beside the reference in f32.
//!
//! The steps multiply what was rounded before them. In 16 bits running bounds of five of them end beyond the results: there
//! blocks may be off as far as what the reference makes in that element type, whose roundings are the same, is off on
//! average. In f32 the bounds are those of a corner of the first matrix, iterated by itself: how far roundings carry
//! does not hang on the size.

use super::Spot;
use super::whole::{self, Typical};
use crate::operator::Operator;
use burn::tensor::DType;
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
    let typical = match spot.call.rows(0).dtype() {
        DType::F32 => vec![of_corner(spot, options)?],
        dtype => Typical::of_reference(op, spot, dtype)?,
    };
    whole::check(op, spot, &typical)
}

fn of_corner(spot: &Spot<'_>, options: NewtonSchulzOptions) -> Result<Typical, String> {
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
    Ok(corner.times((sides[0].max(sides[1]) as f64 / m.max(n) as f64).sqrt()))
}
