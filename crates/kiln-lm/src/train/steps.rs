//! The loop, and one optimizer step.

use super::seeds::Garden;
use super::{Observer, Outcome, StepMetrics, Summary, TrainError, Trainer};
use crate::run::Kind;
use burn::tensor::Tensor;
use kiln_ops::device;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Steps between looks at the numbers on a device that works on its own. A look waits for it, which
/// costs the time to prepare a step; on the CPU a step is done when it returns, and a look is free.
const LOOK_EVERY: usize = 10;

impl Trainer {
    /// Trains until all steps are done or `stop` is set; both leave a checkpoint of the last step.
    ///
    /// # Errors
    ///
    /// [`TrainError::Diverged`] if the loss or the gradient norm is no finite number, in which
    /// case the last checkpoint stays as it is; and what can go wrong with files and devices.
    pub fn run(
        &mut self,
        observer: &mut dyn Observer,
        stop: &AtomicBool,
    ) -> Result<Summary, TrainError> {
        let (begin, tokens_before) = (Instant::now(), self.state.tokens);
        observer.started(&self.start());
        let steps = self.config.train.steps as u64;
        let mut saved = self.state.step;
        let mut since = Instant::now();
        while self.state.step < steps && !stop.load(Ordering::SeqCst) {
            self.optimizer_step()?;
            let step = self.state.step;
            observer.stepped(step);
            if self.garden.as_ref().is_some_and(|garden| garden.due(step)) {
                self.look()?;
                let begin = Instant::now();
                self.tend(observer)?;
                // As evaluations are, apart from training.
                since += begin.elapsed();
            }

            let train = &self.config.train;
            let last = step == steps;
            let due = |every: usize| last || every > 0 && step.is_multiple_of(every as u64);
            let log = due(train.log_every) || step == 1;
            let (evaluate, sample) = (due(train.eval_every), due(train.sample_every));
            let checkpoint = due(train.checkpoint_every);
            let look = !device::is_cube(self.replica.device()) || self.pending.len() >= LOOK_EVERY;
            if !(log || evaluate || sample || checkpoint) {
                if look {
                    self.look()?;
                }
                continue;
            }
            // Before anything else happens with the model: nothing is saved after a NaN.
            let metrics = self.read_back(since)?;
            if log {
                self.log(
                    Kind::Train,
                    &[
                        ("loss", metrics.loss.into()),
                        ("learning_rate", metrics.learning_rate),
                        ("gradient_norm", metrics.gradient_norm.into()),
                        ("tokens_per_second", metrics.tokens_per_second),
                    ],
                )?;
                observer.logged(&metrics);
            }
            let evaluation = if evaluate { Some(self.evaluate()?) } else { None };
            if let Some(evaluation) = &evaluation {
                self.log(Kind::Validation, &[("loss", evaluation.loss.into())])?;
                observer.evaluated(evaluation);
            }
            if sample {
                observer.sampled(step, &self.config.sample.prompt, &self.sample()?);
            }
            if checkpoint || evaluation.is_some_and(|evaluation| evaluation.best) {
                let path = self.save(evaluation.map(|evaluation| evaluation.loss))?;
                self.draw_curve()?;
                observer.saved(step, &path);
                saved = step;
            }
            since = Instant::now();
        }
        if saved != self.state.step {
            self.read_back(since)?;
            let path = self.save(None)?;
            self.draw_curve()?;
            observer.saved(self.state.step, &path);
        }
        let tokens = self.state.tokens - tokens_before;
        Ok(Summary {
            outcome: if self.state.step < steps { Outcome::Stopped } else { Outcome::Finished },
            step: self.state.step,
            first_loss: self.state.first_loss,
            last_loss: self.state.last_loss,
            best_validation: self.state.best_validation,
            unigram_loss: self.dataset.unigram_loss(),
            tokens: self.state.tokens,
            tokens_per_second: per_second(tokens as f64, self.training_time),
            elapsed: begin.elapsed(),
            seeds: self.garden.as_ref().map(Garden::counts).unwrap_or_default(),
            run: self.run.root().to_path_buf(),
        })
    }

    /// One optimizer step. Its loss and gradient norm stay on the device until
    /// [`look`](Self::look): a read waits for the device, which is then idle while the
    /// next step is prepared.
    fn optimizer_step(&mut self) -> Result<(), TrainError> {
        let rate = self.learning_rate(self.state.step);
        self.pending.push(self.replica.step(&self.config, rate)?);
        self.state.step += 1;
        self.state.tokens += self.config.tokens_per_step() as u64;
        Ok(())
    }

    /// Learning rate of a step, counted from 0.
    fn learning_rate(&self, step: u64) -> f64 {
        let highest = self.config.optimizer.learning_rate;
        self.config.schedule.rate(step as usize, self.config.train.steps, highest)
    }

    /// Reads loss and gradient norm of every step that was not looked at yet, in their order: the
    /// first that is no finite number ends the run.
    fn look(&mut self) -> Result<(), TrainError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let first = self.state.step - self.pending.len() as u64 + 1;
        let numbers = read(Tensor::cat(std::mem::take(&mut self.pending), 0))?;
        for (step, numbers) in (first..).zip(numbers.chunks(2)) {
            for (what, value) in ["loss", "gradient norm"].into_iter().zip(numbers) {
                if !value.is_finite() {
                    return Err(self.diverged(step, what.into(), *value));
                }
            }
            self.state.first_loss.get_or_insert(numbers[0]);
            self.state.last_loss = Some(numbers[0]);
            self.gradient_norm = numbers[1];
            self.unlogged += 1;
        }
        Ok(())
    }

    /// Looks at what there is; the metrics of the last step, with the speed since the last time.
    fn read_back(&mut self, since: Instant) -> Result<StepMetrics, TrainError> {
        self.look()?;
        let steps = std::mem::take(&mut self.unlogged);
        let elapsed = since.elapsed();
        self.training_time += elapsed;
        Ok(StepMetrics {
            step: self.state.step,
            loss: self.state.last_loss.unwrap_or(f32::NAN),
            learning_rate: self.learning_rate(self.state.step.saturating_sub(1)),
            gradient_norm: self.gradient_norm,
            tokens_per_second: per_second(
                steps as f64 * self.config.tokens_per_step() as f64,
                elapsed,
            ),
        })
    }

    /// The error for a number that is none, with what stays on disk.
    pub(super) fn diverged(&self, step: u64, what: String, value: f32) -> TrainError {
        let kept = match self.store.latest() {
            Ok(latest) => match latest.checkpoint {
                Some(checkpoint) => format!("the checkpoint of step {} is kept", checkpoint.step()),
                None => "no checkpoint was saved yet".into(),
            },
            Err(error) => error.to_string(),
        };
        TrainError::Diverged { step, what, value, kept }
    }
}

/// The numbers of a tensor.
pub(super) fn read(tensor: Tensor<1>) -> Result<Vec<f32>, TrainError> {
    let data = tensor.try_into_data().map_err(|error| TrainError::Device(error.to_string()))?;
    Ok(data.iter::<f32>().collect())
}

fn per_second(tokens: f64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens / time.as_secs_f64() }
}
