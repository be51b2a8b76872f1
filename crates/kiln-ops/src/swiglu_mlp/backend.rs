//! The SwiGLU MLP as a Burn operation: dispatch, fusion and autodiff.
//!
//! Where wgmma runs, both products of the input are one launch that leaves the gated product too, and
//! the backward sums dx over both in one. Elsewhere they are products and gates of their own. What
//! the gate makes of the products is not kept but made again in the backward, by the kernel that reads
//! them anyway, in the memory of its own gradient.

use crate::exponential::sigmoid;
use crate::launch;
use crate::swiglu::kernel::{self, Gradients};
use crate::tile::epilogue::Epilogue;
use crate::tile::{self, Family, Product, dual, view};
use burn::backend::autodiff::{
    NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients as Registry,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Autodiff, Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

const OP: &str = "swiglu_mlp";

/// silu(gate) · up of the two products of the input.
struct SiluGate;

#[cube]
impl Epilogue for SiluGate {
    fn join(gate: f32, up: f32, #[comptime] ptx: bool) -> f32 {
        let s = sigmoid::<Const<1>>(Vector::new(gate), ptx);
        gate * s.extract(0usize) * up
    }
}

/// The kernels that products run on, and the gradients that somebody asked for.
#[derive(Debug, Clone, Copy)]
pub struct Mlp {
    family: Option<Family>,
    /// Of x, w_gate, w_up, w_down.
    wanted: [bool; 4],
}

impl Mlp {
    /// All gradients, on the kernels that this thread has forced.
    pub fn new() -> Self {
        Self { family: tile::forced(), wanted: [true; 4] }
    }

    fn product(self, a: CubeTensor, b: CubeTensor, dtype: DType) -> Product {
        Product { family: self.family, ..Product::new(OP, a, b, dtype) }
    }
}

impl Default for Mlp {
    fn default() -> Self {
        Self::new()
    }
}

/// The MLP, differentiable.
#[backend_extension(Cube, Fusion, Autodiff)]
pub trait SwiGluMlpOps: Backend {
    /// y of a matrix `x`.
    #[fusion(dtype = x, shape = x)]
    fn swiglu_mlp(
        x: FloatTensor<Self>,
        w_gate: FloatTensor<Self>,
        w_up: FloatTensor<Self>,
        w_down: FloatTensor<Self>,
        mlp: Mlp,
    ) -> FloatTensor<Self>;
}

/// What its backward is made of; not differentiable again.
#[backend_extension(Cube, Fusion)]
pub trait SwiGluMlpGradOps: Backend {
    /// y, and the products that the backward needs: x·w_gate and x·w_up.
    #[fusion(meta = kept)]
    fn swiglu_mlp_kept(
        x: FloatTensor<Self>,
        w_gate: FloatTensor<Self>,
        w_up: FloatTensor<Self>,
        w_down: FloatTensor<Self>,
        mlp: Mlp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// dx, dw_gate, dw_up and dw_down; one element of anything for those that are not wanted.
    #[fusion(meta = gradients)]
    fn swiglu_mlp_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        w_gate: FloatTensor<Self>,
        w_up: FloatTensor<Self>,
        w_down: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        mlp: Mlp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}

fn kept(
    x: &TensorSpec,
    w_gate: &TensorSpec,
    _w_up: &TensorSpec,
    _w_down: &TensorSpec,
    _mlp: &Mlp,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    let product = TensorSpec::new(tile::shape(&x.shape, &w_gate.shape), x.dtype);
    (x.clone(), product.clone(), product)
}

fn gradients(
    _dy: &TensorSpec,
    x: &TensorSpec,
    w_gate: &TensorSpec,
    w_up: &TensorSpec,
    w_down: &TensorSpec,
    _gate: &TensorSpec,
    _up: &TensorSpec,
    mlp: &Mlp,
) -> (TensorSpec, TensorSpec, TensorSpec, TensorSpec) {
    let spec = |i: usize, of: &TensorSpec| match mlp.wanted[i] {
        true => of.clone(),
        false => TensorSpec::new(Shape::new([1]), of.dtype),
    };
    (spec(0, x), spec(1, w_gate), spec(2, w_up), spec(3, w_down))
}

/// Whether both products of the input can be one launch.
fn pairs(mlp: Mlp, x: &CubeTensor, weight: &CubeTensor) -> bool {
    let ([rows, width], inner) = ([x.meta.shape()[0], x.meta.shape()[1]], weight.meta.shape()[1]);
    tile::dual_runs(mlp.family, x, [rows, inner, width])
}

/// x·w_gate and x·w_up if `keep`, and what the gate makes of them.
fn hidden(
    x: CubeTensor,
    w_gate: CubeTensor,
    w_up: CubeTensor,
    mlp: Mlp,
    keep: bool,
) -> (Option<[CubeTensor; 2]>, CubeTensor) {
    if pairs(mlp, &x, &w_gate) {
        let (products, hidden) = dual::joined::<SiluGate>(OP, x, [w_gate, w_up], keep);
        return (products.map(|both| [0, 1].map(|i| view::select(&both, i))), hidden);
    }
    let dtype = x.dtype;
    let gate = mlp.product(x.clone(), w_gate, dtype).run();
    let up = mlp.product(x, w_up, dtype).run();
    let hidden = kernel::forward(OP, gate.clone(), up.clone());
    (keep.then_some([gate, up]), hidden)
}

impl SwiGluMlpOps for CubeBackend {
    fn swiglu_mlp(
        x: FloatTensor<Self>,
        w_gate: FloatTensor<Self>,
        w_up: FloatTensor<Self>,
        w_down: FloatTensor<Self>,
        mlp: Mlp,
    ) -> FloatTensor<Self> {
        let dtype = x.dtype;
        let (_, hidden) = hidden(x, w_gate, w_up, mlp, false);
        mlp.product(hidden, w_down, dtype).run()
    }
}

impl SwiGluMlpGradOps for CubeBackend {
    fn swiglu_mlp_kept(
        x: FloatTensor<Self>,
        w_gate: FloatTensor<Self>,
        w_up: FloatTensor<Self>,
        w_down: FloatTensor<Self>,
        mlp: Mlp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = x.dtype;
        let (products, hidden) = hidden(x, w_gate, w_up, mlp, true);
        let [gate, up] = products.expect("the products are kept");
        (mlp.product(hidden, w_down, dtype).run(), gate, up)
    }

    fn swiglu_mlp_backward(
        dy: FloatTensor<Self>,
        x: FloatTensor<Self>,
        w_gate: FloatTensor<Self>,
        w_up: FloatTensor<Self>,
        w_down: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        mlp: Mlp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let dtype = x.dtype;
        let [of_x, of_gate, of_up, of_down] = mlp.wanted;
        let paired = pairs(mlp, &x, &w_gate);
        let shape = gate.meta.shape().clone();
        let [rows, inner] = [shape[0], shape[1]];
        let output = |name, shape| launch::output(&x, OP, name, shape, dtype);
        let unwanted = || launch::unused(&x, dtype);

        // Both in one stack for the products that take them as a pair.
        let stack = (paired && (of_x || (of_gate && of_up)))
            .then(|| output("grad.products", Shape::new([2, rows, inner])));
        let single = |i: usize, wanted: bool, name| match &stack {
            Some(stack) => Some(view::select(stack, i)),
            None => wanted.then(|| output(name, shape.clone())),
        };
        let dgate = single(0, of_x || of_gate, "grad.gate");
        let dup = single(1, of_x || of_up, "grad.up");
        let hidden = if of_x || of_gate || of_up {
            let dhidden = mlp.product(dy.clone(), view::transposed(w_down), dtype).run();
            let hidden = of_down.then(|| match launch::reusable(&dhidden) {
                true => dhidden.clone(),
                false => output("hidden", shape.clone()),
            });
            let into = Gradients { gate: dgate.clone(), up: dup.clone(), y: hidden.clone() };
            kernel::backward_into([dhidden, gate, up], into);
            hidden
        } else {
            of_down.then(|| kernel::forward(OP, gate, up))
        };

        let dw_down = hidden.map(|hidden| mlp.product(view::transposed(hidden), dy, dtype).run());
        let [dw_gate, dw_up] = match &stack {
            Some(stack) if of_gate && of_up => {
                let left = view::batch_of_one(view::transposed(x.clone()));
                let both = mlp.product(left, stack.clone(), dtype).run();
                [0, 1].map(|i| Some(view::select(&both, i)))
            }
            _ => [(of_gate, &dgate), (of_up, &dup)].map(|(wanted, d)| {
                let d = d.clone().filter(|_| wanted)?;
                Some(mlp.product(view::transposed(x.clone()), d, dtype).run())
            }),
        };
        let weights = [w_gate, w_up].map(view::transposed);
        let dx = of_x.then(|| {
            if let Some(stack) = stack {
                return dual::sum(OP, "grad.x", stack, weights);
            }
            let [w_gate, w_up] = weights;
            let (dgate, dup) = dgate.zip(dup).expect("both are made for dx");
            let first = mlp.product(dgate, w_gate, DType::F32).run();
            mlp.product(dup, w_up, dtype).accumulate(first, 1.0).run()
        });
        let or = |gradient: Option<CubeTensor>| gradient.unwrap_or_else(unwanted);
        (or(dx), or(dw_gate), or(dw_up), or(dw_down))
    }
}

#[derive(Debug)]
struct State<B: Backend> {
    /// x, w_gate, w_up, w_down.
    inputs: [NodeId; 4],
    gate: FloatTensor<B>,
    up: FloatTensor<B>,
    mlp: Mlp,
}

impl<B: Backend> Clone for State<B> {
    fn clone(&self) -> Self {
        let Self { inputs, gate, up, mlp } = self;
        Self { inputs: *inputs, gate: gate.clone(), up: up.clone(), mlp: *mlp }
    }
}

#[derive(Debug)]
struct SwiGluMlpBackward;

impl<B: Backend + SwiGluMlpGradOps> Backward<B, 4> for SwiGluMlpBackward {
    type State = State<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 4>,
        grads: &mut Registry,
        checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let State { inputs, gate, up, mlp } = ops.state;
        let [x, w_gate, w_up, w_down] =
            inputs.map(|node| checkpointer.retrieve_node_output::<FloatTensor<B>>(node));
        let mlp = Mlp { wanted: [0, 1, 2, 3].map(|i| ops.parents[i].is_some()), ..mlp };
        let (dx, dw_gate, dw_up, dw_down) =
            B::swiglu_mlp_backward(dy, x, w_gate, w_up, w_down, gate, up, mlp);
        for (parent, gradient) in ops.parents.into_iter().zip([dx, dw_gate, dw_up, dw_down]) {
            if let Some(node) = parent {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}

impl<B, C> SwiGluMlpOps for Autodiff<B, C>
where
    B: Backend + SwiGluMlpOps + SwiGluMlpGradOps,
    C: CheckpointStrategy,
{
    fn swiglu_mlp(
        x: FloatTensor<Self>,
        w_gate: FloatTensor<Self>,
        w_up: FloatTensor<Self>,
        w_down: FloatTensor<Self>,
        mlp: Mlp,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), w_gate.node(), w_up.node(), w_down.node()];
        match SwiGluMlpBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let inputs = [&x, &w_gate, &w_up, &w_down].map(|input| prep.checkpoint(input));
                let [x, w_gate, w_up, w_down] =
                    [x, w_gate, w_up, w_down].map(|input| input.into_primitive());
                let (y, gate, up) = B::swiglu_mlp_kept(x, w_gate, w_up, w_down, mlp);
                prep.finish(State { inputs, gate, up, mlp }, y)
            }
            OpsKind::UnTracked(prep) => {
                let [x, w_gate, w_up, w_down] =
                    [x, w_gate, w_up, w_down].map(|input| input.into_primitive());
                prep.finish(B::swiglu_mlp(x, w_gate, w_up, w_down, mlp))
            }
        }
    }
}

