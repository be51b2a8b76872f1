//! cross_entropy.

use super::elements;
use crate::attributes::{Attribute, Kind};
use crate::host::HostTensor;
use crate::registry::*;
use burn::tensor::{DType, Tensor};
use kiln_ops::cross_entropy::{CrossEntropyOptions, cross_entropy};
use kiln_ops::{OpError, oracle::cross_entropy as oracle};

pub(crate) struct Row;

const SPEC: Spec = Spec {
    name: "cross_entropy",
    formula: "loss = mean of logsumexp(logits) - logits[target] over targets that are not ignored",
    inputs: &[
        InputSpec {
            name: "logits",
            shape: &["M", "V"],
            holds: Holds::Float,
            mean: 0.5,
            fan_in: false,
        },
        InputSpec {
            name: "targets",
            shape: &["M"],
            holds: Holds::Classes("V"),
            mean: 0.0,
            fan_in: false,
        },
    ],
    attributes: &[Attribute { name: "ignore_index", default: "-100", kind: Kind::Integer }],
    outputs: &[OutputSpec { name: "loss", shape: &["1"], f32: true }],
    differentiable: true,
    kernel: false,
    roundings: (1, 1),
    rounds_inside: false,
};

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Tensor<1>>, OpError> {
        let ignore_index = call.attributes.integer("ignore_index");
        let options = CrossEntropyOptions { ignore_index, check_targets: false };
        Ok(vec![cross_entropy(call.rows(0), call.int(1), options)?])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<HostTensor> {
        let [logits, targets] = call.inputs else { unreachable!("two inputs") };
        let ignore = call.attributes.integer("ignore_index");
        let loss = oracle::forward(&logits.values, &targets.integers(), logits.shape[1], ignore);
        vec![HostTensor::new([1], vec![loss])]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dloss: &[HostTensor]) -> Vec<HostTensor> {
        let [logits, targets] = call.inputs else { unreachable!("two inputs") };
        let ignore = call.attributes.integer("ignore_index");
        let (classes, dloss) = (logits.shape[1], dloss[0].values[0]);
        let grad = oracle::backward(&logits.values, &targets.integers(), classes, ignore, dloss);
        vec![HostTensor::new(logits.shape.clone(), grad)]
    }

    fn cases(&self) -> Vec<Case> {
        vec![
            Case::new([&[1, 2], &[1]]),
            Case::new([&[13, 7], &[13]]),
            Case::new([&[33, 257], &[33]]).with("ignore_index", -1),
            Case::new([&[5, 1009], &[5]]),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let [m, v] = match scale {
            Scale::Small => [2048, 256],
            Scale::Train => [8192, 50_304],
            Scale::Large => [32_768, 50_304],
        };
        vec![Case::new([&[m, v], &[m]])]
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let (n, size) = (elements(case, 0), dtype.size() as f64);
        (Work { bytes: n * size, flops: 4.0 * n }, Work { bytes: 2.0 * n * size, flops: 4.0 * n })
    }
}
