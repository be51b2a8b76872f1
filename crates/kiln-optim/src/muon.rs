//! Muon: momentum whose matrices are made nearly orthogonal.
//!
//! Source: Jordan et al., Muon, 2024. With g the gradient, μ the momentum, η the learning rate and λ the decay,
//!
//! * m = μ·m + (1 − μ)·g
//! * u = μ·m + (1 − μ)·g (Nesterov), or m
//! * p = p·(1 − η·λ) − η·s·NS(u)
//!
//! with NS the [Newton-Schulz iteration](kiln_ops::newton_schulz), on CUDA in bf16 and elsewhere in f32, and s by the
//! [`LearningRateScale`]. What is no matrix moves by AdamW; embeddings and a head should too, which a [group](crate::Optimizer::with_group) says.

use crate::rule::{Member, Moved, Pace};
use crate::{AdamWConfig, Optimizer, Settings};
use burn::config::Config;
use burn::tensor::{DType, Tensor};
use kiln_ops::device;
use kiln_ops::newton_schulz::{Coefficients, NewtonSchulzOptions, newton_schulz};

/// By what the update of a weight `[in, out]` is multiplied, so that one learning rate fits all shapes.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum LearningRateScale {
    /// √max(1, out / in), as in the original.
    Original,
    /// 0.2 · √max(in, out): the update has the size of AdamW's, so that a learning rate of AdamW fits.
    MatchRmsAdamW,
}

/// Configuration of Muon, for all parameters or one group.
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
        let shape = batch[0].value.shape();
        // Sums are f32 there too, and tensor cores multiply.
        let on_cuda = device::is_cuda(&batch[0].value.device());
        let dtype = if on_cuda { DType::BF16 } else { DType::F32 };
        let mut values = Vec::with_capacity(batch.len());
        let mut momenta = Vec::with_capacity(batch.len());
        let mut updates = Vec::with_capacity(batch.len());
        for Member { value, grad, mut state } in batch {
            let grad = match &pace.scale {
                Some(scale) => {
                    let scale = scale.clone().cast(grad.dtype());
                    grad * scale.unsqueeze()
                }
                None => grad,
            };
            let new = grad.mul_scalar(1.0 - self.momentum);
            let momentum = match state.pop().flatten() {
                Some(old) => old.mul_scalar(self.momentum) + new.clone(),
                None => new.clone(),
            };
            let update = match self.nesterov {
                true => momentum.clone().mul_scalar(self.momentum) + new,
                false => momentum.clone(),
            };
            let [rows, columns] = [shape[D - 2], shape[D - 1]];
            let matrices = shape.num_elements() / (rows * columns).max(1);
            updates.push(update.reshape([matrices, rows, columns]).cast(dtype));
            values.push(value);
            momenta.push(momentum);
        }
        let updates = self.orthogonal(Tensor::cat(updates, 0));
        let each = updates.chunk(values.len(), 0);
        let decay = 1.0 - pace.learning_rate * self.weight_decay;
        let moved = values.into_iter().zip(momenta).zip(each).map(|((value, momentum), update)| {
            let value = if decay == 1.0 { value } else { value.mul_scalar(decay) };
            let update = update.reshape(shape.clone()).mul_scalar(pace.learning_rate);
            let update = update.cast(value.dtype());
            Moved { value: value - update, state: vec![momentum] }
        });
        moved.collect()
    }

    /// The updates `[matrices, in, out]`, made orthogonal and scaled.
    fn orthogonal(&self, updates: Tensor<3>) -> Tensor<3> {
        let [_, rows, columns] = updates.dims();
        let split = self.columns.iter().sum::<usize>() == columns && !self.columns.contains(&0);
        let parts =
            if split { updates.split_with_sizes(self.columns.clone(), 2) } else { vec![updates] };
        let options = NewtonSchulzOptions { steps: self.steps, coefficients: self.coefficients };
        let made = parts.into_iter().map(|part| {
            let [_, _, columns] = part.dims();
            let y = newton_schulz(part, options).unwrap_or_else(|e| panic!("{e}"));
            y.cast(DType::F32).mul_scalar(self.factor(rows, columns))
        });
        Tensor::cat(made.collect(), 2)
    }

    fn factor(&self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self.learning_rate_scale {
            LearningRateScale::Original => (columns / rows).max(1.0).sqrt(),
            LearningRateScale::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
        }
    }
}
