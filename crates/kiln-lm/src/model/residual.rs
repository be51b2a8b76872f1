//! How layers read the residual stream and write to it.

use crate::config::ResidualKind;
use burn::tensor::Tensor;
use kiln_nn::prelude::*;

/// The stream between two layers.
///
/// What the last layer returned is not added before the next one reads: the addition is then one operation
/// with the norm that follows ([`add_rms_norm`](kiln_ops::add_rms_norm)).
pub(super) struct Stream {
    x: Tensor<3>,
    /// What is to be added to `x`.
    delta: Option<Tensor<3>>,
}

impl Stream {
    /// A stream that begins with `x`, `[B, T, width]`.
    pub(super) fn new(x: Tensor<3>) -> Self {
        Self { x, delta: None }
    }
}

/// How a layer reads the stream and writes to it. A new kind is a variant here and one of
/// [`ResidualKind`]; one with parameters is a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Residual {
    /// x + layer(norm(x)).
    Plain,
}

impl Residual {
    pub(super) fn new(kind: ResidualKind) -> Self {
        match kind {
            ResidualKind::Plain => Self::Plain,
        }
    }

    /// What a layer reads, normalised; and the stream, in which everything is added by then.
    pub(super) fn read(self, stream: Stream, norm: &RmsNorm) -> (Stream, Tensor<3>) {
        match self {
            Self::Plain => {
                let (x, y) = match stream.delta {
                    Some(delta) => norm.forward_add(delta, stream.x),
                    None => (stream.x.clone(), norm.forward(stream.x)),
                };
                (Stream { x, delta: None }, y)
            }
        }
    }

    /// The stream after a layer that has read it and returned `y`.
    pub(super) fn write(self, stream: Stream, y: Tensor<3>) -> Stream {
        match self {
            Self::Plain => Stream { delta: Some(y), ..stream },
        }
    }
}
