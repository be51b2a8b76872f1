//! mhc_pre.

use super::elements;
use crate::attributes::{Attribute, Attributes, Kind};
use crate::host::BoundedTensor;
use crate::operator::*;
use crate::special::{Holder, Special, Why, undefined};
use crate::spot::{self, Spot};
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::mhc_post::MAX_STREAMS;
#[cfg(feature = "cube")]
use kiln_ops::mhc_pre::backend;
use kiln_ops::mhc_pre::oracle::{self, Inputs};
#[cfg(feature = "cube")]
use kiln_ops::mhc_pre::scaled;
use kiln_ops::mhc_pre::{MAX_SINKHORN, MhcPreOptions, mhc_pre};
use kiln_ops::oracle::Bounded;

pub(crate) struct Row;

/// The input that scales x.
const GAMMA: usize = 4;

pub(super) const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "norm_eps", default: "1e-6", kind: Kind::AtLeast(0.0) },
    Attribute { name: "hc_eps", default: "1e-6", kind: Kind::AtLeast(0.0) },
    Attribute {
        name: "sinkhorn",
        default: "0",
        kind: Kind::IntegerBetween(0, MAX_SINKHORN as i64),
    },
];

const SPEC: Spec = Spec {
    name: "mhc_pre",
    formula: "with y = norm(x)·φᵀ: h_in = Σ_i (sigmoid(α₀·y + bias) + hc_eps)[i]·x[i], \
              h_post = 2·sigmoid(α₁·y + bias), h_res = sinkhorn(α₂·y + bias), without \
              repeats α₂·y + bias itself; \
              K = n·D, M = L = n² + 2n",
    inputs: &[
        InputSpec {
            name: "x",
            shape: &["B", "S", "n", "D"],
            holds: Holds::Float,
            mean: 0.2,
            fan_in: None,
        },
        InputSpec {
            name: "phi",
            shape: &["M", "K"],
            holds: Holds::F32,
            mean: 0.0,
            fan_in: Some(1),
        },
        InputSpec { name: "alpha", shape: &["3"], holds: Holds::F32, mean: 1.0, fan_in: None },
        // Not the M of φ, which would be blamed on it: the operator goes by x.
        InputSpec { name: "bias", shape: &["L"], holds: Holds::F32, mean: 0.1, fan_in: None },
        InputSpec {
            name: "gamma",
            shape: &["n", "D"],
            holds: Holds::OptionalF32,
            mean: 1.0,
            fan_in: None,
        },
    ],
    attributes: ATTRIBUTES,
    outputs: &[
        OutputSpec { name: "h_in", shape: &["B", "S", "D"], f32: false, constant: false },
        OutputSpec { name: "h_post", shape: &["B", "S", "n"], f32: true, constant: false },
        OutputSpec { name: "h_res", shape: &["B", "S", "n", "n"], f32: true, constant: false },
    ],
    differentiable: true,
    kernel: true,
};

pub(super) fn options(attributes: &Attributes) -> MhcPreOptions {
    MhcPreOptions {
        norm_eps: attributes.number("norm_eps"),
        hc_eps: attributes.number("hc_eps"),
        sinkhorn: attributes.integer("sinkhorn") as usize,
    }
}

fn inputs<'a>(call: &HostCall<'a>) -> Inputs<'a, Bounded> {
    let [x, phi, alpha, bias, gamma] = call.inputs else { unreachable!("five inputs") };
    Inputs {
        x: &x.values,
        phi: &phi.values,
        alpha: &alpha.values,
        bias: &bias.values,
        gamma: &gamma.values,
    }
}

/// γ, which is input number `at`, if it is there.
pub(super) fn gamma(call: &Call<'_>, at: usize) -> Option<Tensor<2>> {
    let missing = call.inputs[at].shape().contains(&0);
    (!missing).then(|| call.float(at))
}

