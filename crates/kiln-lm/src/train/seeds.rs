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
use kiln_nn::kasmina::{
    Blend, Life, Lifecycle, Schedule, SeedMetrics, SeedState, TransitionError, following,
};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Epochs over whose losses stability is taken.
const WINDOW: usize = 5;

/// A seed has gone from one state to another.
#[derive(Debug, Clone, PartialEq)]
pub struct SeedStep {
    /// Optimizer steps done.
    pub step: u64,
    /// Number of the block.
    pub block: usize,
    /// Number of the seed in it.
    pub seed: usize,
    /// Number of its MLP among those of the block, of a seed that has germinated.
    pub mlp: Option<usize>,
    /// The state that it has left.
    pub from: SeedState,
    /// The one that it is in.
    pub to: SeedState,
    /// By how much the validation loss is lower with the seed than without, if that was measured.
    pub gain: Option<f32>,
    /// The loss of its blueprint, of a seed that was in training.
    pub reconstruction: Option<f32>,
    /// The gate to the next state that was shut when the seed was taken out; none where no gate was asked, as in Grafting, and
    /// of one that its errors ended.
    pub shut: Option<TransitionError>,
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

    /// The step after which the first seed germinates.
    pub(super) fn first(&self) -> u64 {
        // The first epoch that ends is number 1.
        (self.config.first.max(1) as u64).saturating_mul(self.config.epoch_steps as u64)
    }

    /// How many seeds are in each state.
    pub(super) fn counts(&self) -> BTreeMap<SeedState, usize> {
        let mut counts = BTreeMap::new();
        for state in self.states().into_values() {
            *counts.entry(state).or_default() += 1;
        }
        counts
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
        let lives = self.lives.values().flat_map(Lifecycle::lives);
        let begun = all - lives.filter(|life| dormant(life)).count();
        let most = if most == 0 { all } else { most.min(all) };
        // The first epoch that ends is number 1.
        let first = first.max(1);
        if epoch < first || !(epoch - first).is_multiple_of(every) || begun >= most {
            return;
        }
        let Some((block, seed, mlp)) = next(&self.lives, self.mlps) else { return };
        if let Some(lifecycle) = self.lives.get_mut(&block) {
            let germinated = lifecycle.germinate(seed, mlp, Blend::Mlp);
            debug_assert!(germinated.is_ok(), "a dormant seed");
        }
    }
}

fn dormant(life: &Life) -> bool {
    life.seed().state == SeedState::Dormant
}

/// The next seed to germinate and its MLP: of the block with the most dormant seeds, of several the first. One without a
/// free MLP keeps no other waiting.
fn next(lives: &BTreeMap<usize, Lifecycle>, mlps: usize) -> Option<(usize, usize, usize)> {
    let count = |of: &Lifecycle| of.lives().iter().filter(|life| dormant(life)).count();
    let mut blocks: Vec<_> = lives.iter().collect();
    blocks.sort_by_key(|(_, lifecycle)| Reverse(count(lifecycle)));
    blocks.into_iter().find_map(|(block, lifecycle)| {
        let seed = lifecycle.lives().iter().position(dormant)?;
        Some((*block, seed, free_mlp(lifecycle, mlps)?))
    })
}

/// An MLP for the next seed: one that no seed has had, else one whose seeds have ended, as they have left it, and none of them
/// for its errors. What a seed in training learns must not move what another has blended in.
fn free_mlp(lifecycle: &Lifecycle, mlps: usize) -> Option<usize> {
    let had = |mlp: usize| {
        lifecycle.lives().iter().filter(move |life| life.seed().blueprint == Some(mlp))
    };
    let ended = |life: &Life| {
        let state = life.seed().state;
        following(state).is_empty() && state != SeedState::Fossilized && life.errors() == 0
    };
    let unused = (0..mlps).find(|mlp| had(*mlp).next().is_none());
    unused.or_else(|| (0..mlps).find(|mlp| had(*mlp).all(ended)))
}

