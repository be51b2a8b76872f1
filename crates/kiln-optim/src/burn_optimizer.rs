//! A [`Rule`] behind Burn's own optimizer trait, one tensor at a time: for what takes Burn's
//! [`ModuleOptimizer`](burn::optim::ModuleOptimizer), such as the `Learner` of burn-train.
//!
//! The formulas and their numbers are those of [`Optimizer`](crate::Optimizer), but nothing is batched, the state is
//! Burn's, by the ids of parameters, and a parameter counts the steps in which it had a gradient.

use crate::rule::{KEPT, Member, Moved, Pace, Rule};
use crate::state;
use burn::optim::{self, LearningRate, RecordState, StateSink, StateSource};
use burn::tensor::{DType, Device, Tensor, TensorData};

/// What a rule keeps of one parameter, in f32 for parameters of 16 bits too. That of another rule counts for nothing.
#[derive(Clone)]
pub struct RuleState<const D: usize> {
    /// Steps taken.
    steps: u64,
    /// Such as the two moments of AdamW, and their names.
    kept: Vec<(&'static str, Kept<D>)>,
}

/// Burn loads a state before it says for which device: onto the default one, which may not even be there.
#[derive(Clone)]
enum Kept<const D: usize> {
    Tensor(Tensor<D>),
    Saved(TensorData),
}

impl<const D: usize> Kept<D> {
    fn on(self, device: &Device) -> Tensor<D> {
        match self {
            Self::Tensor(tensor) => tensor.to_device(device),
            Self::Saved(data) => {
                let dtype = data.dtype();
                Tensor::from_data(data, (device, dtype))
            }
        }
    }

    fn to_data(&self) -> TensorData {
        match self {
            Self::Tensor(tensor) => state::read(tensor),
            Self::Saved(data) => data.clone(),
        }
    }
}

/// Leaves `steps` and the names of what is kept.
impl<const D: usize> RecordState for RuleState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_scalar(prefix, "steps", self.steps.into());
        for (name, kept) in &self.kept {
            out.push_tensor(prefix, name, kept.to_data());
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, _: &Device) -> Option<Self> {
        let steps = src.take_scalar(prefix, "steps")?.try_into().ok()?;
        let saved =
            KEPT.into_iter().filter_map(|name| Some((name, src.take_tensor(prefix, name)?)));
        Some(Self { steps, kept: saved.map(|(name, data)| (name, Kept::Saved(data))).collect() })
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
        let (device, dtype, names) = (tensor.device(), tensor.dtype(), self.state(D));
        let saved = state.filter(|state| state.kept.iter().map(|(name, _)| name).eq(names));
        let (steps, kept) = saved.map_or((0, vec![]), |state| (state.steps, state.kept));
        let kept = kept.into_iter().map(|(_, kept)| kept.on(&device));
        let state = (steps > 0).then(|| kept.collect());
        let steps = steps + 1;
        let pace = Pace { learning_rate: lr, step: steps, scale: None };
        let wide = match dtype {
            DType::F16 | DType::BF16 => DType::F32,
            wide => wide,
        };
        let (value, grad) = (tensor.cast(wide), grad.cast(wide));
        let member = Member { value, copy: None, grad, state };
        let moved = Rule::step(self, vec![member], &pace).pop();
        let Moved { value, state, .. } = moved.expect("one comes back for one");
        let kept = names.iter().copied().zip(state.into_iter().map(Kept::Tensor)).collect();
        (value.cast(dtype), Some(RuleState { steps, kept }))
    }

    fn to_device<const D: usize>(state: RuleState<D>, device: &Device) -> RuleState<D> {
        let moved = |(name, kept): (_, Kept<D>)| (name, Kept::Tensor(kept.on(device)));
        RuleState { kept: state.kept.into_iter().map(moved).collect(), ..state }
    }
}
