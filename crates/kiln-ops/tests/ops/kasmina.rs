//! kasmina on every device: values, telemetry and gradients against float64, states, changes, layouts, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::kasmina::{chunk, oracle};
use kiln_ops::policy::{self, Implementation};
use kiln_ops::prelude::*;

const UNCHECKED: KasminaOptions = KasminaOptions { check_seeds: false };

/// Seeds in every state and blend, by their number; several share a blueprint.
fn garden(count: usize, blueprints: usize) -> Vec<Seed> {
    let one = |i: usize| Seed {
        state: SeedState::ALL[(3 + 7 * i) % SeedState::ALL.len()],
        blueprint: Some(5 * i % blueprints),
        blend: Blend::OF_ROWS[(i + i / 4) % Blend::OF_ROWS.len()],
        alpha: (i * 37 % 101) as f32 / 100.0,
    };
    (0..count).map(one).collect()
}

/// M, H, C, P.
const SHAPES: &[[usize; 4]] = &[
    [1, 1, 1, 1],
    [5, 7, 7, 2],
    [3, 33, 5, 1],
    [11, 80, 1, 3],
    [41, 257, 100, 4],
    [67, 96, 10, 10],
    [2, 2100, 7, 2],
    [2100, 24, 5, 2],
];

struct Case {
    x: Tensor<2>,
    blueprints: Tensor<2>,
    dy: Tensor<2>,
    seeds: Vec<Seed>,
    /// x, blueprints, dy, alpha.
    held: [Vec<f64>; 4],
    features: usize,
    device: Device,
}

impl Case {
    fn new(
        [m, h, c, p]: [usize; 4],
        dtype: DType,
        table: DType,
        seed: u64,
        device: &Device,
    ) -> Self {
        let drawn = |at: u64, count: usize, mean: f64| numbers(count, 10 * seed + at, mean);
        let (x, x_held) = tensor(&drawn(0, m * h, 0.3), [m, h], dtype, device);
        let (blueprints, table) = tensor(&drawn(1, p * h, 0.4), [p, h], table, device);
        let (dy, dy_held) = tensor(&drawn(2, m * h, 0.1), [m, h], dtype, device);
        let seeds = garden(c, p);
        let alpha = seeds.iter().map(|seed| f64::from(seed.alpha)).collect();
        let held = [x_held, table, dy_held, alpha];
        Self { x, blueprints, dy, seeds, held, features: h, device: device.clone() }
    }

    fn expected(&self) -> (oracle::Outputs<f64>, [Vec<f64>; 3]) {
        let codes = |of: fn(&Seed) -> i64| self.seeds.iter().map(of).collect::<Vec<_>>();
        let [x, blueprints, dy, alpha] = &self.held;
        let call = oracle::Call {
            x,
            blueprints,
            alpha,
            lifecycle: &codes(|seed| seed.state.code()),
            blueprint_id: &codes(|seed| seed.blueprint.map_or(-1, |row| row as i64)),
            blend: &codes(|seed| seed.blend.code()),
            features: self.features,
        };
        (oracle::forward(&call), oracle::backward(&call, dy))
    }

    fn seeds(&self) -> Seeds {
        Seeds::new(&self.seeds, &self.device).unwrap()
    }

    /// y, mean, variance; then the gradients that are wanted of x, alpha, blueprints.
    fn run(&self, wanted: [bool; 3]) -> ([Vec<f64>; 3], [Option<Vec<f64>>; 3]) {
        fn leaf<const D: usize>(of: Tensor<D>, wanted: bool) -> Tensor<D> {
            if wanted { of.autodiff().require_grad() } else { of.autodiff() }
        }
        let mut seeds = self.seeds();
        seeds.alpha = leaf(seeds.alpha, wanted[1]);
        let [x, blueprints] = [(&self.x, wanted[0]), (&self.blueprints, wanted[2])]
            .map(|(of, wanted)| leaf(of.clone(), wanted));
        let (y, seen) = kasmina(x.clone(), blueprints.clone(), &seeds, UNCHECKED).unwrap();
        assert!(!seen.mean.is_tracked() && !seen.variance.is_tracked());
        let outputs = [values(&y), values(&seen.mean), values(&seen.variance)];
        if wanted == [false; 3] {
            assert!(!y.is_tracked());
            return (outputs, [const { None }; 3]);
        }
        let grads = pull(y, &self.dy.clone().autodiff()).backward();
        let gradients = [
            x.grad(&grads).map(|g| values(&g)),
            seeds.alpha.grad(&grads).map(|g| values(&g)),
            blueprints.grad(&grads).map(|g| values(&g)),
        ];
        (outputs, gradients)
    }

