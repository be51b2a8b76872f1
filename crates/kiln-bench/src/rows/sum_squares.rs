//! sum_squares.

use super::elements;
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::spot::{self, Spot};
use burn::tensor::DType;
use kiln_ops::OpError;
use kiln_ops::sum_squares::{oracle, sum_squares};

pub(crate) struct Row;

const SPEC: Spec = Spec {
    name: "sum_squares",
    formula: "y[l] = sums[l] + Σ x[i]² over the i, in order, with (i div 2048) mod L = l",
    inputs: &[
        InputSpec { name: "x", shape: &["...", "D"], holds: Holds::Float, mean: 0.1, fan_in: None },
        InputSpec { name: "sums", shape: &["L"], holds: Holds::F32, mean: 1.0, fan_in: None },
    ],
    attributes: &[],
    outputs: &[OutputSpec { name: "y", shape: &["L"], f32: true, constant: false }],
    differentiable: false,
    kernel: true,
};

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        Ok(vec![sum_squares(call.rows(0), call.float(1))?.into()])
    }

    fn in_place(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [x, sums] = call.inputs else { unreachable!("two inputs") };
        let y = oracle::forward(&x.values, &sums.values);
        vec![BoundedTensor::new(sums.shape.clone(), y)]
    }

    fn oracle_backward(&self, _call: &HostCall<'_>, _dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        vec![]
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::sum_squares(spot)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["...", "D"]
    }

    fn cases(&self) -> Vec<Case> {
        // Part of a chunk, chunks for some sums, for all and several times, one sum for all.
        [([1, 1], 1), ([5, 13], 3), ([33, 80], 4), ([37, 257], 8), ([40, 1000], 3), ([3, 4099], 1)]
            .iter()
            .map(|(x, count)| Case::new([&x[..], &[*count]]))
            .collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let shape = match scale {
            Scale::Small => [768, 2304],
            Scale::Train => [50_304, 768],
            _ => return vec![],
        };
        vec![Case::new([&shape[..], &[1024]])]
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let n = elements(case, 0);
        (Work { bytes: n * dtype.size() as f64, flops: 2.0 * n }, Work { bytes: 0.0, flops: 0.0 })
    }
}
