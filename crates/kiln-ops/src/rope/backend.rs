//! RoPE as Burn operations, of one tensor and of two: dispatch, fusion and autodiff.
//!
//! The backward is the same operation with the angles reversed, so there is no trait of gradients.

use super::{OP, RopeLayout, RopeTable, kernel};
use crate::autodiff::{self, MultiBackward};
use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata, backend_extension, tensor::FloatTensor,
};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::CubeBackend;

/// Which way to turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// The first position.
    pub(crate) offset: usize,
    /// Channels 2k and 2k + 1 form a pair, else k and k + D/2.
    pub(crate) interleaved: bool,
    /// Back.
    pub(crate) inverse: bool,
}

impl Turn {
    /// Forth, from a position on.
    pub fn new(layout: RopeLayout, offset: usize) -> Self {
        Self { offset, interleaved: layout == RopeLayout::Interleaved, inverse: false }
    }

    fn back(self) -> Self {
        Self { inverse: !self.inverse, ..self }
    }
}

/// RoPE, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait RopeOps: Backend {
    /// `x` turned.
    #[fusion(dtype = x, shape = x)]
    fn rope(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        turn: Turn,
    ) -> FloatTensor<Self>;

    /// `q` and `k` turned, in one launch.
    #[fusion(meta = outputs)]
    fn rope_qk(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        turn: Turn,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

fn outputs(
    q: &TensorSpec,
    k: &TensorSpec,
    _cos: &TensorSpec,
    _sin: &TensorSpec,
    _turn: &Turn,
) -> (TensorSpec, TensorSpec) {
    (q.clone(), k.clone())
}

impl RopeOps for CubeBackend {
    fn rope(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        turn: Turn,
    ) -> FloatTensor<Self> {
        kernel::rope(OP, x, None, cos, sin, turn).0
    }

    fn rope_qk(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        turn: Turn,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (q, k) = kernel::rope(OP, q, Some(k), cos, sin, turn);
        (q, k.expect("there are keys"))
    }
}

/// The table is kept for the backward itself; it needs no gradient.
#[derive(Debug)]
struct State<B: Backend> {
    cos: FloatTensor<B>,
    sin: FloatTensor<B>,
    turn: Turn,
}

impl<B: Backend> Clone for State<B> {
    fn clone(&self) -> Self {
        Self { cos: self.cos.clone(), sin: self.sin.clone(), turn: self.turn }
    }
}

#[derive(Debug)]
struct RopeBackward;

impl<B: Backend + RopeOps> Backward<B, 1> for RopeBackward {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let State { cos, sin, turn } = ops.state;
        if let [Some(x)] = ops.parents {
            grads.register::<B>(x.id, B::rope(dy, cos, sin, turn.back()));
        }
    }
}

#[derive(Debug)]
struct RopeQkBackward;

impl<B: Backend + RopeOps> MultiBackward<B, 2, 2> for RopeQkBackward {
    type State = (State<B>, [Shape; 2], DType);

    fn backward(
        self,
        nodes: [Option<NodeId>; 2],
        (State { cos, sin, turn }, shapes, dtype): Self::State,
        cotangents: [Option<FloatTensor<B>>; 2],
        grads: &mut Gradients,
        _: &mut Checkpointer,
    ) {
        let turn = turn.back();
        let gradients = match (nodes, cotangents) {
            ([Some(_), Some(_)], [Some(dq), Some(dk)]) => {
                let (dq, dk) = B::rope_qk(dq, dk, cos, sin, turn);
                [Some(dq), Some(dk)]
            }
            (_, cotangents) => {
                let mut wanted = nodes.into_iter().zip(shapes);
                cotangents.map(|cotangent| {
                    let (node, shape) = wanted.next()?;
                    node?;
                    Some(match cotangent {
                        Some(dy) => B::rope(dy, cos.clone(), sin.clone(), turn),
                        None => B::float_zeros(shape, &cos.device(), dtype.into()),
                    })
                })
            }
        };
        for (node, gradient) in nodes.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node, gradient);
            }
        }
    }
}

impl<B: Backend + RopeOps, C: CheckpointStrategy> RopeOps for Autodiff<B, C> {
    fn rope(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        turn: Turn,
    ) -> FloatTensor<Self> {
        let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
        match RopeBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let state = State { cos: cos.clone(), sin: sin.clone(), turn };
                prep.finish(state, B::rope(x.into_primitive(), cos, sin, turn))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::rope(x.into_primitive(), cos, sin, turn)),
        }
    }

    fn rope_qk(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        turn: Turn,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let nodes = [q.node(), k.node()];
        let (q, k) = (q.into_primitive(), k.into_primitive());
        let state: State<B> = State { cos: cos.into_primitive(), sin: sin.into_primitive(), turn };
        let kept = (state.clone(), [q.shape(), k.shape()], q.dtype());
        let [q, k] = autodiff::outputs::<B, C, _, 2, 2>(
            RopeQkBackward,
            nodes,
            |_| kept,
            || {
                let (q, k) = B::rope_qk(q, k, state.cos, state.sin, turn);
                [q, k]
            },
        );
        (q, k)
    }
}

/// [`rope`](fn@super::rope) through the kernel, without its checks.
pub(crate) fn fused(x: Tensor<4>, table: &RopeTable, offset: usize) -> Tensor<4> {
    apply(x, table, Turn::new(table.layout(), offset))
}

/// [`rope_qk`](super::rope_qk) through the kernel, without its checks.
pub(crate) fn fused_qk(
    q: Tensor<4>,
    k: Tensor<4>,
    table: &RopeTable,
    offset: usize,
) -> (Tensor<4>, Tensor<4>) {
    let (q, k) = <Dispatch as RopeOps>::rope_qk(
        q.into_dispatch(),
        k.into_dispatch(),
        table.cos.clone().into_dispatch(),
        table.sin.clone().into_dispatch(),
        Turn::new(table.layout(), offset),
    );
    (Tensor::from_dispatch(q), Tensor::from_dispatch(k))
}

/// dx through the kernel, without checks.
pub fn backward(dy: Tensor<4>, table: &RopeTable, offset: usize) -> Tensor<4> {
    apply(dy, table, Turn::new(table.layout(), offset).back())
}

fn apply(x: Tensor<4>, table: &RopeTable, turn: Turn) -> Tensor<4> {
    Tensor::from_dispatch(<Dispatch as RopeOps>::rope(
        x.into_dispatch(),
        table.cos.clone().into_dispatch(),
        table.sin.clone().into_dispatch(),
        turn,
    ))
}
