//! Rules in Burn's own `ModuleOptimizer`.
#![cfg(feature = "flex")]

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor};
use kiln_optim::prelude::*;

#[derive(Module, Debug)]
struct Model {
    wide: Linear,
    tall: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            wide: LinearConfig::new(4, 6).init(device),
            tall: LinearConfig::new(6, 3).init(device),
        }
    }

    /// The gradients of a step, another loss in each.
    fn gradients(&self, step: usize, device: &Device) -> GradientsParams {
        let x = Tensor::<2>::ones([5, 4], device).mul_scalar(0.3 + 0.1 * step as f64);
        let y = self.tall.forward(self.wide.forward(x).tanh());
        GradientsParams::from_grads(y.sub_scalar(0.5).square().mean().backward(), self)
    }

    fn numbers(&self) -> Vec<f32> {
        let of = |layer: &Linear| {
            let bias = layer.bias.as_ref().unwrap().val().into_data().try_to_vec::<f32>().unwrap();
            [layer.weight.val().into_data().try_to_vec::<f32>().unwrap(), bias].concat()
        };
        [of(&self.wide), of(&self.tall)].concat()
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
    let device = Device::flex().autodiff();
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
}

#[test]
fn a_saved_state_goes_on_bit_for_bit() {
    let device = Device::flex().autodiff();
    for rule in rules() {
        let mut model = Model::new(&device);
        let mut optimizer = burns(&rule, &model);
        for step in 0..3 {
            let gradients = model.gradients(step, &device);
            model = optimizer.step(1e-2, model, gradients);
        }
        let mut resumed = model.clone();
        let bytes = optimizer.into_bytes().unwrap();
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
}
