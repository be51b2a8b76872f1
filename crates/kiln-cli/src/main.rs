//! `kiln`: train, generate, curves, data, bench, verify, op.
//!
//! Errors are one line on stderr and exit status 2.

// What is printed goes through `stdout::print` and `stderr::say`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod commands;
mod panics;
mod progress;
mod stderr;
mod stdout;

use clap::{Parser, Subcommand};
use std::io::IsTerminal;
use std::process::ExitCode;

/// Train small language models, and measure and verify the operators they are built from.
#[derive(Parser)]
#[command(name = "kiln", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a language model as a configuration describes it.
    Train(commands::train::Args),
    /// Continue a text with a trained model.
    Generate(commands::generate::Args),
    /// Compare the losses of runs.
    Curves(commands::curves::Args),
    /// Prepare text for training.
    #[command(subcommand)]
    Data(commands::data::Command),
    /// Time operators, behind the correctness gate.
    Bench(commands::bench::Args),
    /// Verify operators against float64.
    Verify(commands::verify::Args),
    /// Run one operator on tensors from a file.
    Op(commands::op::Args),
}

const DISPLAY_HELP: clap::error::ErrorKind =
    clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;

fn main() -> ExitCode {
    #[cfg(target_os = "linux")]
    quiet_wayland();
    panics::install();
    let filter = tracing_subscriber::EnvFilter::try_from_env("KILN_LOG").unwrap_or_else(|_| {
        tracing_subscriber::EnvFilter::new("kiln=warn,kiln_lm=warn,kiln_ops=warn,kiln_bench=warn")
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .log_internal_errors(false) // it would panic where stderr is full
        .without_time()
        .init();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && error.kind() != DISPLAY_HELP => {
            // One line, as all errors; the rest of clap's message is the usage that --help prints.
            let text = error.to_string();
            let about = text.lines().take_while(|line| !line.trim().is_empty());
            stderr::say(about.map(str::trim).collect::<Vec<_>>().join(" "));
            return ExitCode::from(2);
        }
        Err(error) => {
            stdout::written(error.print());
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    #[cfg(feature = "compile-cache")]
    if std::env::var_os("KILN_KERNEL_CACHE").is_none_or(|value| value != "off") {
        kiln_ops::kernel_cache::keep();
    }
    let result = match cli.command {
        Command::Train(args) => commands::train::run(args),
        Command::Generate(args) => commands::generate::run(args),
        Command::Curves(args) => commands::curves::run(args),
        Command::Data(command) => commands::data::run(command),
        Command::Bench(args) => commands::bench::run(args),
        Command::Verify(args) => commands::verify::run(args),
        Command::Op(args) => commands::op::run(args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            stderr::say(format_args!("error: {}", one_line(&error)));
            ExitCode::from(2)
        }
    }
}

/// Without `XDG_RUNTIME_DIR` the Wayland library that Mesa asks for a display prints an error each time a
/// graphics adapter is looked for. Nobody needs a display here: it is sent to look for one in a folder
/// that is not there, which it does without a word.
#[cfg(target_os = "linux")]
fn quiet_wayland() {
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        // SAFETY: the first thing that main does: no other thread reads the environment yet.
        unsafe { std::env::set_var("XDG_RUNTIME_DIR", "/nonexistent") };
    }
}

/// The error and its causes on one line.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    let mut last = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        // Transparent errors say the same as their cause.
        if text != last && !last.ends_with(&text) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&text);
            last = text;
        }
    }
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}
