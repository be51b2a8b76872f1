//! The symmetric product of a matrix and itself transposed: matmul, told that the result is symmetric.

use super::elements;
use super::matmul::{stack, transpose};
use crate::attributes::{Attribute, Kind};
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::spot::{Product, Spot, stored_sum};
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::matmul::oracle;
use kiln_ops::matmul::{MatmulOptions, matmul};

static SPEC: Spec = Spec {
    name: "gram",
    formula: "y = alpha · a·aᵀ",
    inputs: &[InputSpec {
        name: "a",
        shape: &["...", "M", "K"],
        holds: Holds::Float,
        mean: 0.1,
        fan_in: None,
    }],
    attributes: &[Attribute { name: "alpha", default: "1", kind: Kind::Number }],
    outputs: &[OutputSpec { name: "y", shape: &["...", "M", "M"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

/// a and its transpose, as the operands of one product.
fn operands(call: &Call<'_>) -> [Tensor<3>; 2] {
    let a = call.shaped(0, stack(call.inputs[0].shape()));
    [a.clone(), a.swap_dims(1, 2)]
}

/// [batches, M, K, M].
fn sizes(shape: &[usize]) -> [usize; 4] {
    let [batches, m, k] = stack(shape);
    [batches, m, k, m]
}

pub(crate) struct Row;

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn families(&self) -> &'static [&'static str] {
        &crate::registry::FAMILIES
    }

    fn tf32_reference(&self) -> bool {
        true
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let alpha = call.attributes.number("alpha");
        let options = MatmulOptions { alpha, symmetric: true, ..MatmulOptions::default() };
        let [a, at] = operands(call);
        Ok(vec![matmul(a, at, options)?.into()])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let a = &call.inputs[0];
        let alpha = call.attributes.number("alpha");
        let y = oracle::forward(&a.values, &transpose(a).values, sizes(&a.shape), alpha);
        let mut shape = a.shape.clone();
        let last = shape.len() - 1;
        shape[last] = shape[last - 1];
        vec![BoundedTensor::new(shape, y)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let a = &call.inputs[0];
        let at = transpose(a);
        let alpha = call.attributes.number("alpha");
        let (left, right) =
            oracle::backward(&a.values, &at.values, sizes(&a.shape), alpha, &dy[0].values);
        let right = transpose(&BoundedTensor::new(at.shape, right));
        vec![BoundedTensor::new(a.shape.clone(), stored_sum([left, right.values]))]
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        let alpha = spot.call.attributes.number("alpha");
        let (a, out) = (spot.input(0)?, spot.result(0)?);
        let (a, out) = (a.stack(), out.stack());
        if !spot.backward() {
            let terms = vec![[a, a.transposed()]];
            return Product { result: 0, terms, out, alpha, lower: false }.check(spot);
        }
        let dy = spot.cotangent(0)?;
        let dy = dy.stack();
        let terms = vec![[dy, a], [dy.transposed(), a]];
        Product { result: 0, terms, out, alpha, lower: false }.check(spot)
    }

    fn vary(&self, case: Case, mut number: u64) -> Case {
        case.with("alpha", super::pick(&mut number, &[1.0, 0.3, -0.7, 0.0]))
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        super::shrink_batch(dims)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["...", "M"]
    }

    fn cases(&self) -> Vec<Case> {
        [
            [1, 1, 1].as_slice(),
            &[7, 5],
            &[130, 70],
            // Whole tiles, whole vectors.
            &[256, 192],
            &[2, 3, 33, 17],
            &[3, 264, 72],
            // K long and few tiles: cubes in pairs.
            &[24, 2056],
            &[400, 2056],
        ]
        .iter()
        .map(|shape| Case::new([shape]).with("alpha", 0.7))
        .collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let shapes: &[&[usize]] = match scale {
            Scale::Small => &[&[64, 64], &[128, 128], &[256, 256]],
            // The matrices of a 124M model, as Newton-Schulz has them.
            Scale::Train => &[&[768, 768], &[768, 3072], &[24, 768, 768], &[24, 768, 3072]],
            Scale::Large => &[&[2048, 2048], &[4096, 4096], &[8192, 8192]],
            Scale::Thin | Scale::Lengths => return vec![],
        };
        shapes.iter().map(|shape| Case::new([shape])).collect()
    }

    fn stressed(&self) -> Option<Case> {
        self.shapes(Scale::Train).pop()
    }

    /// Of the dense product, so that its rate compares with others.
    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let [batches, m, k, _] = sizes(&case.shapes[0]);
        let (a, y) = (elements(case, 0), (batches * m * m) as f64);
        let (size, flops) = (dtype.size() as f64, 2.0 * y * k as f64);
        (
            Work { bytes: (a + y) * size, flops },
            Work { bytes: (2.0 * a + y) * size, flops: 2.0 * flops },
        )
    }
}
