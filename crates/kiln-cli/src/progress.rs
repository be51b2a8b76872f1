//! What `kiln train` shows: a bar where stderr is a terminal, plain lines elsewhere. And the bar of others.

use crate::stderr::say;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use kiln_lm::data;
use kiln_lm::train::{
    Evaluation, Observer, Outcome, SeedStep, Start, StepMetrics, Summary, TransitionError,
};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Shows how far the preparation of the data is, if it takes long enough to be seen.
pub struct Preparing {
    bar: ProgressBar,
    stage: Option<data::Stage>,
}

impl Preparing {
    /// Shows nothing yet.
    pub fn new() -> Self {
        Self { bar: ProgressBar::hidden(), stage: None }
    }

    /// Shows a part of the work.
    pub fn show(&mut self, progress: data::Progress) {
        if self.stage != Some(progress.stage) {
            self.bar.finish_and_clear();
            self.stage = Some(progress.stage);
            // Hidden by itself where stderr is no terminal.
            let style = ProgressStyle::with_template("{msg} {wide_bar} {percent}%");
            self.bar = ProgressBar::new(progress.total as u64)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_message(progress.stage.to_string());
        }
        self.bar.set_position(progress.done as u64);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// A bar of rows, with those that are being worked on as its message. Hidden by itself where stderr is no
/// terminal.
pub fn rows(count: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:24} {pos}/{len} in {elapsed}: {wide_msg}");
    let bar = ProgressBar::new(count as u64)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    // The clock goes on where a row takes long.
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

/// Prints lines above the bar, from any thread.
#[derive(Clone)]
pub struct Printer(Option<MultiProgress>);

impl Printer {
    /// Prints a line or several to stderr.
    pub fn print(&self, text: &str) {
        match &self.0 {
            Some(bars) if bars.println(text).is_ok() => {}
            // Training goes on if nobody listens any more, as in `kiln train 2>&1 | head`.
            _ => say(text),
        }
    }
}

/// Shows a run.
pub struct Progress {
    run: PathBuf,
    printer: Printer,
    bar: ProgressBar,
    steps: u64,
    first_step: u64,
    begin: Instant,
}

impl Progress {
    /// Of the run in this folder.
    pub fn new(run: &Path) -> Self {
        let bars = std::io::stderr().is_terminal().then(MultiProgress::new);
        Self {
            run: run.to_path_buf(),
            printer: Printer(bars),
            bar: ProgressBar::hidden(),
            steps: 0,
            first_step: 0,
            begin: Instant::now(),
        }
    }

    /// What prints above the bar.
    pub fn printer(&self) -> Printer {
        self.printer.clone()
    }

    /// Removes the bar and prints how the run ended.
    pub fn finish(&self, summary: &Summary) {
        self.bar.finish_and_clear();
        let loss = |loss: Option<f32>| loss.map_or("none".into(), |loss| format!("{loss:.4}"));
        let mut lines = vec![String::new()];
        let what = match summary.outcome {
            Outcome::Finished => "finished",
            Outcome::Stopped => "stopped",
        };
        lines.push(format!(
            "{what} at step {} in {}: {} tokens, {} tokens/s",
            summary.step,
            time(summary.elapsed),
            count(summary.tokens as f64),
            count(summary.tokens_per_second)
        ));
        lines.push(format!(
            "training loss    {} at the first step, {} at the last",
            loss(summary.first_loss),
            loss(summary.last_loss)
        ));
        if let Some((step, best)) = summary.best_validation {
            let below = summary.unigram_loss - f64::from(best);
            let relation = if below >= 0.0 { "below" } else { "above" };
            lines.push(format!(
                "validation loss  {best:.4} at step {step}, {:.4} {relation} the unigram baseline \
                 of {:.4}",
                below.abs(),
                summary.unigram_loss
            ));
        }
        if !summary.seeds.is_empty() {
            let counts = summary.seeds.iter().map(|(state, count)| format!("{count} {state:?}"));
            let all: usize = summary.seeds.values().sum();
            let counts = counts.collect::<Vec<_>>().join(", ");
            lines.push(format!(
                "seeds            {counts}, of {all}: seeds.svg in the run's folder"
            ));
        }
        lines.push(format!("run              {}", summary.run.display()));
        lines.push(format!(
            "generate         {} generate --run {}",
            program(),
            quoted(&summary.run.to_string_lossy())
        ));
        self.printer.print(&lines.join("\n"));
    }

    fn time_left(&self, step: u64) -> Option<Duration> {
        let done = step.checked_sub(self.first_step).filter(|done| *done > 0)?;
        let left = self.steps.saturating_sub(step) as f64 / done as f64;
        // None where it is more than a duration holds.
        Duration::try_from_secs_f64(self.begin.elapsed().as_secs_f64() * left).ok()
    }
}

impl Observer for Progress {
    fn started(&mut self, start: &Start) {
        for rejected in &start.rejected {
            self.printer.print(&format!("warning: checkpoint passed over: {rejected}"));
        }
        self.printer.print(&format!(
            "model: {} parameters, activations in {}; data: {} training and {} validation tokens of \
             {} kinds, text {}",
            count(start.parameters as f64),
            start.precision,
            count(start.train_tokens as f64),
            count(start.validation_tokens as f64),
            start.vocab_size,
            start.text
        ));
        self.printer.print(&format!(
            "steps {} to {} of {} tokens each; a unigram model reaches a validation loss of {:.4}",
            start.step, start.steps, start.tokens_per_step, start.unigram_loss
        ));
        if let Some(first) = start.first_seed.filter(|first| *first > start.steps) {
            self.printer.print(&format!(
                "warning: no seed germinates in {} steps: the first would after step {first}, where epoch \
                 seeds.first of seeds.epoch_steps steps ends",
                start.steps
            ));
        }
        for unused in &start.unused {
            self.printer.print(&format!("warning: {unused}"));
        }
        (self.steps, self.first_step, self.begin) = (start.steps, start.step, Instant::now());
        if let Some(bars) = &self.printer.0 {
            let style = "{bar:24} {pos}/{len} {msg}, {eta} left";
            let style = ProgressStyle::with_template(style);
            let bar = ProgressBar::new(start.steps)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_position(start.step);
            bar.reset_eta();
            self.bar = bars.add(bar);
        }
    }

    fn stepped(&mut self, step: u64) {
        self.bar.set_position(step);
    }

    fn logged(&mut self, metrics: &StepMetrics) {
        let StepMetrics { step, loss, learning_rate, gradient_norm, tokens_per_second } = *metrics;
        let numbers = format!(
            "loss {loss:.4}, lr {learning_rate:.2e}, norm {gradient_norm:.3}, {} tokens/s",
            count(tokens_per_second)
        );
        if self.printer.0.is_some() {
            self.bar.set_message(numbers);
        } else {
            let left =
                self.time_left(step).map_or(String::new(), |left| format!(", {} left", time(left)));
            self.printer.print(&format!("step {step}/{}: {numbers}{left}", self.steps));
        }
    }

    fn evaluated(&mut self, evaluation: &Evaluation) {
        let Evaluation { step, loss, best } = *evaluation;
        let best = if best { ", the lowest so far" } else { "" };
        self.printer.print(&format!("step {step}: validation loss {loss:.4}{best}"));
    }

    fn seed_stepped(&mut self, seed: &SeedStep) {
        let SeedStep { step, block, seed, from, to, gain, reconstruction, shut, .. } = seed;
        let mut line = format!("step {step}: seed {block}.{seed} {from:?} -> {to:?}");
        if let Some(gain) = gain {
            line += &format!(", a gain of {}", small(*gain));
        }
        if let Some(TransitionError::Gate { metric, found, expected, .. }) = shut {
            line += &format!(", {metric} was {found}, expected {expected}");
        } else if let Some(loss) = reconstruction {
            line += &format!(", reconstruction loss {}", small(*loss));
        }
        self.printer.print(&line);
    }

    fn sampled(&mut self, step: u64, prompt: &str, text: &str) {
        let text = format!("{prompt}{text}");
        let text: Vec<String> = text.trim().lines().map(|line| format!("  | {line}")).collect();
        self.printer.print(&format!("step {step}: a sample\n{}", text.join("\n")));
    }

    fn saved(&mut self, step: u64, path: &Path) {
        let path = path.strip_prefix(&self.run).unwrap_or(path);
        self.printer.print(&format!("step {step}: saved {}", path.display()));
    }
}

/// The program as it was called, for commands that can be copied.
pub fn program() -> String {
    quoted(&std::env::args().next().unwrap_or_else(|| "kiln".into()))
}

/// As a shell takes it for one word: in quotes if it would not by itself.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_./:=,@%+-".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// `0.0123`, `1.23e-5`.
fn small(number: f32) -> String {
    if number == 0.0 || number.abs() >= 0.01 {
        format!("{number:.4}")
    } else {
        format!("{number:.2e}")
    }
}

/// `950`, `12.3k`, `124.0M`, `2.0G`.
fn count(number: f64) -> String {
    for (unit, size) in [("G", 1e9), ("M", 1e6), ("k", 1e3)] {
        if number >= size {
            return format!("{:.1}{unit}", number / size);
        }
    }
    format!("{number:.0}")
}

/// `42s`, `3m05s`, `2h07m`.
fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}
