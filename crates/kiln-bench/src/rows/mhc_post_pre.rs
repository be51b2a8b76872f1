//! mhc_post_pre.

use super::elements;
use super::mhc_pre::{self, gamma, options};
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::special::{Holder, Special, Why};
use crate::spot::{self, Spot};
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
#[cfg(feature = "cube")]
use kiln_ops::mhc_post_pre::backend;
use kiln_ops::mhc_post_pre::oracle::{self, Inputs};
use kiln_ops::mhc_post_pre::{MhcPost, mhc_post_pre};
#[cfg(feature = "cube")]
use kiln_ops::mhc_pre::{MhcPre, scaled};
use kiln_ops::oracle::Bounded;

pub(crate) struct Row;

/// Where φ, α, bias and γ are.
const PHI: usize = 4;
const GAMMA: usize = 7;

const fn float(name: &'static str, shape: &'static [&'static str], mean: f64) -> InputSpec {
    InputSpec { name, shape, holds: Holds::Float, mean, fan_in: None }
}

const fn weights(name: &'static str, shape: &'static [&'static str], mean: f64) -> InputSpec {
    InputSpec { name, shape, holds: Holds::F32, mean, fan_in: None }
}

const SPEC: Spec = Spec {
    name: "mhc_post_pre",
    formula: "y = mhc_post(x, f, h_post, h_res); h_in, next_post and next_res are mhc_pre of y; \
              K = n·D, M = L = n² + 2n",
    inputs: &[
        float("x", &["B", "S", "n", "D"], 0.2),
        float("f", &["B", "S", "D"], -0.1),
        weights("h_post", &["B", "S", "n"], 0.7),
        weights("h_res", &["B", "S", "n", "n"], 0.3),
        InputSpec {
            name: "phi",
            shape: &["M", "K"],
            holds: Holds::F32,
            mean: 0.0,
            fan_in: Some(1),
        },
        weights("alpha", &["3"], 1.0),
        // Not the M of φ, which would be blamed on it: the operator goes by x.
        weights("bias", &["L"], 0.1),
        InputSpec {
            name: "gamma",
            shape: &["n", "D"],
            holds: Holds::OptionalF32,
            mean: 1.0,
            fan_in: None,
        },
    ],
    attributes: mhc_pre::ATTRIBUTES,
    outputs: &[
        OutputSpec { name: "y", shape: &["B", "S", "n", "D"], f32: false, constant: false },
        OutputSpec { name: "h_in", shape: &["B", "S", "D"], f32: false, constant: false },
        OutputSpec { name: "next_post", shape: &["B", "S", "n"], f32: true, constant: false },
        OutputSpec { name: "next_res", shape: &["B", "S", "n", "n"], f32: true, constant: false },
    ],
    differentiable: true,
    kernel: true,
};

fn inputs<'a>(call: &HostCall<'a>) -> Inputs<'a, Bounded> {
    let [x, f, h_post, h_res, phi, alpha, bias, gamma] = call.inputs else {
        unreachable!("eight inputs")
    };
    Inputs {
        x: &x.values,
        f: &f.values,
        h_post: &h_post.values,
        h_res: &h_res.values,
        phi: &phi.values,
        alpha: &alpha.values,
        bias: &bias.values,
        gamma: &gamma.values,
    }
}

fn post(call: &Call<'_>) -> MhcPost {
    MhcPost { x: call.float(0), f: call.float(1), h_post: call.float(2), h_res: call.float(3) }
}

