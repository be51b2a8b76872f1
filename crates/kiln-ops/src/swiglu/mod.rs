//! SwiGLU, elementwise: y = silu(gate) · up with silu(g) = g · sigmoid(g).
//!
//! Source: Shazeer, GLU Variants Improve Transformer, 2020 (arXiv 2002.05202).
//!
//! Backward, with s = sigmoid(gate): dgate = dy · up · s · (1 + gate · (1 − s)), dup = dy · gate · s.
//!
//! Bytes that must move, for n elements of s bytes: forward 3·n·s, backward 5·n·s.

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
use burn::tensor::Tensor;

const OP: &str = "swiglu";

/// silu(gate) · up.
///
/// * `gate`, `up`: the same shape, of rank 1 or more, f32, bf16 or f16, any strides; elements may
///   be none.
///
/// Returns that shape and element type; arithmetic is f32. Gradients flow to `gate` and `up`.
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type or device, and where the fused kernel was asked for
/// on a device that has none.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Result<Tensor<D>, OpError> {
    let check = Check(OP);
    let dtype = check.float("gate", &gate)?;
    check.shape("up", &up.dims(), up.dims() == gate.dims(), format!("{:?}", gate.dims()))?;
    check.dtype("up", &up, &[dtype])?;
    check.device("up", &up.device(), &gate.device())?;
    Ok(match policy::choose(OP, gate.shape().num_elements(), &gate)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(gate, up),
        Choice::Reference => reference::swiglu(gate, up),
    })
}