    fn check(&self, wanted: [bool; 3], dtype: DType, what: &str) {
        let ([y, mean, variance], gradients) = self.run(wanted);
        let (expected, of) = self.expected();
        assert_near(&y, &expected.y, dtype, 4, &format!("y of {what}"));
        assert_near(&mean, &expected.mean, DType::F32, 100, &format!("mean of {what}"));
        assert_near(&variance, &expected.variance, DType::F32, 100, &format!("variance of {what}"));
        for (i, (found, expected)) in gradients.iter().zip(&of).enumerate() {
            assert_eq!(found.is_some(), wanted[i], "gradient {i} of {what}");
            if let Some(found) = found {
                assert_near(found, expected, dtype, 200, &format!("gradient {i} of {what}"));
            }
        }
    }
}

#[test]
fn matches_float64() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for table in [dtype, DType::F32] {
                for (i, shape) in SHAPES.iter().enumerate() {
                    poison(shape[0] * shape[1], dtype, &device);
                    let case = Case::new(*shape, dtype, table, i as u64, &device);
                    let what = format!("{shape:?}, blueprints {table:?}, {device:?}");
                    case.check([true; 3], dtype, &what);
                }
            }
        }
    }
}

#[test]
fn frozen_inputs() {
    for device in devices() {
        // On CUDA with as many rows as come through shared memory there, and one by itself at the end.
        let many = kiln_ops::device::is_cuda(&device).then_some([1151, 4096, 12, 3]);
        for shape in many.into_iter().chain([[37, 50, 12, 3]]) {
            let case = Case::new(shape, DType::F32, DType::F32, 3, &device);
            for set in 0..8 {
                let wanted = [0, 1, 2].map(|i| set >> i & 1 == 1);
                case.check(wanted, DType::F32, &format!("{shape:?}, {wanted:?} on {device:?}"));
            }
        }
    }
}

#[test]
fn repeats_bit_for_bit() {
    for device in kernel_devices() {
        let case = Case::new([3001, 40, 11, 2], DType::F32, DType::F32, 5, &device);
        assert!(case.run([true; 3]) == case.run([true; 3]), "{device:?}");
    }
}

/// The spec's numbers: x = 2, w = 3.
#[test]
fn golden() {
    for device in devices() {
        for (blend, alpha, expected) in [
            (Blend::Lerp, 0.5, 4.0),
            (Blend::Scale, 0.5, 6.0),
            (Blend::Add, 1.0, 5.0),
            (Blend::Mixed, 0.25, 2.25),
        ] {
            let seed = Seed { state: SeedState::Fossilized, blueprint: Some(0), blend, alpha };
            let seeds = Seeds::new(&[seed], &device).unwrap();
            let x = Tensor::<3>::full([2, 3, 5], 2.0, &device);
            let table = Tensor::full([1, 5], 3.0, &device);
            let (y, seen) = kasmina(x, table, &seeds, KasminaOptions::default()).unwrap();
            assert_eq!(y.dims(), [2, 3, 5]);
            assert_eq!(values(&y), [expected; 30], "{blend:?} on {device:?}");
            assert_eq!((values(&seen.mean), values(&seen.variance)), (vec![2.0], vec![0.0]));
        }
    }
}

/// What does not contribute passes through bit for bit, and its cotangent too; the blueprint has no part in it.
#[test]
fn others_pass_through() {
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, 1e-30, -3.5, 7.0];
    for device in devices() {
        for state in SeedState::ALL.into_iter().filter(|state| !state.contributes()) {
            for blueprint in [None, Some(0)] {
                let seeds: Vec<Seed> = Blend::OF_ROWS
                    .into_iter()
                    .map(|blend| Seed { state, blueprint, blend, alpha: 0.7 })
                    .collect();
                let mut seeds = Seeds::new(&seeds, &device).unwrap();
                seeds.alpha = seeds.alpha.autodiff().require_grad();
                let numbers: Vec<f32> = special.iter().copied().cycle().take(48).collect();
                let x = || Tensor::<1>::from_floats(numbers.as_slice(), &device).reshape([3, 16]);
                let leaf = x().autodiff().require_grad();
                let table = Tensor::<2>::full([1, 16], f32::NAN, &device).autodiff().require_grad();
                let (y, _) = kasmina(leaf.clone(), table.clone(), &seeds, UNCHECKED).unwrap();
                let bits = |of: Tensor<2>| -> Vec<u32> {
                    of.into_data()
                        .iter::<f32>()
                        .map(|x| if x.is_nan() { 1 } else { x.to_bits() })
                        .collect()
                };
                assert_eq!(bits(y.clone().inner()), bits(x()), "{state:?} on {device:?}");
                let grads =
                    pull(y, &Tensor::<2>::full([3, 16], 3.0, &device).autodiff()).backward();
                assert_eq!(values(&leaf.grad(&grads).unwrap()), [3.0; 48]);
                assert_eq!(values(&table.grad(&grads).unwrap()), [0.0; 16], "{state:?}");
                assert_eq!(values(&seeds.alpha.grad(&grads).unwrap()), [0.0; 4], "{state:?}");
            }
        }
    }
}

