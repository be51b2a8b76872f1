//! The triangular product as a Burn operation: dispatch, fusion and autodiff.

use super::OP;
use crate::autodiff::{Graph, transposed};
use crate::tile::{self, Family, Product, Triangle, Triangles};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
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
        Triangular { a_upper, b_upper, family }: Triangular,
    ) -> FloatTensor<Self> {
        let side = |upper: bool| if upper { Triangle::Upper } else { Triangle::Lower };
        let triangles = Triangles { a: side(a_upper), b: side(b_upper), out_lower: true };
        let dtype = a.dtype;
        Product { triangles, family, ..Product::new(OP, a, b, dtype) }.run()
    }
}

impl<B: TrilMatmulOps, C: CheckpointStrategy> TrilMatmulOps for Autodiff<B, C> {
    fn tril_matmul(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        triangular: Triangular,
    ) -> FloatTensor<Self> {
        Graph::<C>::output([a, b], [0, 1], |[a, b], [of_a, of_b]| {
            (B::tril_matmul(a, b, triangular), move |dy: FloatTensor<B>, [a, b]| {
                let da = || B::tril_matmul(dy.clone(), transposed::<B>(b), triangular.grad_a());
                let da = of_a.then(da);
                let db = || B::tril_matmul(transposed::<B>(a), dy, triangular.grad_b());
                [da.into(), of_b.then(db).into()]
            })
        })
    }
}

/// [`tril_matmul`](fn@super::tril_matmul) through the kernels, without its checks.
pub(crate) fn fused<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> Tensor<D> {
    run(a, b, Triangular::lower())
}

fn run<const D: usize>(a: Tensor<D>, b: Tensor<D>, triangular: Triangular) -> Tensor<D> {
    let (a, b) = (a.into_dispatch(), b.into_dispatch());
    Tensor::from_dispatch(Dispatch::tril_matmul(a, b, triangular))
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
