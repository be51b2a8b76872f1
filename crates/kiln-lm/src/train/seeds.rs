//! The lives of the seeds of a model, by what the run measures.
//!
//! An epoch is some optimizer steps. At its end every seed is measured: how well its blueprint reconstructs the chunk while
//! it is in training, and, once it is to be judged, the validation loss with it and without it. Then it goes on as far as
//! its [`Lifecycle`] allows, and the next dormant seed may germinate. What is decided is part of the model's record; what
//! else it depends on, the losses of the last epochs, is part of the run's state: a resumed run decides alike.

use super::steps::read;
use super::{Observer, TrainError, Trainer};
use crate::config::{Config, SeedsConfig};
use crate::data::ValidationBatches;
use crate::model::Transformer;
use crate::run::{Kind, Record};
use burn::module::Module;
use burn::tensor::DType;
use kiln_nn::kasmina::{Blend, Life, Lifecycle, Schedule, SeedMetrics, SeedState, following};
use std::collections::BTreeMap;

/// Epochs over whose losses stability is taken.
const WINDOW: usize = 5;

/// A seed has gone from one state to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SeedStep {
    /// Optimizer steps done.
    pub step: u64,
    /// Number of the block.
    pub block: usize,
    /// Number of the seed in it.
    pub seed: usize,
    /// The state that it has left.
    pub from: SeedState,
    /// The one that it is in.
    pub to: SeedState,
    /// By how much the validation loss is lower with the seed than without, if that was measured.
    pub gain: Option<f32>,
    /// The loss of its blueprint, of a seed that was in training.
    pub reconstruction: Option<f32>,
}

/// The lives of the seeds of each block that has some.
pub(super) struct Garden {
    config: SeedsConfig,
    /// Of each block.
    mlps: usize,
    lives: BTreeMap<usize, Lifecycle>,
    validation: ValidationBatches,
}

impl Garden {
    /// As the model has it; none of a model without seeds.
    pub(super) fn open(
        config: &Config,
        validation: ValidationBatches,
        model: &mut Transformer,
    ) -> Result<Option<Self>, TrainError> {
        let mut lives = BTreeMap::new();
        for (block, mlp) in model.seeded() {
            let of = mlp.seeds.lifecycle().map_err(|source| TrainError::Seeds { block, source })?;
            lives.insert(block, of.with_config(config.seeds.rules()));
        }
        if lives.is_empty() {
            return Ok(None);
        }
        let mlps = config.model.resolved_seed_mlps();
        let garden = Self { config: config.seeds.clone(), mlps, lives, validation };
        garden.follow(model)?;
        Ok(Some(garden))
    }

    /// Whether an epoch ends with this step.
    pub(super) fn due(&self, step: u64) -> bool {
        step.is_multiple_of(self.config.epoch_steps as u64)
    }

    /// Brings the model's seeds to where the lives are.
    fn follow(&self, model: &mut Transformer) -> Result<(), TrainError> {
        for (block, lifecycle) in &self.lives {
            if let Some(mlp) = model.blocks[*block].mlp.kasmina_mut() {
                let block = *block;
                mlp.follow(lifecycle).map_err(|source| TrainError::Seeds { block, source })?;
            }
        }
        Ok(())
    }

    /// Whether this life is to be judged at the end of the epoch, for which its seed is left out once.
    fn judged(&self, life: &Life) -> bool {
        let state = life.seed().state;
        match state {
            // Two schedules go by it.
            SeedState::Grafting => {
                matches!(self.config.schedule, Schedule::Momentum | Schedule::Adaptive)
            }
            SeedState::Evaluating | SeedState::FineTuning => {
                life.epochs() + 1 >= self.config.rules().minimum(state)
            }
            _ => false,
        }
    }

    /// Whether the schedule goes by the norms of weights.
    fn by_norms(&self) -> bool {
        matches!(self.config.schedule, Schedule::DriftControlled | Schedule::Adaptive)
    }

    /// All seeds as they are.
    fn states(&self) -> BTreeMap<(usize, usize), SeedState> {
        let of = |(block, lifecycle): (&usize, &Lifecycle)| {
            let block = *block;
            let states: Vec<SeedState> =
                lifecycle.lives().iter().map(|life| life.seed().state).collect();
            states.into_iter().enumerate().map(move |(seed, state)| ((block, seed), state))
        };
        self.lives.iter().flat_map(of).collect()
    }

