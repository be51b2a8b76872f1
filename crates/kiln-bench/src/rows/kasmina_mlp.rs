//! kasmina_mlp: that of kasmina, and MLPs.

use super::elements;
use super::kasmina::{
    ALPHA, BLEND, BLUEPRINTS, codes, frozen, host, on_host, refuse, seeds, times_reference,
};
use crate::attributes::Attributes;
use crate::dims::replace;
use crate::host::{BoundedTensor, HostTensor};
use crate::operator::*;
use crate::special::{Holder, Special, Why, undefined};
use crate::spot::{self, Spot};
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn::tensor::Tensor;
use kiln_ops::OpError;
use kiln_ops::kasmina::{Blend, BlueprintCounts, KasminaOptions, SeedState, chunk};
use kiln_ops::kasmina_mlp::{MOST_FEATURES, kasmina_mlp, mlp_rows, oracle};

pub(crate) struct Row;

/// After the inputs of kasmina.
const MLPS: usize = BLEND + 1;

static SPEC: Spec = Spec {
    name: "kasmina_mlp",
    formula: "y = blend(x, blueprints[blueprint_id] or mlps[blueprint_id](x), alpha) in the chunks of seeds that \
              contribute, else x",
    inputs: &[
        InputSpec { name: "x", shape: &["B", "H"], holds: Holds::Float, mean: 0.3, fan_in: None },
        InputSpec { name: "alpha", shape: &["C"], holds: Holds::Shares, mean: 0.5, fan_in: None },
        InputSpec {
            name: "blueprints",
            shape: &["P", "H"],
            holds: Holds::Float,
            mean: 0.4,
            fan_in: None,
        },
        InputSpec {
            name: "lifecycle",
            shape: &["C"],
            holds: Holds::Codes(SeedState::ALL.len()),
            mean: 0.0,
            fan_in: None,
        },
        InputSpec {
            name: "blueprint_id",
            shape: &["C"],
            holds: Holds::RowsOrNone("P"),
            mean: 0.0,
            fan_in: None,
        },
        InputSpec {
            name: "blend",
            shape: &["C"],
            holds: Holds::MostlyLast(Blend::ALL.len()),
            mean: 0.0,
            fan_in: None,
        },
        // 4S + 3 rows.
        InputSpec {
            name: "mlps",
            shape: &["P", "R", "S"],
            holds: Holds::Float,
            mean: 0.1,
            fan_in: Some(2),
        },
    ],
    attributes: &[],
    outputs: &[
        OutputSpec { name: "y", shape: &["B", "H"], f32: false, constant: false },
        OutputSpec { name: "mean", shape: &["C"], f32: true, constant: true },
        OutputSpec { name: "var", shape: &["C"], f32: true, constant: true },
    ],
    differentiable: true,
    kernel: true,
};

