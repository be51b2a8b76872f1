//! AdamW: Adam with weight decay decoupled from the gradient.
//!
//! Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019 (arXiv 1711.05101).
//! With g the gradient, η the learning rate, λ the decay and t the step, counted from 1,
//!
//! * m = β1·m + (1 − β1)·g
//! * v = β2·v + (1 − β2)·g²
//! * p = p·(1 − η·λ) − η · m/(1 − β1ᵗ) / (√(v/(1 − β2ᵗ)) + ε)
//!
//! as in PyTorch's `torch.optim.AdamW`.

use crate::rule::{Member, Moved, Pace};
use crate::{Optimizer, Settings};
use burn::config::Config;

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
    pub(crate) fn step<const D: usize>(&self, member: Member<D>, pace: Pace) -> Moved<D> {
        let Member { value, grad, state } = member;
        let Pace { learning_rate, step } = pace;
        let [first, second]: [_; 2] = state.try_into().expect("two moments");

        let new = grad.clone().mul_scalar(1.0 - self.beta1);
        let first = match first {
            Some(old) => old.mul_scalar(self.beta1) + new,
            None => new,
        };
        let new = grad.square().mul_scalar(1.0 - self.beta2);
        let second = match second {
            Some(old) => old.mul_scalar(self.beta2) + new,
            None => new,
        };

        // The corrections are numbers: they cost no pass over the tensors.
        let correction1 = 1.0 - self.beta1.powf(step as f64);
        let correction2 = 1.0 - self.beta2.powf(step as f64);
        let rate = learning_rate / correction1;
        let root = second.clone().sqrt().mul_scalar(correction2.sqrt().recip());
        let update = first.clone().mul_scalar(rate) / root.add_scalar(self.eps);
        let decay = learning_rate * self.weight_decay;
        let value = if decay == 0.0 { value } else { value.mul_scalar(1.0 - decay) };
        Moved { value: value - update, state: vec![first, second] }
    }
}
