//! newton_schulz.

use super::matmul::stack;
use crate::attributes::{Attribute, Attributes, Kind};
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::spot::{self, Spot};
use burn::tensor::DType;
use kiln_ops::OpError;
use kiln_ops::newton_schulz::oracle;
use kiln_ops::newton_schulz::{Coefficients, NewtonSchulzOptions, newton_schulz};

pub(crate) struct Row;

static SPEC: Spec = Spec {
    name: "newton_schulz",
    formula: "x = g / (s·‖g‖ + 1e-7); for each step A = x·xᵀ, x = a·x + (b·A + c·A²)·x",
    inputs: &[InputSpec {
        name: "g",
        shape: &["...", "M", "N"],
        holds: Holds::Float,
        // One large singular value, whose square counts.
        mean: 1.0,
        fan_in: None,
    }],
    attributes: &[
        Attribute { name: "steps", default: "5", kind: Kind::IntegerBetween(0, 100) },
        Attribute {
            name: "coefficients",
            default: "muon",
            kind: Kind::OneOf(&["muon", "polar_express"]),
        },
    ],
    outputs: &[OutputSpec { name: "y", shape: &["...", "M", "N"], f32: false, constant: false }],
    differentiable: false,
    kernel: true,
};

/// Those that the attribute names.
pub(super) fn coefficients(attributes: &Attributes) -> Coefficients {
    match attributes.word("coefficients") {
        "polar_express" => Coefficients::PolarExpress,
        _ => Coefficients::Muon,
    }
}

fn options(attributes: &Attributes) -> NewtonSchulzOptions {
    let steps = attributes.integer("steps") as usize;
    NewtonSchulzOptions { steps, coefficients: coefficients(attributes) }
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn families(&self) -> &'static [&'static str] {
        &crate::registry::FAMILIES
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let g = call.shaped(0, stack(call.inputs[0].shape()));
        Ok(vec![newton_schulz(g, options(call.attributes))?.into()])
    }

    fn in_place(&self) -> bool {
        true
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let g = &call.inputs[0];
        let y = oracle::forward(&g.values, stack(&g.shape), options(call.attributes));
        vec![BoundedTensor::new(g.shape.clone(), y)]
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

    fn vary(&self, case: Case, mut number: u64) -> Case {
        let case = case.with("steps", super::pick(&mut number, &[0, 1, 2]));
        case.with("coefficients", super::pick(&mut number, &["muon", "polar_express"]))
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["...", "M", "N"]
    }

    // Bounds grow by what the steps multiply an error with: one step after the other is held to what it rounds.
    fn cases(&self) -> Vec<Case> {
        let case = |shape: &[usize], steps: usize| Case::new([shape]).with("steps", steps);
        let polar = |case: Case| case.with("coefficients", "polar_express");
        vec![
            case(&[1, 1], 1),
            case(&[1, 9], 2),
            case(&[7, 5], 1),
            case(&[24, 40], 2),
            case(&[130, 70], 1),
            case(&[70, 130], 1),
            case(&[2, 3, 33, 17], 1),
            case(&[3, 64, 64], 1),
            // Several tiles of A.
            case(&[400, 408], 1),
            polar(case(&[16, 24], 1)),
            polar(case(&[40, 264], 2)),
            case(&[5, 8], 0),
        ]
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::newton_schulz(self, spot)
    }

    // The weights of a 124M model, and squares.
    fn shapes(&self, scale: Scale) -> Vec<Case> {
        match scale {
            Scale::Small => vec![Case::new([&[4, 128, 384]])],
            Scale::Train => vec![Case::new([&[12, 768, 768]]), Case::new([&[12, 768, 3072]])],
            Scale::Large => vec![Case::new([&[2048, 2048]]), Case::new([&[4096, 4096]])],
            _ => vec![],
        }
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let [batches, rows, columns] = stack(&case.shapes[0]);
        let (m, n) = (rows.min(columns) as f64, rows.max(columns) as f64);
        let bytes = 2.0 * batches as f64 * m * n * dtype.size() as f64;
        // As dense products; of the default of five steps.
        let flops = 5.0 * batches as f64 * (4.0 * m * m * n + 2.0 * m * m * m);
        (Work { bytes, flops }, Work { bytes: 0.0, flops: 0.0 })
    }
}
