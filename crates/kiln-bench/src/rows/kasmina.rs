//! kasmina.

use super::elements;
use crate::dims::replace;
use crate::host::{BoundedTensor, HostTensor};
use crate::operator::*;
use crate::spot::{self, Spot};
use burn::tensor::DType;
#[cfg(feature = "cube")]
use burn::tensor::Tensor;
use kiln_ops::OpError;
use kiln_ops::kasmina::{
    Blend, BlueprintCounts, KasminaOptions, Seed, SeedState, Seeds, kasmina, oracle,
};
use kiln_ops::oracle::Number;

pub(crate) struct Row;

/// Which input is which.
pub(super) const ALPHA: usize = 1;
pub(super) const BLUEPRINTS: usize = 2;
const LIFECYCLE: usize = 3;
const BLUEPRINT_ID: usize = 4;
pub(super) const BLEND: usize = 5;

static SPEC: Spec = Spec {
    name: "kasmina",
    formula: "y = blend(x, blueprints[blueprint_id], alpha) in the chunks of seeds that contribute, else x",
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
            holds: Holds::Codes(Blend::OF_ROWS.len()),
            mean: 0.0,
            fan_in: None,
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

pub(super) fn seeds(call: &Call<'_>) -> Seeds {
    let [lifecycle, blueprint_id, blend] = [LIFECYCLE, BLUEPRINT_ID, BLEND].map(|i| call.int(i));
    Seeds { alpha: call.rows(ALPHA).flatten(0, 1), lifecycle, blueprint_id, blend }
}

/// What the oracle takes, of the inputs' numbers.
pub(super) fn host<'a, N>(
    numbers: [&'a [N]; 3],
    codes: &'a [Vec<i64>; 3],
    features: usize,
) -> oracle::Call<'a, N> {
    let [x, alpha, blueprints] = numbers;
    let [lifecycle, blueprint_id, blend] = codes;
    oracle::Call { x, blueprints, alpha, lifecycle, blueprint_id, blend, features }
}

pub(super) fn codes<N: Number>(inputs: &[HostTensor<N>]) -> [Vec<i64>; 3] {
    [LIFECYCLE, BLUEPRINT_ID, BLEND].map(|i| inputs[i].integers())
}

/// The seeds as they are on the host; the codes have been looked at.
pub(super) fn on_host(inputs: &[HostTensor]) -> Vec<Seed> {
    let [lifecycle, blueprint_id, blend] = codes(inputs);
    let one = |(seed, alpha): (usize, &f64)| Seed {
        state: SeedState::ALL[lifecycle[seed] as usize],
        blueprint: usize::try_from(blueprint_id[seed]).ok(),
        blend: Blend::ALL[blend[seed] as usize],
        alpha: *alpha as f32,
    };
    inputs[ALPHA].values.iter().enumerate().map(one).collect()
}

/// Where everything is a launch, a hundred launches beside one say nothing, and where there is much of everything, they
/// take minutes.
pub(super) fn times_reference(case: &Case, beside_kernels: bool) -> bool {
    let least = if beside_kernels { 1e6 } else { 0.0 };
    (least..2e8).contains(&elements(case, 0))
}

/// Seeds that do not fit.
pub(super) fn refuse(inputs: &[HostTensor], counts: BlueprintCounts) -> Result<(), String> {
    let mut seeds = on_host(inputs).into_iter().enumerate();
    seeds.try_for_each(|(i, seed)| seed.check(i, counts)).map_err(|e| e.to_string())
}

/// Whether an element of the blueprints is that of a seed that does not train it.
pub(super) fn frozen(inputs: &[HostTensor], element: usize) -> bool {
    let features = inputs[0].shape[1];
    let seeds = on_host(inputs);
    let feature = element % features;
    let of = |i: &usize| kiln_ops::kasmina::chunk(*i, features, seeds.len()).contains(&feature);
    let seed = (0..seeds.len()).find(of).map(|i| seeds[i]);
    let row = Some(element / features);
    seed.is_some_and(|s| s.blend != Blend::Mlp && s.blueprint == row && !s.state.trains())
}

