//! embedding.

use super::elements;
use crate::dims::replace;
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::spot::{self, Spot};
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::embedding::{EmbeddingOptions, embedding, oracle};

pub(crate) struct Row;

const SPEC: Spec = Spec {
    name: "embedding",
    formula: "y[b, t] = weight[tokens[b, t]]",
    inputs: &[
        InputSpec {
            name: "weight",
            shape: &["V", "D"],
            holds: Holds::Float,
            mean: 0.1,
            fan_in: None,
        },
        InputSpec {
            name: "tokens",
            shape: &["B", "T"],
            holds: Holds::Rows("V"),
            mean: 0.0,
            fan_in: None,
        },
    ],
    attributes: &[],
    outputs: &[OutputSpec { name: "y", shape: &["B", "T", "D"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let [batch, length] = call.inputs[1].shape() else { unreachable!("[B, T]") };
        let tokens = match batch * length {
            // Burn's reshape takes a 0 for a size that stays.
            0 => Tensor::empty([*batch, *length], &call.int(1).device()),
            _ => call.int(1).reshape([*batch, *length]),
        };
        // The gate draws tokens that fit, and `kiln op` checks those that it reads.
        let options = EmbeddingOptions { check_tokens: false, ..EmbeddingOptions::default() };
        Ok(vec![embedding(call.rows(0), tokens, options)?.into()])
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        use kiln_ops::embedding::backend::backward;
        let (weight, tokens) = (call.rows(0), call.int(1));
        let [rows, width] = weight.dims();
        let dy = dy[0].clone().reshape([tokens.dims()[0], width]);
        Some(vec![backward(dy, tokens, rows, weight.dtype())])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [weight, tokens] = call.inputs else { unreachable!("two inputs") };
        let width = weight.shape[1];
        let y = oracle::forward(&weight.values, width, &tokens.integers());
        let shape: Vec<usize> = tokens.shape.iter().copied().chain([width]).collect();
        vec![BoundedTensor::new(shape, y)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [weight, tokens] = call.inputs else { unreachable!("two inputs") };
        let [rows, width] = weight.shape[..] else { unreachable!("[V, D]") };
        let sums = oracle::backward(rows, width, &tokens.integers(), &dy[0].values);
        vec![BoundedTensor::new(weight.shape.clone(), sums)]
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::embedding(spot)
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        // As many tokens as several batches are.
        replace(dims, "B", 3);
        replace(dims, "T", 2800);
        vec![replace(dims, "V", 600)]
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["B", "T"]
    }

    fn cases(&self) -> Vec<Case> {
        // One row, rows that nobody names, rows in pieces, which may be few among rows, rows in parts, several batches of tokens.
        [
            ([1, 1], [1, 1]),
            ([5, 13], [2, 3]),
            ([700, 33], [3, 50]),
            ([3, 80], [7, 60]),
            ([40, 1009], [1, 100]),
            ([131, 96], [2, 129]),
            ([1, 7], [3, 2800]),
            ([300, 4], [2, 5000]),
        ]
        .iter()
        .map(|(weight, tokens)| Case::new([&weight[..], &tokens[..]]))
        .collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let (weight, tokens) = match scale {
            Scale::Small => ([256, 128], [16, 128]),
            Scale::Train => ([50_304, 768], [32, 1024]),
            Scale::Large => ([128_256, 4096], [8, 4096]),
            Scale::Thin | Scale::Lengths => return vec![],
        };
        vec![Case::new([&weight[..], &tokens[..]])]
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let size = dtype.size() as f64;
        let (table, tokens) = (elements(case, 0), elements(case, 1));
        let rows = tokens * case.shapes[0][1] as f64;
        (
            Work { bytes: 2.0 * rows * size, flops: 0.0 },
            Work { bytes: (rows + table) * size, flops: rows },
        )
    }
}
