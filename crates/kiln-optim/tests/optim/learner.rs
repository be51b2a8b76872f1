//! Rules in the `Learner` of burn-train.

use crate::common::on_each;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor, TensorData};
use burn::train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use kiln_optim::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const EPOCHS: usize = 3;
const BATCHES: usize = 4;
const ITEMS: usize = 5;
const RATE: f64 = 0.02;

#[derive(Module, Debug)]
struct Model {
    hidden: Linear,
    out: Linear,
}

/// Numbers and what is to be made of them.
type Pair = [Tensor<2>; 2];

impl Model {
    fn new(device: &Device) -> Self {
        let hidden = LinearConfig::new(4, 8).init(device);
        Self { hidden, out: LinearConfig::new(8, 2).init(device) }
    }

    fn output(&self, [x, targets]: Pair) -> RegressionOutput {
        let output = self.out.forward(self.hidden.forward(x).tanh());
        let loss = (output.clone() - targets.clone()).square().mean();
        RegressionOutput::new(loss, output, targets)
    }

    fn numbers(&self) -> Vec<f32> {
        let of = |layer: &Linear| {
            let bias = layer.bias.as_ref().unwrap().val().into_data().try_to_vec::<f32>().unwrap();
            [layer.weight.val().into_data().try_to_vec::<f32>().unwrap(), bias].concat()
        };
        [of(&self.hidden), of(&self.out)].concat()
    }
}

impl TrainStep for Model {
    type Input = Pair;
    type Output = RegressionOutput;

    fn step(&self, pair: Pair) -> TrainOutput<RegressionOutput> {
        let output = self.output(pair);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Model {
    type Input = Pair;
    type Output = RegressionOutput;

    fn step(&self, pair: Pair) -> RegressionOutput {
        self.output(pair)
    }
}

/// Makes batches of numbers from numbers of items.
#[derive(Clone)]
struct Numbers;

impl Batcher<usize, Pair> for Numbers {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Pair {
        let made = |width: usize, from: usize| {
            let number = |i: usize, j: usize| ((i * 7 + j * 5 + from) % 11) as f32 / 5.0 - 1.0;
            let rows = items.iter().flat_map(|i| (0..width).map(move |j| number(*i, j)));
            let data = TensorData::new(rows.collect::<Vec<f32>>(), [items.len(), width]);
            Tensor::from_data(data, device)
        };
        [made(4, 0), made(2, 3)]
    }
}

fn loader(device: &Device) -> Arc<dyn DataLoader<Pair>> {
    DataLoaderBuilder::new(Numbers)
        .batch_size(ITEMS)
        .set_device(device.clone())
        .build(InMemDataset::new((0..BATCHES * ITEMS).collect()))
}

/// Matrices by the rule, biases by an AdamW of their own: a group by path, since a checkpoint brings the ids of the run
/// that wrote it.
fn optimizer(rule: &Rule) -> ModuleOptimizer {
    let biases = Rule::from(AdamWConfig::new().with_beta2(0.95));
    ModuleOptimizer::from(rule.clone()).with_group(ParamGroup::from_predicate("bias"), biases, None)
}

/// Trains up to an epoch, from the checkpoint of one if there is any.
fn learn(
    rule: &Rule,
    model: &Model,
    folder: &Path,
    [from, to]: [usize; 2],
    device: &Device,
) -> Vec<f32> {
    let autodiff = device.clone().autodiff();
    let mut training = SupervisedTraining::new(folder, loader(&autodiff), loader(device))
        .with_application_logger(None)
        .with_default_checkpointers()
        .num_epochs(to);
    if from > 0 {
        training = training.checkpoint(from);
    }
    let learner = Learner::new(model.clone(), optimizer(rule), RATE);
    training.launch(learner).model.numbers()
}

/// A folder that is gone in the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("kiln-learner-{}-{name}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_learner_steps_by_rules_and_goes_on_from_its_checkpoint() {
    on_each(|device| {
        let rules = [
            Rule::from(AdamWConfig::new().with_weight_decay(0.1)),
            Rule::from(MuonConfig::new().with_weight_decay(0.1)),
        ];
        for (name, rule) in ["adamw", "muon"].iter().zip(&rules) {
            let model = Model::new(&device.clone().autodiff());
            let begun = model.numbers();
            let whole = Folder::new(&format!("{name}-whole"));
            let learned = learn(rule, &model, &whole.0, [0, EPOCHS], &device);
            assert_ne!(learned, begun, "{name}");

            // The same steps without a learner.
            let (mut stepped, mut by_hand) = (model.clone(), optimizer(rule));
            for _ in 0..EPOCHS {
                for batch in loader(&device.clone().autodiff()).iter() {
                    let output = TrainStep::step(&stepped, batch.unwrap());
                    stepped = by_hand.step(RATE, stepped, output.grads);
                }
            }
            assert_eq!(learned, stepped.numbers(), "{name}");

            let parts = Folder::new(&format!("{name}-parts"));
            let first = learn(rule, &model, &parts.0, [0, 1], &device);
            assert_ne!(first, learned, "{name}");
            // As another process would: with a model of other ids and numbers.
            let other = Model::new(&device.clone().autodiff());
            assert_eq!(learn(rule, &other, &parts.0, [1, EPOCHS], &device), learned, "{name}");
        }
    });
}
