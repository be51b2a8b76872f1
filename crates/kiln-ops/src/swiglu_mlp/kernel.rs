//! What the MLP launches: products and gates.
//!
//! Where wgmma runs, both products of the input are one launch that leaves the gated product too, and
//! the backward sums dx over both in one. Elsewhere they are products and gates of their own. What
//! the gate makes of the products is not kept but made again in the backward, by the kernel that reads
//! them anyway, in the memory of its own gradient.

use super::OP;
use crate::launch;
use crate::swiglu::kernel::{self as gates, Gradients};
use crate::tile::{self, Family, Product, dual, view};
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

/// silu(gate) · up of the two products of the input.
struct SiluGate;

#[cfg(feature = "cuda")]
mod epilogue {
    use crate::exponential::sigmoid;
    use crate::tile::epilogue::Epilogue;
    use cubecl::prelude::*;

    #[cube]
    impl Epilogue for super::SiluGate {
        fn join(gate: f32, up: f32, #[comptime] ptx: bool) -> f32 {
            let s = sigmoid::<Const<1>>(Vector::new(gate), ptx);
            gate * s.extract(0usize) * up
        }
    }
}

/// The input and the weights.
#[derive(Clone, Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Mlp<B: Backend> {
    /// A matrix.
    pub x: FloatTensor<B>,
    /// Of the gate.
    pub w_gate: FloatTensor<B>,
    /// Of what is gated.
    pub w_up: FloatTensor<B>,
    /// Of the result.
    pub w_down: FloatTensor<B>,
    /// The kernels that products run on.
    pub family: Option<Family>,
}

/// What the gradients are made of.
#[derive(Debug, ExtensionType)]
#[extension_type(fusion)]
pub struct Backward<B: Backend> {
    /// The gradient of y.
    pub dy: FloatTensor<B>,
    /// The input and the weights.
    #[extension_type]
    pub mlp: Mlp<B>,
    /// x·w_gate.
    pub gate: FloatTensor<B>,
    /// x·w_up.
    pub up: FloatTensor<B>,
    /// Whether somebody needs dx, dw_gate, dw_up and dw_down.
    pub wanted: [bool; 4],
}

impl<B: Backend> Mlp<B> {
    /// Of x, w_gate, w_up and w_down.
    pub fn new(inputs: [FloatTensor<B>; 4], family: Option<Family>) -> Self {
        let [x, w_gate, w_up, w_down] = inputs;
        Self { x, w_gate, w_up, w_down, family }
    }
}

impl Mlp<CubeBackend> {
    /// Whether both products of the input can be one launch.
    fn dual(&self) -> bool {
        let [rows, width] = [self.x.meta.shape()[0], self.x.meta.shape()[1]];
        tile::dual_runs(self.family, &self.x, [rows, self.w_gate.meta.shape()[1], width])
    }
}

/// A product on these kernels.
fn product(family: Option<Family>, a: CubeTensor, b: CubeTensor, dtype: DType) -> Product {
    Product { family, ..Product::new(OP, a, b, dtype) }
}

/// y, and x·w_gate and x·w_up if `keep`.
pub(super) fn forward(mlp: Mlp<CubeBackend>, keep: bool) -> (CubeTensor, Option<[CubeTensor; 2]>) {
    let (products, hidden) = hidden(&mlp, keep);
    (product(mlp.family, hidden, mlp.w_down, mlp.x.dtype).run(), products)
}

/// x·w_gate and x·w_up if `keep`, and what the gate makes of them.
fn hidden(mlp: &Mlp<CubeBackend>, keep: bool) -> (Option<[CubeTensor; 2]>, CubeTensor) {
    let weights = [mlp.w_gate.clone(), mlp.w_up.clone()];
    if mlp.dual() {
        let (products, hidden) = dual::joined::<SiluGate>(OP, mlp.x.clone(), weights, keep);
        return (products.map(|both| [0, 1].map(|i| view::matrix(&both, i))), hidden);
    }
    let [gate, up] = weights.map(|w| product(mlp.family, mlp.x.clone(), w, mlp.x.dtype).run());
    let hidden = gates::forward(OP, gate.clone(), up.clone());
    (keep.then_some([gate, up]), hidden)
}

/// dx, dw_gate, dw_up and dw_down, those that are wanted.
pub(super) fn backward(request: Backward<CubeBackend>) -> [Option<CubeTensor>; 4] {
    let Backward { dy, mlp, gate, up, wanted: [of_x, of_gate, of_up, of_down] } = request;
    let dual = mlp.dual();
    let Mlp { x, w_gate, w_up, w_down, family } = mlp;
    let dtype = x.dtype;
    let product = |a, b, dtype| product(family, a, b, dtype);
    let shape = gate.meta.shape().clone();
    let [rows, inner] = [shape[0], shape[1]];
    let output = |name, shape| launch::output(&x, OP, name, shape, dtype);

    // Both in one stack for the products that take them as a pair.
    let stack = (dual && (of_x || (of_gate && of_up)))
        .then(|| output("grad.products", Shape::new([2, rows, inner])));
    let single = |i: usize, wanted: bool, name| match &stack {
        Some(stack) => Some(view::matrix(stack, i)),
        None => wanted.then(|| output(name, shape.clone())),
    };
    let dgate = single(0, of_x || of_gate, "grad.gate");
    let dup = single(1, of_x || of_up, "grad.up");
    let hidden = if of_x || of_gate || of_up {
        let mut dhidden = product(dy.clone(), view::transposed(w_down), dtype).run();
        let hidden = of_down.then(|| match launch::in_place(&mut dhidden, OP, "hidden") {
            true => dhidden.clone(),
            false => output("hidden", shape.clone()),
        });
        let into = Gradients { gate: dgate.clone(), up: dup.clone(), y: hidden.clone() };
        gates::backward_into([dhidden, gate, up], into);
        hidden
    } else {
        of_down.then(|| gates::forward(OP, gate, up))
    };

    let dw_down = hidden.map(|hidden| product(view::transposed(hidden), dy, dtype).run());
    let [dw_gate, dw_up] = match &stack {
        Some(stack) if of_gate && of_up => {
            let left = view::batch_of_one(view::transposed(x.clone()));
            let both = product(left, stack.clone(), dtype).run();
            [0, 1].map(|i| Some(view::matrix(&both, i)))
        }
        _ => [(of_gate, &dgate), (of_up, &dup)].map(|(wanted, d)| {
            let d = d.clone().filter(|_| wanted)?;
            Some(product(view::transposed(x.clone()), d, dtype).run())
        }),
    };
    let weights = [w_gate, w_up].map(view::transposed);
    let dx = of_x.then(|| {
        if let Some(stack) = stack {
            return dual::sum(OP, "grad.x", stack, weights);
        }
        let [w_gate, w_up] = weights;
        let (dgate, dup) = dgate.zip(dup).expect("both are made for dx");
        let first = product(dgate, w_gate, DType::F32).run();
        product(dup, w_up, dtype).accumulate(first, 1.0).run()
    });
    [dx, dw_gate, dw_up, dw_down]
}
