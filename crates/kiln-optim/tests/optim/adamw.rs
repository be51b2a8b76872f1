//! AdamW and clipping against plain f64 loops.

use crate::common::{numbers, on_each, tensor};
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_optim::prelude::*;
use std::collections::BTreeMap;

const STEPS: usize = 30;

fn layer(device: &Device) -> Linear {
    let mut layer = LinearConfig::new(5, 3).init(device);
    layer.weight = layer.weight.map(|_| matrix(0, device).require_grad());
    layer
}

fn matrix(start: usize, device: &Device) -> Tensor<2> {
    tensor([5, 3], start, device)
}

/// Gradients that are exactly these numbers: of Σ parameter · number.
fn gradients(layer: &Linear, step: usize, device: &Device) -> GradientsParams {
    let weight = (layer.weight.val() * matrix(100 * step, device)).sum();
    let bias = tensor([3], 100 * step + 50, device);
    let bias = (layer.bias.as_ref().unwrap().val() * bias).sum();
    GradientsParams::from_grads((weight + bias).backward(), layer)
}

fn values(layer: &Linear) -> (Vec<f32>, Vec<f32>) {
    let weight = layer.weight.val().into_data().iter::<f32>().collect();
    (weight, layer.bias.as_ref().unwrap().val().into_data().iter::<f32>().collect())
}

/// Plain AdamW on one list of numbers.
struct Plain {
    p: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
}

impl Plain {
    fn new(p: &[f32]) -> Self {
        let zeros = vec![0.0; p.len()];
        Self { p: p.iter().map(|p| *p as f64).collect(), m: zeros.clone(), v: zeros }
    }

    fn step(&mut self, grad: &[f32], t: usize, lr: f64, decay: f64) {
        let (b1, b2, eps) = (0.9, 0.99, 1e-8);
        for (i, grad) in grad.iter().enumerate() {
            let g = *grad as f64;
            self.m[i] = b1 * self.m[i] + (1.0 - b1) * g;
            self.v[i] = b2 * self.v[i] + (1.0 - b2) * g * g;
            let (m, v) =
                (self.m[i] / (1.0 - b1.powi(t as i32)), self.v[i] / (1.0 - b2.powi(t as i32)));
            self.p[i] -= lr * decay * self.p[i];
            self.p[i] -= lr * m / (v.sqrt() + eps);
        }
    }

    fn check(&self, found: &[f32]) {
        for (found, expected) in found.iter().zip(&self.p) {
            assert!((*found as f64 - expected).abs() < 1e-5, "{found} {expected}");
        }
    }
}

fn rate(step: usize) -> f64 {
    0.02 / (1.0 + step as f64 / 10.0)
}

fn optimizer(layer: &Linear) -> Optimizer {
    let config = AdamWConfig::new().with_beta2(0.99).with_weight_decay(0.5);
    let spared = config.clone().with_weight_decay(0.0);
    config.init().with_group(below_rank_two(layer), spared)
}

#[test]
fn follows_a_plain_f64_adamw_with_decay_for_the_matrix_only() {
    on_each(|device| {
        let device = device.autodiff();
        let mut layer = layer(&device);
        let (weight, bias) = values(&layer);
        let (mut weight, mut bias) = (Plain::new(&weight), Plain::new(&bias));
        let mut optimizer = optimizer(&layer);
        for step in 0..STEPS {
            let grads = gradients(&layer, step, &device);
            layer = optimizer.step(layer, grads, rate(step));
            weight.step(&numbers(15, 100 * step), step + 1, rate(step), 0.5);
            bias.step(&numbers(3, 100 * step + 50), step + 1, rate(step), 0.0);
        }
        let found = values(&layer);
        weight.check(&found.0);
        bias.check(&found.1);
        assert_eq!(optimizer.steps(), STEPS as u64);
        assert!(layer.weight.is_require_grad());
    });
}