/// Blueprints learn in two states and in no other, and seeds that share one add up.
#[test]
fn frozen_blueprints() {
    for device in devices() {
        for state in SeedState::ALL.into_iter().filter(|state| state.contributes()) {
            let seed = Seed { state, blueprint: Some(1), blend: Blend::Add, alpha: 0.5 };
            let seeds = Seeds::new(&[seed; 3], &device).unwrap();
            let table = Tensor::<2>::ones([2, 6], &device).autodiff().require_grad();
            let x = Tensor::<2>::ones([4, 6], &device).autodiff().require_grad();
            let (y, _) = kasmina(x.clone(), table.clone(), &seeds, UNCHECKED).unwrap();
            let grads = y.sum().backward();
            let learned = if state.trains() { 2.0 } else { 0.0 };
            let expected: Vec<f64> = [[0.0; 6], [learned; 6]].concat();
            assert_eq!(values(&table.grad(&grads).unwrap()), expected, "{state:?} on {device:?}");
            assert_eq!(values(&x.grad(&grads).unwrap()), [1.0; 24]);
        }
    }
}

/// Far from 0 a variance by sums of squares would be noise.
#[test]
fn variance_far_from_zero() {
    for device in devices() {
        let drawn: Vec<f64> = numbers(3000 * 12, 9, 4000.0);
        let (x, held) = tensor(&drawn, [3000, 12], DType::F32, &device);
        let seeds = Seeds::new(&garden(5, 1), &device).unwrap();
        let table = Tensor::ones([1, 12], &device);
        let (_, seen) = kasmina(x, table, &seeds, UNCHECKED).unwrap();
        let found = values(&seen.variance);
        for (seed, found) in found.iter().enumerate() {
            let chunk = chunk(seed, 12, 5);
            let of: Vec<f64> =
                held.chunks(12).flat_map(|row| row[chunk.clone()].to_vec()).collect();
            let mean = of.iter().sum::<f64>() / of.len() as f64;
            let variance = of.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / of.len() as f64;
            assert!((found / variance - 1.0).abs() < 1e-3, "{found}, {variance} on {device:?}");
        }
    }
}

/// A chunk's telemetry is its own: what is not a number stays where it is.
#[test]
fn telemetry_of_the_chunk_alone() {
    for device in devices() {
        let mut drawn = numbers(5 * 8, 2, 0.0);
        drawn[8 + 3] = f64::NAN;
        let (x, _) = tensor(&drawn, [5, 8], DType::F32, &device);
        let seeds = Seeds::new(&[Seed::default(); 4], &device).unwrap();
        let (_, seen) = kasmina(x, Tensor::ones([1, 8], &device), &seeds, UNCHECKED).unwrap();
        for of in [seen.mean, seen.variance] {
            let nan: Vec<bool> = values(&of).into_iter().map(f64::is_nan).collect();
            assert_eq!(nan, [false, true, false, false], "{device:?}");
        }
    }
}

#[test]
fn every_stride() {
    for device in devices() {
        let case = Case::new([12, 256, 7, 2], DType::F32, DType::F32, 7, &device);
        let (expected, gradients) = case.expected();
        let near = |x: Tensor<2>, table: Tensor<2>, what: &str| {
            let (y, seen) = kasmina(x, table, &case.seeds(), UNCHECKED).unwrap();
            assert_near(&values(&y), &expected.y, DType::F32, 4, what);
            assert_near(&values(&seen.variance), &expected.variance, DType::F32, 100, what);
        };
        let turned = |of: &Tensor<2>| {
            Tensor::<2>::from_data(of.clone().transpose().to_data(), &device).transpose()
        };
        near(turned(&case.x), turned(&case.blueprints), "turned");
        let wide = |of: &Tensor<2>| {
            Tensor::cat(vec![of.zeros_like(), of.clone(), of.zeros_like()], 1).narrow(1, 256, 256)
        };
        near(wide(&case.x), wide(&case.blueprints), "cut");
        if kiln_ops::device::is_cube(&device) {
            let (dy, x) = (wide(&case.dy), wide(&case.x));
            let of =
                kiln_ops::kasmina::backend::backward(dy, x, case.blueprints.clone(), &case.seeds());
            let found = [values(&of.0), values(&of.1), values(&of.2)];
            for (i, (found, expected)) in found.iter().zip(&gradients).enumerate() {
                assert_near(found, expected, DType::F32, 200, &format!("gradient {i}, cut"));
            }
        }
    }
}

