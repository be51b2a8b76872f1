//! [AdamW](kiln_ops::adamw), for all parameters or one group.

use crate::rule::{Member, Moved, Pace};
use crate::{Optimizer, Settings};
use burn::config::Config;
use burn::tensor::{DType, Tensor};
use kiln_ops::adamw::{AdamWBatch, AdamWOptions, Moving, adamw, reference};

/// Configuration of AdamW, for all parameters or one group.
#[derive(Config, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay rate of the first moment.
    #[config(default = 0.9)]
    pub beta1: f64,
    /// Decay rate of the second moment.
    #[config(default = 0.999)]
    pub beta2: f64,
    /// Added to the root of the second moment.
    #[config(default = 1e-8)]
    pub eps: f64,
    /// Decoupled weight decay.
    #[config(default = 0.0)]
    pub weight_decay: f64,
}

impl AdamWConfig {
    /// What is kept of a parameter: names in checkpoints.
    pub(crate) const STATE: &'static [&'static str] = &["first", "second"];

    /// An optimizer that moves all parameters by AdamW and has taken no step.
    pub fn init(&self) -> Optimizer {
        Optimizer::new(Settings::from(self.clone()))
    }

    /// A step of parameters that are added to it, each f32.
    pub(crate) fn batch(&self, pace: &Pace) -> AdamWBatch {
        AdamWBatch::new(pace.scale.clone(), self.options(pace)).unwrap_or_else(|e| panic!("{e}"))
    }

    /// One step of one parameter. Its state is the two moments.
    pub(crate) fn step<const D: usize>(&self, member: Member<D>, pace: &Pace) -> Moved<D> {
        let (of, grad) = moving(member);
        let (scale, options) = (pace.scale.clone(), self.options(pace));
        moved(match of.value.dtype() {
            DType::F32 => adamw(of, grad, scale, options).unwrap_or_else(|e| panic!("{e}")),
            // In the element type of the parameter.
            _ => reference::adamw(of, grad, scale, options),
        })
    }

    fn options(&self, pace: &Pace) -> AdamWOptions {
        let Self { beta1, beta2, eps, weight_decay } = *self;
        let Pace { learning_rate, step, .. } = *pace;
        AdamWOptions { learning_rate, beta1, beta2, eps, weight_decay, step }
    }
}

/// A parameter with its moments, zeros before its first step, and its gradient.
pub(crate) fn moving<const D: usize>(member: Member<D>) -> (Moving<D>, Tensor<D>) {
    let Member { value, copy, grad, state } = member;
    let state = state.unwrap_or_else(|| vec![value.zeros_like(), value.zeros_like()]);
    let [first, second] = state.try_into().expect("two moments");
    (Moving { value, first, second, copy }, grad)
}

/// It after its step.
pub(crate) fn moved<const D: usize>(of: Moving<D>) -> Moved<D> {
    let Moving { value, first, second, copy } = of;
    Moved { value, copy, state: vec![first, second] }
}
