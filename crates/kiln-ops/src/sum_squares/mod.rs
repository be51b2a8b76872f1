//! The squares of a tensor's elements, added to sums that go from tensor to tensor: what a norm over many tensors is
//! made of.
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
use burn::tensor::{DType, Device, Tensor};

const OP: &str = "sum_squares";

/// Neighbouring elements that count to one sum.
pub const CHUNK: usize = 2048;

/// `sums`, with the squares of the elements of `x` added.
///
/// * `x`: any shape of rank 1 or more, f32, bf16 or f16, any strides; elements may be none.
/// * `sums`: `[L]`, f32, L at least 1: as many cubes work at a time, if there are as many chunks.
///
/// Returns `[L]`, on CUDA in the memory of `sums` if nobody else holds it. Two runs agree bit for bit. For many tensors
/// there is [`SumSquaresBatch`].
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type or device, and where the fused kernel was asked for on a device that has
/// none.
pub fn sum_squares<const D: usize>(x: Tensor<D>, sums: Tensor<1>) -> Result<Tensor<1>, OpError> {
    let mut batch = SumSquaresBatch::new();
    batch.push(x)?;
    batch.sum(sums)
}

/// Tensors of any ranks and shapes whose squares are added to the same sums: on CUDA up to 32 of them in one launch.
///
/// Their chunks are counted on from tensor to tensor: the first of a tensor follows the last of the one before.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use kiln_ops::prelude::*;
///
/// let device = Device::flex();
/// let mut batch = SumSquaresBatch::new();
/// batch.push(Tensor::<2>::full([3, 4], 2.0, &device))?;
/// batch.push(Tensor::<1>::ones([5], &device))?;
/// let sums = batch.sum(Tensor::zeros([8], &device))?;
/// assert_eq!(sums.sum().into_scalar::<f32>(), 12.0 * 4.0 + 5.0);
/// # }
/// # Ok::<(), kiln_ops::OpError>(())
/// ```
#[derive(Default)]
#[must_use = "the squares are added by a sum"]
pub struct SumSquaresBatch {
    /// Of all tensors.
    device: Option<Device>,
    /// Chunks of all tensors so far.
    chunks: usize,
    parts: Vec<Part>,
}

/// A tensor of a batch.
enum Part {
    /// For the kernel.
    #[cfg(feature = "cube")]
    Fused(Box<backend::Single>),
    /// What adds its squares, one tensor after the other.
    Reference(Box<dyn FnOnce(Tensor<1>) -> Tensor<1> + Send>),
}

impl SumSquaresBatch {
    /// No tensors yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor, as [`sum_squares`] takes it.
    ///
    /// # Errors
    ///
    /// As there, and for a tensor on another device than those before; it is not added then.
    pub fn push<const D: usize>(&mut self, x: Tensor<D>) -> Result<(), OpError> {
        let check = Check(OP);
        check.float("x", &x)?;
        let x = x.inner();
        if let Some(device) = &self.device {
            check.device("x", &x.device(), device)?;
        }
        let elements = x.shape().num_elements();
        let choice = match elements {
            0 => None,
            elements => Some(policy::choose(OP, elements, &x)?),
        };
        self.device = Some(x.device());
        let first = self.chunks;
        self.chunks += elements.div_ceil(CHUNK);
        self.parts.extend(choice.map(|choice| match choice {
            #[cfg(feature = "cube")]
            Choice::Fused => Part::Fused(Box::new(backend::Single::new(x, first))),
            Choice::Reference => {
                Part::Reference(Box::new(move |sums| reference::sum_squares(x, sums, first)))
            }
        }));
        Ok(())
    }

    /// `sums` with all squares added.
    ///
    /// # Errors
    ///
    /// As [`sum_squares`].
    pub fn sum(self, sums: Tensor<1>) -> Result<Tensor<1>, OpError> {
        let check = Check(OP);
        check.dtype("sums", &sums, &[DType::F32])?;
        check.shape("sums", &sums.dims(), sums.dims()[0] > 0, "[L], L at least 1")?;
        let tracked = sums.is_autodiff();
        let mut sums = sums.inner();
        if let Some(device) = &self.device {
            check.device("sums", &sums.device(), device)?;
        }
        #[cfg(feature = "cube")]
        let mut fused = vec![];
        for part in self.parts {
            match part {
                #[cfg(feature = "cube")]
                Part::Fused(x) => fused.push(*x),
                Part::Reference(add) => sums = add(sums),
            }
        }
        #[cfg(feature = "cube")]
        if !fused.is_empty() {
            sums = backend::fused(fused, sums, self.device.as_ref());
        }
        Ok(if tracked { sums.autodiff() } else { sums })
    }
}
