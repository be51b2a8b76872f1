//! kasmina_mlp on every device: values and gradients against float64, states, layouts, kinks, wide chunks, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::kasmina::{BlueprintCounts, oracle as rows};
use kiln_ops::kasmina_mlp::{MOST_FEATURES, oracle};
use kiln_ops::policy::{self, Implementation};
use kiln_ops::prelude::*;

const UNCHECKED: KasminaOptions = KasminaOptions { check_seeds: false };

/// Seeds in every state, four of five with an MLP; several share one.
fn garden(count: usize, blueprints: usize) -> Vec<Seed> {
    let one = |i: usize| Seed {
        state: SeedState::ALL[(3 + 7 * i) % SeedState::ALL.len()],
        blueprint: Some(5 * i % blueprints),
        blend: if i % 5 == 4 { Blend::ALL[i / 5 % 4] } else { Blend::Mlp },
        alpha: (i * 37 % 101) as f32 / 100.0,
    };
    (0..count).map(one).collect()
}

/// M, H, C, P.
const SHAPES: &[[usize; 4]] = &[
    [1, 1, 1, 1],
    [3, 7, 5, 2],
    [5, 23, 23, 2],
    [19, 96, 12, 3],
    [33, 40, 1, 1],
    [21, 190, 3, 2],
    [150, 256, 8, 4],
    [260, 128, 2, 1],
    [2100, 24, 5, 2],
];

struct Case {
    x: Tensor<2>,
    blueprints: Tensor<2>,
    mlps: Tensor<3>,
    dy: Tensor<2>,
    seeds: Vec<Seed>,
    /// x, alpha, blueprints, MLPs, dy.
    held: [Vec<f64>; 5],
    sizes: [usize; 4],
    device: Device,
}

/// What a call makes: y; the gradients that are wanted of x, alpha, blueprints and MLPs.
type Found = (Vec<f64>, [Option<Vec<f64>>; 4]);

impl Case {
    /// Rows and alpha of type `table`.
    fn new(sizes: [usize; 4], dtype: DType, table: DType, seed: u64, device: &Device) -> Self {
        let [m, h, c, p] = sizes;
        let widest = h.div_ceil(c);
        let drawn = |at: u64, count: usize, mean: f64| numbers(count, 10 * seed + at, mean);
        let (x, x_held) = tensor(&drawn(0, m * h, 0.3), [m, h], dtype, device);
        let (blueprints, rows) = tensor(&drawn(1, p * h, 0.4), [p, h], table, device);
        let (dy, dy_held) = tensor(&drawn(2, m * h, 0.1), [m, h], dtype, device);
        let shape = [p, mlp_rows(widest), widest];
        let scale = 1.0 / (widest as f64).sqrt();
        let weights: Vec<f64> =
            drawn(3, shape.iter().product(), 0.1).into_iter().map(|w| w * scale).collect();
        let (mlps, mlps_held) = tensor(&weights, shape, dtype, device);
        let seeds = garden(c, p);
        let alpha: Vec<f64> = seeds.iter().map(|seed| f64::from(seed.alpha)).collect();
        let (_, alpha) = tensor(&alpha, [c], table, device);
        let held = [x_held, alpha, rows, mlps_held, dy_held];
        Self { x, blueprints, mlps, dy, seeds, held, sizes, device: device.clone() }
    }

    fn expected(&self) -> (Vec<f64>, [Vec<f64>; 4]) {
        let codes = |of: fn(&Seed) -> i64| self.seeds.iter().map(of).collect::<Vec<_>>();
        let [x, alpha, blueprints, mlps, dy] = &self.held;
        let [_, features, seeds, _] = self.sizes;
        let call = oracle::Call {
            rows: rows::Call {
                x,
                blueprints,
                alpha,
                lifecycle: &codes(|seed| seed.state.code()),
                blueprint_id: &codes(|seed| seed.blueprint.map_or(-1, |row| row as i64)),
                blend: &codes(|seed| seed.blend.code()),
                features,
            },
            mlps,
            widest: features.div_ceil(seeds),
        };
        (oracle::forward(&call).y, oracle::backward(&call, dy))
    }

    fn seeds(&self) -> Seeds {
        Seeds::new(&self.seeds, &self.device).unwrap()
    }

