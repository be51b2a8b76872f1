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
    ///
    /// As above, what the last layer returned is mixed in by the operation that makes what the next one reads.
    Hyper {
        x: Tensor<4>,
        /// What is to be mixed in.
        after: Option<After>,
    },
}

/// What a layer returned, and the weights with which it goes to the streams and they to each other.
pub(super) struct After {
    f: Tensor<3>,
    h_post: Tensor<3>,
    h_res: Tensor<4>,
}

impl After {
    fn with(self, x: Tensor<4>) -> MhcPost {
        let Self { f, h_post, h_res } = self;
        MhcPost { x, f, h_post, h_res }
    }
}

impl Stream {
    /// What begins with `x`, `[B, T, width]`: as many streams as become one again in `head`.
    pub(super) fn new(x: Tensor<3>, head: Option<&HyperHead>) -> Self {
        match head {
            None => Self::Plain { x, delta: None },
            Some(head) => Self::Hyper { x: streams(x, head.streams()), after: None },
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
            (Self::Hyper { x, after }, Some(connection)) => {
                let next = match after {
                    None => connection.read(x),
                    Some(after) => connection.read_after(after.with(x)),
                };
                let MhcPre { x, h_in, h_post, h_res } = next;
                let f = layer(norm.forward(h_in));
                Self::Hyper { x, after: Some(After { f, h_post, h_res }) }
            }
            _ => unreachable!("blocks and head are made of one configuration"),
        }
    }

    /// What the output projection reads.
    pub(super) fn end(self, head: Option<&HyperHead>, norm: &RmsNorm) -> Tensor<3> {
        match (self, head) {
            (Self::Plain { x, delta }, None) => read(x, delta, norm).1,
            (Self::Hyper { x, after }, Some(head)) => norm.forward(match after {
                None => head.forward(x),
                Some(after) => head.forward_after(after.with(x)),
            }),
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
