//! add_rms_norm.

use super::elements;
use super::rms_norm::{GATE, LARGE, TRAIN, eps_for};
use crate::attributes::{Attribute, Kind};
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::spot::{self, Spot};
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn::tensor::Tensor;
use kiln_ops::OpError;
use kiln_ops::add_rms_norm::{add_rms_norm, oracle};

pub(crate) struct Row;

const SPEC: Spec = Spec {
    name: "add_rms_norm",
    formula: "sum = x + residual, y = rms_norm(sum)",
    inputs: &[
        InputSpec { name: "x", shape: &["...", "D"], holds: Holds::Float, mean: 0.3, fan_in: None },
        InputSpec {
            name: "residual",
            shape: &["...", "D"],
            holds: Holds::Float,
            mean: -0.1,
            fan_in: None,
        },
        InputSpec { name: "weight", shape: &["D"], holds: Holds::Float, mean: 1.0, fan_in: None },
    ],
    attributes: &[Attribute { name: "eps", default: "1e-5", kind: Kind::AtLeast(0.0) }],
    outputs: &[
        OutputSpec { name: "sum", shape: &["...", "D"], f32: false, constant: false },
        OutputSpec { name: "y", shape: &["...", "D"], f32: false, constant: false },
    ],
    differentiable: true,
    kernel: true,
};

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let weight = call.rows(2).flatten(0, 1);
        let eps = call.attributes.number("eps");
        let (sum, y) = add_rms_norm(call.rows(0), call.rows(1), weight, eps)?;
        Ok(vec![sum.into(), y.into()])
    }

    /// The sum.
    #[cfg(feature = "cube")]
    fn saved(&self, call: &Call<'_>) -> Vec<Tensor<2>> {
        let weight = call.rows(2).flatten(0, 1);
        let eps = call.attributes.number("eps");
        let (sum, _) =
            add_rms_norm(call.rows(0), call.rows(1), weight, eps).expect("the forward took them");
        vec![sum]
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(
        &self,
        call: &Call<'_>,
        cotangents: &[Tensor<1>],
    ) -> Option<Vec<Tensor<2>>> {
        let (sum, weight): (_, Tensor<1>) = (call.rows(3), call.rows(2).flatten(0, 1));
        let [dsum, dy] = [0, 1].map(|i| cotangents[i].clone().reshape(sum.dims()));
        let eps = call.attributes.number("eps");
        let (dx, dw) = kiln_ops::add_rms_norm::backend::backward(dsum, dy, sum, weight, eps);
        Some(vec![dx.clone(), dx, dw.unsqueeze()])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [x, residual, weight] = call.inputs else { unreachable!("three inputs") };
        let eps = call.attributes.number("eps");
        let (sum, y) = oracle::forward(&x.values, &residual.values, &weight.values, eps);
        vec![BoundedTensor::new(x.shape.clone(), sum), BoundedTensor::new(x.shape.clone(), y)]
    }

    fn oracle_backward(
        &self,
        call: &HostCall<'_>,
        cotangents: &[BoundedTensor],
    ) -> Vec<BoundedTensor> {
        let [x, residual, weight] = call.inputs else { unreachable!("three inputs") };
        let [dsum, dy] = cotangents else { unreachable!("two outputs") };
        let eps = call.attributes.number("eps");
        let (x_, r, w) = (&x.values, &residual.values, &weight.values);
        let (dx, dw) = oracle::backward(x_, r, w, eps, &dsum.values, &dy.values);
        let dx = BoundedTensor::new(x.shape.clone(), dx);
        vec![dx.clone(), dx, BoundedTensor::new(weight.shape.clone(), dw)]
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        if !spot.backward() {
            return spot::rows(self, spot, &[]);
        }
        spot::rows(self, spot, &[2])?;
        let (x, residual, dy) = (spot.input(0)?, spot.input(1)?, spot.cotangent(1)?);
        let (x, residual, rounding) = (x.lines(), residual.lines(), spot.rounding);
        let row = |row| {
            let [x, residual] = [x, residual].map(|of| rounding.numbers(&of.row(row)));
            oracle::sum(&x, &residual)
        };
        spot::of_weight(spot, 2, row, dy.lines(), spot.call.attributes.number("eps"))
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
        let case = |[m, d]: &[usize; 2]| eps_for(Case::new([&[*m, *d], &[*m, *d], &[*d]]), *d);
        GATE.iter().map(case).collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let sizes: &[[usize; 2]] = match scale {
            Scale::Small => &[[2048, 128], [4096, 384]],
            Scale::Train => &TRAIN,
            Scale::Large => &LARGE,
            Scale::Thin | Scale::Lengths => return vec![],
        };
        sizes.iter().map(|[m, d]| Case::new([&[*m, *d], &[*m, *d], &[*d]])).collect()
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let (n, size) = (elements(case, 0), dtype.size() as f64);
        (
            Work { bytes: 4.0 * n * size, flops: 5.0 * n },
            Work { bytes: 4.0 * n * size, flops: 11.0 * n },
        )
    }
}
