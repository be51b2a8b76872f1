//! muon.

use super::elements;
use super::matmul::stack;
use super::newton_schulz::coefficients;
use crate::attributes::{Attribute, Attributes, Kind};
use crate::host::BoundedTensor;
use crate::operator::*;
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::muon::{LearningRateScale, MuonOptions, MuonWeight, muon, oracle};
use kiln_ops::newton_schulz::NewtonSchulzOptions;
use kiln_ops::oracle::Number;

pub(crate) struct Row;

/// Where the factor on the gradients is.
const SCALE: usize = 3;

static SPEC: Spec = Spec {
    name: "muon",
    formula: "m = momentum·first + (1 - momentum)·s·grad, u = momentum·m + (1 - momentum)·s·grad, value·(1 - \
              learning_rate·weight_decay) - learning_rate·√max(1, N/M)·newton_schulz(u); s is scale, u is m without \
              nesterov; new_copy is new_value in the element type of grad",
    inputs: &[
        InputSpec {
            name: "value",
            shape: &["...", "M", "N"],
            holds: Holds::F32,
            mean: 0.5,
            fan_in: None,
        },
        InputSpec {
            name: "grad",
            shape: &["...", "M", "N"],
            holds: Holds::Float,
            // One large singular value, whose square counts.
            mean: 1.0,
            fan_in: None,
        },
        InputSpec {
            name: "first",
            shape: &["...", "M", "N"],
            holds: Holds::F32,
            mean: 1.0,
            fan_in: None,
        },
        InputSpec {
            name: "scale",
            shape: &["1"],
            holds: Holds::OptionalF32,
            mean: 0.7,
            fan_in: None,
        },
    ],
    attributes: &[
        Attribute { name: "learning_rate", default: "0.02", kind: Kind::AtLeast(0.0) },
        Attribute { name: "momentum", default: "0.95", kind: Kind::Between(0.0, 0.9999) },
        Attribute { name: "nesterov", default: "true", kind: Kind::Flag },
        Attribute { name: "weight_decay", default: "0", kind: Kind::AtLeast(0.0) },
        Attribute { name: "steps", default: "5", kind: Kind::IntegerBetween(0, 100) },
        Attribute {
            name: "coefficients",
            default: "muon",
            kind: Kind::OneOf(&["muon", "polar_express"]),
        },
        Attribute {
            name: "learning_rate_scale",
            default: "original",
            kind: Kind::OneOf(&["original", "match_rms_adamw"]),
        },
        // Of the first of two matrices side by side; 0, all or more: there is one.
        Attribute { name: "columns", default: "0", kind: Kind::IntegerAtLeast(0) },
    ],
    outputs: &[
        OutputSpec { name: "new_value", shape: &["...", "M", "N"], f32: true, constant: false },
        OutputSpec { name: "new_first", shape: &["...", "M", "N"], f32: true, constant: false },
        OutputSpec { name: "new_copy", shape: &["...", "M", "N"], f32: false, constant: false },
    ],
    differentiable: false,
    kernel: true,
};

