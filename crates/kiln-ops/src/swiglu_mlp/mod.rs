//! The SwiGLU MLP: y = (silu(x · w_gate) · (x · w_up)) · w_down.
//!
//! Source: Shazeer, GLU Variants Improve Transformer, 2020 (arXiv 2002.05202).
//!
//! Backward, with g = x·w_gate, u = x·w_up, s = sigmoid(g), h = g·s·u: dh = dy·w_downᵀ,
//! dg = dh·u·s·(1 + g·(1 − s)), du = dh·g·s, dw_gate = xᵀ·dg, dw_up = xᵀ·du, dw_down = hᵀ·dy,
//! dx = dg·w_gateᵀ + du·w_upᵀ.
//!
//! 6·M·D·F operations forward, twice that backward, for M rows, width D and inner width F.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::Tensor;

const OP: &str = "swiglu_mlp";

/// (silu(x · w_gate) · (x · w_up)) · w_down.
///
/// * `x`: `[..., D]`, f32, bf16 or f16, of rank 2 or more.
/// * `w_gate`, `w_up`: `[D, F]`; `w_down`: `[F, D]`; the element type of `x`. Every size may be 0.
///
/// Returns `[..., D]` in the element type of `x`.
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type or device, and where the fused kernel was
/// asked for on a device that has none.
pub fn swiglu_mlp<const D: usize>(
    x: Tensor<D>,
    w_gate: Tensor<2>,
    w_up: Tensor<2>,
    w_down: Tensor<2>,
) -> Result<Tensor<D>, OpError> {
    let check = Check(OP);
    let dtype = check.float("x", &x)?;
    let shape = x.dims();
    check.shape("x", &shape, D >= 2, "[..., D] of rank 2 or more")?;
    let width = shape[D - 1];
    let [rows, inner] = w_gate.dims();
    check.shape("w_gate", &[rows, inner], rows == width, format!("[{width}, F]"))?;
    let ok = w_up.dims() == [width, inner];
    check.shape("w_up", &w_up.dims(), ok, format!("[{width}, {inner}]"))?;
    let ok = w_down.dims() == [inner, width];
    check.shape("w_down", &w_down.dims(), ok, format!("[{inner}, {width}]"))?;
    for (name, weight) in [("w_gate", &w_gate), ("w_up", &w_up), ("w_down", &w_down)] {
        check.dtype(name, weight, &[dtype])?;
        check.device(name, &weight.device(), &x.device())?;
    }
    Ok(match policy::choose(OP, x.shape().num_elements(), &x)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(x, w_gate, w_up, w_down),
        Choice::Reference => reference::swiglu_mlp(x, w_gate, w_up, w_down),
    })
}
