//! What stands between the last gradient and the next forward: the global norm, clipping and a step of the optimizer, over
//! the parameters of a GPT-2 of 124 million, in f32; on CUDA Muon iterates in bf16.
//!
//! ```text
//! cargo run --release --example optimizer_step -- [DEVICE [adamw|muon]…] [--layers N] [--vocabulary N]
//! cargo run --release --example optimizer_step -- cuda adamw muon
//! cargo run --release --example optimizer_step -- cpu --layers 1 --vocabulary 1000
//! ```
//!
//! Milliseconds of a step, the median of 9 bursts of 10 after one that compiles: on its own, and on a GPU behind work that
//! keeps it busy while the host is ahead, as the backward of a training step does. Beside it
//! `benches/peers/optimizer_step.py` in PyTorch.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Distribution, Tensor};
use kiln_ops::OpError;
use kiln_ops::device;
use kiln_ops::prelude::sum_squares;
use kiln_optim::prelude::*;
use std::time::Instant;

const BURSTS: usize = 9;
const STEPS: usize = 10;
const WIDTH: usize = 768;
/// Work before a burst: passes over so many numbers. Some 110 ms on an H200.
const BUSY: usize = 1 << 28;
const PASSES: usize = 400;

/// The parameters of a block.
#[derive(Module, Debug)]
struct Block {
    qkv: Param<Tensor<2>>,
    out: Param<Tensor<2>>,
    gate_up: Param<Tensor<2>>,
    down: Param<Tensor<2>>,
    norms: Vec<Param<Tensor<1>>>,
}

#[derive(Module, Debug)]
struct Model {
    embedding: Param<Tensor<2>>,
    blocks: Vec<Block>,
    norm: Param<Tensor<1>>,
}

fn parameter<const D: usize>(shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
    let value = Tensor::random(shape, Distribution::Normal(0.0, 0.02), device);
    Param::initialized(ParamId::new(), value.autodiff().require_grad())
}

impl Model {
    fn new(layers: usize, vocabulary: usize, device: &Device) -> Self {
        let mlp = (8 * WIDTH).div_ceil(3).next_multiple_of(64);
        let block = || Block {
            qkv: parameter([WIDTH, 3 * WIDTH], device),
            out: parameter([WIDTH, WIDTH], device),
            gate_up: parameter([WIDTH, 2 * mlp], device),
            down: parameter([mlp, WIDTH], device),
            norms: vec![parameter([WIDTH], device), parameter([WIDTH], device)],
        };
        Self {
            embedding: parameter([vocabulary, WIDTH], device),
            blocks: (0..layers).map(|_| block()).collect(),
            norm: parameter([WIDTH], device),
        }
    }
}

/// Puts the gradient of a parameter among those of a step.
type Register = Box<dyn Fn(&mut GradientsParams)>;

/// A gradient for each parameter.
struct Gradients(Vec<Register>);

impl ModuleVisitor for Gradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (id, value) = (param.id, param.val().inner());
        let gradient = value.random_like(Distribution::Normal(0.0, 1e-3));
        self.0.push(Box::new(move |all| all.register(id, gradient.clone())));
    }
}

fn optimizer(kind: &str, model: &Model) -> Result<Optimizer, String> {
    let adamw = AdamWConfig::new().with_beta2(0.99).with_weight_decay(0.1);
    let muon = MuonConfig::new()
        .with_weight_decay(0.1)
        .with_learning_rate_scale(LearningRateScale::MatchRmsAdamW)
        .with_adamw(adamw.clone());
    let plain = adamw.clone().with_weight_decay(0.0);
    match kind {
        "adamw" => Ok(adamw.init().with_group(below_rank_two(model), plain)),
        "muon" => {
            let embedding = ParamGroup::from_ids(vec![model.embedding.id]);
            let of_matrices = Optimizer::new(muon).with_group(below_rank_two(model), plain);
            Ok(of_matrices.with_group(embedding, adamw))
        }
        _ => Err(format!("`{kind}` is no optimizer, expected adamw or muon")),
    }
}

/// Work of a GPU that the host is soon done with.
struct Busy {
    numbers: Tensor<1>,
    sums: Tensor<1>,
}

impl Busy {
    fn new(device: &Device) -> Self {
        let [numbers, sums] = [BUSY, 1024].map(|count| Tensor::zeros([count], device));
        Self { numbers, sums }
    }

    fn work(&mut self) -> Result<(), OpError> {
        for _ in 0..PASSES {
            self.sums = sum_squares(self.numbers.clone(), self.sums.clone())?;
        }
        Ok(())
    }
}

/// Middle, least and most of milliseconds.
fn spread(mut times: Vec<f64>) -> [f64; 3] {
    times.sort_by(f64::total_cmp);
    [times[times.len() / 2], times[0], times[times.len() - 1]]
}

fn time(kind: &str, model: Model, device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let mut gradients = Gradients(vec![]);
    model.visit(&mut gradients);
    let mut optimizer = optimizer(kind, &model)?;
    let count = model.num_params() as f64;
    let mut model = Some(model);
    let mut busy = device::is_cuda(device).then(|| Busy::new(device));
    let mut burst =
        |steps: usize, busy: Option<&mut Busy>| -> Result<f64, Box<dyn std::error::Error>> {
            device.sync()?;
            let start = Instant::now();
            if let Some(busy) = busy {
                busy.work()?;
            }
            for _ in 0..steps {
                let mut grads = GradientsParams::new();
                gradients.0.iter().for_each(|register| register(&mut grads));
                // Nobody else holds it while it moves.
                let before = model.take().expect("it was put back");
                let scale = clip_scale(&global_norm(&before, &grads), 1.0);
                model = Some(optimizer.step_scaled(before, grads, 6e-4, Some(scale)));
            }
            device.sync()?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        };
    // Compiles.
    burst(1, busy.as_mut())?;
    let (mut alone, mut behind) = (vec![], vec![]);
    for _ in 0..BURSTS {
        alone.push(burst(STEPS, None)? / STEPS as f64);
        if busy.is_some() {
            let work = burst(0, busy.as_mut())?;
            behind.push((burst(STEPS, busy.as_mut())? - work) / STEPS as f64);
        }
    }
    // The gradient for the norm; p, g, m and v in and p, m and v out.
    let bytes = 4.0 * 8.0 * count;
    println!("{kind}, {:.1}M parameters, {:.2} GB of AdamW", count / 1e6, bytes / 1e9);
    for (what, times) in [("alone", alone), ("behind other work", behind)] {
        if times.is_empty() {
            continue;
        }
        let [median, least, most] = spread(times);
        print!("  {what}: {median:.2} ms ({least:.2} to {most:.2})");
        match kind {
            "adamw" => println!(", {:.0} GB/s", bytes / median / 1e6),
            _ => println!(),
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut layers, mut vocabulary, mut words) = (12, 50_304, vec![]);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || -> Result<usize, Box<dyn std::error::Error>> {
            let value = arguments.next().ok_or(format!("{argument} lacks its number"))?;
            Ok(value.parse().map_err(|_| format!("{argument} = {value} is no number"))?)
        };
        match argument.as_str() {
            "--layers" => layers = number()?,
            "--vocabulary" => vocabulary = number()?,
            _ => words.push(argument),
        }
    }
    let name = if words.is_empty() { "auto".into() } else { words.remove(0) };
    let opened = device::open(&name)?;
    println!("device: {}", opened.why);
    for kind in if words.is_empty() { vec!["adamw".into(), "muon".into()] } else { words } {
        time(&kind, Model::new(layers, vocabulary, &opened.device), &opened.device)?;
    }
    Ok(())
}
