//! RMSNorm: y = x · w · (mean(x²) + eps)^-½ over the last dimension.
//!
//! Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv 1910.07467).
//!
//! With r = (mean(x²) + eps)^-½, backward is
//!
//! * dx = r · w · dy − r³ · x · mean(x · w · dy)
//! * dw = Σ over rows of r · x · dy
//!
//! and r is computed again from x, which the backward reads anyway, so nothing but x and w is kept.
//!
//! Bytes that must move, for M rows of D elements of s bytes: forward 2·M·D·s (x in, y out),
//! backward 3·M·D·s (x and dy in, dx out); some 4·M·D and 10·M·D operations, so memory decides.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
pub(crate) mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Tensor};

const OP: &str = "rms_norm";

/// Normalises the last dimension of `x` by its root mean square and scales it by `weight`.
///
/// * `x`: `[..., D]`, f32, bf16 or f16, any strides; rows may be none, D at least 1.
/// * `weight`: `[D]`, the element type of `x` or f32.
/// * `eps`: at least 0.
///
/// Returns `[..., D]` in the element type of `x`; arithmetic is f32. Gradients flow to `x` and
/// `weight`; reductions have a fixed order, so two runs agree bit for bit.
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type, device or eps, and where the fused kernel was asked
/// for on a device that has none.
pub fn rms_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    eps: f64,
) -> Result<Tensor<D>, OpError> {
    check(OP, &x, &weight, eps)?;
    Ok(match policy::choose(OP, x.shape().num_elements(), &x)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(x, weight, eps),
        Choice::Reference => reference::rms_norm(x, weight, eps),
    })
}

/// What `rms_norm` and `add_rms_norm` demand of their inputs.
pub(crate) fn check<const D: usize>(
    op: &'static str,
    x: &Tensor<D>,
    weight: &Tensor<1>,
    eps: f64,
) -> Result<(), OpError> {
    let check = Check(op);
    let shape = x.dims();
    let width = shape.last().copied().unwrap_or(0);
    check.shape("x", &shape, width > 0, "[..., D] with D at least 1")?;
    check.shape("weight", &weight.dims(), weight.dims() == [width], format!("[{width}]"))?;
    let dtype = check.float("x", x)?;
    check.dtype("weight", weight, &[dtype, DType::F32])?;
    check.device("weight", &weight.device(), &x.device())?;
    check.number("eps", eps, eps >= 0.0, "a number of at least 0")
}
