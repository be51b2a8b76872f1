//! Rows of a table as a Burn operation: dispatch, fusion and autodiff.

use super::{OP, kernel};
use crate::autodiff::{Graph, Maybe};
use crate::cross_entropy::backend::known;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{
    Autodiff, Backend, Dispatch, ExtensionType, TensorMetadata, backend_extension,
};
use burn::tensor::{DType, Int, Shape, Tensor};
use burn_cubecl::CubeBackend;

/// What the backward computes from.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// The operator, for the audit.
    pub op: &'static str,
    /// `[T, D]`.
    pub dy: FloatTensor<B>,
    /// `[T]`.
    pub tokens: IntTensor<B>,
    /// Rows of the table, V.
    pub rows: usize,
    /// Its element type.
    pub dtype: DType,
    /// What the gradient is added to: a table of its element type.
    #[extension_type]
    pub onto: Maybe<B>,
}

/// Rows of a table, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait EmbeddingOps: Backend {
    /// weight\[tokens\], `[T, D]` in `dtype`; there are tokens.
    #[fusion(meta = |weight, tokens, dtype| {
        TensorSpec::new(Shape::new([tokens.shape[0], weight.shape[1]]), *dtype)
    })]
    fn kiln_embedding(
        weight: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self>;

    /// The same, and the table, for those who read it next.
    #[fusion(meta = |weight, tokens, dtype| {
        let shape = Shape::new([tokens.shape[0], weight.shape[1]]);
        (TensorSpec::new(shape, *dtype), weight.clone())
    })]
    fn kiln_tied_embedding(
        weight: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

/// The gradient of the table; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait EmbeddingGradOps: Backend {
    /// dweight, `[V, D]`.
    #[fusion(meta = |of| TensorSpec::new(Shape::new([of.rows, of.dy.shape[1]]), of.dtype))]
    fn kiln_embedding_backward(#[extension_type] of: Backward<Self>) -> FloatTensor<Self>;
}

impl EmbeddingOps for CubeBackend {
    fn kiln_embedding(
        weight: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        kernel::forward(weight, tokens, dtype)
    }

    fn kiln_tied_embedding(
        weight: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        (kernel::forward(weight.clone(), tokens, dtype), weight)
    }
}

impl EmbeddingGradOps for CubeBackend {
    fn kiln_embedding_backward(of: Backward<Self>) -> FloatTensor<Self> {
        kernel::backward(of)
    }
}

impl<B, C> EmbeddingOps for Autodiff<B, C>
where
    B: EmbeddingOps + EmbeddingGradOps,
    C: CheckpointStrategy,
{
    fn kiln_embedding(
        weight: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        Graph::<C>::output([weight], [], |[weight], _| {
            let (rows, of_weight) = (weight.shape()[0], weight.dtype());
            let y = B::kiln_embedding(weight, tokens.clone(), dtype);
            (y, move |dy, []| {
                let onto = Maybe::None;
                let of = Backward { op: OP, dy, tokens, rows, dtype: of_weight, onto };
                [Maybe::Some(B::kiln_embedding_backward(of))]
            })
        })
    }

    fn kiln_tied_embedding(
        weight: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [y, table] = Graph::<C>::outputs([weight], [], |[weight], _| {
            let (rows, of_weight) = (weight.shape()[0], weight.dtype());
            let y = B::kiln_embedding(weight.clone(), tokens.clone(), dtype);
            ([y, weight], move |[dy, dtable]: [Maybe<B>; 2], []| {
                let Maybe::Some(dy) = dy else { return [dtable] };
                let of = Backward { op: OP, dy, tokens, rows, dtype: of_weight, onto: dtable };
                [Maybe::Some(B::kiln_embedding_backward(of))]
            })
        });
        (y, table)
    }
}

/// [`embedding`](fn@super::embedding) through the kernels, without its checks.
pub(super) fn fused(weight: Tensor<2>, tokens: Tensor<1, Int>, dtype: DType) -> Tensor<2> {
    let (weight, tokens) = (weight.into_dispatch(), known(tokens).into_dispatch());
    Tensor::from_dispatch(Dispatch::kiln_embedding(weight, tokens, dtype))
}

/// [`tied_embedding`](fn@super::tied_embedding) through the kernels, without its checks.
pub(super) fn tied(
    weight: Tensor<2>,
    tokens: Tensor<1, Int>,
    dtype: DType,
) -> (Tensor<2>, Tensor<2>) {
    let (weight, tokens) = (weight.into_dispatch(), known(tokens).into_dispatch());
    let (y, table) = Dispatch::kiln_tied_embedding(weight, tokens, dtype);
    (Tensor::from_dispatch(y), Tensor::from_dispatch(table))
}

/// The gradient of a table of `rows` rows through the kernels, past autodiff and without checks.
pub fn backward(dy: Tensor<2>, tokens: Tensor<1, Int>, rows: usize, dtype: DType) -> Tensor<2> {
    let (dy, tokens) = (dy.into_dispatch(), known(tokens).into_dispatch());
    let of = Backward { op: OP, dy, tokens, rows, dtype, onto: Maybe::None };
    Tensor::from_dispatch(Dispatch::kiln_embedding_backward(of))
}
