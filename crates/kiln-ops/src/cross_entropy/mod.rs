//! Cross-entropy of logits against class indices, mean over the targets that are not ignored.
//!
//! For a row with target t: loss = logsumexp(logits) − logits\[t\], and the gradient is
//! (softmax(logits) − onehot(t)) / n with n the number of targets that count; ignored rows have a
//! zero gradient. If every target is ignored the loss is 0.
//!
//! With label smoothing ε (Szegedy et al., Rethinking the Inception Architecture, 2015, arXiv
//! 1512.00567) and z-loss ζ (Chowdhery et al., PaLM, 2022, arXiv 2204.02311), and with
//! z = logsumexp(logits):
//!
//! * loss = z − (1 − ε)·logits\[t\] − ε·mean(logits) + ζ·z²
//! * gradient = ((1 + 2·ζ·z)·softmax(logits) − (1 − ε)·onehot(t) − ε/V) / n
//!
//! Bytes that must move, for M rows of V logits of s bytes: forward M·V·s, backward 2·M·V·s.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
pub(crate) mod gradient;
#[cfg(feature = "cube")]
pub(crate) mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::{Int, Tensor};

const OP: &str = "cross_entropy";

/// What counts as a target, and what is added to the loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyOptions {
    /// Targets of this value do not count.
    pub ignore_index: i64,
    /// Read the targets back and refuse those that are no class. The read waits for the device, so
    /// a trainer whose data is known to be in range turns it off; then such a target makes the
    /// loss NaN.
    pub check_targets: bool,
    /// Share of the target that is spread over all classes, 0 to 1.
    pub label_smoothing: f64,
    /// Weight of the square of logsumexp(logits), at least 0.
    pub z_loss: f64,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        Self { ignore_index: -100, check_targets: true, label_smoothing: 0.0, z_loss: 0.0 }
    }
}

/// Mean of logsumexp(logits) − logits\[target\].
///
/// * `logits`: `[M, V]`, M and V at least 1, f32, bf16 or f16, rows at any distance; `targets`: `[M]`,
///   0 to V − 1 or `ignore_index`.
///
/// Returns `[1]` in f32; arithmetic is f32. The gradient flows to `logits`. Sums have a fixed
/// order, so two runs agree bit for bit.
///
/// # Errors
///
/// [`OpError`] on a shape, element type, device, option or target that does not fit, and where the
/// fused kernel was asked for on a device that has none.
pub fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
) -> Result<Tensor<1>, OpError> {
    let check = Check(OP);
    check.float("logits", &logits)?;
    let [rows, classes] = logits.dims();
    check.shape(
        "logits",
        &logits.dims(),
        rows > 0 && classes > 0,
        "[M, V] with M, V at least 1",
    )?;
    check.shape("targets", &targets.dims(), targets.dims() == [rows], format!("[{rows}]"))?;
    check.device("targets", &targets.device(), &logits.device())?;
    check_options(OP, options)?;
    check_targets(OP, &targets, classes, options)?;
    Ok(match policy::choose(OP, rows * classes, &logits)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(logits, targets, options),
        Choice::Reference => reference::cross_entropy(logits, targets, &options),
    })
}

/// Refuses a smoothing or a weight that is out of range.
pub(crate) fn check_options(op: &'static str, options: CrossEntropyOptions) -> Result<(), OpError> {
    let check = Check(op);
    let CrossEntropyOptions { label_smoothing: smoothing, z_loss, .. } = options;
    let ok = (0.0..=1.0).contains(&smoothing);
    check.number("label_smoothing", smoothing, ok, "a number from 0 to 1")?;
    check.number("z_loss", z_loss, z_loss >= 0.0, "a number of at least 0")
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
