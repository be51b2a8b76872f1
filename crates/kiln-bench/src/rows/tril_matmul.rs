//! tril_matmul.

use super::elements;
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::special::{Holder, Special, Why, undefined};
use crate::spot::{Product, Spot};
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::tril_matmul::{oracle, tril_matmul};

pub(crate) struct Row;

const SPEC: Spec = Spec {
    name: "tril_matmul",
    formula: "y = tril(tril(a) · tril(b))",
    inputs: &[
        InputSpec {
            name: "a",
            shape: &["...", "N", "N"],
            holds: Holds::Float,
            mean: 0.1,
            fan_in: None,
        },
        InputSpec {
            name: "b",
            shape: &["...", "N", "N"],
            holds: Holds::Float,
            mean: 0.1,
            fan_in: None,
        },
    ],
    attributes: &[],
    outputs: &[OutputSpec { name: "y", shape: &["...", "N", "N"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

/// [matrices, N].
fn sizes(shape: &[usize]) -> [usize; 2] {
    let n = shape[shape.len() - 1];
    [shape[..shape.len() - 2].iter().product(), n]
}

fn device(call: &Call<'_>, input: usize, shape: &[usize]) -> Tensor<3> {
    let [batches, n] = sizes(shape);
    call.shaped(input, [batches, n, n])
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn families(&self) -> &'static [&'static str] {
        &crate::registry::FAMILIES
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let shape = call.inputs[0].shape();
        let y = tril_matmul(device(call, 0, shape), device(call, 1, shape))?;
        Ok(vec![y.into()])
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let shape = call.inputs[0].shape();
        let (a, b) = (device(call, 0, shape), device(call, 1, shape));
        let dy = dy[0].clone().reshape(a.dims());
        let (da, db) = kiln_ops::tril_matmul::backend::backward(dy, a, b);
        Some([da, db].map(|t| t.flatten(0, 1)).into())
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [a, b] = call.inputs else { unreachable!("two inputs") };
        let y = oracle::forward(&a.values, &b.values, sizes(&a.shape));
        vec![BoundedTensor::new(a.shape.clone(), y)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [a, b] = call.inputs else { unreachable!("two inputs") };
        let (da, db) = oracle::backward(&a.values, &b.values, sizes(&a.shape), &dy[0].values);
        [da, db].map(|g| BoundedTensor::new(a.shape.clone(), g)).into()
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        let (a, b) = (spot.input(0)?, spot.input(1)?);
        let (a, b) = (a.stack().lower(), b.stack().lower());
        let check = |result: usize, factors| {
            let out = spot.result(result)?;
            let (terms, out) = (vec![factors], out.stack());
            Product { result, terms, out, alpha: 1.0, lower: true }.check(spot)
        };
        if !spot.backward() {
            return check(0, [a, b]);
        }
        let dy = spot.cotangent(0)?;
        let dy = dy.stack().lower();
        check(0, [dy, b.transposed()])?;
        check(1, [a.transposed(), dy])
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        super::shrink_batch(dims)
    }

    // Zeros of the other factor are multiplied with, or left out, a tile of them at a time.
    fn leaves_out(&self, _holder: Holder, special: Special, _dtype: DType) -> Option<Why> {
        undefined(!special.finite())
    }

    fn cases(&self) -> Vec<Case> {
        // One element, ragged, whole tiles, several tiles with a ragged last one, stacks.
        let shapes: [&[usize]; 7] = [
            &[1, 1],
            &[5, 5],
            &[67, 67],
            &[128, 128],
            &[264, 264],
            &[3, 40, 40],
            &[2, 2, 131, 131],
        ];
        shapes.iter().map(|shape| Case::new([*shape, *shape])).collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let shapes: &[&[usize]] = match scale {
            Scale::Small => &[&[128, 128], &[512, 512]],
            Scale::Train => &[&[16, 1024, 1024]],
            Scale::Large => &[&[4096, 4096], &[8192, 8192], &[16, 1024, 1024]],
            Scale::Thin | Scale::Lengths => return vec![],
        };
        shapes.iter().map(|shape| Case::new([*shape, *shape])).collect()
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let [batches, n] = sizes(&case.shapes[0]).map(|size| size as f64);
        let (a, size) = (elements(case, 0), dtype.size() as f64);
        let flops = batches * n * (n + 1.0) * (n + 2.0) / 3.0;
        // Half of each input, all of the output.
        (Work { bytes: 2.0 * a * size, flops }, Work { bytes: 3.5 * a * size, flops: 2.0 * flops })
    }
}