    /// The next dormant seed germinates, one block after another, if it is time.
    fn germinate(&mut self, epoch: u64) {
        let SeedsConfig { first, every, most, .. } = self.config;
        let (first, every) = (first as u64, every as u64);
        let all: usize = self.lives.values().map(|of| of.lives().len()).sum();
        let dormant = |of: &Life| of.seed().state == SeedState::Dormant;
        let lives = self.lives.values().flat_map(Lifecycle::lives);
        let begun = all - lives.filter(|life| dormant(life)).count();
        let most = if most == 0 { all } else { most.min(all) };
        // The first epoch that ends is number 1.
        let first = first.max(1);
        if epoch < first || !(epoch - first).is_multiple_of(every) || begun >= most {
            return;
        }
        let most_dormant =
            |lives: &&mut Lifecycle| lives.lives().iter().filter(|l| dormant(l)).count();
        // Of several the first: the last is what `max_by_key` takes.
        let Some(lifecycle) = self.lives.values_mut().rev().max_by_key(most_dormant) else {
            return;
        };
        let Some(seed) = lifecycle.lives().iter().position(dormant) else { return };
        // What a seed in training learns must not move what another has blended in.
        let held = |mlp: &usize| {
            let mut lives = lifecycle.lives().iter().map(Life::seed);
            let ended = |state| following(state).is_empty() && state != SeedState::Fossilized;
            lives.any(|seed| seed.blueprint == Some(*mlp) && !ended(seed.state))
        };
        let Some(mlp) = (0..self.mlps).find(|mlp| !held(mlp)) else { return };
        let germinated = lifecycle.germinate(seed, mlp, Blend::Mlp);
        debug_assert!(germinated.is_ok(), "a dormant seed");
    }
}

/// Sends a seed as far as it may go; at most one state further.
fn send(
    lifecycle: &mut Lifecycle,
    config: &SeedsConfig,
    seed: usize,
    metrics: &SeedMetrics,
    failing: bool,
) {
    let life = &lifecycle.lives()[seed];
    let (state, epochs, alpha) = (life.seed().state, life.epochs(), life.seed().alpha);
    // Alpha needs its ramp.
    let least = if state == SeedState::Grafting { config.ramp } else { 1 };
    let worn = epochs >= config.patience * lifecycle.config().minimum(state).max(least);
    let ways: &[SeedState] = match state {
        _ if failing => &[SeedState::Culled, SeedState::RolledBack],
        SeedState::Germinated => &[SeedState::Training],
        SeedState::Training if worn => &[SeedState::Grafting, SeedState::Culled],
        SeedState::Training => &[SeedState::Grafting],
        SeedState::Grafting if alpha >= 1.0 => &[SeedState::Stabilization],
        SeedState::Grafting if worn => &[SeedState::RolledBack],
        SeedState::Stabilization => &[SeedState::Evaluating],
        SeedState::Evaluating if worn => {
            &[SeedState::FineTuning, SeedState::Culled, SeedState::RolledBack]
        }
        SeedState::Evaluating => &[SeedState::FineTuning, SeedState::Culled],
        SeedState::FineTuning if worn => &[SeedState::Fossilized, SeedState::Culled],
        SeedState::FineTuning => &[SeedState::Fossilized],
        _ => &[],
    };
    // What is refused is asked for again after the next epoch.
    let _ = ways.iter().any(|to| lifecycle.transition(seed, *to, metrics).is_ok());
}

impl Trainer {
    /// Ends an epoch of the seeds, if there are some. All steps have been looked at.
    pub(super) fn tend(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let Some(mut garden) = self.garden.take() else { return Ok(()) };
        let tended = self.end_epoch(&mut garden, observer);
        self.garden = Some(garden);
        tended
    }

