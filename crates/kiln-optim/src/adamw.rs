//! [AdamW](kiln_ops::adamw), for all parameters or one group.

use crate::rule::{Member, Moved, Pace};
use crate::{Optimizer, Settings};
use burn::config::Config;
use burn::tensor::DType;
use kiln_ops::adamw::{AdamWOptions, Moving, adamw, reference};

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
    /// An optimizer that moves all parameters by AdamW and has taken no step.
    pub fn init(&self) -> Optimizer {
        Optimizer::new(Settings::from(self.clone()))
    }

    /// One step of one parameter. Its state is the two moments.
    pub(crate) fn step<const D: usize>(&self, member: Member<D>, pace: &Pace) -> Moved<D> {
        let Member { value, grad, state } = member;
        let state: [_; 2] = state.try_into().expect("two moments");
        let [first, second] = state.map(|moment| moment.unwrap_or_else(|| value.zeros_like()));
        let Self { beta1, beta2, eps, weight_decay } = *self;
        let Pace { learning_rate, step, ref scale } = *pace;
        let options = AdamWOptions { learning_rate, beta1, beta2, eps, weight_decay, step };
        let (of, scale) = (Moving { value, first, second }, scale.clone());
        let Moving { value, first, second } = match of.value.dtype() {
            DType::F32 => adamw(of, grad, scale, options).unwrap_or_else(|e| panic!("{e}")),
            // In the element type of the parameter.
            _ => reference::adamw(of, grad, scale, options),
        };
        Moved { value, state: vec![first, second] }
    }
}
