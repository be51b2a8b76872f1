//! newton_schulz: every block, beside the reference in f32.
//!
//! The steps multiply what was rounded before them, and running bounds of five of them end beyond the results. So blocks may
//! be off as far as what the reference makes in 16 bits, whose roundings are the same, is off on average. In f32 they are
//! smaller by the ratio of the two roundoffs; but there sums round too, of n terms as √n roundings.

use super::Spot;
use super::whole::{self, Typical};
use crate::operator::Operator;
use burn::tensor::DType;
use kiln_ops::oracle::unit_roundoff;

/// Checks y.
///
/// # Errors
///
/// One line if it is wrong or cannot be read.
pub(crate) fn check<O: Operator + ?Sized>(op: &O, spot: &Spot<'_>) -> Result<(), String> {
    let g = spot.call.rows(0);
    if g.dtype() != DType::F32 {
        return whole::check(op, spot, &Typical::of_reference(op, spot, g.dtype())?);
    }
    let device = g.device();
    let coarse = if device.supports_dtype(DType::BF16) { DType::BF16 } else { DType::F16 };
    let longest = spot.call.inputs[0].shape().iter().rev().take(2).max().copied().unwrap_or(1);
    let finer = unit_roundoff(DType::F32) / unit_roundoff(coarse) * (longest as f64).sqrt();
    let typical = Typical::of_reference(op, spot, coarse)?;
    let typical: Vec<Typical> = typical.into_iter().map(|of| of.off_by(finer)).collect();
    whole::check(op, spot, &typical)
}
