//! `kiln train`: trains as a configuration describes it, or goes on with a run.

use crate::progress::{Preparing, Progress, program, quoted};
use crate::stderr::say;
use crate::stdout::print;
use anyhow::Context;
use kiln_lm::config::{self, Config};
use kiln_lm::data;
use kiln_lm::run::RunDir;
use kiln_lm::train::{Outcome, Trainer};
use kiln_ops::device::{self, Opened};
use kiln_ops::policy::{self, Implementation, Policy};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The device where none is given.
const AUTO: &str = "auto";

/// Operators by the names with which they ask a policy: those of products and of turned heads have one for all forms.
const DECIDED: [&str; 21] = [
    "adamw",
    "add_rms_norm",
    "attention",
    "bk",
    "cross_entropy",
    "embedding",
    "kasmina",
    "kasmina_mlp",
    "linear_cross_entropy",
    "matmul",
    "mhc_post",
    "mhc_post_pre",
    "mhc_pre",
    "muon",
    "newton_schulz",
    "rms_norm",
    "rope",
    "sum_squares",
    "swiglu",
    "swiglu_mlp",
    "tril_matmul",
];

/// Arguments of `kiln train`.
#[derive(clap::Args)]
pub struct Args {
    /// Configuration.
    #[arg(default_value = "configs/quickstart.toml")]
    config: PathBuf,
    /// Overrides a value of the configuration: section.key=value.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// auto, cuda, cuda:INDEX, wgpu, vulkan, cpu or ndarray.
    #[arg(long, default_value = AUTO)]
    device: String,
    /// Go on with the run in `train.out`, or in the folder whose `config.toml` is given, from its last checkpoint,
    /// with the configuration it was started with and the overrides given now.
    #[arg(long)]
    resume: bool,
    /// Print the effective configuration and do nothing.
    #[arg(long)]
    print_config: bool,
    /// Which implementation of the operators runs: auto (the one measured faster), fused (the
    /// kernel wherever there is one) or reference (plain Burn operations).
    #[arg(long, default_value_t = Implementation::Auto)]
    kernel: Implementation,
    /// What `kiln bench --policy` measured: `auto` takes the faster implementation.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
}

/// Trains.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let config = config(&args)?;
    if args.print_config {
        print(config::to_toml(&config)?.trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let opened = device::open(&args.device)?;
    if let Some(path) = &args.policy {
        policy::set(read_policy(path, &opened)?);
    }
    policy::set(kernels(args.kernel, &opened)?);
    say(format_args!("device: {}", opened.why));

    let mut preparing = Preparing::new();
    let dataset = data::prepare(&config.data, Path::new(""), &mut |p| preparing.show(p))?;
    preparing.finish();
    let out = config.train.out.clone();
    let mut trainer = if args.resume {
        let trainer = Trainer::resume(config, dataset, &opened.device)?;
        if trainer.step() == 0 {
            say(format_args!("note: {} has no checkpoint, so it begins anew", out.display()));
        }
        trainer
    } else {
        Trainer::new(config, dataset, &opened.device)?
    };

    let stop = Arc::new(AtomicBool::new(false));
    let mut progress = Progress::new(&out);
    stop_on_ctrl_c(&stop, &progress)?;
    let summary = trainer.run(&mut progress, &stop)?;
    progress.finish(&summary);
    if summary.outcome == Outcome::Stopped {
        progress.printer().print(&format!("go on            {}", resume_command(&args)));
    }
    Ok(ExitCode::SUCCESS)
}

/// The configuration in the file, or that of the run to go on with, with the overrides.
fn config(args: &Args) -> anyhow::Result<Config> {
    if !args.resume {
        return Ok(config::load(&args.config, &args.set)?);
    }
    if args.config.with_file_name("state.json").is_file() {
        anyhow::bail!(
            "{} is of a checkpoint, expected the file of its run: --resume goes on from the run's last checkpoint",
            args.config.display()
        );
    }
    // The file only says where the run is: nothing else of it counts, so it may be wrong. That in the folder of a run
    // means the folder that it is in, which may be a copy.
    let given = args.set.iter().any(|set| config::names_folder(set));
    let out = match RunDir::of_config(&args.config).filter(|_| !given) {
        Some(out) => out,
        None => config::run_folder(&args.config, &args.set)?,
    };
    let run = RunDir::open(&out)?;
    let mut saved = run.load_config(&args.set)?;
    saved.train.out = out; // the folder may have moved
    let file = config::load(&args.config, &args.set).map(|mut config| {
        config.train.out.clone_from(&saved.train.out);
        config
    });
    if file.is_ok_and(|config| config != saved) {
        say(format_args!(
            "note: {} differs from {}, which the run goes by",
            args.config.display(),
            run.config().display()
        ));
    }
    Ok(saved)
}

/// The policy in a file, if this device can follow it.
fn read_policy(path: &Path, opened: &Opened) -> anyhow::Result<Policy> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
    let policy: Policy =
        toml::from_str(&text).with_context(|| format!("{shown} is no policy of `kiln bench`"))?;
    let named = policy.ops.keys().map(String::as_str);
    if let Some(other) = named.into_iter().find(|op| !DECIDED.contains(op)) {
        anyhow::bail!("{shown}: no policy decides on `{other}`, expected {}", DECIDED.join(", "));
    }
    let all = ("default", policy.default);
    let ops = policy.ops.iter().map(|(op, wish)| (op.as_str(), *wish));
    let fused = std::iter::once(all).chain(ops).find(|(_, wish)| *wish == Implementation::Fused);
    if let Some((key, _)) = fused.filter(|_| !device::is_cube(&opened.device)) {
        anyhow::bail!(
            "{shown}: {key} = \"fused\": kernels run on cuda, wgpu and vulkan, not on {}",
            opened.name
        )
    }
    Ok(policy)
}