#[test]
fn no_rows() {
    for device in devices() {
        let x = Tensor::<3>::zeros([2, 0, 6], &device).autodiff().require_grad();
        let table = Tensor::<2>::ones([2, 6], &device).autodiff().require_grad();
        let seeds = Seeds::new(&garden(4, 2), &device).unwrap();
        let (y, seen) = kasmina(x.clone(), table.clone(), &seeds, UNCHECKED).unwrap();
        let grads = y.clone().sum().backward();
        assert_eq!(x.grad(&grads).unwrap().dims(), [2, 0, 6]);
        // The reference returns x, of which nothing else is part.
        if kiln_ops::device::is_cube(&device) {
            assert_eq!(values(&table.grad(&grads).unwrap()), [0.0; 12]);
        }
        assert_eq!(y.dims(), [2, 0, 6]);
        assert_eq!((values(&seen.mean), values(&seen.variance)), (vec![0.0; 4], vec![0.0; 4]));
    }
}

#[test]
fn gradient_checkpointing() {
    for device in devices() {
        let case = Case::new([5, 40, 9, 2], DType::F32, DType::F32, 11, &device);
        let (_, [dx, _, dblueprints]) = case.expected();
        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        let of = |x: &Tensor<2>| Tensor::<2>::from_data(x.to_data(), &checkpointing);
        let (x, table) = (of(&case.x).require_grad(), of(&case.blueprints).require_grad());
        let doubled = x.clone().mul_scalar(2.0).mul_scalar(0.5);
        let seeds = Seeds::new(&case.seeds, &checkpointing).unwrap();
        let (y, _) = kasmina(doubled, table.clone(), &seeds, UNCHECKED).unwrap();
        let grads = pull(y.mul_scalar(1.0), &of(&case.dy)).backward();
        assert_near(&values(&x.grad(&grads).unwrap()), &dx, DType::F32, 4, "dx");
        let found = values(&table.grad(&grads).unwrap());
        assert_near(&found, &dblueprints, DType::F32, 200, "dblueprints");
    }
}

/// What is not a number or infinite goes the same ways through kernel and reference, and so do codes that are none.
#[test]
fn as_the_reference_has_it() {
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e30, -1.5, 0.5, 2.0];
    for device in kernel_devices() {
        let many =
            |n: usize, step: usize| -> Vec<f32> { (0..n).map(|i| special[i * step % 8]).collect() };
        let of = |numbers: Vec<f32>, rows: usize| {
            Tensor::<1>::from_floats(numbers.as_slice(), &device).reshape([rows, 48])
        };
        let seeds = Seeds {
            alpha: Tensor::from_floats([0.0, 0.25, 0.5, 1.0, 0.75, 0.3], &device),
            lifecycle: Tensor::from_ints([3, 4, 6, 7, 11, 5], &device),
            blueprint_id: Tensor::from_ints([0, 1, 1, 0, 1, -1], &device),
            blend: Tensor::from_ints([0, 1, 2, 3, 0, 4], &device),
        };
        let run = |implementation| {
            policy::force(implementation, || {
                let x = of(many(240, 1), 5).autodiff().require_grad();
                let table = of(many(96, 3), 2).autodiff().require_grad();
                let (y, _) = kasmina(x.clone(), table.clone(), &seeds, UNCHECKED).unwrap();
                let grads = pull(y.clone(), &of(many(240, 5), 5).autodiff()).backward();
                let found = [y.inner(), x.grad(&grads).unwrap(), table.grad(&grads).unwrap()];
                found.map(|of| values(&of))
            })
        };
        let (fused, reference) = (run(Implementation::Fused), run(Implementation::Reference));
        for (which, (found, expected)) in fused.iter().zip(&reference).enumerate() {
            for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                let same = found == expected || (found.is_nan() && expected.is_nan());
                let near = (found - expected).abs() <= 1e-5 * expected.abs();
                assert!(same || near, "{which} at {at}: {found}, {expected} on {device:?}");
            }
        }
    }
}

