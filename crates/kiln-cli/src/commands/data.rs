//! `kiln data prepare`: text to token shards, ahead of training.

use crate::progress::Preparing;
use crate::stdout::print;
use kiln_lm::config;
use kiln_lm::data::{self, DataId};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What to do with the data.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Tokenize the text of a configuration; `kiln train` does it on first use.
    Prepare(Prepare),
}

/// Arguments of `kiln data prepare`.
#[derive(clap::Args)]
pub struct Prepare {
    /// Configuration whose `[data]` is prepared.
    config: PathBuf,
    /// Overrides a value: section.key=value.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Prepares the data and prints what there is.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    let Command::Prepare(args) = command;
    let config = config::load(&args.config, &args.set)?;
    let mut preparing = Preparing::new();
    let dataset = data::prepare(&config.data, Path::new(""), &mut |p| preparing.show(p))?;
    preparing.finish();
    let meta = &dataset.meta;
    print(format_args!(
        "{} file{}, {} bytes: {} training and {} validation tokens of {} kinds, text {}",
        meta.files,
        if meta.files == 1 { "" } else { "s" },
        meta.bytes,
        meta.train_tokens,
        meta.validation_tokens,
        meta.vocab_size,
        DataId::of(&dataset).short()
    ));
    let unigram = dataset.unigram_loss();
    print(format_args!("a unigram model reaches a validation loss of {unigram:.4}"));
    let how = if dataset.reused { "found ready" } else { "written" };
    print(format_args!("{how} in {}", dataset.dir.display()));
    Ok(ExitCode::SUCCESS)
}
