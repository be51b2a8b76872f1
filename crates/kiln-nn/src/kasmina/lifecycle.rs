//! The lives of seeds on the host: which transition is allowed, when, and what it takes.

use super::schedule::{Progress, Schedule};
use burn::config::Config;
use kiln_ops::prelude::{Blend, Seed, SeedState};

/// Transitions of a seed that are remembered.
pub const HISTORY: usize = 10;

/// Configuration of a [`Lifecycle`].
#[derive(Config, Debug, PartialEq)]
pub struct LifecycleConfig {
    /// Steps of the optimizer in an epoch.
    #[config(default = 1)]
    pub epoch_steps: usize,
    /// Epochs before a seed may leave Training, Grafting, Stabilization, Evaluating and FineTuning, unless it is rolled
    /// back.
    #[config(default = "[100, 50, 20, 30, 50]")]
    pub minimum_epochs: [usize; 5],
    /// How alpha grows while a seed is grafted.
    #[config(default = "Schedule::Linear")]
    pub schedule: Schedule,
    /// Epochs in which it grows from 0 to 1. A seed that is on its way when this changes goes on from its alpha.
    #[config(default = 50)]
    pub ramp: usize,
    /// Training to Grafting: the largest reconstruction loss.
    #[config(default = 0.01)]
    pub reconstruction_loss: f32,
    /// Evaluating to FineTuning: the least stability; performance has to be better, by however little.
    #[config(default = 0.8)]
    pub stability: f32,
    /// Evaluating to Culled: the change of performance below which a seed may be culled.
    #[config(default = -0.05)]
    pub culled_below: f32,
    /// Evaluating to Culled: the share of errors above which it may be culled.
    #[config(default = 0.1)]
    pub culled_error_rate: f32,
    /// Evaluating to Culled: the number of errors above which it may be culled. As many errors ask for the seed's end in any
    /// state.
    #[config(default = 5)]
    pub errors: usize,
    /// FineTuning to Fossilized: the least improvement over all.
    #[config(default = 0.01)]
    pub total_improvement: f32,
    /// FineTuning to Fossilized: the least stability.
    #[config(default = 0.95)]
    pub final_stability: f32,
}

impl LifecycleConfig {
    /// Epochs before a seed may leave a state.
    pub fn minimum(&self, state: SeedState) -> usize {
        let [training, grafting, stabilization, evaluating, fine_tuning] = self.minimum_epochs;
        match state {
            SeedState::Training => training,
            SeedState::Grafting => grafting,
            SeedState::Stabilization => stabilization,
            SeedState::Evaluating => evaluating,
            SeedState::FineTuning => fine_tuning,
            _ => 0,
        }
    }
}

/// What is known of a seed when it is decided about; what is none has not been measured.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SeedMetrics {
    /// Loss of the blueprint on its chunk.
    pub reconstruction_loss: Option<f32>,
    /// How much better the model is with the seed than without: above 0 where it is, in whatever unit the gates have, such as
    /// by how much the validation loss is lower.
    pub performance_delta: Option<f32>,
    /// How steady the loss is, 0 to 1, as 1 / (1 + its variance over the last epochs).
    pub stability: Option<f32>,
    /// Share of forwards whose blueprint returned what is no number, or failed in another way that the caller can tell.
    pub error_rate: Option<f32>,
    /// How much better the model is than before the seed, as `performance_delta`.
    pub total_improvement: Option<f32>,
    /// Norm of the blueprint's weights.
    pub weight_norm: Option<f32>,
    /// Variance of the loss over the last epochs.
    pub loss_variance: Option<f32>,
    /// Norm of the gradient.
    pub gradient_norm: Option<f32>,
    /// Variance of the accuracy over the last epochs.
    pub accuracy_variance: Option<f32>,
}

