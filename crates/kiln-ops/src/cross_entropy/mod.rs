//! Cross-entropy of logits against class indices, mean over the targets that are not ignored.
//!
//! For a row with target t: loss = logsumexp(logits) − logits\[t\], and the gradient is
//! (softmax(logits) − onehot(t)) / n with n the number of targets that count; ignored rows have a
//! zero gradient. If every target is ignored the loss is 0.
//!
//! Bytes that must move, for M rows of V logits of s bytes: forward M·V·s, backward 2·M·V·s.

#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::check::Check;
use crate::{OpError, policy};
use burn::tensor::{Int, Tensor};

/// What counts as a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrossEntropyOptions {
    /// Targets of this value do not count.
    pub ignore_index: i64,
    /// Read the targets back and refuse those that are no class. The read waits for the device, so
    /// a trainer whose data is known to be in range turns it off.
    pub check_targets: bool,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        Self { ignore_index: -100, check_targets: true }
    }
}

/// Mean of logsumexp(logits) − logits\[target\].
///
/// * `logits`: `[M, V]`, f32, bf16 or f16; `targets`: `[M]`, 0 to V − 1 or `ignore_index`.
///
/// Returns `[1]` in f32; arithmetic is f32.
///
/// # Errors
///
/// [`OpError`] on a shape, element type, device or target that does not fit, and where a fused
/// kernel was asked for.
pub fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
) -> Result<Tensor<1>, OpError> {
    const OP: &str = "cross_entropy";
    let check = Check(OP);
    let dtype = check.float("logits", &logits)?;
    let [rows, classes] = logits.dims();
    check.shape(
        "logits",
        &logits.dims(),
        rows > 0 && classes > 0,
        "[M, V] with M, V at least 1",
    )?;
    check.shape("targets", &targets.dims(), targets.dims() == [rows], format!("[{rows}]"))?;
    check.device("targets", &targets.device(), &logits.device())?;
    check_targets(OP, &targets, classes, options)?;
    let call = policy::Call {
        op: OP,
        elements: rows * classes,
        dtype,
        device: &logits.device(),
        has_kernel: false,
    };
    policy::fused(&call)?;
    Ok(reference::cross_entropy(logits, targets, options.ignore_index))
}

/// Refuses a target that is neither ignored nor a class.
pub(crate) fn check_targets(
    op: &'static str,
    targets: &Tensor<1, Int>,
    classes: usize,
    options: CrossEntropyOptions,
) -> Result<(), OpError> {
    if !options.check_targets {
        return Ok(());
    }
    let data = targets.to_data();
    for (position, found) in data.iter::<i64>().enumerate() {
        if found != options.ignore_index && !(0..classes as i64).contains(&found) {
            let (last, ignore_index) = (classes - 1, options.ignore_index);
            return Err(OpError::Target { op, found, position, last, ignore_index });
        }
    }
    Ok(())
}
