//! [Muon](kiln_ops::muon), for all parameters or one group: it iterates on CUDA in bf16 and elsewhere in f32. Parameters of
//! other element types move in f32.
//!
//! What is no matrix moves by AdamW; embeddings and a head should too, which a [group](crate::Optimizer::with_group) says.

use crate::rule::{Member, Moved, Pace};
use crate::{AdamWConfig, Optimizer, Settings};
use burn::config::Config;
use burn::tensor::{DType, Tensor};
use kiln_ops::device;
use kiln_ops::muon::{LearningRateScale, MuonOptions, MuonWeight, muon};
use kiln_ops::newton_schulz::{Coefficients, NewtonSchulzOptions};

/// Configuration of Muon, for all parameters or one group.
///
/// It moves every matrix, embeddings and an output head too, which AdamW should: give them a group,
/// `.with_group(ParamGroup::from_predicate("embedding"), AdamWConfig::new())`. For a learning rate of AdamW's there is
/// [`LearningRateScale::MatchRmsAdamW`].
#[derive(Config, Debug, PartialEq)]
pub struct MuonConfig {
    /// Decay rate of the momentum.
    #[config(default = 0.95)]
    pub momentum: f64,
    /// Whether the gradient is weighed in once more.
    #[config(default = true)]
    pub nesterov: bool,
    /// Decoupled weight decay.
    #[config(default = 0.0)]
    pub weight_decay: f64,
    /// Steps of the iteration.
    #[config(default = 5)]
    pub steps: usize,
    /// Their factors.
    #[config(default = "Coefficients::Muon")]
    pub coefficients: Coefficients,
    /// What the update is multiplied by.
    #[config(default = "LearningRateScale::Original")]
    pub learning_rate_scale: LearningRateScale,
    /// Columns of the matrices that a weight has side by side, such as those of queries, keys and values; none for
    /// one matrix. A weight with other columns than their sum is one matrix.
    #[config(default = "Vec::new()")]
    pub columns: Vec<usize>,
    /// How parameters of fewer than two dimensions move.
    #[config(default = "AdamWConfig::new()")]
    pub adamw: AdamWConfig,
}

impl MuonConfig {
    /// An optimizer that moves all matrices by Muon, the rest by AdamW, and has taken no step.
    pub fn init(&self) -> Optimizer {
        Optimizer::new(Settings::from(self.clone()))
    }

    /// One step of parameters of one shape, of two dimensions or more: matrices `[in, out]`, or stacks of them. The
    /// state is the momentum.
    pub(crate) fn step<const D: usize>(&self, batch: Vec<Member<D>>, pace: &Pace) -> Vec<Moved<D>> {
        // Sums are f32 there too, and tensor cores multiply.
        let on_cuda = device::is_cuda(&batch[0].value.device());
        let options = MuonOptions {
            learning_rate: pace.learning_rate,
            momentum: self.momentum,
            nesterov: self.nesterov,
            weight_decay: self.weight_decay,
            newton_schulz: NewtonSchulzOptions {
                steps: self.steps,
                coefficients: self.coefficients,
            },
            learning_rate_scale: self.learning_rate_scale,
            columns: self.columns.clone(),
            dtype: if on_cuda { DType::BF16 } else { DType::F32 },
        };
        let mut dtypes = Vec::with_capacity(batch.len());
        let (mut of, mut grads) = (vec![], vec![]);
        for Member { value, copy, grad, state } in batch {
            dtypes.push(value.dtype());
            let value = in_f32(value);
            let momentum = state.and_then(|mut kept| kept.pop()).map(in_f32);
            let momentum = momentum.unwrap_or_else(|| value.zeros_like());
            of.push(MuonWeight { value, momentum, copy });
            grads.push(if grad.dtype() == DType::F64 { in_f32(grad) } else { grad });
        }
        let moved = muon(of, grads, pace.scale.clone(), &options);
        let moved = moved.unwrap_or_else(|error| panic!("{error}"));
        let back = |(of, dtype): (MuonWeight<D>, DType)| {
            let MuonWeight { value, momentum, copy } = of;
            let value = if dtype == DType::F32 { value } else { value.cast(dtype) };
            Moved { value, copy, state: vec![momentum] }
        };
        moved.into_iter().zip(dtypes).map(back).collect()
    }
}

fn in_f32<const D: usize>(of: Tensor<D>) -> Tensor<D> {
    if of.dtype() == DType::F32 { of } else { of.cast(DType::F32) }
}