/// x·w_gate and x·w_up, as the forward keeps them, past autodiff and without checks.
pub fn products(
    x: Tensor<2>,
    w_gate: Tensor<2>,
    w_up: Tensor<2>,
    w_down: Tensor<2>,
) -> [Tensor<2>; 2] {
    let (_, gate, up) = <Dispatch as SwiGluMlpGradOps>::swiglu_mlp_kept(
        x.into_dispatch(),
        w_gate.into_dispatch(),
        w_up.into_dispatch(),
        w_down.into_dispatch(),
        Mlp::new(),
    );
    [gate, up].map(Tensor::from_dispatch)
}

/// The gradients of x, w_gate, w_up and w_down through the kernels, from those and what the forward
/// keeps, past autodiff and without checks.
pub fn backward(
    dy: Tensor<2>,
    [x, w_gate, w_up, w_down]: [Tensor<2>; 4],
    [gate, up]: [Tensor<2>; 2],
) -> [Tensor<2>; 4] {
    let (dx, dw_gate, dw_up, dw_down) = <Dispatch as SwiGluMlpGradOps>::swiglu_mlp_backward(
        dy.into_dispatch(),
        x.into_dispatch(),
        w_gate.into_dispatch(),
        w_up.into_dispatch(),
        w_down.into_dispatch(),
        gate.into_dispatch(),
        up.into_dispatch(),
        Mlp::new(),
    );
    [dx, dw_gate, dw_up, dw_down].map(Tensor::from_dispatch)
}

/// [`swiglu_mlp`](fn@super::swiglu_mlp) through the kernels, without its checks.
pub(crate) fn fused<const D: usize>(
    x: Tensor<D>,
    w_gate: Tensor<2>,
    w_up: Tensor<2>,
    w_down: Tensor<2>,
) -> Tensor<D> {
    let shape = x.dims();
    let x: Tensor<2> = x.reshape([shape[..D - 1].iter().product::<usize>(), shape[D - 1]]);
    let y = Tensor::<2>::from_dispatch(<Dispatch as SwiGluMlpOps>::swiglu_mlp(
        x.into_dispatch(),
        w_gate.into_dispatch(),
        w_up.into_dispatch(),
        w_down.into_dispatch(),
        Mlp::new(),
    ));
    y.reshape(shape)
}
