//! A [`Rule`] behind Burn's own optimizer trait, one tensor at a time: for what takes Burn's
//! [`ModuleOptimizer`](burn::optim::ModuleOptimizer), such as the `Learner` of burn-train.
//!
//! The formulas and their numbers are those of [`Optimizer`](crate::Optimizer), but nothing is batched, and the state is
//! Burn's, by the ids of parameters.

use crate::rule::{Member, Moved, Pace, Rule};
use burn::optim::{self, LearningRate, RecordState, StateSink, StateSource};
use burn::tensor::{Device, Tensor, TensorData};

/// What a rule keeps of one parameter.
#[derive(Clone)]
pub struct RuleState<const D: usize> {
    /// Steps taken.
    steps: u64,
    /// Such as the two moments of AdamW.
    kept: Vec<Kept<D>>,
}

/// Burn loads a state before it says for which device: onto the default one, which may not even be there.
#[derive(Clone)]
enum Kept<const D: usize> {
    Tensor(Tensor<D>),
    Saved(TensorData),
}

impl<const D: usize> Kept<D> {
    fn to_device(self, device: &Device) -> Tensor<D> {
        match self {
            Self::Tensor(tensor) => tensor.to_device(device),
            Self::Saved(data) => Tensor::from_data(data, device),
        }
    }

    fn to_data(&self) -> TensorData {
        match self {
            Self::Tensor(tensor) => tensor.to_data(),
            Self::Saved(data) => data.clone(),
        }
    }
}

/// Leaves `steps`, `0`, `1`, … .
impl<const D: usize> RecordState for RuleState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_scalar(prefix, "steps", self.steps.into());
        for (index, kept) in self.kept.iter().enumerate() {
            out.push_tensor(prefix, &index.to_string(), kept.to_data());
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, _: &Device) -> Option<Self> {
        let steps = src.take_scalar(prefix, "steps")?.try_into().ok()?;
        let saved = (0..).map_while(|index: usize| src.take_tensor(prefix, &index.to_string()));
        Some(Self { steps, kept: saved.map(Kept::Saved).collect() })
    }
}

/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::nn::LinearConfig;
/// use burn::optim::ModuleOptimizer;
/// use burn::tensor::Device;
/// use kiln_optim::prelude::*;
///
/// let layer = LinearConfig::new(4, 2).init(&Device::flex());
/// let optimizer = ModuleOptimizer::from(Rule::from(MuonConfig::new()))
///     .with_group(below_rank_two(&layer), Rule::from(AdamWConfig::new()), None);
/// # }
/// ```
impl optim::Optimizer for Rule {
    type State<const D: usize> = RuleState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<RuleState<D>>,
    ) -> (Tensor<D>, Option<RuleState<D>>) {
        let device = tensor.device();
        let RuleState { steps, kept } = state.unwrap_or(RuleState { steps: 0, kept: vec![] });
        let mut kept = kept.into_iter().map(|kept| kept.to_device(&device));
        let state = self.state(D).iter().map(|_| kept.next()).collect();
        let steps = steps + 1;
        let pace = Pace { learning_rate: lr, step: steps };
        let member = Member { value: tensor, grad, state };
        let moved = Rule::step(self, vec![member], pace).pop();
        let Moved { value, state } = moved.expect("one comes back for one");
        (value, Some(RuleState { steps, kept: state.into_iter().map(Kept::Tensor).collect() }))
    }

    fn to_device<const D: usize>(state: RuleState<D>, device: &Device) -> RuleState<D> {
        let kept = state.kept.into_iter().map(|kept| Kept::Tensor(kept.to_device(device)));
        RuleState { kept: kept.collect(), ..state }
    }
}