/// x, φ with γ in it, α and bias.
#[cfg(feature = "cube")]
fn folded(call: &Call<'_>) -> (Tensor<4>, Tensor<2>, Tensor<1>, Tensor<1>) {
    (call.float(0), scaled(call.float(1), gamma(call, GAMMA)), call.float(2), call.float(3))
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
        let (x, phi, gamma) = (call.float(0), call.float(1), gamma(call, GAMMA));
        let of = mhc_pre(x, phi, call.float(2), call.float(3), gamma, options(call.attributes))?;
        Ok(vec![of.h_in.into(), of.h_post.into(), of.h_res.into()])
    }

    #[cfg(feature = "cube")]
    fn saved(&self, call: &Call<'_>) -> Vec<Tensor<2>> {
        let (x, phi, alpha, bias) = folded(call);
        let (mix, norm) = backend::kept(x, phi, alpha, bias, options(call.attributes));
        vec![mix, norm.unsqueeze()]
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let inputs = folded(call);
        let [b, s, n, d] = inputs.0.dims();
        let dh_in = dy[0].clone().reshape([b, s, d]);
        let (dh_post, dh_res) = (dy[1].clone(), dy[2].clone());
        let cotangents = (dh_in, dh_post.reshape([b, s, n]), dh_res.reshape([b, s, n, n]));
        let kept = (call.rows(GAMMA + 1), call.rows(GAMMA + 2).flatten(0, 1));
        let gradients = backend::backward(cotangents, inputs, kept, options(call.attributes));
        let (dx, dphi, dalpha, dbias) = gradients;
        Some(vec![dx.flatten(0, 2), dphi, dalpha.unsqueeze(), dbias.unsqueeze()])
    }

    // Of φ and γ, where the kernels know of their product.
    fn gradients(
        &self,
        call: &Call<'_>,
        _cotangents: &[Tensor<1>],
        kernels: Vec<Tensor<2>>,
    ) -> Vec<Tensor<1>> {
        let gradients = kernels.into_iter().map(|of| of.flatten(0, 1)).collect();
        unfolded(gradients, 1, call.float(1), gamma(call, GAMMA))
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [b, s, n, d] = call.inputs[0].shape[..] else { unreachable!("rank 4") };
        let outputs = oracle::forward(inputs(call), n, options(call.attributes));
        let shapes = [vec![b, s, d], vec![b, s, n], vec![b, s, n, n]];
        shapes.into_iter().zip(outputs).map(|(shape, y)| BoundedTensor::new(shape, y)).collect()
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [h_in, h_post, h_res] = dy else { unreachable!("three outputs") };
        let cotangents = [&h_in.values[..], &h_post.values, &h_res.values];
        let n = call.inputs[0].shape[2];
        oracle::backward(inputs(call), n, options(call.attributes), cotangents)
            .into_iter()
            .zip(call.inputs)
            .map(|(gradient, input)| BoundedTensor::new(input.shape.clone(), gradient))
            .collect()
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::mhc_pre(self, spot, options(spot.call.attributes))
    }

    fn fit(&self, dims: &mut Dims) {
        fit(dims);
    }

    fn vary(&self, case: Case, number: u64) -> Case {
        vary(case, number, GAMMA)
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        super::mhc_post::shrink_tokens(dims)
    }

    fn leaves_out(&self, holder: Holder, special: Special, dtype: DType) -> Option<Why> {
        leaves_out(holder, special, dtype)
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
            case([3, 5, 4, 96], true).with("sinkhorn", 10),
            case([1, 33, 4, 31], false).with("sinkhorn", 3),
            case([1, 3, 4, 700], true).with("sinkhorn", 20),
            case([1, 130, 4, 16], true).with("sinkhorn", 3),
            // The kernel that reads x once: two cubes share tokens and columns beyond the last, as clusters and, on two
            // multiprocessors, through a workspace whose places are taken again, with repeats of Sinkhorn while other tokens
            // pass.
            case([1, 290, 4, 392], false).with("sinkhorn", 3),
            case([1, 17, 6, 72], true).with("sinkhorn", 1),
            case([1, 70, 1, 72], false),
            case([1, 70, 3, 136], false).with("sinkhorn", 1),
            case([1, 230, 3, 520], false),
            // In the backward two cubes of a group whose places in the workspace are taken again, on two multiprocessors.
            case([1, 340, 4, 136], true).with("sinkhorn", 10),
            case([1, 230, 1, 520], false).with("sinkhorn", 1),
            case([1, 310, 2, 264], false).with("sinkhorn", 1),
            case([1, 340, 3, 136], false).with("sinkhorn", 1),
            case([1, 340, 5, 72], false).with("sinkhorn", 1),
            // Ten cubes, and nineteen, more than there are tokens together.
            case([1, 37, 4, 2888], false),
            case([1, 37, 6, 1160], false),
            // More columns than the units of a cube hold.
            case([1, 2, 1, 4099], false),
            case([1, 3, 8, 64], true).with("sinkhorn", 5),
            // More parts of the gradients of alpha and bias than are added side by side, and warps without a share of φ;
            // and, in the backward's last launch, more of all parts.
            case([1, 1090, 1, 56], false).with("sinkhorn", 0),
            case([1, 2400, 5, 8], false).with("sinkhorn", 0),
            case([1, 2, 5, 200], false).with("sinkhorn", MAX_SINKHORN),
        ]
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        let timed = |of| case(of, false).with("sinkhorn", 20);
        super::mhc_post::sizes(scale).iter().copied().map(timed).collect()
    }

    fn work(&self, of: &Case, dtype: DType) -> (Work, Work) {
        let (n, size) = (of.shapes[0][2] as f64, dtype.size() as f64);
        let (x, rows) = (elements(of, 0), of.shapes[1][0] as f64);
        let small = (x / of.shapes[1][1] as f64 * (n * n + n) + elements(of, 1)) * 4.0;
        let h_in = x / n;
        (
            Work { bytes: (x + h_in) * size + small, flops: 2.0 * x * (rows + 2.0) },
            Work { bytes: (2.0 * x + h_in) * size + 2.0 * small, flops: 4.0 * x * (rows + 2.0) },
        )
    }
}

