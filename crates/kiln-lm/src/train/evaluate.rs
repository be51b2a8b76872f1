//! What is done beside the steps: the validation loss, samples, metrics, the loss curve.

use super::steps::read;
use super::{Evaluation, TrainError, Trainer, derived_seed, tensors};
use crate::data::ValidationBatches;
use crate::generate::{Sampling, generate};
use crate::model::Transformer;
use crate::run::{Kind, Record, curve, metrics, seeds};
use burn::module::Module;
use burn::tensor::Tensor;
use std::ops::ControlFlow;

/// Seeds of samples, apart from those of micro-batches.
const SAMPLES: u64 = u64::MAX;

impl Trainer {
    /// Mean loss over the validation batches, without dropout and autodiff.
    pub(super) fn evaluate(&mut self) -> Result<Evaluation, TrainError> {
        let loss = self.loss_over(&self.model().valid(), &self.validation)?;
        let step = self.state.step;
        if !loss.is_finite() {
            return Err(self.diverged(step, "validation loss".into(), loss));
        }
        let best = self.state.best_validation.is_none_or(|(_, lowest)| loss <= lowest);
        if best {
            self.state.best_validation = Some((step, loss));
        }
        Ok(Evaluation { step, loss, best })
    }

    /// Mean loss of a model without autodiff over these batches.
    pub(super) fn loss_over(
        &self,
        model: &Transformer,
        batches: &ValidationBatches,
    ) -> Result<f32, TrainError> {
        let device = self.replica.device().clone().inner();
        let mut windows = Vec::with_capacity(batches.len());
        let mut losses = Vec::with_capacity(batches.len());
        for batch in batches.iter() {
            windows.push(batch.batch as f64);
            let (inputs, targets) = tensors(batch, &device);
            losses.push(model.loss(inputs, targets));
        }
        let losses = read(Tensor::cat(losses, 0))?;
        // Every window counts the same, also those of a last, smaller batch.
        let sum: f64 = losses.iter().zip(&windows).map(|(loss, n)| *loss as f64 * n).sum();
        Ok((sum / windows.iter().sum::<f64>()) as f32)
    }

    /// A continuation of the prompt, which depends on the seed of the run and the step alone.
    pub(super) fn sample(&self) -> Result<String, TrainError> {
        let (sample, tokenizer) = (&self.config.sample, &self.dataset.tokenizer);
        let seed = derived_seed(self.config.train.seed, self.state.step, SAMPLES);
        let mut tokens = Vec::new();
        let mut take = |token| {
            if Some(token) == tokenizer.eos() {
                return ControlFlow::Break(());
            }
            tokens.push(token);
            ControlFlow::Continue(())
        };
        let (model, sampling) = (self.model().valid(), Sampling::from(sample));
        generate(&model, &self.prompt, sample.tokens, &sampling, seed, &mut take)?;
        Ok(tokenizer.decode(&tokens))
    }

    /// Adds a record of this step to the metrics and the event file.
    pub(super) fn log(&mut self, kind: Kind, values: &[(&str, f64)]) -> Result<(), TrainError> {
        let record = Record::new(kind, self.state.step);
        let record = values.iter().fold(record, |record, (name, value)| record.with(name, *value));
        self.metrics.log(&record)?;
        self.events.log(&record)?;
        Ok(())
    }

    /// Draws `loss.svg` anew from the metrics, and `seeds.svg` of a model with seeds.
    pub(super) fn draw_curve(&self) -> Result<(), TrainError> {
        let records = metrics::read(&self.run.metrics())?;
        let name = self.run.root().file_name().unwrap_or_default().to_string_lossy();
        let unigram = ("unigram", self.dataset.unigram_loss());
        curve::draw(&records, &self.run.curve(), &name, Some(unigram))?;
        if self.garden.is_some() {
            seeds::draw(&records, &self.run.seeds(), &name)?;
        }
        Ok(())
    }
}
