//! The formulas by which parameters move. They know tensors and numbers; which parameters there are,
//! how they are grouped and where their state is kept is the business of [`Optimizer`](crate::Optimizer).

use crate::{AdamWConfig, MuonConfig};
use burn::tensor::Tensor;

/// A formula with its numbers.
#[derive(Debug, Clone, PartialEq)]
pub enum Rule {
    /// Adam with decoupled weight decay.
    AdamW(AdamWConfig),
    /// Momentum of matrices, made orthogonal.
    Muon(MuonConfig),
    /// For tests: parameters of a batch move against the mean of their gradients, and count their steps.
    #[cfg(test)]
    Together,
}

impl From<AdamWConfig> for Rule {
    fn from(config: AdamWConfig) -> Self {
        Self::AdamW(config)
    }
}

impl From<MuonConfig> for Rule {
    fn from(config: MuonConfig) -> Self {
        Self::Muon(config)
    }
}

/// When and how far: what a formula knows beside its tensors.
#[derive(Debug, Clone)]
pub(crate) struct Pace {
    /// Learning rate of the group.
    pub(crate) learning_rate: f64,
    /// Steps, this one included: from 1.
    pub(crate) step: u64,
    /// What gradients are multiplied with, `[1]`.
    pub(crate) scale: Option<Tensor<1>>,
}

/// One parameter of a batch: its value, its gradient, and the state that the formula keeps, `None` before its first step.
/// A formula returns it without the gradient.
pub(crate) struct Member<const D: usize> {
    pub(crate) value: Tensor<D>,
    /// What the module has of a value in f32: it rounded to 16 bits.
    pub(crate) copy: Option<Tensor<D>>,
    pub(crate) grad: Tensor<D>,
    pub(crate) state: Option<Vec<Tensor<D>>>,
}

/// A parameter after its step.
pub(crate) struct Moved<const D: usize> {
    pub(crate) value: Tensor<D>,
    pub(crate) copy: Option<Tensor<D>>,
    pub(crate) state: Vec<Tensor<D>>,
}

/// The names of all that formulas keep.
pub(crate) const KEPT: [&str; 3] = ["momentum", "first", "second"];

impl Rule {
    /// What the formula keeps of a parameter of this rank from step to step, each in f32 and of its shape. These are
    /// names in checkpoints.
    pub(crate) fn state(&self, rank: usize) -> &'static [&'static str] {
        match self {
            Self::Muon(_) if rank >= 2 => &["momentum"],
            Self::AdamW(_) | Self::Muon(_) => AdamWConfig::STATE,
            #[cfg(test)]
            Self::Together => &["steps"],
        }
    }

    /// The AdamW that moves parameters of this rank, if one does. Other formulas move those of one shape together.
    pub(crate) fn adamw(&self, rank: usize) -> Option<&AdamWConfig> {
        match self {
            Self::Muon(_) if rank >= 2 => None,
            Self::AdamW(config) | Self::Muon(MuonConfig { adamw: config, .. }) => Some(config),
            #[cfg(test)]
            Self::Together => None,
        }
    }

    /// One step of a batch; they come back in their order.
    pub(crate) fn step<const D: usize>(&self, batch: Vec<Member<D>>, pace: &Pace) -> Vec<Moved<D>> {
        match (self, self.adamw(D)) {
            (_, Some(config)) => {
                batch.into_iter().map(|member| config.step(member, pace)).collect()
            }
            (Self::Muon(config), None) => config.step(batch, pace),
            #[cfg(test)]
            (Self::Together, None) => together(batch, pace),
            (Self::AdamW(_), None) => unreachable!("AdamW moves parameters of every rank"),
        }
    }
}

#[cfg(test)]
fn together<const D: usize>(batch: Vec<Member<D>>, pace: &Pace) -> Vec<Moved<D>> {
    let count = batch.len() as f64;
    let grads = batch.iter().map(|member| member.grad.clone());
    let mean = grads.reduce(|sum, grad| sum + grad).expect("no batch is empty") / count;
    let step = mean * pace.learning_rate;
    let moved = batch.into_iter().map(|Member { value, copy, state, .. }| {
        let steps = state.map_or_else(|| value.zeros_like(), |mut kept| kept.remove(0));
        let value = value - step.clone();
        let copy = copy.map(|copy| value.clone().cast(copy.dtype()));
        Moved { value, copy, state: vec![steps + 1.0] }
    });
    moved.collect()
}