fn case([b, s, n, d]: [usize; 4], gamma: bool) -> Case {
    let (rows, gamma) = (n * n + 2 * n, if gamma { [n, d] } else { [0, 0] });
    Case::new([&[b, s, n, d], &[rows, n * d], &[3], &[rows], &gamma])
}

/// Without γ, which is input number `at`, every second time, and with other repeats of Sinkhorn.
pub(super) fn vary(mut case: Case, number: u64, at: usize) -> Case {
    if number.is_multiple_of(2) {
        case.shapes[at] = vec![0, 0];
    }
    let mut number = number / 2;
    let case = case.with("sinkhorn", super::pick(&mut number, &[0, 1, 3, 10]));
    let case = case.with("norm_eps", super::pick(&mut number, &[1e-6, 0.1]));
    case.with("hc_eps", super::pick(&mut number, &[1e-6, 0.01]))
}

/// φ and γ are multiplied as sums of two or three numbers of 16 bits, of which an infinity is none. And what is far from 0 in a weight
/// leaves gradients of sigmoids that f16 does not hold.
pub(super) fn leaves_out(holder: Holder, special: Special, dtype: DType) -> Option<Why> {
    let weight = matches!(holder, Holder::Input("phi" | "gamma" | "alpha" | "bias"));
    let no_sum = weight && special == Special::Infinities;
    let beyond = (weight && special.far() && dtype == DType::F16).then_some(Why::Type);
    undefined(special == Special::Masked || no_sum).or(beyond)
}

/// Sizes that go together.
pub(super) fn fit(dims: &mut Dims) {
    let n = (dims["n"][0] - 1) % MAX_STREAMS + 1;
    let rows = n * n + 2 * n;
    for (name, size) in [("n", n), ("M", rows), ("L", rows), ("K", n * dims["D"][0])] {
        dims.insert(name, vec![size]);
    }
    // The bounds of Sinkhorn take time.
    for name in ["B", "S"] {
        dims.entry(name).and_modify(|size| size[0] = size[0].min(3));
    }
}

/// The gradients with that of φ, at `at`, and of γ in the place of that of their product.
pub(super) fn unfolded(
    mut gradients: Vec<Tensor<1>>,
    at: usize,
    phi: Tensor<2>,
    gamma: Option<Tensor<2>>,
) -> Vec<Tensor<1>> {
    let dphi = gradients[at].clone().reshape(phi.dims());
    let dgamma = match gamma {
        Some(gamma) => {
            let scaled = dphi.clone() * gamma.reshape([1, phi.dims()[1]]);
            gradients[at] = scaled.flatten(0, 1);
            (dphi * phi).sum_dim(0).flatten(0, 1)
        }
        None => Tensor::zeros([0], &phi.device()),
    };
    gradients.push(dgamma);
    gradients
}
