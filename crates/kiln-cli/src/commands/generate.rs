//! `kiln generate`: continues a text with a trained model, streaming.

use super::whole;
use crate::stderr::say;
use anyhow::Context;
use burn::module::Module;
use kiln_lm::generate::{Sampling, generate};
use kiln_lm::train::{Trained, Which};
use kiln_ops::device;
use std::io::{self, ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Arguments of `kiln generate`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the run.
    #[arg(long, value_name = "DIR")]
    run: PathBuf,
    /// Text to continue; the run's own sample prompt if not given.
    #[arg(long)]
    prompt: Option<String>,
    /// Tokens to generate.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<usize>)]
    tokens: Option<usize>,
    /// Divides the logits; 0 takes the most likely token.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Keep only this many of the most likely tokens; 0 keeps all.
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = whole::<usize>)]
    top_k: Option<usize>,
    /// Keep the smallest set of tokens whose probability reaches this share.
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f64>,
    /// Seed of the text; the clock if not given.
    #[arg(long, allow_negative_numbers = true, value_parser = whole::<u64>)]
    seed: Option<u64>,
    /// Take the latest checkpoint, not the one with the lowest validation loss.
    #[arg(long)]
    latest: bool,
    /// auto, cuda, cuda:INDEX, wgpu, vulkan, cpu or ndarray.
    #[arg(long, default_value = "auto")]
    device: String,
}

/// Prints the prompt and its continuation.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let opened = device::open(&args.device)?;
    let which = if args.latest { Which::Latest } else { Which::Best };
    let trained = Trained::load(&args.run, which, &opened.device)?;
    for rejected in &trained.rejected {
        say(format_args!("warning: checkpoint passed over: {rejected}"));
    }
    say(format_args!(
        "{} parameters, step {}{}, on {}",
        trained.model.num_params(),
        trained.step,
        trained
            .validation_loss
            .map_or(String::new(), |loss| format!(", validation loss {loss:.4}")),
        opened.name
    ));
    let sample = &trained.config.sample;
    let sampling = Sampling {
        temperature: args.temperature.unwrap_or(sample.temperature),
        top_k: args.top_k.unwrap_or(sample.top_k),
        top_p: args.top_p.unwrap_or(sample.top_p),
    };
    sampling.check()?; // before anything is printed
    let prompt = args.prompt.as_ref().unwrap_or(&sample.prompt);
    let tokens = trained.tokenizer.encode(prompt).context("--prompt")?;
    let seed = args.seed.unwrap_or_else(clock);

    let mut out = Output { result: out(prompt) };
    let mut decoder = trained.tokenizer.stream_decoder();
    let eos = trained.tokenizer.eos();
    let (begin, mut first, mut made) = (Instant::now(), None, 0);
    let mut take = |token| {
        first.get_or_insert_with(Instant::now);
        made += 1;
        if Some(token) == eos {
            return ControlFlow::Break(());
        }
        match decoder.push(token) {
            Some(text) => out.print(&text),
            None => ControlFlow::Continue(()),
        }
    };
    let count = args.tokens.unwrap_or(sample.tokens);
    generate(&trained.model, &tokens, count, &sampling, seed, &mut take)?;
    if let Some(text) = decoder.finish() {
        let _ = out.print(&text);
    }
    let _ = out.print("\n");
    if let Some(first) = first.filter(|_| made > 1) {
        let (waited, seconds) = ((first - begin).as_secs_f64(), first.elapsed().as_secs_f64());
        let rate = f64::from(made - 1) / seconds;
        say(format_args!("the first token after {waited:.1} s, then {rate:.0} tokens/s"));
    }
    match out.result {
        // The reader has seen enough, as in `kiln generate … | head`.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        result => {
            Ok(result.map(|()| ExitCode::SUCCESS).context("cannot write to standard output")?)
        }
    }
}

/// Standard output, up to its first error.
struct Output {
    result: io::Result<()>,
}

impl Output {
    fn print(&mut self, text: &str) -> ControlFlow<()> {
        if self.result.is_ok() {
            self.result = out(text);
        }
        if self.result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    }
}

fn out(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

fn clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}
