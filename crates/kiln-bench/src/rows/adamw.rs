//! adamw.

use super::elements;
use crate::attributes::{Attribute, Attributes, Kind};
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::special::{Holder, Special, Why, undefined};
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::adamw::{AdamWOptions, Moving, adamw, oracle};
use kiln_ops::oracle::Number;

pub(crate) struct Row;

/// Where the factor on the gradients is.
const SCALE: usize = 4;

const SPEC: Spec = Spec {
    name: "adamw",
    formula: "m = beta1·first + (1 - beta1)·s·grad, v = beta2·second + (1 - beta2)·(s·grad)², value·(1 - \
              learning_rate·weight_decay) - learning_rate·m/(1 - beta1^step) / (√(v/(1 - beta2^step)) + eps); s is scale; \
              new_copy is new_value in the element type of grad",
    inputs: &[
        InputSpec {
            name: "value",
            shape: &["...", "D"],
            holds: Holds::F32,
            mean: 0.5,
            fan_in: None,
        },
        InputSpec {
            name: "grad",
            shape: &["...", "D"],
            holds: Holds::Float,
            mean: 0.1,
            fan_in: None,
        },
        InputSpec {
            name: "first",
            shape: &["...", "D"],
            holds: Holds::F32,
            mean: 0.2,
            fan_in: None,
        },
        // No number of these is below 0.
        InputSpec {
            name: "second",
            shape: &["...", "D"],
            holds: Holds::F32,
            mean: 9.0,
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
        Attribute { name: "learning_rate", default: "1e-3", kind: Kind::AtLeast(0.0) },
        Attribute { name: "beta1", default: "0.9", kind: Kind::Between(0.0, 0.9999) },
        Attribute { name: "beta2", default: "0.999", kind: Kind::Between(0.0, 0.9999) },
        Attribute { name: "eps", default: "1e-8", kind: Kind::AtLeast(0.0) },
        Attribute { name: "weight_decay", default: "0", kind: Kind::AtLeast(0.0) },
        Attribute { name: "step", default: "1", kind: Kind::IntegerAtLeast(1) },
    ],
    outputs: &[
        OutputSpec { name: "new_value", shape: &["...", "D"], f32: true, constant: false },
        OutputSpec { name: "new_first", shape: &["...", "D"], f32: true, constant: false },
        OutputSpec { name: "new_second", shape: &["...", "D"], f32: true, constant: false },
        OutputSpec { name: "new_copy", shape: &["...", "D"], f32: false, constant: false },
    ],
    differentiable: false,
    kernel: true,
};

fn options(attributes: &Attributes) -> AdamWOptions {
    AdamWOptions {
        learning_rate: attributes.number("learning_rate"),
        beta1: attributes.number("beta1"),
        beta2: attributes.number("beta2"),
        eps: attributes.number("eps"),
        weight_decay: attributes.number("weight_decay"),
        step: attributes.integer("step") as u64,
    }
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let (value, grad) = (call.rows(0), call.rows(1));
        let dtype = grad.dtype();
        let empty = || Tensor::empty(value.dims(), (&value.device(), dtype));
        let copy = (dtype != DType::F32).then(empty);
        let of = Moving { value, first: call.rows(2), second: call.rows(3), copy };
        let missing = call.inputs[SCALE].shape().contains(&0);
        let scale = (!missing).then(|| call.float(SCALE));
        let moved = adamw(of, grad, scale, options(call.attributes))?;
        let copy = moved.copy.unwrap_or_else(|| moved.value.clone());
        Ok([moved.value, moved.first, moved.second, copy].map(Output::from).into())
    }

    fn in_place(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [value, grad, first, second, scale] = call.inputs else { unreachable!("five inputs") };
        let of = [value, grad, first, second].map(|of| &of.values[..]);
        let scale = scale.values.first().copied();
        let [new, first, second] = oracle::forward(of, scale, options(call.attributes));
        let copy = new.iter().map(|p| p.stored()).collect();
        let all = [new, first, second, copy];
        all.map(|of| BoundedTensor::new(value.shape.clone(), of)).into()
    }

    fn oracle_backward(&self, _call: &HostCall<'_>, _dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        vec![]
    }

    fn vary(&self, mut case: Case, mut number: u64) -> Case {
        if super::pick(&mut number, &[true, false]) {
            case.shapes[SCALE] = vec![0];
        }
        let mut of = |values: &[f64]| super::pick(&mut number, values);
        let case = case.with("beta1", of(&[0.5, 0.0, 0.9])).with("beta2", of(&[0.95, 0.0, 0.999]));
        let case = case.with("learning_rate", of(&[0.02, 0.0, 0.1]));
        let case = case.with("weight_decay", of(&[0.1, 0.0])).with("eps", of(&[0.01, 1e-8]));
        case.with("step", 1 + number % 1000)
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        super::shrink_rows(dims)
    }

    // A mean of squares is not below 0.
    fn leaves_out(&self, holder: Holder, special: Special, _dtype: DType) -> Option<Why> {
        let left_out = match holder {
            Holder::Input("second") => {
                &[Special::Masked, Special::Infinities, Special::Cancelling][..]
            }
            _ => &[Special::Masked],
        };
        undefined(left_out.contains(&special))
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["...", "D"]
    }

    fn cases(&self) -> Vec<Case> {
        vec![
            case([1, 1], true),
            case([5, 13], false).with("step", 3),
            case([33, 80], true).with("learning_rate", 0.1).with("weight_decay", 0.5),
            case([9, 24], true).with("step", 7),
            case([3, 257], false).with("beta1", 0.0).with("beta2", 0.0),
            case([64, 96], true).with("step", 100_000).with("eps", 0.1),
            case([2, 4099], true).with("beta1", 0.5).with("beta2", 0.9).with("step", 2),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let shape = match scale {
            Scale::Small => [768, 2304],
            Scale::Train => [50_304, 768],
            _ => return vec![],
        };
        vec![case(shape, true).with("weight_decay", 0.1)]
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let n = elements(case, 0);
        let copy = if dtype == DType::F32 { 0 } else { dtype.size() };
        let bytes = n * (6 * 4 + dtype.size() + copy) as f64;
        (Work { bytes, flops: 14.0 * n }, Work { bytes: 0.0, flops: 0.0 })
    }
}

fn case(shape: [usize; 2], scaled: bool) -> Case {
    let scale: &[usize] = if scaled { &[1] } else { &[0] };
    Case::new([&shape[..], &shape, &shape, &shape, scale])
}
