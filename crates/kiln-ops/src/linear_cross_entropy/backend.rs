//! Linear cross-entropy as a Burn operation: in chunks of rows, gradients in the same pass.
//!
//! The logits of a chunk are made, turned into their own gradient, and used up for dx and dW before
//! the next chunk is begun: 3 products for each chunk, and no logits are made again in the backward,
//! which only scales.

use crate::cross_entropy::{CrossEntropyOptions, gradient, kernel};
use crate::launch;
use crate::tile::{self, Family, Product, view};
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{DType, FloatDType, Int, Shape, Slice, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

const OP: &str = "linear_cross_entropy";
/// Memory for the logits of a chunk.
const CHUNK_BYTES: usize = 200 << 20;

/// The options, and the kernels that products run on.
#[derive(Debug, Clone, Copy)]
pub struct Loss {
    options: CrossEntropyOptions,
    family: Option<Family>,
}

impl Loss {
    /// On the kernels that this thread has forced.
    pub fn new(options: CrossEntropyOptions) -> Self {
        Self { options, family: tile::forced() }
    }
}

/// The loss, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait LinearCrossEntropyOps: Backend {
    /// The mean loss, `[1]` in f32. `scale` is one over the number of targets that count.
    #[fusion(meta = mean)]
    fn linear_cross_entropy(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        loss: Loss,
    ) -> FloatTensor<Self>;
}

/// The loss with its gradients; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait LinearCrossEntropyGradOps: Backend {
    /// The loss, dx and dW for a cotangent of 1.
    #[fusion(meta = gradients)]
    fn linear_cross_entropy_gradients(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        loss: Loss,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

fn mean(
    _x: &TensorSpec,
    _weight: &TensorSpec,
    _targets: &TensorSpec,
    _scale: &TensorSpec,
    _loss: &Loss,
) -> TensorSpec {
    TensorSpec::new(Shape::new([1]), DType::F32)
}

fn gradients(
    x: &TensorSpec,
    weight: &TensorSpec,
    targets: &TensorSpec,
    scale: &TensorSpec,
    options: &Loss,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    (mean(x, weight, targets, scale, options), x.clone(), weight.clone())
}

/// Rows of a chunk: their logits fill the memory, and whole tiles.
fn chunk_rows(rows: usize, classes: usize, dtype: DType) -> usize {
    let fitting = CHUNK_BYTES / (classes * dtype.size()) / 128 * 128;
    fitting.clamp(128, rows.next_multiple_of(128))
}

/// The loss; with `grads`, dx and dW too.
fn run(
    x: CubeTensor,
    weight: CubeTensor,
    targets: CubeTensor,
    scale: CubeTensor,
    Loss { options, family }: Loss,
    grads: bool,
) -> (CubeTensor, Option<(CubeTensor, CubeTensor)>) {
    let x = burn_cubecl::kernel::into_contiguous(x);
    let (rows, dtype) = (x.meta.shape()[0], x.dtype);
    let classes = weight.meta.shape()[1];
    let step = chunk_rows(rows, classes, dtype);
    let product = |a, b, dtype| Product { family, ..Product::new(OP, a, b, dtype) };
    let dx = grads.then(|| launch::output(&x, OP, "grad.x", x.meta.shape().clone(), dtype));
    let (mut sum, mut dw) = (None, None::<CubeTensor>);
    for start in (0..rows).step_by(step) {
        let length = step.min(rows - start);
        let slice = Slice::from(start..start + length);
        let part = view::narrow(&x, start, length);
        let targets = CubeBackend::int_slice(targets.clone(), &[slice]);
        let logits = product(part.clone(), weight.clone(), dtype).run();
        let (mean, lse, one_over) = kernel::forward(OP, logits.clone(), targets.clone(), &options);
        // The sum over the chunk, in units of the mean over all.
        let share = CubeBackend::float_div(scale.clone(), one_over);
        let share = CubeBackend::float_mul(mean, share);
        sum = Some(match sum {
            Some(sum) => CubeBackend::float_add(sum, share),
            None => share,
        });
        let Some(dx) = &dx else { continue };
        let one = CubeBackend::float_ones(Shape::new([1]), &x.device, FloatDType::F32);
        let (lse, scale) = (lse, scale.clone());
        let dlogits = gradient::backward(OP, one, logits, targets, [lse, scale], &options);
        let to_x = product(dlogits.clone(), view::transposed(weight.clone()), dtype);
        Product { out: Some(view::narrow(dx, start, length)), ..to_x }.run();
        let to_w = product(view::transposed(part), dlogits, DType::F32);
        dw = Some(match dw {
            Some(dw) => to_w.accumulate(dw, 1.0).run(),
            None => to_w.run(),
        });
    }
    let sum = sum.expect("there is a row");
    let grads = dx.zip(dw).map(|(dx, dw)| {
        let dw = if dtype == DType::F32 { dw } else { CubeBackend::float_cast(dw, dtype.into()) };
        (dx, dw)
    });
    (sum, grads)
}

impl LinearCrossEntropyOps for CubeBackend {
    fn linear_cross_entropy(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        loss: Loss,
    ) -> FloatTensor<Self> {
        run(x, weight, targets, scale, loss, false).0
    }
}

impl LinearCrossEntropyGradOps for CubeBackend {
    fn linear_cross_entropy_gradients(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        loss: Loss,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (loss, grads) = run(x, weight, targets, scale, loss, true);
        let (dx, dw) = grads.expect("gradients are wanted");
        (loss, dx, dw)
    }
}

/// The gradients for a cotangent of 1.
#[derive(Debug)]
struct State<B: Backend> {
    dx: FloatTensor<B>,
    dw: FloatTensor<B>,
}

impl<B: Backend> Clone for State<B> {
    fn clone(&self) -> Self {
        Self { dx: self.dx.clone(), dw: self.dw.clone() }
    }
}

#[derive(Debug)]
struct LinearCrossEntropyBackward;

impl<B: Backend> Backward<B, 2> for LinearCrossEntropyBackward {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dloss = grads.consume::<B>(&ops.node);
        let [x_node, w_node] = ops.parents;
        for (node, gradient) in [(x_node, ops.state.dx), (w_node, ops.state.dw)] {
            let Some(node) = node else { continue };
            let dtype = gradient.dtype();
            let factor = B::float_reshape(dloss.clone(), Shape::new([1, 1]));
            // In f32: the cotangent of a scaled loss may be beyond f16.
            let wide = B::float_cast(gradient, FloatDType::F32);
            let scaled = B::float_cast(B::float_mul(wide, factor), FloatDType::from(dtype));
            grads.register::<B>(node.id, scaled);
        }
    }
}