/// Why a seed does not go where it was sent; it stays where it is.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TransitionError {
    /// There is no such seed.
    #[error("kasmina: seed {seed}, expected 0 to {last}")]
    NoSeed {
        /// Its number.
        seed: usize,
        /// The last one.
        last: usize,
    },
    /// No way leads there.
    #[error("kasmina: seed {seed} cannot go from {from:?} to {to:?}, expected {expected}")]
    NoWay {
        /// The seed.
        seed: usize,
        /// Where it is.
        from: SeedState,
        /// Where it was sent.
        to: SeedState,
        /// Where it may go.
        expected: String,
    },
    /// It has to stay for longer.
    #[error("kasmina: seed {seed} has been {state:?} for {epochs} epochs, expected {minimum}")]
    TooEarly {
        /// The seed.
        seed: usize,
        /// Where it is.
        state: SeedState,
        /// For how many epochs.
        epochs: usize,
        /// For how many it has to stay.
        minimum: usize,
    },
    /// A condition does not hold, or has not been measured.
    #[error("kasmina: seed {seed} cannot become {to:?}: {metric} is {found}, expected {expected}")]
    Gate {
        /// The seed.
        seed: usize,
        /// Where it was sent.
        to: SeedState,
        /// Of what.
        metric: &'static str,
        /// Its value.
        found: String,
        /// What would do.
        expected: String,
    },
    /// It has no blueprint.
    #[error("kasmina: seed {seed} has no blueprint, expected one before it becomes {to:?}")]
    NoBlueprint {
        /// The seed.
        seed: usize,
        /// Where it was sent.
        to: SeedState,
    },
}

/// A step in a life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// From where.
    pub from: SeedState,
    /// To where.
    pub to: SeedState,
    /// Epochs in the state that was left.
    pub epochs: usize,
}

/// A life.
#[derive(Debug, Clone, PartialEq)]
pub struct Life {
    pub(super) seed: Seed,
    pub(super) parent: SeedState,
    pub(super) epochs: usize,
    pub(super) errors: usize,
    pub(super) progress: Progress,
    pub(super) history: Vec<Step>,
}

impl Default for Life {
    fn default() -> Self {
        Self {
            seed: Seed::default(),
            parent: SeedState::Dormant,
            epochs: 0,
            errors: 0,
            progress: Progress::default(),
            history: vec![],
        }
    }
}

impl Life {
    /// State, blueprint, blend and alpha.
    pub fn seed(&self) -> Seed {
        self.seed
    }

    /// The state before this one.
    pub fn parent(&self) -> SeedState {
        self.parent
    }

    /// Epochs in this state.
    pub fn epochs(&self) -> usize {
        self.epochs
    }

    /// Errors of the blueprint so far.
    pub fn errors(&self) -> usize {
        self.errors
    }

    /// The last [`HISTORY`] steps, oldest first.
    pub fn history(&self) -> &[Step] {
        &self.history
    }

    fn enter(&mut self, to: SeedState) {
        self.history.push(Step { from: self.seed.state, to, epochs: self.epochs });
        let more = self.history.len().saturating_sub(HISTORY);
        self.history.drain(..more);
        (self.parent, self.seed.state, self.epochs) = (self.seed.state, to, 0);
        if to == SeedState::Grafting {
            (self.seed.alpha, self.progress) = (0.0, Progress::default());
        }
    }
}

/// The states that follow a state.
pub fn following(state: SeedState) -> &'static [SeedState] {
    use SeedState::*;
    match state {
        Dormant => &[Germinated],
        Germinated => &[Training, Cancelled],
        Training => &[Grafting, Culled, Cancelled],
        Grafting => &[Stabilization, RolledBack],
        Stabilization => &[Evaluating, RolledBack],
        Evaluating => &[FineTuning, Culled, RolledBack],
        FineTuning => &[Fossilized, Culled, RolledBack],
        Fossilized | Culled | Cancelled | RolledBack => &[],
    }
}

/// The lives of the seeds of a layer.
///
/// It decides, and the layer's tensors follow with [`KasminaLayer::follow`](super::KasminaLayer::follow).
#[derive(Debug, Clone, PartialEq)]
pub struct Lifecycle {
    config: LifecycleConfig,
    pub(super) lives: Vec<Life>,
    /// Of this epoch.
    pub(super) steps: usize,
}

