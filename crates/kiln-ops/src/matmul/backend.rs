//! The matrix product as a Burn operation: dispatch, fusion and autodiff.

use super::{F32Precision, MatmulOptions, OP};
use crate::autodiff::transposed;
use crate::tile::{self, Alpha, Family, Product};
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
use burn::tensor::{DType, FloatDType, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

/// Factors and element types of a product.
#[derive(Debug, Clone, Copy)]
pub struct Scaled {
    alpha: f64,
    beta: f64,
    dtype: DType,
    precision: F32Precision,
    symmetric: bool,
    family: Option<Family>,
}

impl Scaled {
    /// alpha · A·B + beta · C, in `dtype` if the options name none, on the kernels that this thread has
    /// forced.
    pub fn new(options: MatmulOptions, dtype: DType) -> Self {
        let MatmulOptions { alpha, beta, precision, symmetric, .. } = options;
        let dtype = options.dtype.unwrap_or(dtype);
        Self { alpha, beta, dtype, precision, symmetric, family: tile::forced() }
    }

    fn product(self, a: CubeTensor, b: CubeTensor) -> Product {
        let product = Product::new(OP, a, b, self.dtype);
        let Self { alpha, precision, symmetric, family, .. } = self;
        Product { alpha: Alpha::new(alpha), precision, symmetric, family, ..product }
    }
}

/// Products, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait MatmulOps: Backend {
    /// alpha · a·b in an element type.
    #[fusion(meta = product)]
    fn kiln_matmul(a: FloatTensor<Self>, b: FloatTensor<Self>, scaled: Scaled)
    -> FloatTensor<Self>;

    /// alpha · a·b + beta · c in an element type.
    #[fusion(meta = product_add)]
    fn kiln_matmul_add(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        scaled: Scaled,
    ) -> FloatTensor<Self>;
}

fn product(a: &TensorSpec, b: &TensorSpec, scaled: &Scaled) -> TensorSpec {
    TensorSpec::new(tile::shape(&a.shape, &b.shape), scaled.dtype)
}

fn product_add(a: &TensorSpec, b: &TensorSpec, _c: &TensorSpec, scaled: &Scaled) -> TensorSpec {
    product(a, b, scaled)
}

impl MatmulOps for CubeBackend {
    fn kiln_matmul(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scaled: Scaled,
    ) -> FloatTensor<Self> {
        scaled.product(a, b).run()
    }

    fn kiln_matmul_add(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        scaled: Scaled,
    ) -> FloatTensor<Self> {
        scaled.product(a, b).accumulate(c, scaled.beta).run()
    }
}

/// The gradient of one operand: `a`·`b` in the element type of the operand, summed over the
/// dimensions it was broadcast along.
fn gradient<B: MatmulOps>(
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    scaled: Scaled,
    like: &Shape,
    dtype: DType,
) -> FloatTensor<B> {
    let full = tile::shape(&a.shape(), &b.shape());
    if full == *like {
        return B::kiln_matmul(a, b, Scaled { dtype, ..scaled });
    }
    let wide = Scaled { dtype: DType::F32, ..scaled };
    cast::<B>(sum_to::<B>(B::kiln_matmul(a, b, wide), like), dtype)
}

/// Sums over the dimensions that are 1 in `like`.
fn sum_to<B: Backend>(mut tensor: FloatTensor<B>, like: &Shape) -> FloatTensor<B> {
    for (i, size) in like.iter().enumerate() {
        if *size == 1 && tensor.shape()[i] != 1 {
            tensor = B::float_sum_dim(tensor, i);
        }
    }
    tensor
}

fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype { tensor } else { B::float_cast(tensor, FloatDType::from(dtype)) }
}

/// Registers dA and dB where they are wanted.
fn register<B: MatmulOps>(
    dy: FloatTensor<B>,
    a: FloatTensor<B>,
    b: FloatTensor<B>,
    scaled: Scaled,
    nodes: [Option<NodeId>; 2],
    grads: &mut Gradients,
) {
    let dtype = a.dtype();
    let scaled = Scaled { symmetric: false, ..scaled };
    let dy = cast::<B>(dy, dtype);
    let (a_shape, b_shape) = (a.shape(), b.shape());
    if let Some(node) = nodes[0] {
        let right = transposed::<B>(b);
        grads.register::<B>(node, gradient::<B>(dy.clone(), right, scaled, &a_shape, dtype));
    }
    if let Some(node) = nodes[1] {
        let last = b_shape.num_dims() - 2;
        let shared = b_shape[..last].iter().all(|size| *size == 1);
        let stacked = a_shape[..last].iter().any(|size| *size != 1);
        let db = if shared && stacked && a_shape.num_elements() > 0 {
            // One matrix for a stack: the sum over the stack is one product over all its rows.
            let rows: usize = a_shape[..=last].iter().product();
            let flat = |t, cols| B::float_reshape(t, Shape::new([rows, cols]));
            let left = transposed::<B>(flat(a, a_shape[last + 1]));
            let right = flat(dy, b_shape[last + 1]);
            B::float_reshape(B::kiln_matmul(left, right, Scaled { dtype, ..scaled }), b_shape)
        } else {
            gradient::<B>(transposed::<B>(a), dy, scaled, &b_shape, dtype)
        };
        grads.register::<B>(node, db);
    }
}

