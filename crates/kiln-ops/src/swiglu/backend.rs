//! SwiGLU as a Burn operation: dispatch, fusion and autodiff.

use super::kernel::{self, Wanted};
use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

const OP: &str = "swiglu";

/// SwiGLU, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait SwiGluOps: Backend {
    /// y = silu(gate) · up.
    #[fusion(dtype = gate, shape = gate)]
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Its gradients, those that somebody asked for; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait SwiGluGradOps: Backend {
    /// dgate and dup.
    #[fusion(meta = gradients)]
    fn swiglu_backward(
        dy: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// dgate alone.
    #[fusion(dtype = gate, shape = gate)]
    fn swiglu_backward_gate(
        dy: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// dup alone.
    #[fusion(dtype = up, shape = up)]
    fn swiglu_backward_up(
        dy: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

fn gradients(_dy: &TensorSpec, gate: &TensorSpec, up: &TensorSpec) -> (TensorSpec, TensorSpec) {
    (gate.clone(), up.clone())
}

impl SwiGluOps for CubeBackend {
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        kernel::forward(OP, gate, up)
    }
}

impl SwiGluGradOps for CubeBackend {
    fn swiglu_backward(
        dy: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match kernel::backward(OP, dy, gate, up, Wanted { gate: true, up: true, y: false }) {
            (Some(dgate), Some(dup)) => (dgate, dup),
            _ => unreachable!("both are wanted"),
        }
    }

    fn swiglu_backward_gate(
        dy: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (dgate, _) =
            kernel::backward(OP, dy, gate, up, Wanted { gate: true, up: false, y: false });
        dgate.expect("dgate is wanted")
    }

    fn swiglu_backward_up(
        dy: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (_, dup) =
            kernel::backward(OP, dy, gate, up, Wanted { gate: false, up: true, y: false });
        dup.expect("dup is wanted")
    }
}

impl<B: Backend + SwiGluOps + SwiGluGradOps, C: CheckpointStrategy> SwiGluOps for Autodiff<B, C> {
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct SwiGluBackward;

        impl<B: Backend + SwiGluGradOps> Backward<B, 2> for SwiGluBackward {
            type State = (NodeId, NodeId);

            fn backward(
                self,
                ops: Ops<Self::State, 2>,
                grads: &mut Gradients,
                checkpointer: &mut Checkpointer,
            ) {
                let dy = grads.consume::<B>(&ops.node);
                let (gate, up) = ops.state;
                let gate = checkpointer.retrieve_node_output(gate);
                let up = checkpointer.retrieve_node_output(up);
                match ops.parents {
                    [Some(gate_node), Some(up_node)] => {
                        let (dgate, dup) = B::swiglu_backward(dy, gate, up);
                        grads.register::<B>(gate_node.id, dgate);
                        grads.register::<B>(up_node.id, dup);
                    }
                    [Some(gate_node), None] => {
                        let dgate = B::swiglu_backward_gate(dy, gate, up);
                        grads.register::<B>(gate_node.id, dgate);
                    }
                    [None, Some(up_node)] => {
                        let dup = B::swiglu_backward_up(dy, gate, up);
                        grads.register::<B>(up_node.id, dup);
                    }
                    [None, None] => {}
                }
            }
        }

        match SwiGluBackward.prepare::<C>([gate.node(), up.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = (prep.checkpoint(&gate), prep.checkpoint(&up));
                prep.finish(state, B::swiglu(gate.into_primitive(), up.into_primitive()))
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::swiglu(gate.into_primitive(), up.into_primitive()))
            }
        }
    }
}

/// [`swiglu`](fn@super::swiglu) through the kernels, without its checks.
pub(crate) fn fused<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as SwiGluOps>::swiglu(gate.into_dispatch(), up.into_dispatch()))
}

/// dgate and dup through the kernels, past autodiff and without checks.
pub fn backward<const D: usize>(
    dy: Tensor<D>,
    gate: Tensor<D>,
    up: Tensor<D>,
) -> (Tensor<D>, Tensor<D>) {
    let (dgate, dup) = <Dispatch as SwiGluGradOps>::swiglu_backward(
        dy.into_dispatch(),
        gate.into_dispatch(),
        up.into_dispatch(),
    );
    (Tensor::from_dispatch(dgate), Tensor::from_dispatch(dup))
}
