//! RoPE as Burn operations, of one tensor, of two and of a packed one: dispatch, fusion and autodiff.
//!
//! The backward is the same operation with the angles reversed, so there is no trait of gradients.

pub use super::kernel::Rotation;

use super::{OP, RopeTable, kernel};
use crate::autodiff::{Graph, Maybe};
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_cubecl::CubeBackend;

/// RoPE, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait RopeOps: Backend {
    /// `x` rotated.
    #[fusion(dtype = x, shape = x)]
    fn rope(x: FloatTensor<Self>, #[extension_type] by: Rotation<Self>) -> FloatTensor<Self>;

    /// `q` and `k` rotated, in one launch.
    #[fusion(meta = |q, k, _by| (q.clone(), k.clone()))]
    fn rope_qk(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        #[extension_type] by: Rotation<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// The first `heads` heads of `qkv`, `[B, T, …·D]`, rotated.
    #[fusion(dtype = qkv, shape = qkv)]
    fn rope_packed(
        qkv: FloatTensor<Self>,
        heads: usize,
        #[extension_type] by: Rotation<Self>,
    ) -> FloatTensor<Self>;
}

impl RopeOps for CubeBackend {
    fn rope(x: FloatTensor<Self>, by: Rotation<Self>) -> FloatTensor<Self> {
        kernel::rope(OP, x, None, by).0
    }

    fn rope_qk(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        by: Rotation<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (q, k) = kernel::rope(OP, q, Some(k), by);
        (q, k.expect("there are keys"))
    }

    fn rope_packed(qkv: FloatTensor<Self>, heads: usize, by: Rotation<Self>) -> FloatTensor<Self> {
        kernel::packed(OP, qkv, heads, by)
    }
}

impl<B: Backend> Rotation<B> {
    fn back(self) -> Self {
        Self { inverse: !self.inverse, ..self }
    }
}

impl<B: Backend, C: CheckpointStrategy> Rotation<Autodiff<B, C>> {
    /// Past autodiff: the table needs no gradient.
    fn inner(self) -> Rotation<B> {
        let Self { cos, sin, layout, offset, inverse } = self;
        let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
        Rotation { cos, sin, layout, offset, inverse }
    }
}

impl<B: RopeOps, C: CheckpointStrategy> RopeOps for Autodiff<B, C> {
    fn rope(x: FloatTensor<Self>, by: Rotation<Self>) -> FloatTensor<Self> {
        let by = by.inner();
        Graph::<C>::output([x], [], |[x], _| {
            (B::rope(x, by.clone()), move |dy, []| [Maybe::Some(B::rope(dy, by.back()))])
        })
    }

    fn rope_qk(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        by: Rotation<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let by = by.inner();
        Graph::<C>::outputs([q, k], [], |[q, k], wanted| {
            let (q, k) = B::rope_qk(q, k, by.clone());
            ([q, k], move |[dq, dk], []| {
                let by = by.back();
                let dq = dq.option().filter(|_| wanted[0]);
                let dk = dk.option().filter(|_| wanted[1]);
                match (dq, dk) {
                    (Some(dq), Some(dk)) => {
                        let (dq, dk) = B::rope_qk(dq, dk, by);
                        [Maybe::Some(dq), Maybe::Some(dk)]
                    }
                    (dq, dk) => [dq, dk].map(|dy| dy.map(|dy| B::rope(dy, by.clone())).into()),
                }
            })
        })
        .into()
    }

    fn rope_packed(qkv: FloatTensor<Self>, heads: usize, by: Rotation<Self>) -> FloatTensor<Self> {
        let by = by.inner();
        Graph::<C>::output([qkv], [], |[qkv], _| {
            let back = by.clone().back();
            let y = B::rope_packed(qkv, heads, by.clone());
            (y, move |dy, []| [Maybe::Some(B::rope_packed(dy, heads, back))])
        })
    }
}

impl Rotation<Dispatch> {
    /// Forth, from a position on.
    fn new(table: &RopeTable, offset: usize) -> Self {
        let [cos, sin] = [&table.cos, &table.sin].map(|table| table.clone().into_dispatch());
        Self { cos, sin, layout: table.layout(), offset, inverse: false }
    }
}

/// [`rope`](fn@super::rope) through the kernel, without its checks.
pub(crate) fn fused(x: Tensor<4>, table: &RopeTable, offset: usize) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::rope(x.into_dispatch(), Rotation::new(table, offset)))
}

/// [`rope_qk`](super::rope_qk) through the kernel, without its checks.
pub(crate) fn fused_qk(
    q: Tensor<4>,
    k: Tensor<4>,
    table: &RopeTable,
    offset: usize,
) -> (Tensor<4>, Tensor<4>) {
    let by = Rotation::new(table, offset);
    let (q, k) = Dispatch::rope_qk(q.into_dispatch(), k.into_dispatch(), by);
    (Tensor::from_dispatch(q), Tensor::from_dispatch(k))
}

/// [`rope_qkv`](super::rope_qkv) of so many heads through the kernel, without its checks.
pub(crate) fn fused_packed(
    qkv: Tensor<3>,
    heads: usize,
    table: &RopeTable,
    offset: usize,
) -> Tensor<3> {
    let by = Rotation::new(table, offset);
    Tensor::from_dispatch(Dispatch::rope_packed(qkv.into_dispatch(), heads, by))
}

/// dx through the kernel, without checks.
pub fn backward(dy: Tensor<4>, table: &RopeTable, offset: usize) -> Tensor<4> {
    let by = Rotation::new(table, offset).back();
    Tensor::from_dispatch(Dispatch::rope(dy.into_dispatch(), by))
}