/// With rows enough that a unit reads x again and again: an unknown blend is `mixed`, and so is its gradient of alpha.
#[test]
fn unknown_blends() {
    for device in devices() {
        let case = Case::new([2000, 48, 6, 2], DType::F32, DType::F32, 7, &device);
        let gradients = |blends: [i64; 6]| {
            let mut seeds = case.seeds();
            seeds.lifecycle = Tensor::from_ints([3, 4, 5, 6, 7, 3], &device);
            seeds.blend = Tensor::from_ints(blends, &device);
            seeds.alpha = seeds.alpha.autodiff().require_grad();
            let x = case.x.clone().autodiff().require_grad();
            let table = case.blueprints.clone().autodiff().require_grad();
            let (y, _) = kasmina(x.clone(), table.clone(), &seeds, UNCHECKED).unwrap();
            let grads = pull(y, &case.dy.clone().autodiff()).backward();
            let of_alpha = values(&seeds.alpha.grad(&grads).unwrap());
            (of_alpha, values(&x.grad(&grads).unwrap()), values(&table.grad(&grads).unwrap()))
        };
        assert_eq!(gradients([5, -1, 9, 5, 77, -8]), gradients([3; 6]), "{device:?}");
    }
}

/// Codes of one integer type are read as they are, of several they are brought to one.
#[test]
fn every_integer_type() {
    use burn::tensor::IntDType;
    for types in
        [[IntDType::I32; 3], [IntDType::I64; 3], [IntDType::I32, IntDType::I64, IntDType::I32]]
    {
        // The second type is the one that a device may lack.
        for device in those_with(DType::from(types[1])) {
            let case = Case::new([5, 40, 9, 2], DType::F32, DType::F32, 12, &device);
            let (expected, _) = case.expected();
            let mut seeds = case.seeds();
            seeds.lifecycle = seeds.lifecycle.cast(types[0]);
            seeds.blueprint_id = seeds.blueprint_id.cast(types[1]);
            seeds.blend = seeds.blend.cast(types[2]);
            let (y, _) =
                kasmina(case.x.clone(), case.blueprints.clone(), &seeds, UNCHECKED).unwrap();
            assert_near(&values(&y), &expected.y, DType::F32, 4, &format!("{types:?}"));
        }
    }
}

#[test]
fn wrong_calls() {
    for device in devices() {
        let x = || Tensor::<2>::ones([2, 6], &device);
        let table = || Tensor::<2>::ones([2, 6], &device);
        let seeds = |count| Seeds::new(&vec![Seed::default(); count], &device).unwrap();
        let error = |x, table, seeds: &Seeds| {
            kasmina::<2>(x, table, seeds, KasminaOptions::default()).unwrap_err().to_string()
        };
        let says = |found: String, what: &str| assert_eq!(found, format!("kasmina: {what}"));
        says(
            error(x(), Tensor::ones([2, 5], &device), &seeds(2)),
            "`blueprints` has shape [2, 5], expected [P, 6] with P at least 1",
        );
        says(
            error(x(), table(), &seeds(7)),
            "`alpha` has shape [7], expected [C] with C from 1 to 6, the features of `x`",
        );
        let mut ragged = seeds(3);
        ragged.blend = Tensor::from_ints([0, 1], &device);
        says(error(x(), table(), &ragged), "`blend` has shape [2], expected [3]");
        let with = |lifecycle: i64, row: i64, blend: i64, alpha: f32| Seeds {
            alpha: Tensor::from_floats([0.5, alpha], &device),
            lifecycle: Tensor::from_ints([0, lifecycle], &device),
            blueprint_id: Tensor::from_ints([-1, row], &device),
            blend: Tensor::from_ints([0, blend], &device),
        };
        for (of, what) in [
            (with(11, 0, 0, 0.5), "`lifecycle` of seed 1 is 11, expected 0 to 10"),
            (with(-1, 0, 0, 0.5), "`lifecycle` of seed 1 is -1, expected 0 to 10"),
            (
                with(0, 0, 4, 0.5),
                "`blend` of seed 1 is 4, expected 0 to 3, since there are no MLPs",
            ),
            (with(0, 0, 0, 1.5), "`alpha` of seed 1 is 1.5, expected 0 to 1"),
            (with(0, 0, 0, f32::NAN), "`alpha` of seed 1 is NaN, expected 0 to 1"),
            (with(7, 2, 0, 0.5), "`blueprint_id` of seed 1 is 2, expected 0 to 1"),
            (
                with(3, -1, 0, 0.5),
                "`blueprint_id` of seed 1 is -1, expected a blueprint, since a seed that is Grafting contributes",
            ),
        ] {
            says(error(x(), table(), &of), what);
        }
    }
}
