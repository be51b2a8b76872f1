//! What one replica does: it holds a model on a device, draws its share of the windows, and makes the
//! optimizer's steps. Of files, metrics and evaluations it knows nothing: those are the run's.

use super::optimizer::{optimizer, parameters};
use super::{TrainError, derived_seed, tensors};
use crate::config::Config;
use crate::data::{BatchSampler, SamplerState};
use crate::earlier::renamed;
use crate::model::LanguageModel;
use crate::run::Checkpoint;
use crate::tensors::{from_safetensors, record, to_safetensors, with_record};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_optim::prelude::*;

pub(super) const MODEL: &str = "model.safetensors";
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";

/// Refuses ranks that would have nothing to do.
fn shared(config: &Config, sampler: &BatchSampler) -> Result<(), TrainError> {
    let (accumulation, ranks) = (config.train.accumulation, sampler.rank().ranks());
    if accumulation < ranks {
        return Err(TrainError::TooManyRanks { accumulation, ranks });
    }
    Ok(())
}

/// One replica of a model in training.
pub(super) struct Replica<M> {
    /// Away only while a step changes it.
    model: Option<M>,
    optimizer: Optimizer,
    sampler: BatchSampler,
    device: Device,
    /// Parameters that learn beside the model.
    beside: Vec<ParamId>,
}

impl<M: LanguageModel> Replica<M> {
    /// Before the first step.
    pub(super) fn new(
        config: &Config,
        model: M,
        sampler: BatchSampler,
        device: Device,
    ) -> Result<Self, TrainError> {
        shared(config, &sampler)?;
        let optimizer = optimizer(&config.optimizer, &config.model, &model)?;
        Ok(Self::of(config, model, optimizer, sampler, device))
    }

    /// The model's matrices in the element type of its activations, where the optimizer keeps them in f32.
    fn of(
        config: &Config,
        model: M,
        mut optimizer: Optimizer,
        sampler: BatchSampler,
        device: Device,
    ) -> Self {
        let dtype = config.train.precision.dtype(&device);
        let beside = parameters(&model).into_iter().filter(|of| M::beside(&of.name));
        let beside = beside.map(|of| of.id).collect();
        let model = optimizer.keep_masters(model, dtype, M::in_activations);
        Self { model: Some(model), optimizer, sampler, device, beside }
    }

    /// As in a checkpoint of this step; `skeleton` is a model of any values.
    pub(super) fn restored(
        config: &Config,
        skeleton: M,
        sampler: BatchSampler,
        device: Device,
        checkpoint: &Checkpoint,
    ) -> Result<Self, TrainError> {
        shared(config, &sampler)?;
        let path = checkpoint.path();
        let tensors = |name| -> Result<_, TrainError> {
            let bytes = checkpoint.read(name)?;
            let found = from_safetensors(name, &bytes);
            found.map(renamed).map_err(|error| TrainError::unfit(path, error))
        };
        let model = with_record(MODEL, skeleton, tensors(MODEL)?);
        let model = model.map_err(|error| TrainError::unfit(path, error))?;
        let mut optimizer = optimizer(&config.optimizer, &config.model, &model)?;
        let loaded = optimizer.load_state(&model, checkpoint.step(), tensors(OPTIMIZER)?);
        loaded.map_err(|error| TrainError::unfit(path, error))?;
        Ok(Self::of(config, model, optimizer, sampler, device))
    }

    /// The model as it is now.
    pub(super) fn model(&self) -> &M {
        self.model.as_ref().expect("only away while a step changes it")
    }

    /// The same, to be changed between steps.
    pub(super) fn model_mut(&mut self) -> &mut M {
        self.model.as_mut().expect("only away while a step changes it")
    }

    /// Where it trains.
    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Position in the data.
    pub(super) fn position(&self) -> SamplerState {
        self.sampler.state()
    }

    /// One optimizer step: its loss and gradient norm, `[2]`, which stay on the device.
    pub(super) fn step(
        &mut self,
        config: &Config,
        learning_rate: f64,
    ) -> Result<Tensor<1>, TrainError> {
        let (train, context) = (&config.train, config.model.context);
        let step = self.optimizer.steps();
        let mut gradients = GradientsAccumulator::new();
        let mut losses = Vec::new();
        for micro in 0..train.accumulation {
            let batch = self.sampler.micro_batch(micro, train.batch_size, context)?;
            let Some(batch) = batch else {
                continue;
            };
            let (inputs, targets) = tensors(batch, &self.device);
            if config.model.dropout > 0.0 {
                self.device.seed(derived_seed(train.seed, step, micro as u64));
            }
            let model = self.model();
            let loss = model.loss(inputs, targets).div_scalar(train.accumulation as f64);
            let grads = GradientsParams::from_grads(loss.backward(), model);
            let grads = self.finite_beside(grads);
            // Sums of several are f32.
            let grads = if train.accumulation > 1 { in_f32(model, grads) } else { grads };
            gradients.accumulate(model, grads);
            losses.push(loss.inner());
        }
        let loss = Tensor::cat(losses, 0).sum();

        let grads = gradients.grads();
        let norm = global_norm_without(self.model(), &grads, &self.beside);
        let max = config.optimizer.clip_norm;
        let scale = (max > 0.0).then(|| clip_scale(&norm, max));
        if let Some(model) = self.model.take() {
            let model = self.optimizer.step_scaled(model, grads, learning_rate, scale);
            self.model = Some(model.after_step(self.optimizer.steps()));
        }
        Ok(Tensor::cat(vec![loss, norm], 0))
    }

    /// The gradients, with 0 for what is no number in those of parameters that learn beside the model: the run goes on
    /// without them.
    fn finite_beside(&self, grads: GradientsParams) -> GradientsParams {
        struct Finite<'a>(GradientsParams, &'a [ParamId]);
        impl ModuleVisitor for Finite<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if !self.1.contains(&param.id) {
                    return;
                }
                if let Some(grad) = self.0.remove::<D>(param.id) {
                    let broken = grad.clone().is_finite().bool_not();
                    self.0.register(param.id, grad.mask_fill(broken, 0.0));
                }
            }
        }
        if self.beside.is_empty() {
            return grads;
        }
        let mut finite = Finite(grads, &self.beside);
        self.model().visit(&mut finite);
        finite.0
    }

    /// Everything that the model holds, by name, parameters as the optimizer has them.
    pub(super) fn record(&self) -> Vec<(String, TensorData)> {
        record(&self.optimizer.with_masters(self.model()))
    }

    /// The files of a checkpoint that [`restored`](Self::restored) reads, with what
    /// [`record`](Self::record) returned.
    pub(super) fn files(
        &self,
        record: &[(String, TensorData)],
    ) -> Result<[(&'static str, Vec<u8>); 2], TrainError> {
        let state = self.optimizer.state(self.model());
        Ok([
            (MODEL, to_safetensors(MODEL, record)?),
            (OPTIMIZER, to_safetensors(OPTIMIZER, &state)?),
        ])
    }
}

/// Gradients of other element types cast to f32.
fn in_f32<M: Module>(model: &M, grads: GradientsParams) -> GradientsParams {
    struct Cast(GradientsParams);
    impl ModuleVisitor for Cast {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.0.remove::<D>(param.id) {
                self.0.register(param.id, grad.cast(DType::F32));
            }
        }
    }
    let mut cast = Cast(grads);
    model.visit(&mut cast);
    cast.0
}

#[cfg(all(test, feature = "flex"))]
mod tests;