impl Lifecycle {
    /// So many dormant seeds.
    pub fn new(seeds: usize, config: LifecycleConfig) -> Self {
        Self { config, lives: vec![Life::default(); seeds], steps: 0 }
    }

    pub(super) fn of(config: LifecycleConfig, lives: Vec<Life>, steps: usize) -> Self {
        Self { config, lives, steps }
    }

    /// The same lives under other rules. Alphas go on from where they are.
    pub fn with_config(self, config: LifecycleConfig) -> Self {
        Self { config, ..self }
    }

    /// Its configuration.
    pub fn config(&self) -> &LifecycleConfig {
        &self.config
    }

    /// All lives, in the order of the seeds.
    pub fn lives(&self) -> &[Life] {
        &self.lives
    }

    /// A life.
    ///
    /// # Errors
    ///
    /// If there is no such seed.
    pub fn life(&self, seed: usize) -> Result<&Life, TransitionError> {
        let last = self.lives.len().saturating_sub(1);
        self.lives.get(seed).ok_or(TransitionError::NoSeed { seed, last })
    }

    /// Gives a dormant seed a blueprint and the way in which it is blended: Dormant to Germinated.
    ///
    /// # Errors
    ///
    /// If the seed is not dormant.
    pub fn germinate(
        &mut self,
        seed: usize,
        blueprint: usize,
        blend: Blend,
    ) -> Result<(), TransitionError> {
        self.way(seed, SeedState::Germinated)?;
        let life = &mut self.lives[seed];
        (life.seed.blueprint, life.seed.blend) = (Some(blueprint), blend);
        life.enter(SeedState::Germinated);
        Ok(())
    }

    /// Sends a seed to another state.
    ///
    /// # Errors
    ///
    /// [`TransitionError`] where no way leads there, where it is too early, and where a condition does not hold or has not
    /// been measured.
    pub fn transition(
        &mut self,
        seed: usize,
        to: SeedState,
        metrics: &SeedMetrics,
    ) -> Result<(), TransitionError> {
        self.way(seed, to)?;
        let life = &self.lives[seed];
        let (state, epochs) = (life.seed.state, life.epochs);
        let minimum = self.config.minimum(state);
        if epochs < minimum && to != SeedState::RolledBack {
            return Err(TransitionError::TooEarly { seed, state, epochs, minimum });
        }
        let ends = matches!(to, SeedState::Culled | SeedState::Cancelled | SeedState::RolledBack);
        if life.seed.blueprint.is_none() && !ends {
            return Err(TransitionError::NoBlueprint { seed, to });
        }
        self.gate(seed, to, metrics)?;
        self.lives[seed].enter(to);
        Ok(())
    }

    fn way(&self, seed: usize, to: SeedState) -> Result<(), TransitionError> {
        let from = self.life(seed)?.seed.state;
        let ways = following(from);
        if ways.contains(&to) {
            return Ok(());
        }
        let names: Vec<String> = ways.iter().map(|state| format!("{state:?}")).collect();
        let expected = if names.is_empty() {
            "nothing: its life has ended".into()
        } else {
            names.join(" or ")
        };
        Err(TransitionError::NoWay { seed, from, to, expected })
    }

