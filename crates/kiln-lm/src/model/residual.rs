//! How layers read the residual stream, or streams, and write to them.

use burn::tensor::Tensor;
use kiln_nn::prelude::*;
use kiln_nn::streams;

/// What goes from layer to layer.
#[allow(clippy::large_enum_variant)] // one at a time
pub(super) enum Stream {
    /// One stream.
    ///
    /// What the last layer returned is not added before the next one reads: the addition is then one operation
    /// with the norm that follows ([`add_rms_norm`](kiln_ops::add_rms_norm)).
    Plain {
        x: Tensor<3>,
        /// What is to be added to `x`.
        delta: Option<Tensor<3>>,
    },
    /// The streams of hyper-connections.
    Hyper(Tensor<4>),
}

impl Stream {
    /// What begins with `x`, `[B, T, width]`: as many streams as become one again in `head`.
    pub(super) fn new(x: Tensor<3>, head: Option<&HyperHead>) -> Self {
        match head {
            None => Self::Plain { x, delta: None },
            Some(head) => Self::Hyper(streams(x, head.streams())),
        }
    }

    /// The same after `layer`, which reads what `norm` makes of it: x + layer(norm(x)), or what `connection` makes of
    /// the streams.
    pub(super) fn around(
        self,
        connection: Option<&HyperConnection>,
        norm: &RmsNorm,
        layer: impl FnOnce(Tensor<3>) -> Tensor<3>,
    ) -> Self {
        match (self, connection) {
            (Self::Plain { x, delta }, None) => {
                let (x, y) = read(x, delta, norm);
                Self::Plain { x, delta: Some(layer(y)) }
            }
            (Self::Hyper(x), Some(connection)) => {
                Self::Hyper(connection.forward(x, |x| layer(norm.forward(x))))
            }
            _ => unreachable!("blocks and head are made of one configuration"),
        }
    }

    /// What the output projection reads.
    pub(super) fn end(self, head: Option<&HyperHead>, norm: &RmsNorm) -> Tensor<3> {
        match (self, head) {
            (Self::Plain { x, delta }, None) => read(x, delta, norm).1,
            (Self::Hyper(x), Some(head)) => norm.forward(head.forward(x)),
            _ => unreachable!("blocks and head are made of one configuration"),
        }
    }
}

/// The stream in which everything is added, and the same normalised.
fn read(x: Tensor<3>, delta: Option<Tensor<3>>, norm: &RmsNorm) -> (Tensor<3>, Tensor<3>) {
    match delta {
        Some(delta) => norm.forward_add(delta, x),
        None => (x.clone(), norm.forward(x)),
    }
}