impl Operator for Row {
    fn spec(&self) -> &'static Spec {
        &SPEC
    }

    fn run(&self, call: &Call<'_>) -> Result<Vec<Output>, OpError> {
        // The gate draws seeds that fit, and `refuse` looks at those that `kiln op` reads.
        let options = KasminaOptions { check_seeds: false };
        let (y, seen) = kasmina(call.rows(0), call.rows(BLUEPRINTS), &seeds(call), options)?;
        Ok(vec![y.into(), seen.mean.into(), seen.variance.into()])
    }

    #[cfg(feature = "cube")]
    fn backward_kernels(&self, call: &Call<'_>, dy: &[Tensor<1>]) -> Option<Vec<Tensor<2>>> {
        let (x, blueprints) = (call.rows(0), call.rows(BLUEPRINTS));
        let dy = dy[0].clone().reshape(x.dims());
        let gradients = kiln_ops::kasmina::backend::backward(dy, x, blueprints, &seeds(call));
        Some(vec![gradients.0, gradients.1.unsqueeze(), gradients.2])
    }

    fn oracle(&self, call: &HostCall<'_>) -> Vec<BoundedTensor> {
        let [x, alpha, blueprints, ..] = call.inputs else { unreachable!("six inputs") };
        let codes = codes(call.inputs);
        let numbers = [&x.values[..], &alpha.values, &blueprints.values];
        let outputs = oracle::forward(&host(numbers, &codes, x.shape[1]));
        vec![
            BoundedTensor::new(x.shape.clone(), outputs.y),
            BoundedTensor::new(alpha.shape.clone(), outputs.mean),
            BoundedTensor::new(alpha.shape.clone(), outputs.variance),
        ]
    }

    fn oracle_backward(&self, call: &HostCall<'_>, dy: &[BoundedTensor]) -> Vec<BoundedTensor> {
        let [x, alpha, blueprints, ..] = call.inputs else { unreachable!("six inputs") };
        let codes = codes(call.inputs);
        let numbers = [&x.values[..], &alpha.values, &blueprints.values];
        let gradients = oracle::backward(&host(numbers, &codes, x.shape[1]), &dy[0].values);
        let inputs = [x, alpha, blueprints].into_iter();
        inputs.zip(gradients).map(|(of, grad)| BoundedTensor::new(of.shape.clone(), grad)).collect()
    }

    fn spot(&self, spot: &Spot<'_>) -> Result<(), String> {
        spot::kasmina(spot)
    }

    fn refuse(&self, inputs: &[HostTensor]) -> Result<(), String> {
        refuse(inputs, BlueprintCounts::rows(inputs[BLUEPRINTS].shape[0]))
    }

    fn times_reference(&self, case: &Case, beside_kernels: bool) -> bool {
        times_reference(case, beside_kernels)
    }

    // Blueprints of seeds that do not train them.
    fn frozen(&self, inputs: &[HostTensor], input: usize, element: usize) -> bool {
        input == BLUEPRINTS && frozen(inputs, element)
    }

    fn fit(&self, dims: &mut Dims) {
        let features = dims["H"][0];
        dims.entry("C").and_modify(|count| count[0] = (count[0] - 1) % features + 1);
    }

    fn shrink(&self, dims: &mut Dims, _dtype: DType) -> Vec<[usize; 2]> {
        let rows = ((1 << 19) / dims["H"][0]).clamp(16, 264);
        match dims["B"][0] > rows {
            true => vec![replace(dims, "B", rows)],
            false => vec![],
        }
    }

    fn may_be_zero(&self) -> &'static [&'static str] {
        &["B"]
    }

    fn cases(&self) -> Vec<Case> {
        // One element; chunks of one and two features; one seed; chunks that end within vectors; rows that CUDA
        // pitches; rows in several parts; a chunk that many units share.
        [
            [1, 1, 1, 1],
            [3, 7, 5, 2],
            [5, 13, 13, 3],
            [33, 80, 1, 1],
            [7, 96, 10, 4],
            [129, 257, 9, 3],
            [2051, 40, 11, 2],
            [9, 2100, 100, 10],
            [3, 4096, 3, 2],
        ]
        .into_iter()
        .map(case)
        .collect()
    }

    fn shapes(&self, scale: Scale) -> Vec<Case> {
        // B, H, C, P: the original's, where each seed has a feature.
        let sizes: &[[usize; 4]] = match scale {
            Scale::Small => &[
                [32, 512, 100, 10],
                [64, 512, 200, 10],
                [32, 1024, 500, 10],
                [64, 1024, 500, 10],
                [64, 1024, 1000, 10],
                [16, 2048, 1000, 10],
                [32, 2048, 1000, 10],
                [8, 4096, 2000, 10],
            ],
            Scale::Train => &[[32_768, 3072, 96, 10]],
            Scale::Large => &[[65_536, 4096, 256, 10]],
            Scale::Thin | Scale::Lengths => &[],
        };
        sizes.iter().copied().map(case).collect()
    }

    fn work(&self, case: &Case, dtype: DType) -> (Work, Work) {
        let (n, size) = (elements(case, 0), dtype.size() as f64);
        // A feature reads one blueprint; the gradient is of all. A backward needs x where seeds drawn in five of
        // eleven states blend by two of four ways, and in two states for a third way.
        let (table, row) = (elements(case, BLUEPRINTS) * size, case.shapes[0][1] as f64 * size);
        (
            Work { bytes: 2.0 * n * size + row, flops: 5.0 * n },
            Work { bytes: (2.0 + 3.0 / 11.0) * n * size + row + table, flops: 4.0 * n },
        )
    }
}

/// From rows, features, seeds and blueprints.
fn case([b, h, c, p]: [usize; 4]) -> Case {
    Case::new([&[b, h], &[c], &[p, h], &[c], &[c], &[c]])
}