    fn end_epoch(
        &mut self,
        garden: &mut Garden,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        let step = self.state.step;
        let losses = &mut self.state.epoch_losses;
        losses.extend(self.state.last_loss);
        losses.drain(..losses.len().saturating_sub(WINDOW));
        let stability = stability(losses);
        let gains = self.gains(garden)?;
        let mut reconstruction = BTreeMap::new();
        for (block, mlp) in self.model().seeded() {
            if let Some(losses) = mlp.reconstruction() {
                reconstruction.insert(block, read(losses)?);
            }
        }
        let norms = if garden.by_norms() { self.norms()? } else { BTreeMap::new() };
        let before = garden.states();
        for (block, lifecycle) in &mut garden.lives {
            let lives = lifecycle.lives();
            let norm = |seed: usize| {
                let mlp = lives[seed].seed().blueprint?;
                norms.get(block).map(|norms| norms[mlp])
            };
            let metrics = |seed: usize| SeedMetrics {
                weight_norm: norm(seed),
                reconstruction_loss: reconstruction.get(block).map(|losses| losses[seed]),
                performance_delta: gains.get(&(*block, seed)).copied(),
                total_improvement: gains.get(&(*block, seed)).copied(),
                stability,
                loss_variance: stability.map(|of| 1.0 / of - 1.0),
                gradient_norm: Some(self.gradient_norm),
                ..SeedMetrics::default()
            };
            let metrics: Vec<SeedMetrics> = (0..lives.len()).map(metrics).collect();
            lifecycle.epoch(&metrics);
            for (seed, metrics) in metrics.iter().enumerate() {
                // A blueprint that returns no numbers.
                let broken = metrics.reconstruction_loss.is_some_and(|loss| !loss.is_finite());
                let asked = if broken { lifecycle.error(seed).ok().flatten() } else { None };
                send(lifecycle, &garden.config, seed, metrics, asked.is_some());
            }
        }
        garden.germinate(step / garden.config.epoch_steps as u64);
        garden.follow(self.replica.model_mut())?;
        for (at, to) in garden.states() {
            let (from, (block, seed)) = (before[&at], at);
            if from != to {
                let gain = gains.get(&at).copied();
                let losses = reconstruction.get(&block).filter(|_| from == SeedState::Training);
                let reconstruction = losses.map(|losses| losses[seed]);
                let of = SeedStep { step, block, seed, from, to, gain, reconstruction };
                observer.seed_stepped(&of);
            }
        }
        self.log_seeds(garden, &gains, &reconstruction)
    }

    /// The norm of each MLP of each block.
    fn norms(&self) -> Result<BTreeMap<usize, Vec<f32>>, TrainError> {
        let mut norms = BTreeMap::new();
        for (block, mlp) in self.model().seeded() {
            if let Some(mlps) = &mlp.seeds.mlps {
                let mlps = mlps.val().inner().cast(DType::F32);
                let squares = mlps.powi_scalar(2).flatten::<2>(1, 2).sum_dim(1).sqrt();
                norms.insert(block, read(squares.squeeze_dim(1))?);
            }
        }
        Ok(norms)
    }

    /// By how much the validation loss is lower with each seed that is to be judged than without.
    fn gains(&self, garden: &Garden) -> Result<BTreeMap<(usize, usize), f32>, TrainError> {
        let judged = garden.lives.iter().flat_map(|(block, lifecycle)| {
            let seeds = lifecycle.lives().iter().enumerate();
            seeds.filter(|(_, life)| garden.judged(life)).map(|(seed, _)| (*block, seed))
        });
        let judged: Vec<(usize, usize)> = judged.collect();
        let mut gains = BTreeMap::new();
        if judged.is_empty() {
            return Ok(gains);
        }
        let model = self.model().valid();
        let with = self.loss_over(&model, &garden.validation)?;
        for (block, seed) in judged {
            let mut without = model.clone();
            if let Some(mlp) = without.blocks[block].mlp.kasmina_mut() {
                let seeds = mlp.seeds.without(seed);
                mlp.seeds = seeds.map_err(|source| TrainError::Seeds { block, source })?;
            }
            gains.insert((block, seed), self.loss_over(&without, &garden.validation)? - with);
        }
        Ok(gains)
    }

    /// Adds the seeds that are not dormant to the metrics.
    fn log_seeds(
        &mut self,
        garden: &Garden,
        gains: &BTreeMap<(usize, usize), f32>,
        reconstruction: &BTreeMap<usize, Vec<f32>>,
    ) -> Result<(), TrainError> {
        let mut values: Vec<(String, f64)> = vec![];
        for (block, lifecycle) in &garden.lives {
            for (seed, life) in lifecycle.lives().iter().enumerate() {
                let of = life.seed();
                if of.state == SeedState::Dormant {
                    continue;
                }
                let mut value = |what: &str, value: f64| {
                    values.push((Record::of_seed(*block, seed, what), value));
                };
                value("state", of.state.code() as f64);
                value("alpha", f64::from(of.alpha));
                if let Some(gain) = gains.get(&(*block, seed)) {
                    value("gain", f64::from(*gain));
                }
                let losses = reconstruction.get(block).map(|losses| losses[seed]);
                if let Some(loss) = losses.filter(|_| of.state == SeedState::Training) {
                    value("reconstruction", f64::from(loss));
                }
            }
        }
        let values: Vec<(&str, f64)> =
            values.iter().map(|(name, of)| (name.as_str(), *of)).collect();
        if values.is_empty() { Ok(()) } else { self.log(Kind::Seeds, &values) }
    }
}

/// 1 / (1 + variance) of the losses of some epochs; nothing is known from one.
fn stability(losses: &[f32]) -> Option<f32> {
    let count = losses.len() as f32;
    let mean = losses.iter().sum::<f32>() / count;
    let variance = losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f32>() / count;
    (losses.len() > 1).then(|| 1.0 / (1.0 + variance))
}