    fn gate(&self, seed: usize, to: SeedState, of: &SeedMetrics) -> Result<(), TransitionError> {
        let config = &self.config;
        let check = |metric: &'static str,
                     value: Option<f32>,
                     holds: &dyn Fn(f32) -> bool,
                     expected: String| {
            let found = match value {
                Some(value) if holds(value) => return Ok(()),
                Some(value) => value.to_string(),
                None => "not measured".into(),
            };
            Err(TransitionError::Gate { seed, to, metric, found, expected })
        };
        match (self.lives[seed].seed.state, to) {
            (SeedState::Training, SeedState::Grafting) => {
                let most = config.reconstruction_loss;
                check(
                    "reconstruction_loss",
                    of.reconstruction_loss,
                    &|x| x <= most,
                    format!("at most {most}"),
                )
            }
            (SeedState::Evaluating, SeedState::FineTuning) => {
                check(
                    "performance_delta",
                    of.performance_delta,
                    &|x| x > 0.0,
                    "more than 0".into(),
                )?;
                let least = config.stability;
                check("stability", of.stability, &|x| x >= least, format!("at least {least}"))
            }
            (SeedState::Evaluating, SeedState::Culled) => {
                let worse = of.performance_delta.is_some_and(|x| x < config.culled_below);
                let fails = of.error_rate.is_some_and(|x| x > config.culled_error_rate);
                if worse || fails || self.lives[seed].errors > config.errors {
                    return Ok(());
                }
                let (below, rate, errors) =
                    (config.culled_below, config.culled_error_rate, config.errors);
                let or = format!(
                    "below {below}, an error_rate above {rate} or more than {errors} errors"
                );
                check("performance_delta", of.performance_delta, &|_| false, or)
            }
            (SeedState::FineTuning, SeedState::Fossilized) => {
                let least = config.total_improvement;
                check(
                    "total_improvement",
                    of.total_improvement,
                    &|x| x >= least,
                    format!("at least {least}"),
                )?;
                let least = config.final_stability;
                check("stability", of.stability, &|x| x >= least, format!("at least {least}"))
            }
            _ => Ok(()),
        }
    }

    /// The optimizer has made a step. Returns whether an epoch has passed, and [`epoch`](Self::epoch) is due.
    pub fn step(&mut self) -> bool {
        self.steps += 1;
        let passed = self.steps >= self.config.epoch_steps;
        if passed {
            self.steps = 0;
        }
        passed
    }

    /// An epoch has passed: seeds that are grafted get their next alpha. Returns those whose grafting should end, since
    /// more than half of their forwards fail.
    ///
    /// # Panics
    ///
    /// If there are not as many metrics as seeds.
    #[track_caller]
    pub fn epoch(&mut self, metrics: &[SeedMetrics]) -> Vec<usize> {
        let (found, expected) = (metrics.len(), self.lives.len());
        assert!(found == expected, "kasmina: metrics of {found} seeds, expected {expected}");
        let mut failing = vec![];
        for (seed, (life, metrics)) in self.lives.iter_mut().zip(metrics).enumerate() {
            life.epochs += 1;
            if life.seed.state != SeedState::Grafting {
                continue;
            }
            // Not a number is no good news.
            if metrics.error_rate.is_some_and(|rate| rate.is_nan() || rate > 0.5) {
                failing.push(seed);
                continue;
            }
            let alpha = life.seed.alpha;
            let next =
                self.config.schedule.next(&mut life.progress, alpha, self.config.ramp, metrics);
            life.seed.alpha = next;
        }
        failing
    }

    /// A forward of the seed's blueprint has failed. Returns the state that this asks for, once it has failed often enough:
    /// Culled, or RolledBack and Cancelled where no way leads to that. It is no transition, which is refused until the
    /// seed's epochs and its gate allow it.
    ///
    /// # Errors
    ///
    /// If there is no such seed.
    pub fn error(&mut self, seed: usize) -> Result<Option<SeedState>, TransitionError> {
        self.life(seed)?;
        let life = &mut self.lives[seed];
        life.errors += 1;
        let ways = following(life.seed.state);
        let ends = [SeedState::Culled, SeedState::RolledBack, SeedState::Cancelled];
        let end = ends.into_iter().find(|end| ways.contains(end));
        Ok(end.filter(|_| life.errors >= self.config.errors))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_steps_are_remembered() {
        let mut life = Life::default();
        for epochs in 0..HISTORY + 3 {
            life.epochs = epochs;
            life.enter(SeedState::Training);
        }
        let epochs: Vec<usize> = life.history.iter().map(|step| step.epochs).collect();
        assert_eq!(epochs, (3..HISTORY + 3).collect::<Vec<_>>());
    }
}