    fn run(&self, wanted: [bool; 4]) -> Found {
        fn leaf<const D: usize>(of: Tensor<D>, wanted: bool) -> Tensor<D> {
            if wanted { of.autodiff().require_grad() } else { of.autodiff() }
        }
        let mut seeds = self.seeds();
        seeds.alpha = seeds.alpha.cast(self.blueprints.dtype());
        let x = leaf(self.x.clone(), wanted[0]);
        seeds.alpha = leaf(seeds.alpha, wanted[1]);
        let blueprints = leaf(self.blueprints.clone(), wanted[2]);
        let mlps = leaf(self.mlps.clone(), wanted[3]);
        let (y, seen) =
            kasmina_mlp(x.clone(), blueprints.clone(), mlps.clone(), &seeds, UNCHECKED).unwrap();
        assert!(!seen.mean.is_tracked() && !seen.variance.is_tracked());
        let out = values(&y);
        if wanted == [false; 4] {
            assert!(!y.is_tracked());
            return (out, [const { None }; 4]);
        }
        let grads = pull(y, &self.dy.clone().autodiff()).backward();
        let gradients = [
            x.grad(&grads).map(|g| values(&g)),
            seeds.alpha.grad(&grads).map(|g| values(&g)),
            blueprints.grad(&grads).map(|g| values(&g)),
            mlps.grad(&grads).map(|g| values(&g)),
        ];
        (out, gradients)
    }

    fn check(&self, wanted: [bool; 4], dtype: DType, what: &str) {
        let (y, gradients) = self.run(wanted);
        let (expected, of) = self.expected();
        // Hidden units may be of 16 bits, whose roundings the MLP adds up; TF32 has no more.
        let (one, many) = (12, if dtype == DType::F32 { 600 } else { 24 });
        assert_near(&y, &expected, dtype, one, &format!("y of {what}"));
        for (i, (found, expected)) in gradients.iter().zip(&of).enumerate() {
            assert_eq!(found.is_some(), wanted[i], "gradient {i} of {what}");
            if let Some(found) = found {
                let roundings = if i == 0 { one } else { many };
                assert_near(found, expected, dtype, roundings, &format!("gradient {i} of {what}"));
            }
        }
    }
}

#[test]
fn matches_float64() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (i, shape) in SHAPES.iter().enumerate() {
                let tables = if i % 3 == 1 { vec![dtype, DType::F32] } else { vec![dtype] };
                for table in tables {
                    poison(shape[0] * shape[1], dtype, &device);
                    let case = Case::new(*shape, dtype, table, i as u64, &device);
                    case.check([true; 4], dtype, &format!("{shape:?}, {table:?}, {device:?}"));
                }
            }
        }
    }
}

#[test]
fn frozen_inputs() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let case = Case::new([37, 50, 12, 3], dtype, dtype, 3, &device);
            for set in 0..16 {
                let wanted = [0, 1, 2, 3].map(|i| set >> i & 1 == 1);
                case.check(wanted, dtype, &format!("{wanted:?} on {device:?}"));
            }
        }
    }
}

#[test]
fn repeats_bit_for_bit() {
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            let case = Case::new([1500, 96, 5, 2], dtype, dtype, 5, &device);
            assert!(case.run([true; 4]) == case.run([true; 4]), "{dtype:?} on {device:?}");
        }
    }
}

/// An infinite feature that all hidden units are turned off by is seen at its place alone, also where tiles have more units
/// than the MLP.
#[test]
fn infinite_features() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for size in [3, 5, 8, 24, 33] {
                let mut x = vec![1.0; 20 * size];
                x[2 * size + 1] = f64::INFINITY;
                let (x, _) = tensor(&x, [20, size], dtype, &device);
                let first = vec![-1.0; 2 * size * size];
                let others = vec![1.0; (2 * size + 3) * size];
                let shape = [1, mlp_rows(size), size];
                let (mlps, _) = tensor(&[first, others].concat(), shape, dtype, &device);
                let (rows, _) = tensor(&vec![1.0; size], [1, size], dtype, &device);
                let seed = Seed {
                    state: SeedState::Fossilized,
                    blueprint: Some(0),
                    blend: Blend::Mlp,
                    alpha: 0.5,
                };
                let seeds = Seeds::new(&[seed], &device).unwrap();
                let x = x.autodiff().require_grad();
                let (y, _) = kasmina_mlp(x.clone(), rows, mlps, &seeds, UNCHECKED).unwrap();
                // 1 of the bias, half of it and half of x.
                let expected = |at| if at == 2 * size + 1 { f64::INFINITY } else { 1.0 };
                let expected: Vec<f64> = (0..20 * size).map(expected).collect();
                assert_eq!(values(&y), expected, "{size} features, {dtype:?} on {device:?}");
                // Nothing goes back through units that are off.
                let dy = vec![1.0; 20 * size];
                let (dy, _) = tensor(&dy, [20, size], dtype, &device);
                let dx = x.grad(&pull(y, &dy.autodiff()).backward()).unwrap();
                assert_eq!(values(&dx), vec![0.5; 20 * size], "{size}, {dtype:?} on {device:?}");
            }
        }
    }
}

