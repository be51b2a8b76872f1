//! swiglu.

use super::elements;
use crate::host::BoundedTensor;
use crate::operator::*;
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn::tensor::Tensor;
use kiln_ops::OpError;
use kiln_ops::swiglu::{oracle, swiglu};

pub(crate) struct Row;

const SPEC: Spec = Spec {
    name: "swiglu",
    formula: "y = silu(gate) · up",
    inputs: &[
        InputSpec {
            name: "gate",
            shape: &["...", "F"],
            holds: Holds::Float,
            mean: 0.1,
            fan_in: None,
        },
        InputSpec {
            name: "up",
            shape: &["...", "F"],
            holds: Holds::Float,
            mean: 0.2,
            fan_in: None,
        },
    ],
    attributes: &[],
    outputs: &[OutputSpec { name: "y", shape: &["...", "F"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        Ok(vec![swiglu(call.rows(0), call.rows(1))?.into()])
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(
        &self,
        call: &Call<'_>,
        cotangents: &[Tensor<1>],
    ) -> Option<Vec<Tensor<2>>> {
        let (gate, up) = (call.rows(0), call.rows(1));
        let dy = cotangents[0].clone().reshape(gate.dims());
        let (dgate, dup) = kiln_ops::swiglu::backend::backward(dy, gate, up);
        Some(vec![dgate, dup])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [gate, up] = call.inputs else { unreachable!("two inputs") };
        vec![BoundedTensor::new(gate.shape.clone(), oracle::forward(&gate.values, &up.values))]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [gate, up] = call.inputs else { unreachable!("two inputs") };
        let (dgate, dup) = oracle::backward(&gate.values, &up.values, &dy[0].values);
        vec![
            BoundedTensor::new(gate.shape.clone(), dgate),
            BoundedTensor::new(up.shape.clone(), dup),
        ]
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        super::shrink_rows(dims)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["...", "F"]
    }

    fn cases(&self) -> Vec<Case> {
        [[1, 1], [5, 1], [13, 7], [33, 80], [2, 96], [5, 257], [128, 1000], [3, 4099]]
            .iter()
            .map(|shape| Case::new([shape, shape]))
            .collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let shape = match scale {
            Scale::Small => [2048, 384],
            Scale::Train => [32_768, 2048],
            Scale::Large => [8192, 32_768],
            Scale::Thin | Scale::Lengths => return vec![],
        };
        vec![Case::new([&shape, &shape])]
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let (n, size) = (elements(case, 0), dtype.size() as f64);
        (
            Work { bytes: 3.0 * n * size, flops: 5.0 * n },
            Work { bytes: 5.0 * n * size, flops: 11.0 * n },
        )
    }
}
