//! One step of Muon: momentum whose matrices are made nearly orthogonal. Of a weight p with the momentum m, its gradient
//! g, the decay rate μ of the momentum, the learning rate η and the decay λ,
//!
//! * m = μ·m + (1 − μ)·s·g
//! * u = μ·m + (1 − μ)·s·g (Nesterov), or m
//! * p = p·(1 − η·λ) − η·r·NS(u)
//!
//! with NS the [Newton-Schulz iteration](crate::newton_schulz) and r by the [`LearningRateScale`]. s is a factor on all
//! gradients, by which they are clipped. It is not differentiated. A model that multiplies in 16 bits gets p rounded to
//! them in the same pass.
//!
//! Source: Jordan et al., Muon, 2024.
//!
//! Beside the products of the iteration an element moves 14 bytes for u (g and m in, m and u out, u in bf16) and 10 for p,
//! 12 with p rounded.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::newton_schulz::NewtonSchulzOptions;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

const OP: &str = "muon";

/// By what the update of a weight `[in, out]` is multiplied, so that one learning rate fits all shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LearningRateScale {
    /// √max(1, out / in), as in the original.
    Original,
    /// 0.2 · √max(in, out): the update has the size of AdamW's, so that a learning rate of AdamW fits.
    MatchRmsAdamW,
}

impl LearningRateScale {
    fn factor(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            Self::Original => (columns / rows).max(1.0).sqrt(),
            Self::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
        }
    }
}

/// The numbers of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct MuonOptions {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay rate of the momentum, below 1.
    pub momentum: f64,
    /// Whether the gradient is weighed in once more.
    pub nesterov: bool,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// The iteration.
    pub newton_schulz: NewtonSchulzOptions,
    /// r.
    pub learning_rate_scale: LearningRateScale,
    /// Columns of the matrices that a weight has side by side, such as those of queries, keys and values; none for one
    /// matrix. A weight with other columns than their sum is one matrix.
    pub columns: Vec<usize>,
    /// In which element type u is stored and iterated: f32, bf16 or f16.
    pub dtype: DType,
}

impl Default for MuonOptions {
    fn default() -> Self {
        Self {
            learning_rate: 0.02,
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.0,
            newton_schulz: NewtonSchulzOptions::default(),
            learning_rate_scale: LearningRateScale::Original,
            columns: vec![],
            dtype: DType::F32,
        }
    }
}

impl MuonOptions {
    /// What is left of p: 1 − η·λ.
    fn kept(&self) -> f64 {
        1.0 - self.learning_rate * self.weight_decay
    }

    /// η·r, of matrices of so many rows and columns.
    fn rate(&self, rows: usize, columns: usize) -> f64 {
        self.learning_rate * self.learning_rate_scale.factor(rows, columns)
    }

    /// The matrices side by side in `columns`: how wide each is.
    fn parts(&self, columns: usize) -> Vec<usize> {
        let split = self.columns.iter().sum::<usize>() == columns && !self.columns.contains(&0);
        if split { self.columns.clone() } else { vec![columns] }
    }

    fn check(&self) -> Result<(), OpError> {
        let check = Check(OP);
        let rate = self.learning_rate;
        check.number("learning_rate", rate, rate.is_finite() && rate >= 0.0, "at least 0")?;
        let range = (0.0..1.0).contains(&self.momentum);
        check.number("momentum", self.momentum, range, "at least 0 and below 1")?;
        check.number("weight_decay", self.weight_decay, self.weight_decay.is_finite(), "finite")
    }
}

/// A weight and its momentum, of one shape, f32.
#[derive(Debug, Clone)]
pub struct MuonWeight<const D: usize> {
    /// p.
    pub value: Tensor<D>,
    /// m, zeros before the first step.
    pub momentum: Tensor<D>,
    /// p once more, rounded to bf16 or f16, as a model multiplies with it. The numbers that come are not read.
    pub copy: Option<Tensor<D>>,
}