/// 0.5·2 + 0.5·(relu(2 + 2 + 1)·4 + 1), and what is not blended stays.
#[test]
fn golden() {
    for device in devices() {
        let seed = Seed {
            state: SeedState::Fossilized,
            blueprint: Some(1),
            blend: Blend::Mlp,
            alpha: 0.5,
        };
        let seeds = Seeds::new(&[Seed::default(), seed], &device).unwrap();
        let x = Tensor::<3>::full([2, 3, 4], 2.0, &device);
        let rows = Tensor::ones([1, 4], &device);
        let nan = Tensor::<3>::full([1, 11, 2], f32::NAN, &device);
        let mlps = Tensor::cat(vec![nan, Tensor::ones([1, 11, 2], &device)], 0);
        let (y, seen) = kasmina_mlp(x, rows, mlps, &seeds, KasminaOptions::default()).unwrap();
        assert_eq!(y.dims(), [2, 3, 4]);
        assert_eq!(values(&y), [2.0, 2.0, 11.5, 11.5].repeat(6), "{device:?}");
        assert_eq!((values(&seen.mean), values(&seen.variance)), (vec![2.0; 2], vec![0.0; 2]));
    }
}

/// MLPs learn in two states and in no other, and seeds that share one add up; what does not contribute passes through bit
/// for bit, whatever its MLP is.
#[test]
fn states() {
    for device in devices() {
        for state in SeedState::ALL {
            let seed = Seed { state, blueprint: Some(0), blend: Blend::Mlp, alpha: 0.5 };
            let seeds = Seeds::new(&[seed; 3], &device).unwrap();
            let (weight, x) = match state.contributes() {
                true => (1.0, [1.0; 6]),
                false => (f32::NAN, [-0.0, f32::INFINITY, 1.0, 1e-30, 2.0, f32::NEG_INFINITY]),
            };
            let mlps = Tensor::<3>::full([1, 11, 2], weight, &device).autodiff().require_grad();
            let x = Tensor::<1>::from_floats(x, &device).reshape([1, 6]).repeat_dim(0, 4);
            let leaf = x.clone().autodiff().require_grad();
            let rows = Tensor::ones([1, 6], &device);
            let (y, _) = kasmina_mlp(leaf.clone(), rows, mlps.clone(), &seeds, UNCHECKED).unwrap();
            let bits = |of: Tensor<2>| -> Vec<u32> {
                of.into_data().iter::<f32>().map(f32::to_bits).collect()
            };
            if !state.contributes() {
                assert_eq!(bits(y.clone().inner()), bits(x), "{state:?} on {device:?}");
            }
            let grads = pull(y, &Tensor::<2>::ones([4, 6], &device).autodiff()).backward();
            // Half of dy passes by, the other half through 4 hidden units that have 2 outputs each.
            let (through, rows) = (if state.contributes() { 4.5 } else { 1.0 }, 4.0);
            assert_eq!(values(&leaf.grad(&grads).unwrap()), [through; 24], "{state:?}");
            let [d, h] = if state.trains() { [3.0 * rows, 3.0 * rows * 1.5] } else { [0.0; 2] };
            let expected = [vec![d; 8], vec![h; 8], vec![d; 4], vec![d / 2.0; 2]].concat();
            assert_eq!(values(&mlps.grad(&grads).unwrap()), expected, "{state:?} on {device:?}");
        }
    }
}

