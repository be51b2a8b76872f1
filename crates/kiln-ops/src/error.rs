//! What an operator says when it is called wrongly.

use burn::tensor::DType;

/// A call that an operator refuses before anything is launched.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum OpError {
    /// A tensor's shape does not fit.
    #[error("{op}: `{tensor}` has shape {found:?}, expected {expected}")]
    Shape {
        /// Operator.
        op: &'static str,
        /// Name of the tensor.
        tensor: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// What would fit.
        expected: String,
    },
    /// A tensor's element type does not fit.
    #[error("{op}: `{tensor}` is {found:?}, expected {expected}")]
    DType {
        /// Operator.
        op: &'static str,
        /// Name of the tensor.
        tensor: &'static str,
        /// Its element type.
        found: DType,
        /// What would fit.
        expected: String,
    },
    /// Two tensors stand on different devices.
    #[error("{op}: `{tensor}` is on {found}, expected {expected}, where the first input is")]
    Device {
        /// Operator.
        op: &'static str,
        /// Name of the tensor.
        tensor: &'static str,
        /// Its device.
        found: String,
        /// The device of the first input.
        expected: String,
    },
    /// An attribute is out of range.
    #[error("{op}: {attribute} = {found}, expected {expected}")]
    Attribute {
        /// Operator.
        op: &'static str,
        /// Name of the attribute.
        attribute: &'static str,
        /// Its value.
        found: String,
        /// What would fit.
        expected: String,
    },
    /// The fused kernel was asked for where it cannot run.
    #[error("{op}: the fused kernel cannot run on {device}: {reason}")]
    Unsupported {
        /// Operator.
        op: &'static str,
        /// The device.
        device: String,
        /// Why not.
        reason: String,
    },
    /// A target is neither ignored nor a class.
    #[error(
        "{op}: target {found} at position {position}, expected 0 to {last} or {ignore_index} (ignored)"
    )]
    Target {
        /// Operator.
        op: &'static str,
        /// The target.
        found: i64,
        /// Where it stands.
        position: usize,
        /// Last class.
        last: usize,
        /// The value that is ignored.
        ignore_index: i64,
    },
    /// A token is no row of a table.
    #[error("{op}: token {found} at position {position}, expected 0 to {last}")]
    Token {
        /// Operator.
        op: &'static str,
        /// The token.
        found: i64,
        /// Where it stands.
        position: usize,
        /// Last row.
        last: usize,
    },
    /// A seed of a Kasmina layer is none.
    #[error("{op}: `{field}` of seed {seed} is {found}, expected {expected}")]
    Seed {
        /// Operator.
        op: &'static str,
        /// Number of the seed.
        seed: usize,
        /// What of it.
        field: &'static str,
        /// Its value.
        found: String,
        /// What would fit.
        expected: String,
    },
}
