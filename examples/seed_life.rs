//! The whole life of seeds while a small model trains: they germinate, learn by themselves, are grafted in, frozen, measured,
//! learn once more, and become part of the model. Run it from the top of the repository, on whatever device there is; the
//! picture of states, alphas and losses is in `runs/seed_life/seeds.svg`, in the place of that of the run before:
//!
//! ```text
//! cargo run --release --example seed_life
//! ```

use kiln_lm::config;
use kiln_lm::data::prepare;
use kiln_lm::train::{Evaluation, Observer, SeedStep, Trainer};
use kiln_ops::device;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Four seeds, of which the first of each block lives.
const CONFIG: &str = r#"
[data]
sources = ["README.md", "docs"]
tokenizer = "char"

[model]
layers = 2
width = 64
heads = 2
context = 64
mlp = "kasmina"
seeds = 2

[optimizer]
learning_rate = 3e-3

[seeds]
epoch_steps = 5
first = 4
every = 6
most = 2
minimum_epochs = [8, 8, 2, 4, 8]
ramp = 8
eval_batches = 4

[train]
steps = 300
batch_size = 8
eval_every = 25
out = "runs/seed_life"
"#;

/// Says what happens.
struct Says;

impl Observer for Says {
    fn seed_stepped(&mut self, of: &SeedStep) {
        let gain = of.gain.map_or(String::new(), |gain| format!(", a gain of {gain:.4}"));
        let shut = of.shut.as_ref().map_or(String::new(), |shut| format!("; {shut}"));
        let SeedStep { step, block, seed, from, to, .. } = of;
        println!(
            "step {step}: seed {seed} of block {block} goes from {from:?} to {to:?}{gain}{shut}"
        );
    }

    fn evaluated(&mut self, of: &Evaluation) {
        println!("step {}: validation loss {:.4}", of.step, of.loss);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let opened = device::open("auto")?;
    println!("device: {}", opened.why);
    let config = config::parse(CONFIG, "the example's configuration", &[])?;
    let run = config.train.out.clone();
    if run.exists() {
        std::fs::remove_dir_all(&run)?;
    }
    let dataset = prepare(&config.data, Path::new(""), &mut |_| {})?;
    let mut trainer = Trainer::new(config, dataset, &opened.device)?;
    trainer.run(&mut Says, &AtomicBool::new(false))?;
    println!("the picture: {}", run.join("seeds.svg").display());
    Ok(())
}