#[test]
fn every_stride() {
    for device in devices() {
        let case = Case::new([12, 256, 7, 2], DType::F32, DType::F32, 7, &device);
        let (expected, gradients) = case.expected();
        let near = |x: Tensor<2>, mlps: Tensor<3>, what: &str| {
            let rows = case.blueprints.clone();
            let (y, _) = kasmina_mlp(x, rows, mlps, &case.seeds(), UNCHECKED).unwrap();
            assert_near(&values(&y), &expected, DType::F32, 12, what);
        };
        let turned =
            Tensor::<2>::from_data(case.x.clone().transpose().to_data(), &device).transpose();
        let mlps = case.mlps.clone().swap_dims(1, 2).to_data();
        near(turned, Tensor::<3>::from_data(mlps, &device).swap_dims(1, 2), "turned");
        let wide = |of: &Tensor<2>| {
            Tensor::cat(vec![of.zeros_like(), of.clone(), of.zeros_like()], 1).narrow(1, 256, 256)
        };
        near(wide(&case.x), case.mlps.clone(), "cut");
        if kiln_ops::device::is_cube(&device) {
            let (dy, x, rows) = (wide(&case.dy), wide(&case.x), case.blueprints.clone());
            let mlps = case.mlps.clone();
            let of = kiln_ops::kasmina_mlp::backend::backward(dy, x, rows, mlps, &case.seeds());
            let found = [values(&of.0), values(&of.1), values(&of.2), values(&of.3)];
            for (i, (found, expected)) in found.iter().zip(&gradients).enumerate() {
                assert_near(found, expected, DType::F32, 600, &format!("gradient {i}, cut"));
            }
        }
    }
}

#[test]
fn no_rows() {
    for device in devices() {
        let x = Tensor::<3>::zeros([2, 0, 6], &device).autodiff().require_grad();
        let rows = Tensor::<2>::ones([2, 6], &device);
        let mlps = Tensor::<3>::ones([2, 11, 2], &device).autodiff().require_grad();
        let seeds = Seeds::new(&garden(3, 2), &device).unwrap();
        let (y, _) = kasmina_mlp(x.clone(), rows, mlps.clone(), &seeds, UNCHECKED).unwrap();
        assert_eq!(y.dims(), [2, 0, 6]);
        let grads = y.sum().backward();
        assert_eq!(x.grad(&grads).unwrap().dims(), [2, 0, 6]);
        // The reference returns x, of which nothing else is part.
        if kiln_ops::device::is_cube(&device) {
            assert_eq!(values(&mlps.grad(&grads).unwrap()), [0.0; 44]);
        }
    }
}

#[test]
fn gradient_checkpointing() {
    for device in devices() {
        let case = Case::new([5, 40, 9, 2], DType::F32, DType::F32, 11, &device);
        let (_, [dx, .., dmlps]) = case.expected();
        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        let of = |x: &Tensor<2>| Tensor::<2>::from_data(x.to_data(), &checkpointing);
        let x = of(&case.x).require_grad();
        let mlps = Tensor::<3>::from_data(case.mlps.to_data(), &checkpointing).require_grad();
        let doubled = x.clone().mul_scalar(2.0).mul_scalar(0.5);
        let seeds = Seeds::new(&case.seeds, &checkpointing).unwrap();
        let rows = of(&case.blueprints);
        let (y, _) = kasmina_mlp(doubled, rows, mlps.clone(), &seeds, UNCHECKED).unwrap();
        let grads = pull(y.mul_scalar(1.0), &of(&case.dy)).backward();
        assert_near(&values(&x.grad(&grads).unwrap()), &dx, DType::F32, 12, "dx");
        assert_near(&values(&mlps.grad(&grads).unwrap()), &dmlps, DType::F32, 600, "dmlps");
    }
}