/// What the oracle makes of the inputs' numbers.
fn with_oracle<T>(
    inputs: &[BoundedTensor],
    of: impl FnOnce(&oracle::Call<'_, kiln_ops::oracle::Bounded>) -> T,
) -> T {
    let codes = codes(inputs);
    let numbers = [0, ALPHA, BLUEPRINTS].map(|input| &inputs[input].values[..]);
    let rows = host(numbers, &codes, inputs[0].shape[1]);
    of(&oracle::Call { rows, mlps: &inputs[MLPS].values, widest: inputs[MLPS].shape[2] })
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        // As in kasmina.
        let options = KasminaOptions { check_seeds: false };
        let (blueprints, mlps) = (call.rows(BLUEPRINTS), call.float::<3>(MLPS));
        let (y, seen) = kasmina_mlp(call.rows(0), blueprints, mlps, &seeds(call), options)?;
        Ok(vec![y.into(), seen.mean.into(), seen.variance.into()])
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let (x, blueprints, mlps) = (call.rows(0), call.rows(BLUEPRINTS), call.float::<3>(MLPS));
        let dy = dy[0].clone().reshape(x.dims());
        let (seeds, [.., width]) = (seeds(call), mlps.dims());
        let (dx, dalpha, drows, dmlps) =
            kiln_ops::kasmina_mlp::backend::backward(dy, x, blueprints, mlps, &seeds);
        let rows = dmlps.dims()[0] * dmlps.dims()[1];
        Some(vec![dx, dalpha.unsqueeze(), drows, dmlps.reshape([rows, width])])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let outputs = with_oracle(call.inputs, oracle::forward);
        let shape = |input: usize| call.inputs[input].shape.clone();
        vec![
            BoundedTensor::new(shape(0), outputs.y),
            BoundedTensor::new(shape(ALPHA), outputs.mean),
            BoundedTensor::new(shape(ALPHA), outputs.variance),
        ]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let gradients = with_oracle(call.inputs, |call| oracle::backward(call, &dy[0].values));
        let inputs = [0, ALPHA, BLUEPRINTS, MLPS].map(|input| call.inputs[input].shape.clone());
        inputs.into_iter().zip(gradients).map(|(of, grad)| BoundedTensor::new(of, grad)).collect()
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::kasmina_mlp(spot)
    }

    fn refuse(&self, inputs: &[HostTensor]) -> Result<(), String> {
        let (rows, mlps) = (inputs[BLUEPRINTS].shape[0], inputs[MLPS].shape[0]);
        refuse(inputs, BlueprintCounts { rows, mlps })
    }

    fn kernels_take(&self, shapes: &[Vec<usize>], _attributes: &Attributes) -> bool {
        shapes[MLPS][2] <= MOST_FEATURES
    }

    fn tf32_reference(&self) -> bool {
        true
    }

    fn times_reference(&self, case: &Case, beside_kernels: bool) -> bool {
        times_reference(case, beside_kernels)
    }

    // Blueprints of seeds that do not train them; several seeds may share an MLP.
    fn frozen(&self, inputs: &[HostTensor], input: usize, element: usize) -> bool {
        if input == BLUEPRINTS {
            return frozen(inputs, element);
        }
        let mlp = Some(element / (inputs[MLPS].shape[1] * inputs[MLPS].shape[2]));
        let of = |seed: &kiln_ops::kasmina::Seed| {
            seed.blend == Blend::Mlp && seed.blueprint == mlp && seed.state.contributes()
        };
        input == MLPS && on_host(inputs).iter().any(|seed| of(seed) && !seed.state.trains())
    }

    fn fit(&self, dims: &mut Dims) {
        let features = dims["H"][0];
        let seeds = ((dims["C"][0] - 1) % features + 1).max(features.div_ceil(MOST_FEATURES));
        let widest = features.div_ceil(seeds);
        dims.insert("C", vec![seeds]);
        dims.insert("S", vec![widest]);
        dims.insert("R", vec![mlp_rows(widest)]);
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        // No size that C or S has.
        let rows = ((1 << 18) / dims["H"][0]).clamp(16, 264) + 8;
        match dims["B"][0] > rows {
            true => vec![replace(dims, "B", rows)],
            false => vec![],
        }
    }

    // Rows beyond the last are zeros, and are multiplied.
    fn leaves_out(&self, holder: Holder, special: Special, _dtype: DType) -> Option<Why> {
        let multiplied = (holder, special) == (Holder::Input("mlps"), Special::Infinities);
        undefined(special == Special::Masked || multiplied)
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["B"]
    }

    fn cases(&self) -> Vec<Case> {
        // One element; chunks of one and two features; one seed; features that no vector ends at; whole tiles and a bit
        // of one; rows in parts, long and short ones; the widest that kernels take.
        [
            [1, 1, 1, 1],
            [3, 7, 5, 2],
            [5, 13, 13, 3],
            [33, 32, 1, 1],
            [19, 96, 7, 4],
            [130, 128, 4, 3],
            [3500, 48, 5, 2],
            [40, 256, 4, 2],
            [21, 190, 3, 2],
        ]
        .into_iter()
        .map(case)
        .collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        // B, H, C, P.
        let sizes: &[[usize; 4]] = match scale {
            Scale::Small => &[[64, 1024, 128, 10], [64, 4096, 128, 10], [16, 2048, 1000, 10]],
            Scale::Train => &[[32_768, 3072, 96, 10]],
            Scale::Large => &[[65_536, 4096, 128, 10], [65_536, 4096, 64, 10]],
            Scale::Thin | Scale::Lengths => &[],
        };
        sizes.iter().copied().map(case).collect()
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        // Of the seeds 25 in 99 blend an MLP: five states of eleven, and five draws of a blend in nine. A
        // backward needs x there, and as in kasmina for the other four draws.
        let (n, size, share) = (elements(case, 0), dtype.size() as f64, 25.0 / 99.0);
        let (s, row) = (case.shapes[MLPS][2] as f64, case.shapes[0][1] as f64 * size);
        let tables = (elements(case, BLUEPRINTS) + elements(case, MLPS)) * size;
        let weights = row + elements(case, MLPS) * size;
        (
            Work { bytes: 2.0 * n * size + weights, flops: share * 8.0 * n * s },
            Work {
                bytes: (2.0 + 37.0 / 99.0) * n * size + weights + tables,
                flops: share * 20.0 * n * s,
            },
        )
    }
}

/// From rows, features, seeds and blueprints of each kind.
fn case([b, h, c, p]: [usize; 4]) -> Case {
    let widest = h.div_ceil(c);
    let mlps = [p, mlp_rows(widest), widest];
    debug_assert_eq!(chunk(0, h, c).len(), widest);
    Case::new([&[b, h][..], &[c], &[p, h], &[c], &[c], &[c], &mlps])
}