#[test]
fn a_saved_state_goes_on_bit_for_bit() {
    on_each(|device| {
        let device = device.autodiff();
        let train =
            |mut layer: Linear, optimizer: &mut Optimizer, steps: std::ops::Range<usize>| {
                for step in steps {
                    let grads = gradients(&layer, step, &device);
                    layer = optimizer.step(layer, grads, rate(step));
                }
                layer
            };
        let start = layer(&device);
        let mut whole = optimizer(&start);
        let expected = values(&train(start.clone(), &mut whole, 0..STEPS));

        let mut first = optimizer(&start);
        let half = train(start, &mut first, 0..STEPS / 2);
        let state: BTreeMap<_, _> = first.state(&half).into_iter().collect();
        let names: Vec<&str> = state.keys().map(String::as_str).collect();
        assert_eq!(names, ["bias.first", "bias.second", "weight.first", "weight.second"]);
        // Another layer with the same values has other parameter ids.
        let record = half.into_record();
        let other = LinearConfig::new(5, 3).init(&device).load_record(record);
        let mut second = optimizer(&other);
        second.load_state(&other, first.steps(), state.clone()).unwrap();
        assert_eq!(values(&train(other, &mut second, STEPS / 2..STEPS)), expected);

        let layer = layer(&device);
        let error = |change: &dyn Fn(&mut BTreeMap<String, TensorData>)| {
            let mut state = state.clone();
            change(&mut state);
            optimizer(&layer).load_state(&layer, 1, state).unwrap_err().to_string()
        };
        let line = error(&|state| drop(state.remove("bias.second")));
        assert_eq!(line, "optimizer state lacks `bias.second`");
        let line = error(&|state| {
            let moment = state.remove("bias.first").unwrap();
            state.insert("gain.first".into(), moment);
        });
        assert_eq!(line, "optimizer state lacks `bias.first`");
        let line = error(&|state| {
            state.insert("gain.first".into(), TensorData::new(vec![1f32], [1]));
        });
        assert_eq!(
            line,
            "optimizer state `gain.first` is none of a parameter of the model, as it moves now"
        );
        let line = error(&|state| {
            state.insert("bias.first".into(), TensorData::new(vec![1f32; 4], [4]));
        });
        assert_eq!(
            line,
            "optimizer state `bias.first` is F32 of shape [4], expected F32 of shape [3]"
        );
    });
}

#[test]
fn the_norm_is_global_and_clipping_keeps_the_direction() {
    on_each(|device| {
        let device = device.autodiff();
        let layer = layer(&device);
        let all: Vec<f32> = [numbers(15, 0), numbers(3, 50)].concat();
        let expected = all.iter().map(|g| (*g as f64).powi(2)).sum::<f64>().sqrt();
        for (max, factor) in [(0.5, 0.5 / expected), (2.0 * expected, 1.0)] {
            let (grads, norm) = clip_global_norm(&layer, gradients(&layer, 0, &device), max);
            let norm: f64 = norm.into_scalar();
            assert!((norm - expected).abs() < 1e-5, "{norm} {expected}");
            let weight = grads.get::<2>(layer.weight.id).unwrap().into_data();
            let bias = grads.get::<1>(layer.bias.as_ref().unwrap().id).unwrap().into_data();
            let clipped = weight.iter::<f32>().chain(bias.iter::<f32>());
            for (clipped, grad) in clipped.zip(&all) {
                assert!((clipped as f64 - *grad as f64 * factor).abs() < 1e-5, "{clipped} {grad}");
            }
        }
    });
}

#[test]
fn a_step_that_scales_is_one_with_clipped_gradients() {
    on_each(|device| {
        let device = device.autodiff();
        // With such an eps a first step is not the same whatever the size of the gradient.
        for config in [Rule::from(AdamWConfig::new().with_eps(1.0)), Rule::from(MuonConfig::new())]
        {
            let optimizer = || Optimizer::new(config.clone());
            let start = layer(&device);
            let grads = || gradients(&start, 0, &device);
            let norm = global_norm(&start, &grads());
            let scale = Some(clip_scale(&norm, 0.5));
            let scaled = optimizer().step_scaled(start.clone(), grads(), 0.1, scale);
            let (clipped, _) = clip_global_norm(&start, grads(), 0.5);
            assert_eq!(values(&scaled), values(&optimizer().step(start.clone(), clipped, 0.1)));
        }
    });
}

/// A model of f64: the norm is f32, the gradients stay what they are.
#[test]
fn gradients_of_64_bits_are_clipped() {
    on_each(|device| {
        // As on wgpu.
        if !device.supports_dtype(DType::F64) {
            return;
        }
        let device = device.autodiff();
        let x = Tensor::<2>::ones([2, 5], &device).cast(DType::F64);
        let mut layer = layer(&device);
        layer.weight = layer.weight.map(|w| w.cast(DType::F64).detach().require_grad());
        layer.bias = None;
        let loss = x.matmul(layer.weight.val()).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &layer);
        let (grads, norm) = clip_global_norm(&layer, grads, 0.5);
        assert!((norm.into_scalar::<f32>() - 60f32.sqrt()).abs() < 1e-5);
        let clipped = grads.get::<2>(layer.weight.id).unwrap();
        assert_eq!(clipped.dtype(), DType::F64);
        let first = clipped.into_data().iter::<f64>().next().unwrap();
        assert!((first - 2.0 * 0.5 / 60f64.sqrt()).abs() < 1e-6, "{first}");
    });
}

#[test]
fn a_gradient_that_is_no_number_shows_in_the_norm() {
    on_each(|device| {
        let device = device.autodiff();
        let layer = layer(&device);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut grads = gradients(&layer, 0, &device);
            let bias = layer.bias.as_ref().unwrap();
            let grad = grads.remove::<1>(bias.id).unwrap().mul_scalar(bad);
            grads.register(bias.id, grad);
            let (_, norm) = clip_global_norm(&layer, grads, 1.0);
            assert!(!norm.into_scalar::<f32>().is_finite());
        }
        let none = global_norm(&layer, &GradientsParams::new());
        assert_eq!(none.into_scalar::<f32>(), 0.0);
    });
}

