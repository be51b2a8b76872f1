//! RMSNorm of a sum that is kept: sum = x + residual, y = rms_norm(sum).
//!
//! The residual stream of a pre-norm transformer in one pass: the unfused pair writes the sum and
//! reads it again.
//!
//! Backward, with g the gradient of rms_norm at `sum` for dy: dx = dresidual = dsum + g, and dw as
//! in [`rms_norm`].
//!
//! Bytes that must move, for M rows of D elements of s bytes: forward 4·M·D·s (x and residual in,
//! sum and y out), backward 4·M·D·s (sum, dy and dsum in, one gradient out that both inputs share).

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::check::Check;
use crate::policy::{self, Choice};
use crate::{OpError, rms_norm};
use burn::tensor::Tensor;

const OP: &str = "add_rms_norm";

/// Adds `residual` to `x` and normalises the sum: returns `(sum, y)`.
///
/// * `x`, `residual`: `[..., D]`, f32, bf16 or f16, any strides; rows may be none, D at least 1.
/// * `weight`: `[D]`, the element type of `x` or f32.
/// * `eps`: at least 0.
///
/// Both results are `[..., D]` in the element type of `x`. The sum is rounded to that type before
/// it is normalised, so `y` is exactly what [`rms_norm`](fn@crate::rms_norm::rms_norm) makes of
/// the returned sum.
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type, device or eps, and where the fused kernel was asked
/// for on a device that has none.
pub fn add_rms_norm<const D: usize>(
    x: Tensor<D>,
    residual: Tensor<D>,
    weight: Tensor<1>,
    eps: f64,
) -> Result<(Tensor<D>, Tensor<D>), OpError> {
    rms_norm::check(OP, &x, &weight, eps)?;
    let shape = x.dims();
    let check = Check(OP);
    check.shape("residual", &residual.dims(), residual.dims() == shape, format!("{shape:?}"))?;
    check.dtype("residual", &residual, &[x.dtype()])?;
    check.device("residual", &residual.device(), &x.device())?;
    Ok(match policy::choose(OP, x.shape().num_elements(), &x)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(x, residual, weight, eps),
        Choice::Reference => reference::add_rms_norm(x, residual, weight, eps),
    })
}