/// φ with γ in it.
#[cfg(feature = "cube")]
fn folded(call: &Call<'_>) -> Tensor<2> {
    scaled(call.float(PHI), gamma(call, GAMMA))
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    /// φ is multiplied by γ before.
    fn by_burn(&self) -> &'static [&'static str] {
        &["gamma"]
    }

    fn families(&self) -> &'static [&'static str] {
        &crate::registry::FAMILIES
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        let (phi, alpha, bias) = (call.float(PHI), call.float(PHI + 1), call.float(PHI + 2));
        let next = mhc_post_pre(
            post(call),
            phi,
            alpha,
            bias,
            gamma(call, GAMMA),
            options(call.attributes),
        )?;
        let small = [next.h_post.into(), next.h_res.into()];
        Ok([next.x.into(), next.h_in.into()].into_iter().chain(small).collect())
    }

    #[cfg(feature = "cube")]
    fn saved(&self, call: &Call<'_>) -> Vec<Tensor<2>> {
        let (alpha, bias) = (call.float(PHI + 1), call.float(PHI + 2));
        let (y, mix, norm) =
            backend::kept(post(call), folded(call), alpha, bias, options(call.attributes));
        vec![y.flatten(0, 2), mix, norm.unsqueeze()]
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let (alpha, bias) = (call.float(PHI + 1), call.float(PHI + 2));
        let inputs = (post(call), folded(call), alpha, bias);
        let [b, s, n, d] = inputs.0.x.dims();
        let cotangents = MhcPre {
            x: dy[0].clone().reshape([b, s, n, d]),
            h_in: dy[1].clone().reshape([b, s, d]),
            h_post: dy[2].clone().reshape([b, s, n]),
            h_res: dy[3].clone().reshape([b, s, n, n]),
        };
        let y = call.rows(GAMMA + 1).reshape([b, s, n, d]);
        let kept = (y, call.rows(GAMMA + 2), call.rows(GAMMA + 3).flatten(0, 1));
        let of = backend::backward(cotangents, inputs, kept, options(call.attributes));
        let MhcPost { x, f, h_post, h_res } = of.post;
        Some(vec![
            x.flatten(0, 2),
            f.flatten(0, 1),
            h_post.flatten(0, 1),
            h_res.flatten(0, 2),
            of.phi,
            of.alpha.unsqueeze(),
            of.bias.unsqueeze(),
        ])
    }

    // Of φ and γ, where the kernels know of their product.
    fn gradients(
        &self,
        call: &Call<'_>,
        _cotangents: &[Tensor<1>],
        kernels: Vec<Tensor<2>>,
    ) -> Vec<Tensor<1>> {
        let gradients = kernels.into_iter().map(|of| of.flatten(0, 1)).collect();
        mhc_pre::unfolded(gradients, PHI, call.float(PHI), gamma(call, GAMMA))
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [b, s, n, d] = call.inputs[0].shape[..] else { unreachable!("rank 4") };
        let outputs = oracle::forward(inputs(call), n, options(call.attributes));
        let shapes = [vec![b, s, n, d], vec![b, s, d], vec![b, s, n], vec![b, s, n, n]];
        shapes.into_iter().zip(outputs).map(|(shape, y)| BoundedTensor::new(shape, y)).collect()
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [y, h_in, h_post, h_res] = dy else { unreachable!("four outputs") };
        let cotangents = [&y.values[..], &h_in.values, &h_post.values, &h_res.values];
        let n = call.inputs[0].shape[2];
        oracle::backward(inputs(call), n, options(call.attributes), cotangents)
            .into_iter()
            .zip(call.inputs)
            .map(|(gradient, input)| BoundedTensor::new(input.shape.clone(), gradient))
            .collect()
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::mhc_post_pre(self, spot, options(spot.call.attributes))
    }

    fn fit(&self, dims: &mut Dims) {
        mhc_pre::fit(dims);
    }

    fn vary(&self, case: Case, number: u64) -> Case {
        mhc_pre::vary(case, number, GAMMA)
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        super::mhc_post::shrink_tokens(dims)
    }

    fn leaves_out(&self, holder: Holder, special: Special, dtype: DType) -> Option<Why> {
        mhc_pre::leaves_out(holder, special, dtype)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["B", "S"]
    }

    fn cases(&self) -> Vec<Case> {
        vec![
            case([1, 1, 1, 1], true),
            case([1, 7, 1, 13], false).with("sinkhorn", 1),
            case([2, 3, 2, 80], true).with("sinkhorn", 2).with("hc_eps", 0.01),
            case([1, 5, 3, 257], false).with("norm_eps", 0.1),
            case([1, 3, 8, 64], true).with("sinkhorn", 5),
            // The kernel that reads x once: tokens that are no multiple of sixteen, columns beyond the last, one cube and
            // two that share tokens, as clusters and, on two multiprocessors, through a workspace whose places are taken
            // again, with repeats of Sinkhorn while other tokens pass; for each number of streams more sixteens than a cube
            // has stages, in the backward too. Every second case is allocated as it is on two multiprocessors, the others are
            // cut there, which takes two launches.
            case([1, 276, 4, 16], true).with("sinkhorn", 3),
            case([3, 5, 4, 96], true).with("sinkhorn", 10),
            case([1, 276, 4, 328], false).with("sinkhorn", 3),
            case([1, 116, 5, 72], true).with("sinkhorn", 1),
            case([1, 36, 5, 328], false),
            case([1, 292, 1, 72], false),
            case([1, 76, 3, 136], false).with("sinkhorn", 1),
            case([1, 100, 2, 656], false).with("sinkhorn", 2),
            // In the backward two cubes of a group whose places in the workspace are taken again, there too.
            case([1, 228, 4, 136], true).with("sinkhorn", 1),
            case([1, 228, 1, 520], false).with("sinkhorn", 1),
            case([1, 228, 2, 264], false).with("sinkhorn", 1),
            case([1, 212, 3, 136], false).with("sinkhorn", 1),
            case([1, 244, 5, 72], false).with("sinkhorn", 1),
            // Two launches: more streams, and tokens whose weights do not come in sixteens of bytes.
            case([1, 20, 6, 72], true).with("sinkhorn", 1),
            case([1, 33, 3, 136], false).with("sinkhorn", 1),
            // Ten cubes, and more boxes than are added up at a time; more groups and parts of sums over tokens than that.
            case([1, 36, 4, 2504], false),
            case([1, 2400, 5, 8], false).with("sinkhorn", 0),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let timed = |of| case(of, false).with("sinkhorn", 20);
        super::mhc_post::sizes(scale).iter().copied().map(timed).collect()
    }

    fn work(&self, of: &Case, dtype: DType) -> (Work, Work) {
        let (n, size) = (of.shapes[0][2] as f64, dtype.size() as f64);
        let (f, rows) = (elements(of, 1), of.shapes[PHI][0] as f64);
        let small = (2.0 * (elements(of, 2) + elements(of, 3)) + elements(of, PHI)) * 4.0;
        let flops = n * f * (2.0 * (n + 1.0) + 2.0 * (rows + 2.0));
        (
            Work { bytes: (2.0 * n + 2.0) * f * size + small, flops },
            Work { bytes: (4.0 * n + 3.0) * f * size + 2.0 * small, flops: 2.0 * flops },
        )
    }
}

fn case([b, s, n, d]: [usize; 4], gamma: bool) -> Case {
    let (rows, gamma) = (n * n + 2 * n, if gamma { [n, d] } else { [0, 0] });
    Case::new([
        &[b, s, n, d],
        &[b, s, d],
        &[b, s, n],
        &[b, s, n, n],
        &[rows, n * d],
        &[3],
        &[rows],
        &gamma,
    ])
}
