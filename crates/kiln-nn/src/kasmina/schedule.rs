//! How alpha grows while a seed is grafted.

use super::lifecycle::SeedMetrics;
use serde::{Deserialize, Serialize};

/// Change of the weights' norm, relative to its running mean, from which alpha is held.
const DRIFT: f32 = 0.01;
/// Epochs for which it is held.
const PAUSE: f32 = 10.0;
/// Share of a running mean that is new.
const NEW: f32 = 0.1;
/// What remains of a velocity, and what a gain of performance adds to it.
const MOMENTUM: f32 = 0.1;
const GAIN: f32 = 0.01;
/// Epochs between two looks at stability, the limits of what is stable, and the failures that put alpha back.
const WINDOW: f32 = 5.0;
const STABLE: [f32; 3] = [0.1, 10.0, 0.05];
const FAILURES: f32 = 3.0;

/// A way for alpha from 0 to 1 over the epochs of a ramp. What it asks for and has not been measured counts as calm,
/// what is not a number does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// In equal steps.
    Linear,
    /// Linear, but held for 10 epochs where the norm of the weights is more than 1 % off its running mean.
    DriftControlled,
    /// Linear and a velocity that gains of performance add to, and never back.
    Momentum,
    /// Drift-controlled where there is half of that drift, else by momentum where performance gains more than 0.01, else
    /// linear.
    Adaptive,
    /// Linear; every 5 epochs the variances of loss and accuracy and the norm of the gradient are looked at: where they are
    /// not calm the way so far is halved, and after three such looks alpha is what it was when they last were.
    Stability,
}

/// How far a seed is on its way; all f32, as a record holds it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Progress {
    /// Epochs that count, of a ramp of so many; 0 before the first.
    pub(super) steps: f32,
    pub(super) ramp: f32,
    /// Running mean of the weights' norm; 0 before there is one.
    pub(super) mean: f32,
    /// Epochs for which alpha is still held.
    pub(super) held: f32,
    pub(super) velocity: f32,
    pub(super) failures: f32,
    /// Alpha at the last calm look.
    pub(super) calm: f32,
}

impl Progress {
    /// Numbers of a seed's progress.
    pub(super) const NUMBERS: usize = 7;

    pub(super) fn numbers(&self) -> [f32; Self::NUMBERS] {
        [self.steps, self.ramp, self.mean, self.held, self.velocity, self.failures, self.calm]
    }

    pub(super) fn of(numbers: [f32; Self::NUMBERS]) -> Self {
        let [steps, ramp, mean, held, velocity, failures, calm] = numbers;
        Self { steps, ramp, mean, held, velocity, failures, calm }
    }

    /// Keeps the way so far where the ramp is another than before.
    fn fit(&mut self, ramp: f32) {
        if self.ramp > 0.0 && self.ramp != ramp {
            self.steps *= ramp / self.ramp;
        }
        self.ramp = ramp;
    }

    /// Takes the weights' norm into its mean; returns how far it is off that, relative to it.
    fn drift(&mut self, metrics: &SeedMetrics) -> f32 {
        let Some(norm) = metrics.weight_norm else { return 0.0 };
        if !norm.is_finite() {
            return f32::INFINITY;
        }
        if self.mean == 0.0 {
            self.mean = norm;
        }
        let drift = (norm - self.mean).abs() / self.mean.abs().max(f32::MIN_POSITIVE);
        self.mean = (1.0 - NEW) * self.mean + NEW * norm;
        drift
    }
}

impl Schedule {
    /// Alpha after one more epoch.
    pub(super) fn next(
        self,
        progress: &mut Progress,
        alpha: f32,
        ramp: usize,
        metrics: &SeedMetrics,
    ) -> f32 {
        let ramp = ramp.max(1) as f32;
        progress.fit(ramp);
        let delta = metrics.performance_delta.filter(|delta| delta.is_finite()).unwrap_or(0.0);
        let drift = match self {
            Self::DriftControlled | Self::Adaptive => progress.drift(metrics),
            _ => 0.0,
        };
        match self {
            Self::Linear => linear(progress, ramp),
            Self::DriftControlled => controlled(progress, alpha, ramp, drift),
            Self::Momentum => momentum(progress, alpha, ramp, delta),
            Self::Adaptive if drift > DRIFT / 2.0 || progress.held > 0.0 => {
                controlled(progress, alpha, ramp, drift)
            }
            Self::Adaptive if delta > 0.01 => momentum(progress, alpha, ramp, delta),
            Self::Adaptive => linear(progress, ramp).max(alpha),
            Self::Stability => stable(progress, alpha, ramp, metrics),
        }
    }
}

fn linear(progress: &mut Progress, ramp: f32) -> f32 {
    progress.steps = (progress.steps + 1.0).min(ramp);
    (progress.steps / ramp).clamp(0.0, 1.0)
}

fn controlled(progress: &mut Progress, alpha: f32, ramp: f32, drift: f32) -> f32 {
    if drift > DRIFT {
        progress.held = PAUSE;
    }
    if progress.held > 0.0 {
        progress.held -= 1.0;
        return alpha;
    }
    linear(progress, ramp).max(alpha)
}

fn momentum(progress: &mut Progress, alpha: f32, ramp: f32, delta: f32) -> f32 {
    progress.velocity = MOMENTUM * progress.velocity + GAIN * delta;
    progress.steps = (progress.steps + 1.0).min(ramp);
    (progress.steps / ramp + progress.velocity).clamp(alpha, 1.0)
}

fn stable(progress: &mut Progress, alpha: f32, ramp: f32, metrics: &SeedMetrics) -> f32 {
    progress.held += 1.0;
    if progress.held < WINDOW {
        return linear(progress, ramp);
    }
    progress.held = 0.0;
    let found = [metrics.loss_variance, metrics.gradient_norm, metrics.accuracy_variance];
    let calm = found.iter().zip(STABLE).all(|(found, limit)| found.is_none_or(|x| x < limit));
    if calm {
        (progress.failures, progress.calm) = (0.0, alpha);
        return linear(progress, ramp);
    }
    progress.failures += 1.0;
    if progress.failures >= FAILURES {
        progress.failures = 0.0;
        progress.steps = progress.calm * ramp;
        return progress.calm;
    }
    progress.steps /= 2.0;
    (progress.steps / ramp).clamp(0.0, 1.0)
}
