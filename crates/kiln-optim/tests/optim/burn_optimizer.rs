//! Rules in Burn's own `ModuleOptimizer`.

use crate::common::on_each;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{self, ModuleOptimizer, RecordState, StateSink};
use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_optim::prelude::*;

#[derive(Module, Debug)]
struct Model {
    wide: Linear,
    /// Of the same shape: Kiln's optimizer moves both together.
    gate: Linear,
    tall: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            wide: LinearConfig::new(4, 6).init(device),
            gate: LinearConfig::new(4, 6).init(device),
            tall: LinearConfig::new(6, 3).init(device),
        }
    }

    /// The gradients of a step, of other numbers in each.
    fn gradients(&self, step: usize, device: &Device) -> GradientsParams {
        let numbers: Vec<f32> =
            (0..20).map(|i| ((i * 7 + step * 5) % 11) as f32 / 5.0 - 1.0).collect();
        let x = Tensor::<2>::from_data(TensorData::new(numbers, [5, 4]), device);
        let y = self.wide.forward(x.clone()).tanh() * self.gate.forward(x);
        let y = self.tall.forward(y);
        GradientsParams::from_grads(y.sub_scalar(0.5).square().mean().backward(), self)
    }

    fn numbers(&self) -> Vec<f32> {
        let of = |layer: &Linear| {
            let bias = layer.bias.as_ref().unwrap().val().into_data().try_to_vec::<f32>().unwrap();
            [layer.weight.val().into_data().try_to_vec::<f32>().unwrap(), bias].concat()
        };
        [of(&self.wide), of(&self.gate), of(&self.tall)].concat()
    }
}

fn rules() -> [Rule; 2] {
    let adamw = AdamWConfig::new().with_weight_decay(0.1);
    let muon = MuonConfig::new()
        .with_weight_decay(0.1)
        .with_learning_rate_scale(LearningRateScale::MatchRmsAdamW)
        .with_adamw(adamw.clone());
    [adamw.into(), muon.into()]
}

/// Parameters below two dimensions move by an AdamW of their own.
fn burns(rule: &Rule, model: &Model) -> ModuleOptimizer {
    let others = Rule::from(AdamWConfig::new().with_beta2(0.95));
    ModuleOptimizer::from(rule.clone()).with_group(below_rank_two(model), others, None)
}

#[test]
fn steps_are_those_of_kilns_optimizer() {
    on_each(|device| {
        let device = device.autodiff();
        for rule in rules() {
            let mut model = Model::new(&device);
            let mut other = model.clone();
            let mut burns = burns(&rule, &model);
            let others = Settings::from(AdamWConfig::new().with_beta2(0.95));
            let mut kilns =
                Optimizer::new(Settings::from(rule)).with_group(below_rank_two(&model), others);
            let before = model.numbers();
            for step in 0..10 {
                let gradients = model.gradients(step, &device);
                model = burns.step(1e-2, model, gradients);
                let gradients = other.gradients(step, &device);
                other = kilns.step(other, gradients, 1e-2);
                assert!(model.numbers() == other.numbers(), "step {step}");
            }
            assert!(model.numbers().iter().zip(before).all(|(after, before)| *after != before));
        }
    });
}

#[test]
fn a_saved_state_goes_on_bit_for_bit() {
    on_each(|device| {
        let device = device.autodiff();
        for rule in rules() {
            let mut model = Model::new(&device);
            let mut optimizer = burns(&rule, &model);
            for step in 0..3 {
                let gradients = model.gradients(step, &device);
                model = optimizer.step(1e-2, model, gradients);
            }
            let mut resumed = model.clone();
            let bytes = optimizer.into_bytes().unwrap();
            let loaded = burns(&rule, &resumed).from_bytes(bytes).unwrap();
            // What is saved once more before it moves is the same.
            let bytes = loaded.into_bytes().unwrap();
            let mut loaded = burns(&rule, &resumed).from_bytes(bytes).unwrap();
            let mut fresh = (burns(&rule, &resumed), resumed.clone());
            for step in 3..6 {
                let gradients = model.gradients(step, &device);
                model = optimizer.step(1e-2, model, gradients);
                let gradients = resumed.gradients(step, &device);
                resumed = loaded.step(1e-2, resumed, gradients);
                let gradients = fresh.1.gradients(step, &device);
                fresh.1 = fresh.0.step(1e-2, fresh.1, gradients);
            }
            assert!(model.numbers() == resumed.numbers());
            // One that has forgotten goes elsewhere.
            assert!(model.numbers() != fresh.1.numbers());
        }
    });
}

#[test]
fn a_state_of_another_rule_counts_for_nothing() {
    on_each(|device| {
        let device = device.autodiff();
        let model = Model::new(&device);
        let [adamw, muon] = rules();
        for (from, to) in [(&adamw, &muon), (&muon, &adamw)] {
            let mut optimizer = ModuleOptimizer::from(from.clone());
            optimizer.step(1e-2, model.clone(), model.gradients(0, &device));
            let bytes = optimizer.into_bytes().unwrap();
            let step = |mut optimizer: ModuleOptimizer| {
                optimizer.step(1e-2, model.clone(), model.gradients(1, &device)).wide.weight.val()
            };
            let loaded = step(ModuleOptimizer::from(to.clone()).from_bytes(bytes).unwrap());
            let fresh = step(ModuleOptimizer::from(to.clone()));
            assert_eq!(loaded.into_data(), fresh.into_data());
        }
    });
}

#[test]
fn the_state_of_16_bits_is_f32() {
    on_each(|device| {
        for rule in rules() {
            // wgpu has no bf16.
            let bf16 = device.supports_dtype(DType::BF16);
            let dtype = if bf16 { DType::BF16 } else { DType::F16 };
            let ones = Tensor::<2>::ones([4, 6], (&device, dtype));
            let zeros = ones.zeros_like();
            let step = optim::Optimizer::step(&rule, 1e-2, ones, zeros, None);
            let (value, state) = (step.0, step.1.unwrap());
            assert_eq!(value.dtype(), dtype);
            let numbers = value.cast(DType::F32).into_data().try_to_vec::<f32>().unwrap();
            assert!(numbers.iter().all(|x| x.is_finite()), "{numbers:?}");
            let mut sink = StateSink::default();
            state.state_flatten("p", &mut sink);
            assert!(!sink.tensors.is_empty());
            assert!(sink.tensors.iter().all(|(_, data)| data.dtype() == DType::F32));
        }
    });
}
