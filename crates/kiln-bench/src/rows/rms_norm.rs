//! rms_norm.

use super::elements;
use crate::attributes::{Attribute, Kind};
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::spot::{self, Spot};
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn::tensor::Tensor;
use kiln_ops::OpError;
use kiln_ops::rms_norm::{oracle, rms_norm};

pub(crate) struct Row;

/// Rows of the models and sizes that the field measures.
pub(super) const TRAIN: [[usize; 2]; 2] = [[32_768, 768], [16_384, 1024]];
pub(super) const LARGE: [[usize; 2]; 5] =
    [[16_384, 4096], [32_768, 768], [8192, 8192], [4096, 16_384], [131_072, 128]];

/// Widths of the gate: 1, primes, ragged tails, pitched rows, rows too wide for registers.
pub(super) const GATE: [[usize; 2]; 15] = [
    [1, 1],
    [5, 1],
    [3, 2],
    [13, 7],
    [4, 64],
    [33, 31],
    [130, 80],
    [2, 96],
    [9, 127],
    [5, 257],
    [301, 768],
    [2, 1000],
    [7, 4099],
    [3, 8192],
    [3, 65_536],
];

const SPEC: Spec = Spec {
    name: "rms_norm",
    formula: "y = x · weight · (mean(x²) + eps)^-½",
    inputs: &[
        InputSpec { name: "x", shape: &["...", "D"], holds: Holds::Float, mean: 0.3, fan_in: None },
        InputSpec { name: "weight", shape: &["D"], holds: Holds::Float, mean: 1.0, fan_in: None },
    ],
    attributes: &[Attribute { name: "eps", default: "1e-5", kind: Kind::AtLeast(0.0) }],
    outputs: &[OutputSpec { name: "y", shape: &["...", "D"], f32: false, constant: false }],
    differentiable: true,
    kernel: true,
};

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let weight = call.rows(1).flatten(0, 1);
        let y = rms_norm(call.rows(0), weight, call.attributes.number("eps"))?;
        Ok(vec![y.into()])
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(
        &self,
        call: &Call<'_>,
        cotangents: &[Tensor<1>],
    ) -> Option<Vec<Tensor<2>>> {
        let (x, weight): (_, Tensor<1>) = (call.rows(0), call.rows(1).flatten(0, 1));
        let dy = cotangents[0].clone().reshape(x.dims());
        let eps = call.attributes.number("eps");
        let (dx, dw) = kiln_ops::rms_norm::backend::backward(dy, x, weight, eps);
        Some(vec![dx, dw.unsqueeze()])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [x, weight] = call.inputs else { unreachable!("the spec names two inputs") };
        let y = oracle::forward(&x.values, &weight.values, call.attributes.number("eps"));
        vec![BoundedTensor::new(x.shape.clone(), y)]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [x, weight] = call.inputs else { unreachable!("the spec names two inputs") };
        let eps = call.attributes.number("eps");
        let (dx, dw) = oracle::backward(&x.values, &weight.values, eps, &dy[0].values);
        vec![BoundedTensor::new(x.shape.clone(), dx), BoundedTensor::new(weight.shape.clone(), dw)]
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        if !spot.backward() {
            return spot::rows(self, spot, &[]);
        }
        spot::rows(self, spot, &[1])?;
        let (x, dy, rounding) = (spot.input(0)?, spot.cotangent(0)?, spot.rounding);
        let x = x.lines();
        let row = |row| rounding.numbers(&x.row(row));
        spot::of_weight(spot, 1, row, dy.lines(), spot.call.attributes.number("eps"))
    }

    fn vary(&self, case: Case, mut number: u64) -> Case {
        let width = case.shapes[0].last().copied().unwrap_or(1);
        let eps = super::pick(&mut number, &[1e-5, 0.0, 1e-6, 0.5]);
        if width == 1 { eps_for(case, 1) } else { case.with("eps", eps) }
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        super::shrink_rows(dims)
    }

    fn cases(&self) -> Vec<Case> {
        GATE.iter().map(|[m, d]| eps_for(Case::new([&[*m, *d], &[*d]]), *d)).collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let sizes: &[[usize; 2]] = match scale {
            Scale::Small => &[[2048, 128], [4096, 384]],
            Scale::Train => &TRAIN,
            Scale::Large => &LARGE,
            Scale::Thin | Scale::Lengths => return vec![],
        };
        sizes.iter().map(|[m, d]| Case::new([&[*m, *d], &[*d]])).collect()
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let (n, size) = (elements(case, 0), dtype.size() as f64);
        (
            Work { bytes: 2.0 * n * size, flops: 4.0 * n },
            Work { bytes: 3.0 * n * size, flops: 10.0 * n },
        )
    }
}

/// One column leaves of dx only what eps adds: with a large one there is something to compare.
pub(super) fn eps_for(case: Case, width: usize) -> Case {
    if width == 1 { case.with("eps", 0.5) } else { case }
}
