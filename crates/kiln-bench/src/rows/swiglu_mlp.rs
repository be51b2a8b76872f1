//! swiglu_mlp.

use super::elements;
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::spot::{self, Spot};
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn::tensor::Tensor;
use kiln_ops::OpError;
use kiln_ops::swiglu_mlp::{oracle, swiglu_mlp};

pub(crate) struct Row;

const SPEC: Spec = Spec {
    name: "swiglu_mlp",
    formula: "y = (silu(x·w_gate) · (x·w_up)) · w_down",
    inputs: &[
        InputSpec { name: "x", shape: &["...", "D"], holds: Holds::Float, mean: 0.1, fan_in: None },
        InputSpec {
            name: "w_gate",
            shape: &["D", "F"],
            holds: Holds::Float,
            mean: 0.0,
            fan_in: Some(0),
        },
        InputSpec {
            name: "w_up",
            shape: &["D", "F"],
            holds: Holds::Float,
            mean: 0.0,
            fan_in: Some(0),
        },
        InputSpec {
            name: "w_down",
            shape: &["F", "D"],
            holds: Holds::Float,
            mean: 0.0,
            fan_in: Some(0),
        },
    ],
    attributes: &[],
    outputs: &[OutputSpec { name: "y", shape: &["...", "D"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

fn sizes(inputs: &[BoundedTensor]) -> [usize; 3] {
    let [width, inner] = [inputs[1].shape[0], inputs[1].shape[1]];
    [inputs[0].values.len() / width.max(1), width, inner]
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn families(&self) -> &'static [&'static str] {
        &crate::registry::FAMILIES
    }

    // What the backward needs is not kept then.
    fn untracked(&self) -> bool {
        true
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let y = swiglu_mlp(call.rows(0), call.rows(1), call.rows(2), call.rows(3))?;
        Ok(vec![y.into()])
    }

    #[cfg(feature = "cube")]
    fn saved(&self, call: &Call<'_>) -> Vec<Tensor<2>> {
        kiln_ops::swiglu_mlp::backend::products([0, 1, 2, 3].map(|i| call.rows(i))).into()
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let inputs = [0, 1, 2, 3].map(|i| call.rows(i));
        let products = [4, 5].map(|i| call.rows(i));
        let dy = dy[0].clone().reshape(inputs[0].dims());
        Some(kiln_ops::swiglu_mlp::backend::backward(dy, inputs, products).into())
    }

    fn in_place(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [x, gate, up, down] = call.inputs else { unreachable!("four inputs") };
        let sizes = sizes(call.inputs);
        let y = oracle::forward(&x.values, &gate.values, &up.values, &down.values, sizes);
        vec![BoundedTensor::new(x.shape.clone(), y)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [x, gate, up, down] = call.inputs else { unreachable!("four inputs") };
        let (sizes, dy) = (sizes(call.inputs), &dy[0].values);
        let grads = oracle::backward(&x.values, &gate.values, &up.values, &down.values, sizes, dy);
        grads
            .into_iter()
            .zip(call.inputs)
            .map(|(g, i)| BoundedTensor::new(i.shape.clone(), g))
            .collect()
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::swiglu_mlp(self, spot)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["...", "D", "F"]
    }

    fn cases(&self) -> Vec<Case> {
        [[1, 1, 1], [7, 5, 3], [33, 16, 48], [17, 31, 80]]
            .iter()
            .map(|[m, d, f]| Case::new([&[*m, *d], &[*d, *f], &[*d, *f], &[*f, *d]]))
            .collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let [m, d, f] = match scale {
            Scale::Small => [2048, 128, 384],
            Scale::Train => [32_768, 768, 2048],
            Scale::Large => [65_536, 768, 2048],
            Scale::Thin | Scale::Lengths => return vec![],
        };
        vec![Case::new([&[m, d], &[d, f], &[d, f], &[f, d]])]
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let (x, weight, size) = (elements(case, 0), elements(case, 1), dtype.size() as f64);
        let inner = case.shapes[1][1] as f64;
        let bytes = (2.0 * x + 3.0 * weight) * size;
        let flops = 6.0 * x * inner;
        (
            Work { bytes, flops },
            // x, dy and dx, the weights and their gradients.
            Work { bytes: (3.0 * x + 6.0 * weight) * size, flops: 2.0 * flops },
        )
    }
}
