//! The triangular product Y = tril(tril(A) · tril(B)) of square matrices.
//!
//! Y_ij = Σ_k A_ik·B_kj over j ≤ k ≤ i, for i ≥ j; 0 above the diagonal.
//!
//! Backward, with G = tril(dY): dA = tril(G·tril(B)ᵀ), dB = tril(tril(A)ᵀ·G).
//!
//! Source: problem 15 of level 1 of KernelBench, with its inputs' upper triangles not trusted.
//!
//! N·(N+1)·(N+2)/3 operations, a sixth of the dense product; twice that backward. Only tiles that
//! reach below the diagonal are computed; zeros above it are written by the same launch.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::Tensor;

const OP: &str = "tril_matmul";

/// tril(tril(`a`) · tril(`b`)).
///
/// * `a`, `b`: `[..., N, N]` of one shape, N at least 1, f32, bf16 or f16, any strides. What stands above
///   their diagonals, NaN included, is never read as a number.
///
/// Returns `[..., N, N]` in the element type of the inputs, with zeros above the diagonals, as have
/// the gradients.
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type or device, and where the fused kernel was asked for on
/// a device that has none.
pub fn tril_matmul<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Result<Tensor<D>, OpError> {
    let check = Check(OP);
    let dtype = check.float("a", &a)?;
    let shape = a.dims();
    let ok = D >= 2 && shape[D - 1] == shape[D - 2] && shape[D - 1] >= 1;
    check.shape("a", &shape, ok, "[..., N, N] of rank 2 or more, N at least 1")?;
    check.shape("b", &b.dims(), b.dims() == shape, format!("{shape:?}"))?;
    check.dtype("b", &b, &[dtype])?;
    check.device("b", &b.device(), &a.device())?;
    Ok(match policy::choose(OP, a.shape().num_elements(), &a)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(a, b),
        Choice::Reference => reference::tril_matmul(a, b),
    })
}
