//! The squares of a tensor's elements, added to sums that go from tensor to tensor: what a norm over many tensors is
//! made of, with one launch for each.
//!
//! sums\[l\] + Σ x\[i\]² over the i with (i div [`CHUNK`]) mod L = l, i counting elements in row-major order and L the
//! number of sums: neighbours stay together, and large tensors have all sums at work.
//!
//! Bytes that must move, for n elements of s bytes: n·s. It is not differentiated.

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
use burn::tensor::{DType, Tensor};

const OP: &str = "sum_squares";

/// Neighbouring elements that count to one sum.
pub const CHUNK: usize = 2048;

/// `sums`, with the squares of the elements of `x` added.
///
/// * `x`: any shape of rank 1 or more, f32, bf16 or f16, any strides; elements may be none.
/// * `sums`: `[L]`, f32, L at least 1: as many cubes work at a time, if there are as many chunks.
///
/// Returns `[L]`, on CUDA in the memory of `sums` if nobody else holds it. Two runs agree bit for bit.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use kiln_ops::prelude::*;
///
/// let device = Device::flex();
/// let tensors = [Tensor::<2>::full([3, 4], 2.0, &device), Tensor::<2>::ones([5, 1], &device)];
/// let mut sums = Tensor::zeros([8], &device);
/// for x in tensors {
///     sums = sum_squares(x, sums)?;
/// }
/// assert_eq!(sums.sum().into_scalar::<f32>(), 12.0 * 4.0 + 5.0);
/// # }
/// # Ok::<(), kiln_ops::OpError>(())
/// ```
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type or device, and where the fused kernel was asked for on a device that has
/// none.
pub fn sum_squares<const D: usize>(x: Tensor<D>, sums: Tensor<1>) -> Result<Tensor<1>, OpError> {
    let check = Check(OP);
    check.float("x", &x)?;
    check.dtype("sums", &sums, &[DType::F32])?;
    check.shape("sums", &sums.dims(), sums.dims()[0] > 0, "[L], L at least 1")?;
    let tracked = sums.is_autodiff();
    let (x, sums) = (x.inner(), sums.inner());
    check.device("sums", &sums.device(), &x.device())?;
    let sums = match x.shape().num_elements() {
        0 => sums,
        elements => match policy::choose(OP, elements, &x)? {
            #[cfg(feature = "cube")]
            Choice::Fused => backend::fused(x, sums),
            Choice::Reference => reference::sum_squares(x, sums),
        },
    };
    Ok(if tracked { sums.autodiff() } else { sums })
}
