//! The layer around the resolvent, on the CPU: against float64 on the host, its gradients, what a position knows, and
//! its state.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_nn::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

const BATCH: usize = 2;
const WIDTH: usize = 6;
const CHANNELS: usize = 3;

/// About normal, the same in every run, and numbers of f32.
fn numbers(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let normal = |_| f64::from(((0..12).map(|_| uniform()).sum::<f64>() - 6.0) as f32);
    (0..count).map(normal).collect()
}

fn tensor<const D: usize>(values: &[f64], shape: [usize; D], device: &Device) -> Tensor<D> {
    let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn values<const D: usize>(t: Tensor<D>) -> Vec<f64> {
    t.into_data().iter::<f64>().collect()
}

/// Within `most` of the largest number.
fn close(found: &[f64], expected: &[f64], most: f64) {
    assert_eq!(found.len(), expected.len());
    let size = expected.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
    assert!(found.iter().chain(expected).all(|v| v.is_finite()), "{found:?}, {expected:?}");
    let apart = found.iter().zip(expected).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
    assert!(apart <= most * size, "{apart:e} of {size}");
}

fn message(f: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("a panic");
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).expect("a message")
}

fn config() -> BkCoreConfig {
    BkCoreConfig::new(WIDTH, CHANNELS)
}

/// Layers in which every option does something.
fn configs() -> Vec<BkCoreConfig> {
    let limits = config().with_limit(0.7).with_max_abs(Some(0.5));
    let mut all = vec![config(), limits.clone(), config().with_damping(0.1)];
    all.extend([config().with_causal(false), limits.with_causal(false)]);
    all
}

/// Input, w_in and w_out.
fn inputs(length: usize) -> [Vec<f64>; 3] {
    let counts = [BATCH * length * WIDTH, WIDTH * CHANNELS, 2 * CHANNELS * WIDTH];
    [1, 2, 3].map(|seed| numbers(counts[seed - 1], seed as u64))
}

fn layer(config: &BkCoreConfig, [_, w_in, w_out]: &[Vec<f64>; 3], device: &Device) -> BkCore {
    let mut layer = config.init(device);
    layer.w_in.weight = Param::from_tensor(tensor(w_in, [WIDTH, CHANNELS], device));
    layer.w_out.weight = Param::from_tensor(tensor(w_out, [2 * CHANNELS, WIDTH], device));
    layer
}

/// The layer in float64, site by site.
fn host(config: &BkCoreConfig, [x, w_in, w_out]: &[Vec<f64>; 3]) -> Vec<f64> {
    let length = x.len() / (BATCH * WIDTH);
    let inverse = |[re, im]: [f64; 2]| {
        let square = re * re + im * im;
        [re / square, -im / square]
    };
    let mut y = vec![0.0; x.len()];
    for (x, y) in x.chunks(length * WIDTH).zip(y.chunks_mut(length * WIDTH)) {
        for channel in 0..CHANNELS {
            let alpha = |t: usize| {
                let row = &x[t * WIDTH..(t + 1) * WIDTH];
                let v: f64 = (0..WIDTH).map(|i| row[i] * w_in[i * CHANNELS + channel]).sum();
                [v.clamp(-config.limit, config.limit) - 2.0, -config.damping]
            };
            let pivots = |order: Vec<usize>| {
                let mut pivots = vec![[0.0; 2]; length];
                let mut from = [0.0; 2];
                for t in order {
                    let of = alpha(t);
                    pivots[t] = [of[0] - from[0], of[1] - from[1]];
                    from = inverse(pivots[t]);
                }
                pivots
            };
            let (left, right) =
                (pivots((0..length).collect()), pivots((0..length).rev().collect()));
            for t in 0..length {
                let g = inverse(match config.causal {
                    true => left[t],
                    false => [0, 1].map(|i| left[t][i] + right[t][i] - alpha(t)[i]),
                });
                let factor = config.max_abs.map_or(1.0, |most| (most / g[0].hypot(g[1])).min(1.0));
                for i in 0..WIDTH {
                    let weight = |part: usize| w_out[(2 * channel + part) * WIDTH + i];
                    y[t * WIDTH + i] += factor * (g[0] * weight(0) + g[1] * weight(1));
                }
            }
        }
    }
    y
}