impl<B, C> LinearCrossEntropyOps for Autodiff<B, C>
where
    B: Backend + LinearCrossEntropyOps + LinearCrossEntropyGradOps,
    C: CheckpointStrategy,
{
    fn linear_cross_entropy(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        loss: Loss,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), weight.node()];
        let scale = scale.into_primitive();
        match LinearCrossEntropyBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (x, weight) = (x.into_primitive(), weight.into_primitive());
                let (loss, dx, dw) =
                    B::linear_cross_entropy_gradients(x, weight, targets, scale, loss);
                prep.finish(State { dx, dw }, loss)
            }
            OpsKind::UnTracked(prep) => {
                let (x, weight) = (x.into_primitive(), weight.into_primitive());
                prep.finish(B::linear_cross_entropy(x, weight, targets, scale, loss))
            }
        }
    }
}

/// The targets as the kernels know them, and one over the number of those that count.
fn counted(targets: Tensor<1, Int>, ignore_index: i64) -> (Tensor<1, Int>, Tensor<1>) {
    let counted = targets.clone().not_equal_elem(ignore_index).int().sum();
    let scale = counted.float().cast(DType::F32).clamp_min(1.0).recip();
    (crate::cross_entropy::backend::known(targets), scale)
}

/// The loss, dx and dW through the kernels, past autodiff and without checks.
pub fn gradients_of(
    x: Tensor<2>,
    weight: Tensor<2>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
) -> (Tensor<1>, Tensor<2>, Tensor<2>) {
    let (targets, scale) = counted(targets, options.ignore_index);
    let (loss, dx, dw) = <Dispatch as LinearCrossEntropyGradOps>::linear_cross_entropy_gradients(
        x.into_dispatch(),
        weight.into_dispatch(),
        targets.into_dispatch(),
        scale.into_dispatch(),
        Loss::new(options),
    );
    (Tensor::from_dispatch(loss), Tensor::from_dispatch(dx), Tensor::from_dispatch(dw))
}

/// [`linear_cross_entropy`](fn@super::linear_cross_entropy) through the kernels, without its checks.
pub(crate) fn fused(
    x: Tensor<2>,
    weight: Tensor<2>,
    targets: Tensor<1, Int>,
    options: CrossEntropyOptions,
) -> Tensor<1> {
    let (targets, scale) = counted(targets, options.ignore_index);
    Tensor::from_dispatch(<Dispatch as LinearCrossEntropyOps>::linear_cross_entropy(
        x.into_dispatch(),
        weight.into_dispatch(),
        targets.into_dispatch(),
        scale.into_dispatch(),
        Loss::new(options),
    ))
}
