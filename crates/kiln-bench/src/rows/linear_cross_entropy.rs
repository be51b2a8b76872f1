//! linear_cross_entropy.

use super::cross_entropy::{ATTRIBUTES, options};
use super::elements;
use crate::dims::shrink;
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::special::{Holder, Special, Why, undefined};
use crate::spot::{self, Spot};
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::cross_entropy::cross_entropy;
use kiln_ops::linear_cross_entropy::linear_cross_entropy;
use kiln_ops::linear_cross_entropy::oracle;

pub(crate) struct Row;

/// Rows whose logits are looked at for zeros.
const ROWS: usize = 1024;

const SPEC: Spec = Spec {
    name: "linear_cross_entropy",
    formula: "loss = cross_entropy(x·weight, targets), in chunks of rows",
    inputs: &[
        InputSpec { name: "x", shape: &["M", "D"], holds: Holds::Float, mean: 0.1, fan_in: None },
        InputSpec {
            name: "weight",
            shape: &["D", "V"],
            holds: Holds::Float,
            mean: 0.0,
            fan_in: Some(0),
        },
        InputSpec {
            name: "targets",
            shape: &["M"],
            holds: Holds::Classes("V"),
            mean: 0.0,
            fan_in: None,
        },
    ],
    attributes: ATTRIBUTES,
    outputs: &[OutputSpec { name: "loss", shape: &["1"], f32: true, constant: false }],
    differentiable: true,
    kernel: true,
};

fn sizes(inputs: &[BoundedTensor]) -> [usize; 3] {
    [inputs[0].shape[0], inputs[0].shape[1], inputs[1].shape[1]]
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn families(&self) -> &'static [&'static str] {
        &crate::registry::FAMILIES
    }

    // Without gradients its chunks are products alone.
    fn untracked(&self) -> bool {
        true
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let options = options(call.attributes);
        Ok(vec![linear_cross_entropy(call.rows(0), call.rows(1), call.int(2), options)?.into()])
    }

    fn gradients_in_forward(&self) -> bool {
        true
    }

    /// The gradient of the logits, scaled as the mean over all rows scales it.
    fn intermediates(&self, call: &Call<'_>) -> Vec<(&'static str, Tensor<2>)> {
        let (x, targets) = (call.rows(0), call.int(2));
        let all = x.dims()[0];
        let rows = all.min(ROWS);
        let logits = x.narrow(0, 0, rows).matmul(call.rows(1)).autodiff().require_grad();
        let targets = targets.narrow(0, 0, rows).autodiff();
        let Ok(loss) = cross_entropy(logits.clone(), targets, options(call.attributes)) else {
            return vec![];
        };
        let gradients = loss.mul_scalar(rows as f64 / all as f64).backward();
        logits.grad(&gradients).map(|dlogits| ("dlogits", dlogits)).into_iter().collect()
    }

    fn in_place(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [x, weight, targets] = call.inputs else { unreachable!("three inputs") };
        let (sizes, options) = (sizes(call.inputs), options(call.attributes));
        let loss = oracle::forward(&x.values, &weight.values, &targets.integers(), sizes, &options);
        vec![BoundedTensor::new([1], vec![loss])]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dloss: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [x, weight, targets] = call.inputs else { unreachable!("three inputs") };
        let (sizes, options) = (sizes(call.inputs), options(call.attributes));
        let (t, dloss) = (targets.integers(), dloss[0].values[0]);
        let (dx, dw) = oracle::backward(&x.values, &weight.values, &t, sizes, &options, dloss);
        vec![BoundedTensor::new(x.shape.clone(), dx), BoundedTensor::new(weight.shape.clone(), dw)]
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::linear_cross_entropy(self, spot, options(spot.call.attributes))
    }

    fn vary(&self, case: Case, number: u64) -> Case {
        super::cross_entropy::vary(case, number)
    }

    /// Three chunks: the first, one that is added, and a short one.
    fn shrink(&self, dims: &mut Dims, dtype: DType) -> Vec<[usize; 2]> {
        let [rows, classes] = ["M", "V"].map(|name| dims[name][0]);
        let mut pairs = shrink(dims, |_, _| true);
        pairs.push([128, kiln_ops::linear_cross_entropy::chunk_rows(rows, classes, dtype)]);
        pairs
    }

    fn leaves_out(&self, holder: Holder, special: Special, _dtype: DType) -> Option<Why> {
        match (holder, special) {
            (_, Special::Masked) => Some(Why::Operator),
            // Gradients are made with the loss and multiplied then: those of rows that are ignored, 0, too.
            (Holder::Cotangent(_), _) => undefined(!special.finite()),
            // The shares of all rows are nearly alike then, and so are their roundings.
            (Holder::Input("x"), Special::Offset) => Some(Why::Bound),
            _ => None,
        }
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &[]
    }

    fn cases(&self) -> Vec<Case> {
        let case = |m: usize, d: usize, v: usize| Case::new([&[m, d], &[d, v], &[m]]);
        vec![
            case(1, 1, 2),
            case(13, 7, 5),
            case(33, 48, 257),
            case(1100, 8, 31),
            // A cube takes classes in groups.
            case(3, 4, 8456),
            case(150, 16, 40).with("label_smoothing", 0.1).with("ignore_index", 3),
            case(9, 24, 130).with("z_loss", 0.01),
            case(300, 8, 33).with("label_smoothing", 0.3).with("z_loss", 0.002),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let [m, d, v] = match scale {
            Scale::Small => [2048, 128, 256],
            Scale::Train => [8192, 768, 50_304],
            Scale::Large => [32_768, 768, 50_304],
            Scale::Thin | Scale::Lengths => return vec![],
        };
        vec![Case::new([&[m, d], &[d, v], &[m]])]
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let (x, weight, size) = (elements(case, 0), elements(case, 1), dtype.size() as f64);
        let flops = 2.0 * x * case.shapes[1][1] as f64;
        let bytes = (x + weight) * size;
        (Work { bytes, flops }, Work { bytes: 2.0 * bytes, flops: 2.0 * flops })
    }
}