#[test]
fn the_layer_is_its_equation() {
    let device = Device::flex();
    for config in configs() {
        for length in [1, 2, 37] {
            let inputs = inputs(length);
            let layer = layer(&config, &inputs, &device);
            let y = layer.forward(tensor(&inputs[0], [BATCH, length, WIDTH], &device));
            assert_eq!(y.dims(), [BATCH, length, WIDTH]);
            close(&values(y), &host(&config, &inputs), 5e-6);
        }
    }
    // The options do something.
    let inputs = inputs(37);
    let all: Vec<_> = configs().iter().map(|config| host(config, &inputs)).collect();
    for (i, y) in all.iter().enumerate() {
        assert!(all[..i].iter().all(|other| other != y), "{i}");
    }
    assert_eq!(config().init(&device).num_params(), 3 * WIDTH * CHANNELS);
    assert_eq!(config().init(&device).channels(), CHANNELS);
}

#[test]
fn gradients_are_the_slopes_of_the_equation() {
    const LENGTH: usize = 5;
    let device = Device::flex().autodiff();
    let cotangent = numbers(BATCH * LENGTH * WIDTH, 4);
    for config in configs() {
        let inputs = inputs(LENGTH);
        let layer = layer(&config, &inputs, &device);
        let shape = [BATCH, LENGTH, WIDTH];
        let x = tensor(&inputs[0], shape, &device).require_grad();
        let loss = (layer.forward(x.clone()) * tensor(&cotangent, shape, &device)).sum();
        let gradients = loss.backward();
        let found = [
            values(x.grad(&gradients).expect("of x")),
            values(layer.w_in.weight.val().grad(&gradients).expect("of w_in")),
            values(layer.w_out.weight.val().grad(&gradients).expect("of w_out")),
        ];
        let loss = |inputs: &[Vec<f64>; 3]| {
            let y = host(&config, inputs);
            y.iter().zip(&cotangent).map(|(y, r)| y * r).sum::<f64>()
        };
        for (of, found) in found.iter().enumerate() {
            let slope = |i: usize| {
                let at = |h: f64| {
                    let mut inputs = inputs.clone();
                    inputs[of][i] += h;
                    loss(&inputs)
                };
                (at(1e-5) - at(-1e-5)) / 2e-5
            };
            let expected: Vec<f64> = (0..found.len()).map(slope).collect();
            assert!(expected.iter().any(|slope| slope.abs() > 1e-3), "{of}: it has a slope");
            close(found, &expected, 2e-5);
        }
    }
}

#[test]
fn a_position_knows_the_past_alone_unless_the_layer_is_full() {
    let device = Device::flex();
    for (causal, knows) in [(true, false), (false, true)] {
        let inputs = inputs(9);
        let layer = layer(&config().with_causal(causal), &inputs, &device);
        let x = tensor(&inputs[0], [BATCH, 9, WIDTH], &device);
        let other = tensor(&numbers(BATCH * WIDTH, 5), [BATCH, 1, WIDTH], &device);
        let changed = x.clone().slice_assign([0..BATCH, 5..6, 0..WIDTH], other);
        let (y, changed) = (layer.forward(x), layer.forward(changed));
        let part = |y: &Tensor<3>, from, to| values(y.clone().narrow(1, from, to - from));
        assert_eq!(part(&y, 0, 5) != part(&changed, 0, 5), knows);
        for t in 5..9 {
            assert_ne!(part(&y, t, t + 1), part(&changed, t, t + 1), "{t}");
        }
    }
}