#[derive(Debug)]
struct MatmulBackward;

impl<B: MatmulOps> Backward<B, 2> for MatmulBackward {
    type State = (NodeId, NodeId, Scaled);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let (a, b, scaled) = ops.state;
        let a = checkpointer.retrieve_node_output(a);
        let b = checkpointer.retrieve_node_output(b);
        let nodes = ops.parents.map(|parent| parent.map(|node| node.id));
        register::<B>(dy, a, b, scaled, nodes, grads);
    }
}

#[derive(Debug)]
struct MatmulAddBackward;

impl<B: MatmulOps> Backward<B, 3> for MatmulAddBackward {
    type State = (NodeId, NodeId, Shape, DType, Scaled);

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let (a, b, shape, dtype, scaled) = ops.state;
        let a = checkpointer.retrieve_node_output(a);
        let b = checkpointer.retrieve_node_output(b);
        let [a_node, b_node, c_node] = ops.parents.map(|parent| parent.map(|node| node.id));
        if let Some(node) = c_node {
            let mut dc = cast::<B>(dy.clone(), DType::F32);
            if scaled.beta != 1.0 {
                dc = B::float_mul_scalar(dc, scaled.beta.into());
            }
            grads.register::<B>(node, cast::<B>(sum_to::<B>(dc, &shape), dtype));
        }
        register::<B>(dy, a, b, scaled, [a_node, b_node], grads);
    }
}

impl<B: MatmulOps, C: CheckpointStrategy> MatmulOps for Autodiff<B, C> {
    fn kiln_matmul(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        scaled: Scaled,
    ) -> FloatTensor<Self> {
        match MatmulBackward.prepare::<C>([a.node(), b.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = (prep.checkpoint(&a), prep.checkpoint(&b), scaled);
                let y = B::kiln_matmul(a.into_primitive(), b.into_primitive(), scaled);
                prep.finish(state, y)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::kiln_matmul(a.into_primitive(), b.into_primitive(), scaled))
            }
        }
    }

    fn kiln_matmul_add(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        scaled: Scaled,
    ) -> FloatTensor<Self> {
        let nodes = [a.node(), b.node(), c.node()];
        let (shape, dtype) = (c.shape(), c.dtype());
        match MatmulAddBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = (prep.checkpoint(&a), prep.checkpoint(&b), shape, dtype, scaled);
                let (a, b, c) = (a.into_primitive(), b.into_primitive(), c.into_primitive());
                prep.finish(state, B::kiln_matmul_add(a, b, c, scaled))
            }
            OpsKind::UnTracked(prep) => {
                let (a, b, c) = (a.into_primitive(), b.into_primitive(), c.into_primitive());
                prep.finish(B::kiln_matmul_add(a, b, c, scaled))
            }
        }
    }
}

/// The gradients of both operands of a·b through the kernels, past autodiff and without checks.
pub fn backward<const D: usize>(
    dy: Tensor<D>,
    a: Tensor<D>,
    b: Tensor<D>,
    alpha: f64,
) -> (Tensor<D>, Tensor<D>) {
    let options = MatmulOptions { alpha, ..MatmulOptions::default() };
    let da = fused(dy.clone(), b.swap_dims(D - 2, D - 1), None, options);
    (da, fused(a.swap_dims(D - 2, D - 1), dy, None, options))
}

/// [`matmul`](fn@super::matmul) and [`matmul_add`](super::matmul_add) through the kernels, without
/// their checks.
pub(crate) fn fused<const D: usize>(
    a: Tensor<D>,
    b: Tensor<D>,
    c: Option<Tensor<D>>,
    options: MatmulOptions,
) -> Tensor<D> {
    let scaled = Scaled::new(options, a.dtype());
    let (a, b) = (a.into_dispatch(), b.into_dispatch());
    Tensor::from_dispatch(match c {
        None => <Dispatch as MatmulOps>::kiln_matmul(a, b, scaled),
        Some(c) => <Dispatch as MatmulOps>::kiln_matmul_add(a, b, c.into_dispatch(), scaled),
    })
}
