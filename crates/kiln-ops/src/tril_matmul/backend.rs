//! The triangular product as a Burn operation: dispatch, fusion and autodiff.

use super::OP;
use crate::autodiff::transposed;
use crate::tile::{self, Family, Product, Triangle, Triangles};
use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// Which operands are upper triangles: the product itself and its two gradients. The result is a
/// lower triangle in all of them.
#[derive(Debug, Clone, Copy)]
pub struct Triangular {
    a_upper: bool,
    b_upper: bool,
    family: Option<Family>,
}

impl Triangular {
    /// Lower · lower, on the kernels that this thread has forced.
    pub fn lower() -> Self {
        Self { a_upper: false, b_upper: false, family: tile::forced() }
    }

    /// G · Bᵀ: the gradient of A.
    pub fn grad_a(self) -> Self {
        Self { b_upper: true, ..self }
    }

    /// Aᵀ · G: the gradient of B.
    pub fn grad_b(self) -> Self {
        Self { a_upper: true, ..self }
    }
}

/// Triangular products, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait TrilMatmulOps: Backend {
    /// tril(a·b) of triangles.
    #[fusion(dtype = a, shape = a)]
    fn tril_matmul(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        triangular: Triangular,
    ) -> FloatTensor<Self>;
}

impl TrilMatmulOps for CubeBackend {
    fn tril_matmul(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        triangular: Triangular,
    ) -> FloatTensor<Self> {
        let side = |upper: bool| if upper { Triangle::Upper } else { Triangle::Lower };
        let triangles =
            Triangles { a: side(triangular.a_upper), b: side(triangular.b_upper), out_lower: true };
        let dtype = a.dtype;
        let product = Product::new(OP, a, b, dtype);
        Product { triangles, family: triangular.family, ..product }.run()
    }
}

#[derive(Debug)]
struct TrilMatmulBackward;

impl<B: TrilMatmulOps> Backward<B, 2> for TrilMatmulBackward {
    type State = (NodeId, NodeId, Triangular);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let (a, b, triangular) = ops.state;
        let a = checkpointer.retrieve_node_output(a);
        let b = checkpointer.retrieve_node_output(b);
        let [a_node, b_node] = ops.parents;
        if let Some(node) = a_node {
            let da = B::tril_matmul(dy.clone(), transposed::<B>(b), triangular.grad_a());
            grads.register::<B>(node.id, da);
        }
        if let Some(node) = b_node {
            let db = B::tril_matmul(transposed::<B>(a), dy, triangular.grad_b());
            grads.register::<B>(node.id, db);
        }
    }
}

impl<B: TrilMatmulOps, C: CheckpointStrategy> TrilMatmulOps for Autodiff<B, C> {
    fn tril_matmul(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        triangular: Triangular,
    ) -> FloatTensor<Self> {
        match TrilMatmulBackward.prepare::<C>([a.node(), b.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = (prep.checkpoint(&a), prep.checkpoint(&b), triangular);
                let y = B::tril_matmul(a.into_primitive(), b.into_primitive(), triangular);
                prep.finish(state, y)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::tril_matmul(a.into_primitive(), b.into_primitive(), triangular))
            }
        }
    }
}

/// [`tril_matmul`](fn@super::tril_matmul) through the kernels, without its checks.
pub(crate) fn fused<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    run(a, b, Triangular::lower())
}

fn run<const D: usize>(a: Tensor<D>, b: Tensor<D>, triangular: Triangular) -> Tensor<D> {
    let (a, b) = (a.into_dispatch(), b.into_dispatch());
    Tensor::from_dispatch(<Dispatch as TrilMatmulOps>::tril_matmul(a, b, triangular))
}

/// dA and dB through the kernels, past autodiff and without checks.
pub fn backward<const D: usize>(
    dy: Tensor<D>,
    a: Tensor<D>,
    b: Tensor<D>,
) -> (Tensor<D>, Tensor<D>) {
    let lower = Triangular::lower();
    let da = run(dy.clone(), b.swap_dims(D - 2, D - 1), lower.grad_a());
    (da, run(a.swap_dims(D - 2, D - 1), dy, lower.grad_b()))
}