#[test]
fn a_zero_gradient_moves_only_what_decays() {
    on_each(|device| {
        let device = device.autodiff();
        let start = layer(&device);
        let before = values(&start);
        let mut optimizer = optimizer(&start);
        let zero = gradients(&start, 0, &device);
        let mut zeros = GradientsParams::new();
        let (weight, bias) = (start.weight.id, start.bias.as_ref().unwrap().id);
        zeros.register(weight, zero.get::<2>(weight).unwrap().zeros_like());
        zeros.register(bias, zero.get::<1>(bias).unwrap().zeros_like());
        let after = values(&optimizer.step(start, zeros, 0.1));
        let decayed: Vec<f32> = before.0.iter().map(|w| w * (1.0 - 0.1 * 0.5) as f32).collect();
        assert_eq!(after, (decayed, before.1));
    });
}

#[test]
fn parameters_of_one_shape_move_in_their_own_groups_and_keep_their_places() {
    on_each(|device| {
        let device = device.autodiff();
        // Four of one shape between two of another, in groups that cut across both.
        let start: Vec<Linear> = (0..4).map(|_| layer(&device)).collect();
        let grads = |layers: &Vec<Linear>, step: usize| {
            let loss = |(i, layer): (usize, &Linear)| {
                let by = matrix(100 * step + 7 * i, &device);
                let bias = layer.bias.as_ref().unwrap().val().sum().mul_scalar(i as f64 + 1.0);
                (layer.weight.val() * by).sum() + bias
            };
            let sum = Tensor::cat(layers.iter().enumerate().map(loss).collect(), 0).sum();
            GradientsParams::from_grads(sum.backward(), layers)
        };
        let config = AdamWConfig::new().with_beta2(0.99).with_weight_decay(0.5);
        let slow = Settings::from(config.clone()).with_learning_rate_scale(0.25);
        let mut optimizer = config
            .init()
            .with_group(ParamGroup::from_predicate("1."), slow)
            .with_group(ParamGroup::from_path("2.weight"), config.clone().with_weight_decay(0.0));
        let plain = |layer: &Linear| {
            let (weight, bias) = values(layer);
            (Plain::new(&weight), Plain::new(&bias))
        };
        let mut expected: Vec<_> = start.iter().map(plain).collect();
        let ids = |layers: &[Linear]| layers.iter().map(|l| l.weight.id).collect::<Vec<_>>();
        let before = ids(&start);
        let mut layers = start;
        for step in 0..3 {
            let of = grads(&layers, step);
            layers = optimizer.step(layers, of, 0.02);
            for (i, (weight, bias)) in expected.iter_mut().enumerate() {
                let rate = if i == 1 { 0.005 } else { 0.02 };
                let decay = if i == 2 { 0.0 } else { 0.5 };
                weight.step(&numbers(15, 100 * step + 7 * i), step + 1, rate, decay);
                bias.step(&[i as f32 + 1.0; 3], step + 1, rate, 0.5);
            }
        }
        for (layer, (weight, bias)) in layers.iter().zip(&expected) {
            let found = values(layer);
            weight.check(&found.0);
            bias.check(&found.1);
            assert!(layer.weight.is_require_grad());
        }
        assert_eq!(ids(&layers), before);
    });
}

#[test]
fn a_parameter_without_a_gradient_stays_and_has_no_state() {
    on_each(|device| {
        let device = device.autodiff();
        let start = layer(&device);
        let before = values(&start);
        let mut optimizer = optimizer(&start);
        let mut grads = gradients(&start, 0, &device);
        grads.remove::<1>(start.bias.as_ref().unwrap().id);
        let layer = optimizer.step(start, grads, 0.1);
        let after = values(&layer);
        assert!(after.1 == before.1 && after.0 != before.0);
        let names: Vec<String> =
            optimizer.state(&layer).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["weight.first", "weight.second"]);
        let state = optimizer.state(&layer).into_iter().collect();
        optimizer.load_state(&layer, 1, state).unwrap();
    });
}

#[test]
fn names_that_are_given_are_those_of_groups_and_of_the_state() {
    on_each(|device| {
        let device = device.autodiff();
        let start = layer(&device);
        let before = values(&start);
        let still = Settings::from(AdamWConfig::new()).with_learning_rate_scale(0.0);
        let mut optimizer = AdamWConfig::new()
            .init()
            .with_names(|path| path.replace("weight", "matrix"))
            .with_group(ParamGroup::from_path("matrix"), still);
        let grads = gradients(&start, 0, &device);
        let layer = optimizer.step(start, grads, 0.1);
        assert!(values(&layer).0 == before.0 && values(&layer).1 != before.1);
        let state: BTreeMap<_, _> = optimizer.state(&layer).into_iter().collect();
        let names: Vec<&str> = state.keys().map(String::as_str).collect();
        assert_eq!(names, ["bias.first", "bias.second", "matrix.first", "matrix.second"]);
        optimizer.load_state(&layer, 1, state).unwrap();
    });
}