#[test]
fn the_state_changes_nothing() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        for config in configs().into_iter().filter(|config| config.causal) {
            let inputs = inputs(7);
            let layer = layer(&config, &inputs, &device);
            let x = tensor::<3>(&inputs[0], [BATCH, 7, WIDTH], &device);
            let y = layer.forward(x.clone());
            let mut state = BkState::new();
            for parts in [[1; 7].to_vec(), vec![3, 1, 3], vec![1, 6], vec![7]] {
                assert!(state.is_empty());
                let mut first = 0;
                for length in parts {
                    let part = x.clone().narrow(1, first, length);
                    let part = layer.forward_cached(part, &mut state);
                    assert_eq!(part.is_autodiff(), device.is_autodiff());
                    let expected = values(y.clone().narrow(1, first, length));
                    close(&values(part), &expected, 1e-5);
                    first += length;
                    assert_eq!(state.len(), first);
                }
                state.clear();
            }
            // What was forgotten may be followed by another number of sequences.
            let one = layer.forward_cached(x.clone().narrow(0, 1, 1), &mut state);
            close(&values(one), &values(y.narrow(0, 1, 1)), 1e-5);
            let line = message(|| drop(layer.forward_cached(x, &mut state.clone())));
            assert_eq!(
                line,
                "bk_core: [B, channels] = [2, 3], expected [1, 3], those of the state"
            );
        }
    }
}

#[test]
fn a_bf16_input_gives_bf16_and_f32_gradients() {
    let device = Device::flex().autodiff();
    let inputs = inputs(5);
    let layer = layer(&config(), &inputs, &device);
    let x = tensor::<3>(&inputs[0], [BATCH, 5, WIDTH], &device);
    let half = layer.forward(x.clone().cast(DType::BF16));
    assert_eq!(half.dtype(), DType::BF16);
    close(&values(half.clone()), &values(layer.forward(x.clone())), 0.03);
    let gradients = half.cast(DType::F32).square().sum().backward();
    for weight in [&layer.w_in.weight, &layer.w_out.weight] {
        assert_eq!(weight.val().grad(&gradients).expect("a gradient").dtype(), DType::F32);
    }
    let mut state = BkState::new();
    let first = layer.forward_cached(x.clone().narrow(1, 0, 2).cast(DType::BF16), &mut state);
    let next = layer.forward_cached(x.narrow(1, 2, 1).cast(DType::BF16), &mut state);
    assert_eq!((first.dtype(), next.dtype()), (DType::BF16, DType::BF16));
}

#[test]
fn what_does_not_fit_is_named() {
    let device = Device::flex();
    let layer = config().init(&device);
    let x = |shape| Tensor::<3>::ones(shape, &device);
    let line = message(|| drop(layer.forward(x([2, 4, 5]))));
    let expected = "expected [B, T, 6] with B and T at least 1";
    assert_eq!(line, format!("bk_core: `x` has shape [2, 4, 5], {expected}"));
    let line = message(|| drop(layer.forward(x([2, 0, 6]))));
    assert_eq!(line, format!("bk_core: `x` has shape [2, 0, 6], {expected}"));
    let full = config().with_causal(false).init(&device);
    let line = message(|| drop(full.forward_cached(x([1, 1, 6]), &mut BkState::new())));
    assert_eq!(line, "bk_core: a layer that is not causal has no state");
    for (config, expected) in [
        (BkCoreConfig::new(0, 3), "bk_core: width = 0, expected at least 1"),
        (BkCoreConfig::new(6, 0), "bk_core: channels = 0, expected at least 1"),
        (config().with_limit(0.0), "bk_core: limit = 0, expected above 0 and at most 1e6"),
        (config().with_damping(0.0), "bk_core: damping = 0, expected from 1e-6 to 1e6"),
        (config().with_damping(f64::NAN), "bk_core: damping = NaN, expected from 1e-6 to 1e6"),
        (
            config().with_max_abs(Some(-1.0)),
            "bk_core: max_abs = -1, expected a number above 0, within f32",
        ),
    ] {
        assert_eq!(message(|| drop(config.init(&device))), expected);
    }
}
