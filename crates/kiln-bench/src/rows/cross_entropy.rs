//! cross_entropy.

use super::elements;
use crate::attributes::{Attribute, Attributes, Kind};
use crate::dims::replace;
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::special::{Holder, Special, Why, undefined};
use crate::spot::{self, Spot};
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn::tensor::Tensor;
use kiln_ops::OpError;
use kiln_ops::cross_entropy::oracle;
use kiln_ops::cross_entropy::{CrossEntropyOptions, cross_entropy};

pub(crate) struct Row;

/// Of both cross-entropies.
pub(super) const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "ignore_index", default: "-100", kind: Kind::Integer },
    Attribute { name: "label_smoothing", default: "0", kind: Kind::Between(0.0, 1.0) },
    Attribute { name: "z_loss", default: "0", kind: Kind::AtLeast(0.0) },
];

const SPEC: Spec = Spec {
    name: "cross_entropy",
    formula: "loss = mean of logsumexp(logits) - logits[target] over targets that are not ignored",
    inputs: &[
        InputSpec {
            name: "logits",
            shape: &["M", "V"],
            holds: Holds::Float,
            mean: 0.5,
            fan_in: None,
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

/// The gate draws targets that fit, and `kiln op` checks those that it reads.
pub(super) fn options(attributes: &Attributes) -> CrossEntropyOptions {
    CrossEntropyOptions {
        ignore_index: attributes.integer("ignore_index"),
        check_targets: false,
        label_smoothing: attributes.number("label_smoothing"),
        z_loss: attributes.number("z_loss"),
    }
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        Ok(vec![cross_entropy(call.rows(0), call.int(1), options(call.attributes))?.into()])
    }

    #[cfg(feature = "cube")]
    fn saved(&self, call: &Call<'_>) -> Vec<Tensor<2>> {
        let options = options(call.attributes);
        let kept = kiln_ops::cross_entropy::backend::kept(call.rows(0), call.int(1), options);
        kept.map(Tensor::unsqueeze).into()
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dloss: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        use kiln_ops::cross_entropy::backend::backward;
        let kept = [2, 3].map(|i| call.rows(i).flatten(0, 1));
        let (dloss, options) = (dloss[0].clone(), options(call.attributes));
        Some(vec![backward(dloss, call.rows(0), call.int(1), kept, options)])
    }

    fn in_place(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [logits, targets] = call.inputs else { unreachable!("two inputs") };
        let (classes, options) = (logits.shape[1], options(call.attributes));
        let loss = oracle::forward(&logits.values, &targets.integers(), classes, &options);
        vec![BoundedTensor::new([1], vec![loss])]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dloss: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [logits, targets] = call.inputs else { unreachable!("two inputs") };
        let (classes, dloss) = (logits.shape[1], dloss[0].values[0]);
        let (targets, options) = (targets.integers(), options(call.attributes));
        let grad = oracle::backward(&logits.values, &targets, classes, &options, dloss);
        vec![BoundedTensor::new(logits.shape.clone(), grad)]
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::cross_entropy(spot, options(spot.call.attributes))
    }

    fn vary(&self, case: Case, number: u64) -> Case {
        vary(case, number)
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        vec![replace(dims, "M", 24)]
    }

    // Classes that are masked, too.
    fn leaves_out(&self, holder: Holder, special: Special, _dtype: DType) -> Option<Why> {
        undefined(special == Special::Masked && matches!(holder, Holder::Cotangent(_)))
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &[]
    }

    fn cases(&self) -> Vec<Case> {
        vec![
            Case::new([&[1, 2], &[1]]),
            Case::new([&[13, 7], &[13]]),
            Case::new([&[33, 257], &[33]]).with("ignore_index", -1),
            Case::new([&[5, 1009], &[5]]),
            Case::new([&[3, 80], &[3]]).with("label_smoothing", 0.1),
            Case::new([&[9, 512], &[9]]).with("z_loss", 0.01),
            Case::new([&[4, 8192], &[4]]).with("label_smoothing", 0.3).with("z_loss", 0.002),
            Case::new([&[2, 50_257], &[2]]),
            // The mean takes rows in groups.
            Case::new([&[8300, 3], &[8300]]),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let [m, v] = match scale {
            Scale::Small => [2048, 256],
            Scale::Train => [8192, 50_304],
            Scale::Large => [32_768, 50_304],
            Scale::Thin | Scale::Lengths => return vec![],
        };
        vec![Case::new([&[m, v], &[m]])]
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let (n, size) = (elements(case, 0), dtype.size() as f64);
        (Work { bytes: n * size, flops: 4.0 * n }, Work { bytes: 2.0 * n * size, flops: 4.0 * n })
    }
}

/// Attributes of a loss, by a random number.
pub(super) fn vary(case: Case, mut number: u64) -> Case {
    let ignored = super::pick(&mut number, &[-100, -1, 0]);
    let smoothing = super::pick(&mut number, &[0.0, 0.1, 1.0]);
    let z_loss = super::pick(&mut number, &[0.0, 0.01]);
    let case = case.with("ignore_index", ignored).with("label_smoothing", smoothing);
    case.with("z_loss", z_loss)
}
