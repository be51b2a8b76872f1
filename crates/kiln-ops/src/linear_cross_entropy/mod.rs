//! Cross-entropy of x·W against class indices, in chunks of rows.
//!
//! The same as [`cross_entropy`](crate::cross_entropy) of x·W, without one M×V matrix of logits:
//! each chunk of rows has its own. Backward, with g the gradient of the logits: dx = g·Wᵀ,
//! dW = xᵀ·g. The kernels make both in the pass of the forward, from one chunk of logits after the
//! other; the backward scales them.
//!
//! 2·M·D·V operations forward, twice that backward.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
mod chunks;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::cross_entropy::{CrossEntropyOptions, check_options, check_targets};
use crate::policy::{self, Choice};
use burn::tensor::{DType, Int, Tensor};

const OP: &str = "linear_cross_entropy";
/// Memory for the logits of a chunk.
const CHUNK_BYTES: usize = 200 << 20;

/// Rows of a chunk of the kernels' path: their logits fill the memory, and whole tiles.
pub fn chunk_rows(rows: usize, classes: usize, dtype: DType) -> usize {
    rows_of(CHUNK_BYTES, rows, classes, dtype)
}

/// That for so much memory.
fn rows_of(bytes: usize, rows: usize, classes: usize, dtype: DType) -> usize {
    let fitting = bytes / (classes * dtype.size()) / 128 * 128;
    fitting.clamp(128, rows.next_multiple_of(128))
}

/// Mean of logsumexp(x·weight) − (x·weight)\[target\].
///
/// * `x`: `[M, D]`, f32, bf16 or f16; `weight`: `[D, V]`, the same element type; `targets`: `[M]`,
///   0 to V − 1 or `ignore_index`. M, D and V are at least 1.
///
/// Returns `[1]` in f32.
///
/// # Errors
///
/// [`OpError`] on a shape, element type, device or target that does not fit, and where the
/// fused kernel was asked for on a device that has none.
pub fn linear_cross_entropy(
    x: Tensor<2>,
    weight: Tensor<2>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
) -> Result<Tensor<1>, OpError> {
    loss_of(x, weight, false, targets, options)
}

/// The same with the weight as an embedding has it: a table `[V, D]`, of which each row is a class. Its gradient comes
/// as rows too, where that of a transposed table would have to be transposed.
///
/// # Errors
///
/// As [`linear_cross_entropy`].
pub fn linear_cross_entropy_of_table(
    x: Tensor<2>,
    table: Tensor<2>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
) -> Result<Tensor<1>, OpError> {
    loss_of(x, table, true, targets, options)
}

/// Of a weight `[D, V]`, or of a table.
fn loss_of(
    x: Tensor<2>,
    weight: Tensor<2>,
    table: bool,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
) -> Result<Tensor<1>, OpError> {
    let (check, name) = (Check(OP), if table { "table" } else { "weight" });
    let dtype = check.float("x", &x)?;
    let [rows, width] = x.dims();
    check.shape("x", &x.dims(), rows > 0 && width > 0, "[M, D] with M, D at least 1")?;
    let ([inner, classes], expected) = match (weight.dims(), table) {
        (dims, false) => (dims, format!("[{width}, V] with V at least 1")),
        ([classes, inner], true) => ([inner, classes], format!("[V, {width}] with V at least 1")),
    };
    let ok = inner == width && classes > 0;
    check.shape(name, &weight.dims(), ok, expected)?;
    check.dtype(name, &weight, &[dtype])?;
    check.shape("targets", &targets.dims(), targets.dims() == [rows], format!("[{rows}]"))?;
    check.device(name, &weight.device(), &x.device())?;
    check.device("targets", &targets.device(), &x.device())?;
    check_options(OP, options)?;
    check_targets(OP, &targets, classes, options)?;
    Ok(match policy::choose(OP, rows * classes, &x)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(x, weight, targets, options, table),
        Choice::Reference => {
            let weight = if table { weight.transpose() } else { weight };
            reference::linear_cross_entropy(x, weight, targets, &options)
        }
    })
}