fn options(attributes: &Attributes, dtype: DType, columns: usize) -> MuonOptions {
    let first = attributes.integer("columns") as usize;
    let columns = columns.checked_sub(first).map_or(vec![], |rest| vec![first, rest]);
    MuonOptions {
        learning_rate: attributes.number("learning_rate"),
        momentum: attributes.number("momentum"),
        nesterov: attributes.flag("nesterov"),
        weight_decay: attributes.number("weight_decay"),
        newton_schulz: NewtonSchulzOptions {
            steps: attributes.integer("steps") as usize,
            coefficients: coefficients(attributes),
        },
        learning_rate_scale: match attributes.word("learning_rate_scale") {
            "match_rms_adamw" => LearningRateScale::MatchRmsAdamW,
            _ => LearningRateScale::Original,
        },
        columns,
        dtype,
    }
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn families(&self) -> &'static [&'static str] {
        &crate::registry::FAMILIES
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let shape = stack(call.inputs[0].shape());
        let [value, grad, momentum] = [0, 1, 2].map(|i| call.shaped(i, shape));
        let missing = call.inputs[SCALE].shape().contains(&0);
        let scale = (!missing).then(|| call.float(SCALE));
        let options = options(call.attributes, grad.dtype(), shape[2]);
        let dtype = grad.dtype();
        let empty = || Tensor::empty(value.dims(), (&value.device(), dtype));
        let copy = (dtype != DType::F32).then(empty);
        let of = MuonWeight { value, momentum, copy };
        let one = |MuonWeight { value, momentum, copy }: MuonWeight<3>| {
            let copy = copy.unwrap_or_else(|| value.clone());
            [value, momentum, copy].map(Output::from)
        };
        Ok(muon(vec![of], vec![grad], scale, &options)?.into_iter().flat_map(one).collect())
    }

    fn in_place(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [value, grad, momentum, scale] = call.inputs else { unreachable!("four inputs") };
        let of = [value, grad, momentum].map(|of| &of.values[..]);
        let scale = scale.values.first().copied();
        // Numbers know how they are stored.
        let shape = stack(&value.shape);
        let options = options(call.attributes, DType::F32, shape[2]);
        let [new, momentum] = oracle::forward(of, scale, shape, &options);
        let copy = new.iter().map(|p| p.stored()).collect();
        let all = [new, momentum, copy];
        all.map(|of| BoundedTensor::new(value.shape.clone(), of)).into()
    }

    fn oracle_backward(&self, _call: &HostCall<'_>, _dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        vec![]
    }

    fn fit(&self, dims: &mut Dims) {
        // Matrices of one element are all ±1: what one is off, all are.
        if dims["M"][0] * dims["N"][0] == 1 {
            dims.insert("...", vec![]);
        }
    }

    fn vary(&self, mut case: Case, number: u64) -> Case {
        if number.is_multiple_of(2) {
            case.shapes[SCALE] = vec![0];
        }
        let mut number = number / 2;
        let case = case.with("steps", super::pick(&mut number, &[0, 1, 2]));
        let case = case.with("nesterov", super::pick(&mut number, &[true, false]));
        let mut of = |values: &[f64]| super::pick(&mut number, values);
        let case = case.with("momentum", of(&[0.9, 0.0])).with("learning_rate", of(&[0.1, 0.02]));
        let case = case.with("weight_decay", of(&[0.5, 0.0]));
        let coefficients = super::pick(&mut number, &["muon", "polar_express"]);
        let scale = super::pick(&mut number, &["original", "match_rms_adamw"]);
        let case = case.with("coefficients", coefficients).with("learning_rate_scale", scale);
        // Two beside each other, neither of one element.
        match case.shapes[0][..] {
            [.., rows, columns] if rows > 1 && columns > 4 => {
                case.with("columns", super::pick(&mut number, &[0, 4]))
            }
            _ => case,
        }
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["...", "M", "N"]
    }

    // As those of newton_schulz: one step after the other is held to what it rounds.
    fn cases(&self) -> Vec<Case> {
        vec![
            case(&[1, 9], true, 1),
            case(&[7, 5], false, 2).with("nesterov", false),
            case(&[24, 40], true, 1).with("learning_rate", 0.1).with("weight_decay", 0.5),
            case(&[130, 72], false, 1).with("momentum", 0.5),
            case(&[2, 3, 33, 17], true, 1).with("momentum", 0.0),
            case(&[3, 64, 64], true, 1),
            case(&[2, 24, 40], true, 0),
            case(&[40, 264], false, 1).with("coefficients", "polar_express"),
            case(&[48, 200], true, 1).with("learning_rate_scale", "match_rms_adamw"),
            case(&[2, 72, 96], false, 1).with("columns", 64),
        ]
    }

    // What costs is newton_schulz, and what does not is a part of an optimizer's step: examples/optimizer_step.rs.
    fn shapes(&self, _scale: Scale) -> Vec<Case> {
        vec![]
    }

    fn stressed(&self) -> Option<Case> {
        Some(case(&[12, 768, 768], true, 5))
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let bytes = elements(case, 0) * (4.0 * 4.0 + dtype.size() as f64);
        (Work { bytes, flops: 0.0 }, Work { bytes: 0.0, flops: 0.0 })
    }
}

fn case(shape: &[usize], scaled: bool, steps: usize) -> Case {
    let scale: &[usize] = if scaled { &[1] } else { &[0] };
    Case::new([shape, shape, shape, scale]).with("steps", steps)
}