/// The weights and their momenta after a step, in their order.
///
/// * `of`: `[..., in, out]` of rank 2 or more, all of one shape, f32; elements may be none.
/// * `grads`: one for each, the same shape, f32, bf16 or f16.
/// * `scale`: `[1]`, f32: s; none is 1.
///
/// All of them are iterated as one stack of matrices, up to 32 weights at a time; on CUDA they share launches, and each
/// value, momentum and copy is in the memory that it was in, if nobody else holds that and it has no gaps. What comes back is
/// constant.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use kiln_ops::prelude::*;
///
/// let device = Device::flex();
/// let value = Tensor::<2>::random([4, 8], Distribution::Default, &device);
/// let grad = Tensor::<2>::random([4, 8], Distribution::Normal(0.0, 1.0), &device);
/// let weight = MuonWeight { momentum: value.zeros_like(), value: value.clone(), copy: None };
/// let options = MuonOptions { learning_rate: 0.1, ..Default::default() };
/// let moved = muon(vec![weight], vec![grad], None, &options)?.remove(0);
/// // Four singular values, none far from √2 · 0.1.
/// let squares: f32 = (moved.value - value).square().sum().into_scalar();
/// assert!((0.03..0.11).contains(&squares));
/// # }
/// # Ok::<(), kiln_ops::OpError>(())
/// ```
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type, device or number, and where the fused kernel was asked for on a device
/// that has none.
///
/// # Panics
///
/// If there are not as many gradients as weights.
pub fn muon<const D: usize>(
    of: Vec<MuonWeight<D>>,
    grads: Vec<Tensor<D>>,
    scale: Option<Tensor<1>>,
    options: &MuonOptions,
) -> Result<Vec<MuonWeight<D>>, OpError> {
    assert_eq!(of.len(), grads.len(), "there is a gradient for each weight");
    let check = Check(OP);
    options.check()?;
    let scale = scale.map(Tensor::inner);
    let grads: Vec<Tensor<D>> = grads.into_iter().map(Tensor::inner).collect();
    let inner = |of: MuonWeight<D>| MuonWeight {
        value: of.value.inner(),
        momentum: of.momentum.inner(),
        copy: of.copy.map(Tensor::inner),
    };
    let of: Vec<MuonWeight<D>> = of.into_iter().map(inner).collect();
    let Some(first) = of.first() else { return Ok(of) };
    let (shape, device) = (first.value.dims(), first.value.device());
    check.shape("value", &shape, D >= 2, "[..., in, out] of rank 2 or more")?;
    check.float_on("dtype", options.dtype, &device)?;
    if let Some(scale) = &scale {
        check.shape("scale", &scale.dims(), scale.dims() == [1], "[1]")?;
        check.dtype("scale", scale, &[DType::F32])?;
        check.device("scale", &scale.device(), &device)?;
    }
    for (MuonWeight { value, momentum, copy }, grad) in of.iter().zip(&grads) {
        check.float("grad", grad)?;
        let tensors = [("value", value), ("grad", grad), ("momentum", momentum)];
        for (name, tensor) in tensors.into_iter().chain(copy.as_ref().map(|copy| ("copy", copy))) {
            check.shape(name, &tensor.dims(), tensor.dims() == shape, format!("{shape:?}"))?;
            check.device(name, &tensor.device(), &device)?;
        }
        for (name, tensor) in [("value", value), ("momentum", momentum)] {
            check.dtype(name, tensor, &[DType::F32])?;
        }
        if let Some(copy) = copy {
            check.dtype("copy", copy, &[DType::BF16, DType::F16])?;
        }
    }
    let elements = shape.iter().product();
    if elements == 0 {
        return Ok(of);
    }
    Ok(match policy::choose(OP, elements, &grads[0])? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(of, grads, scale, options),
        Choice::Reference => reference::muon(of, grads, scale, options),
    })
}