/// The policy for `--kernel`.
fn kernels(wish: Implementation, opened: &Opened) -> anyhow::Result<Policy> {
    Ok(match wish {
        Implementation::Auto => policy::get(),
        Implementation::Reference => Policy { default: wish, ..Policy::default() },
        // Without measurements `auto` takes every kernel there is. `fused` itself would refuse the
        // operators that have none yet.
        Implementation::Fused if device::is_cube(&opened.device) => Policy::default(),
        Implementation::Fused => {
            anyhow::bail!(
                "--kernel fused: kernels run on cuda, wgpu and vulkan, not on {}",
                opened.name
            )
        }
    })
}

/// The first Ctrl-C asks the trainer to stop, the second ends the program.
fn stop_on_ctrl_c(stop: &Arc<AtomicBool>, progress: &Progress) -> anyhow::Result<()> {
    let (stop, printer) = (stop.clone(), progress.printer());
    let handler = move || {
        if stop.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
        printer.print("finishing the step and saving; Ctrl-C again ends at once");
    };
    ctrlc::set_handler(handler).context("cannot listen to Ctrl-C")
}

/// What goes on with this run in the same way, to be copied.
fn resume_command(args: &Args) -> String {
    let mut command = format!("{} train {}", program(), quoted(&args.config.to_string_lossy()));
    for set in &args.set {
        command += &format!(" --set {}", quoted(set));
    }
    if args.device != AUTO {
        command += &format!(" --device {}", args.device);
    }
    if args.kernel != Implementation::Auto {
        command += &format!(" --kernel {}", args.kernel);
    }
    if let Some(policy) = &args.policy {
        command += &format!(" --policy {}", quoted(&policy.to_string_lossy()));
    }
    command + " --resume"
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    /// The other forms of products and of turned heads ask by the name of one.
    #[test]
    fn every_operator_is_one_that_a_policy_decides_on() {
        let forms = |name: &str| {
            let products = name.starts_with("matmul_") || name == "gram";
            products || name.starts_with("rope_") || name == "attention_qkv"
        };
        let names = kiln_bench::registry::all().iter().map(|op| op.spec().name);
        let mut asked: Vec<_> = names.filter(|name| !forms(name)).collect();
        asked.sort_unstable();
        assert_eq!(asked, DECIDED);
    }

    #[test]
    fn the_command_that_goes_on_has_all_that_was_given() {
        let hint = |line: &str| {
            let args = Line::parse_from(line.split(' ')).args;
            resume_command(&args).split_once(" train ").unwrap().1.to_string()
        };
        assert_eq!(hint("train"), "configs/quickstart.toml --resume");
        let line = "train a.toml --set train.steps=9 --device cuda:1 --kernel reference --policy p";
        assert_eq!(
            hint(line),
            "a.toml --set train.steps=9 --device cuda:1 --kernel reference --policy p --resume"
        );
        assert_eq!(hint("train a.toml --device wgpu --resume"), "a.toml --device wgpu --resume");
        let hint = hint("train it's.toml --set data.sources=[\"a\"]");
        assert_eq!(hint, r#"'it'\''s.toml' --set 'data.sources=["a"]' --resume"#);
        assert_eq!(quoted("my runs/a.toml"), "'my runs/a.toml'");
        assert_eq!(quoted(""), "''");
    }
}