/// Sends a seed, whose errors end it or whose alpha grows, as far as it may go; at most one state further. Returns the gate
/// that was shut if it went elsewhere.
fn send(
    lifecycle: &mut Lifecycle,
    config: &SeedsConfig,
    seed: usize,
    metrics: &SeedMetrics,
    [failing, grows]: [bool; 2],
) -> Option<TransitionError> {
    let life = &lifecycle.lives()[seed];
    let (state, epochs, alpha) = (life.seed().state, life.epochs(), life.seed().alpha);
    // Alpha needs its ramp.
    let least = if state == SeedState::Grafting { config.ramp } else { 1 };
    let worn =
        epochs >= config.patience.saturating_mul(lifecycle.config().minimum(state).max(least));
    let ways: &[SeedState] = match state {
        _ if failing => &[SeedState::Culled, SeedState::RolledBack],
        SeedState::Germinated => &[SeedState::Training],
        SeedState::Training if worn => &[SeedState::Grafting, SeedState::Culled],
        SeedState::Training => &[SeedState::Grafting],
        SeedState::Grafting if alpha >= 1.0 => &[SeedState::Stabilization],
        // Under a shorter ramp its epochs may be over while it is on its way.
        SeedState::Grafting if worn && !grows => &[SeedState::RolledBack],
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
    let mut shut = None;
    for to in ways {
        match lifecycle.transition(seed, *to, metrics) {
            Ok(()) => return shut.filter(|_| !failing),
            Err(error) => shut = shut.or(Some(error)),
        }
    }
    None
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
        let mut shut = BTreeMap::new();
        for (block, lifecycle) in &mut garden.lives {
            let lives = lifecycle.lives();
            let norm = |seed: usize| {
                let mlp = lives[seed].seed().blueprint?;
                norms.get(block).map(|norms| norms[mlp])
            };
            // A blueprint that returns no numbers. What the model is worth without a seed says nothing of it there: of a
            // model with a broken one no gain is a number.
            let broken = |seed: usize| {
                reconstruction.get(block).is_some_and(|losses| !losses[seed].is_finite())
            };
            let metrics = |seed: usize| SeedMetrics {
                error_rate: Some(if broken(seed) { 1.0 } else { 0.0 }),
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
            let alpha = |life: &Life| life.seed().alpha;
            let alphas: Vec<f32> = lives.iter().map(alpha).collect();
            let failing = lifecycle.epoch(&metrics);
            for (seed, metrics) in metrics.iter().enumerate() {
                let broken = metrics.error_rate == Some(1.0);
                let asked = if broken { lifecycle.error(seed).ok().flatten() } else { None };
                let failing = asked.is_some() || failing.contains(&seed);
                let grows = alpha(&lifecycle.lives()[seed]) > alphas[seed];
                let gate = send(lifecycle, &garden.config, seed, metrics, [failing, grows]);
                shut.extend(gate.map(|gate| ((*block, seed), gate)));
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
                let mlp = garden.lives[&block].lives()[seed].seed().blueprint;
                let shut = shut.remove(&at);
                let of = SeedStep { step, block, seed, mlp, from, to, gain, reconstruction, shut };
                observer.seed_stepped(&of);
            }
        }
        self.log_seeds(garden, &before, &gains, &reconstruction, stability)
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

    /// Adds the seeds that are not dormant to the metrics, with what decided whether they left the state of `before`.
    fn log_seeds(
        &mut self,
        garden: &Garden,
        before: &BTreeMap<(usize, usize), SeedState>,
        gains: &BTreeMap<(usize, usize), f32>,
        reconstruction: &BTreeMap<usize, Vec<f32>>,
        stability: Option<f32>,
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
                let trained = before.get(&(*block, seed)) == Some(&SeedState::Training);
                if let Some(loss) = losses.filter(|_| trained) {
                    value("reconstruction", f64::from(loss));
                }
            }
        }
        if values.is_empty() {
            return Ok(());
        }
        values.extend(stability.map(|of| ("stability".to_string(), f64::from(of))));
        let values: Vec<(&str, f64)> =
            values.iter().map(|(name, of)| (name.as_str(), *of)).collect();
        self.log(Kind::Seeds, &values)
    }
}

/// 1 / (1 + variance) of the losses of some epochs; nothing is known from one.
fn stability(losses: &[f32]) -> Option<f32> {
    let count = losses.len() as f32;
    let mean = losses.iter().sum::<f32>() / count;
    let variance = losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f32>() / count;
    (losses.len() > 1).then(|| 1.0 / (1.0 + variance))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_nn::kasmina::LifecycleConfig;

    /// Seeds of which some have an MLP and are in a state.
    fn block(seeds: &[Option<(usize, SeedState)>]) -> Lifecycle {
        let rules = LifecycleConfig::new().with_minimum_epochs([0; 5]);
        let mut lifecycle = Lifecycle::new(seeds.len(), rules);
        let good = SeedMetrics {
            reconstruction_loss: Some(0.0),
            performance_delta: Some(1.0),
            stability: Some(1.0),
            total_improvement: Some(1.0),
            ..SeedMetrics::default()
        };
        use SeedState::*;
        for (seed, of) in seeds.iter().enumerate() {
            let Some((mlp, state)) = *of else { continue };
            lifecycle.germinate(seed, mlp, Blend::Mlp).unwrap();
            let ways: &[SeedState] = match state {
                Training => &[Training],
                Culled => &[Training, Culled],
                _ => &[Training, Grafting, Stabilization, Evaluating, FineTuning, Fossilized],
            };
            for to in ways {
                lifecycle.transition(seed, *to, &good).unwrap();
            }
            assert_eq!(lifecycle.lives()[seed].seed().state, state);
        }
        lifecycle
    }

    #[test]
    fn the_next_seed_and_its_mlp() {
        use SeedState::*;
        let fossil = block(&[Some((0, Fossilized)), None, None]);
        let culled = block(&[Some((0, Culled)), None]);
        let of = |blocks: [&Lifecycle; 2], mlps| {
            let lives = blocks.into_iter().cloned().enumerate().collect();
            next(&lives, mlps)
        };
        // The one with more dormant seeds, if it has an MLP.
        assert_eq!(of([&fossil, &culled], 2), Some((0, 1, 1)));
        assert_eq!(of([&fossil, &culled], 1), Some((1, 1, 0)));
        assert_eq!(of([&culled, &culled], 2), Some((0, 1, 1)));
        assert_eq!(of([&fossil, &fossil], 1), None);
        // None that somebody trains or that is part of the model, the lowest of those that seeds have left.
        let both = block(&[Some((0, Training)), Some((1, Culled)), Some((2, Culled)), None]);
        assert_eq!(of([&both, &culled], 3), Some((0, 3, 1)));
        let none = block(&[Some((0, Culled)), Some((0, Culled))]);
        assert_eq!(of([&none, &none], 2), None);
        // Nor one that returned no numbers.
        let mut broken = block(&[Some((0, Culled)), None]);
        broken.error(0).unwrap();
        assert_eq!(of([&broken, &broken], 1), None);
    }
}
