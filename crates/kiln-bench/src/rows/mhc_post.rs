//! mhc_post.

use super::elements;
use crate::dims::replace;
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::spot::{self, Spot};
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::mhc_post::{MAX_STREAMS, mhc_post, oracle};

pub(crate) struct Row;

const SPEC: Spec = Spec {
    name: "mhc_post",
    formula: "y[o] = Σ_i h_res[o, i]·x[i] + h_post[o]·f",
    inputs: &[
        InputSpec {
            name: "x",
            shape: &["B", "S", "n", "D"],
            holds: Holds::Float,
            mean: 0.2,
            fan_in: None,
        },
        InputSpec {
            name: "f",
            shape: &["B", "S", "D"],
            holds: Holds::Float,
            mean: -0.1,
            fan_in: None,
        },
        InputSpec {
            name: "h_post",
            shape: &["B", "S", "n"],
            holds: Holds::F32,
            mean: 0.7,
            fan_in: None,
        },
        InputSpec {
            name: "h_res",
            shape: &["B", "S", "n", "n"],
            holds: Holds::F32,
            mean: 0.3,
            fan_in: None,
        },
    ],
    attributes: &[],
    outputs: &[OutputSpec { name: "y", shape: &["B", "S", "n", "D"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

fn tensors(call: &Call<'_>) -> (Tensor<4>, Tensor<3>, Tensor<3>, Tensor<4>) {
    (call.float(0), call.float(1), call.float(2), call.float(3))
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let (x, f, h_post, h_res) = tensors(call);
        Ok(vec![mhc_post(x, f, h_post, h_res)?.into()])
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let (x, f, h_post, h_res) = tensors(call);
        let dy = dy[0].clone().reshape(x.dims());
        let gradients = kiln_ops::mhc_post::backend::backward(dy, x, f, h_post, h_res);
        let (dx, df, dh_post, dh_res) = gradients;
        Some(vec![dx.flatten(0, 2), df.flatten(0, 1), dh_post.flatten(0, 1), dh_res.flatten(0, 2)])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [x, f, h_post, h_res] = call.inputs else { unreachable!("four inputs") };
        let n = h_post.shape[2];
        let y = oracle::forward(&x.values, &f.values, &h_post.values, &h_res.values, n);
        vec![BoundedTensor::new(x.shape.clone(), y)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [x, f, post, res] = call.inputs else { unreachable!("four inputs") };
        let (n, dy) = (post.shape[2], &dy[0].values);
        oracle::backward(&x.values, &f.values, &post.values, &res.values, n, dy)
            .into_iter()
            .zip(call.inputs)
            .map(|(gradient, input)| BoundedTensor::new(input.shape.clone(), gradient))
            .collect()
    }

    // A token has a row of `f` and of `h_post`, and n of `x` and of `h_res`.
    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        let [b, s, n, _] = spot.call.inputs[0].shape()[..] else { unreachable!("rank 4") };
        let tokens = spot.sample(b * s, spot::ROWS);
        let streams: Vec<usize> =
            tokens.iter().flat_map(|token| token * n..(token + 1) * n).collect();
        let rows = [&streams, &tokens, &tokens, &streams];
        let mut inputs = vec![];
        for (i, rows) in rows.iter().enumerate() {
            inputs.push(spot.numbers(&spot.input_rows(i, rows)?));
        }
        let [x, f, h_post, h_res] = &inputs[..] else { unreachable!("four inputs") };
        if !spot.backward() {
            return spot.compare_rows(0, &streams, &oracle::forward(x, f, h_post, h_res, n));
        }
        let dy = spot.numbers(&spot.cotangent_rows(0, &streams)?);
        let gradients = oracle::backward(x, f, h_post, h_res, n, &dy);
        for (i, (rows, gradient)) in rows.iter().zip(&gradients).enumerate() {
            spot.compare_rows(i, rows, gradient)?;
        }
        Ok(())
    }

    fn fit(&self, dims: &mut Dims) {
        dims.entry("n").and_modify(|n| n[0] = (n[0] - 1) % MAX_STREAMS + 1);
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        shrink_tokens(dims)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["B", "S"]
    }

    fn cases(&self) -> Vec<Case> {
        let cases = [
            [1, 1, 1, 1],
            [1, 7, 1, 13],
            [2, 3, 2, 80],
            [1, 5, 3, 257],
            [3, 5, 4, 96],
            [1, 33, 4, 31],
            [1, 3, 4, 2100],
            [2, 2, 8, 64],
            [1, 2, 5, 1000],
        ];
        cases.into_iter().map(case).collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        sizes(scale).iter().copied().map(case).collect()
    }

    fn work(&self, of: &Case, dtype: DType) -> (Work, Work) {
        let (n, size) = (of.shapes[0][2] as f64, dtype.size() as f64);
        let (f, small) = (elements(of, 1), (elements(of, 2) + elements(of, 3)) * 4.0);
        (
            Work { bytes: (2.0 * n + 1.0) * f * size + small, flops: 2.0 * n * (n + 1.0) * f },
            Work {
                bytes: (3.0 * n + 2.0) * f * size + 2.0 * small,
                flops: 4.0 * n * (n + 1.0) * f,
            },
        )
    }
}

/// What is timed of both operators beside a layer: B, S, n, D.
pub(super) fn sizes(scale: Scale) -> &'static [[usize; 4]] {
    match scale {
        Scale::Small => &[[2, 256, 4, 256]],
        Scale::Train => &[[8, 1024, 4, 768], [32, 1024, 4, 768]],
        Scale::Large => &[
            [1, 4096, 4, 768],
            [1, 4096, 4, 2560],
            [1, 4096, 4, 7168],
            [8, 4096, 4, 768],
            [8, 4096, 4, 2560],
            [8, 4096, 4, 7168],
        ],
        Scale::Thin | Scale::Lengths => &[],
    }
}

fn case([b, s, n, d]: [usize; 4]) -> Case {
    Case::new([&[b, s, n, d], &[b, s, d], &[b, s, n], &[b, s, n, n]])
}

/// Leaves 40 tokens, as many for plans as there were.
pub(super) fn shrink_tokens(dims: &mut Dims) -> Vec<[usize; 2]> {
    let [[_, batches], [small, tokens]] = [replace(dims, "B", 1), replace(dims, "S", 40)];
    vec![[small, batches * tokens]]
}