/// At the kink, at what is not a number or infinite, and at codes that are none, kernel and reference go the same ways.
#[test]
fn as_the_reference_has_it() {
    let special = [f32::NAN, f32::INFINITY, 0.0, -0.0, 1.0, -1.0, 0.5, 2.0];
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            // A row for each, in a chunk of its own.
            let x: Vec<f32> = (0..8 * 16).map(|i| special[(i / 16 + i % 16) % 8]).collect();
            let seeds = Seeds {
                alpha: Tensor::from_floats([0.0, 0.25, 0.5, 1.0, 0.75, 0.3, 1.0, 0.5], &device),
                lifecycle: Tensor::from_ints([3, 4, 6, 7, 11, 5, 3, 0], &device),
                blueprint_id: Tensor::from_ints([0, 1, 1, 0, 1, -1, 7, -1], &device),
                blend: Tensor::from_ints([4, 4, 4, 4, 4, 4, 4, 4], &device),
            };
            // Hidden units that are exactly 0: no weights and no bias.
            let weights: Vec<f32> = (0..44).map(|i| [0.0, 0.5, -1.0, 1.0][i * 7 % 4]).collect();
            let run = |implementation| {
                policy::force(implementation, || {
                    let of = |numbers: &[f32]| Tensor::<1>::from_data(numbers, (&device, dtype));
                    let x = of(&x).reshape([8, 16]).autodiff().require_grad();
                    let mlps = of(&weights).reshape([2, 11, 2]).autodiff().require_grad();
                    let rows = Tensor::<2>::ones([1, 16], (&device, dtype));
                    let (y, _) =
                        kasmina_mlp(x.clone(), rows, mlps.clone(), &seeds, UNCHECKED).unwrap();
                    let dy = of(&[1.0; 128]).reshape([8, 16]).autodiff();
                    let grads = pull(y.clone(), &dy).backward();
                    let (dx, dmlps) = (x.grad(&grads).unwrap(), mlps.grad(&grads).unwrap());
                    [values(&y), values(&dx), values(&dmlps)]
                })
            };
            let (fused, reference) = (run(Implementation::Fused), run(Implementation::Reference));
            for (which, (found, expected)) in fused.iter().zip(&reference).enumerate() {
                for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let same = found == expected || (found.is_nan() && expected.is_nan());
                    let near = (found - expected).abs() <= 1e-2 * expected.abs();
                    assert!(
                        same || near,
                        "{which} at {at}: {found}, {expected}, {dtype:?} on {device:?}"
                    );
                }
            }
        }
    }
}

/// Wider chunks than kernels take go through the reference, which may multiply in TF32, and are an error where kernels are
/// asked for.
#[test]
fn wide_chunks() {
    for device in devices() {
        let case = Case::new([9, 200, 2, 2], DType::F32, DType::F32, 13, &device);
        let (expected, _) = case.expected();
        let (y, _) = case.run([true; 4]);
        assert_near(&y, &expected, DType::F16, 4, &format!("wide on {device:?}"));
        if kiln_ops::device::is_cube(&device) {
            let error = policy::force(Implementation::Fused, || {
                let (x, rows, mlps) = (case.x.clone(), case.blueprints.clone(), case.mlps.clone());
                kasmina_mlp(x, rows, mlps, &case.seeds(), UNCHECKED).unwrap_err().to_string()
            });
            let expected = format!("chunks have 100 features, kernels take {MOST_FEATURES}");
            assert!(error.contains(&expected), "{error}");
        }
    }
}

#[test]
fn refuses_what_does_not_fit() {
    let device = devices().remove(0);
    let mlp =
        Seed { state: SeedState::Grafting, blueprint: Some(1), blend: Blend::Mlp, alpha: 0.5 };
    let error = |mlps: [usize; 3], dtype: DType, seed: Seed| {
        let (x, rows) = (Tensor::<2>::ones([2, 5], &device), Tensor::ones([3, 5], &device));
        let mlps = Tensor::<3>::ones(mlps, (&device, dtype));
        let seeds = Seeds::new(&[Seed::default(), seed], &device).unwrap();
        kasmina_mlp(x, rows, mlps, &seeds, KasminaOptions::default()).unwrap_err().to_string()
    };
    for (found, expected) in [
        (
            error([2, 11, 2], DType::F32, mlp),
            "kasmina_mlp: `mlps` has shape [2, 11, 2], expected [Q, 15, 3] with Q at least 1",
        ),
        (
            error([0, 15, 3], DType::F32, mlp),
            "kasmina_mlp: `mlps` has shape [0, 15, 3], expected [Q, 15, 3] with Q at least 1",
        ),
        (error([2, 15, 3], DType::F16, mlp), "kasmina_mlp: `mlps` is F16, expected"),
        (
            error([1, 15, 3], DType::F32, mlp),
            "kasmina: `blueprint_id` of seed 1 is 1, expected 0 to 0",
        ),
    ] {
        assert!(found.starts_with(expected), "{found}");
    }
    // Rows and MLPs are counted by themselves.
    let counts = BlueprintCounts { rows: 1, mlps: 2 };
    assert!(mlp.check(0, counts).is_ok());
    assert!(Seed { blend: Blend::Add, ..mlp }.check(0, counts).is_err());
    // Where there are no MLPs no seed has a blend of them, contributing or not.
    let dormant = Seed { blend: Blend::Mlp, ..Seed::default() };
    let refused = dormant.check(4, BlueprintCounts::rows(3)).unwrap_err().to_string();
    let expected = "kasmina: `blend` of seed 4 is 4, expected 0 to 3, since there are no MLPs";
    assert_eq!(refused, expected);
}
