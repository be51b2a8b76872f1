//! One step of AdamW, Adam with weight decay decoupled from the gradient: of a parameter p with the moments m and v,
//! its gradient g, the learning rate η, the decay λ and the step t, counted from 1,
//!
//! * m = β1·m + (1 − β1)·s·g
//! * v = β2·v + (1 − β2)·(s·g)²
//! * p = p·(1 − η·λ) − η · m/(1 − β1ᵗ) / (√(v/(1 − β2ᵗ)) + ε)
//!
//! as in PyTorch's `torch.optim.AdamW`. s is a factor on all gradients, by which they are clipped. It is not
//! differentiated.
//!
//! Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019 (arXiv 1711.05101).
//!
//! Bytes that must move for each element: 7 of f32, four in and three out; g in its element type.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Tensor};

const OP: &str = "adamw";

/// The numbers of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay rate of the first moment, below 1.
    pub beta1: f64,
    /// Decay rate of the second moment, below 1.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Steps, this one included: from 1.
    pub step: u64,
}

impl Default for AdamWOptions {
    /// The first step with PyTorch's numbers, but without decay.
    fn default() -> Self {
        let (beta1, beta2, eps) = (0.9, 0.999, 1e-8);
        Self { learning_rate: 1e-3, beta1, beta2, eps, weight_decay: 0.0, step: 1 }
    }
}

impl AdamWOptions {
    /// What m is multiplied with in the update: η/(1 − β1ᵗ).
    fn rate(&self) -> f64 {
        self.learning_rate / (1.0 - self.beta1.powf(self.step as f64))
    }

    /// What √v is multiplied with: (1 − β2ᵗ)^-½.
    fn root(&self) -> f64 {
        (1.0 - self.beta2.powf(self.step as f64)).sqrt().recip()
    }

    /// What is left of p: 1 − η·λ.
    fn kept(&self) -> f64 {
        1.0 - self.learning_rate * self.weight_decay
    }

    fn check(&self) -> Result<(), OpError> {
        let check = Check(OP);
        for (name, number) in [("learning_rate", self.learning_rate), ("eps", self.eps)] {
            check.number(name, number, number.is_finite() && number >= 0.0, "at least 0")?;
        }
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            check.number(name, beta, (0.0..1.0).contains(&beta), "at least 0 and below 1")?;
        }
        check.number("weight_decay", self.weight_decay, self.weight_decay.is_finite(), "finite")?;
        check.number("step", self.step as f64, self.step > 0, "at least 1")
    }
}

/// A parameter and its moments, of one shape, f32.
#[derive(Debug, Clone)]
pub struct Moving<const D: usize> {
    /// p.
    pub value: Tensor<D>,
    /// m, zeros before the first step.
    pub first: Tensor<D>,
    /// v, zeros before the first step.
    pub second: Tensor<D>,
}

/// The parameter and its moments after a step.
///
/// * `of`: any shape of rank 1 or more, f32; elements may be none.
/// * `grad`: the same shape, f32, bf16 or f16.
/// * `scale`: `[1]`, f32: s; none is 1.
///
/// On CUDA each of the three is in the memory that it was in, if nobody else holds that and it has no gaps.
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type, device or number, and where the fused kernel was asked for on a device
/// that has none.
pub fn adamw<const D: usize>(
    of: Moving<D>,
    grad: Tensor<D>,
    scale: Option<Tensor<1>>,
    options: AdamWOptions,
) -> Result<Moving<D>, OpError> {
    let check = Check(OP);
    let tracked = of.value.is_autodiff();
    let Moving { value, first, second } = of;
    let [value, first, second] = [value, first, second].map(Tensor::inner);
    let (grad, scale) = (grad.inner(), scale.map(Tensor::inner));
    check.dtype("value", &value, &[DType::F32])?;
    check.float("grad", &grad)?;
    let (shape, device) = (value.dims(), value.device());
    for (name, tensor) in [("grad", &grad), ("first", &first), ("second", &second)] {
        check.shape(name, &tensor.dims(), tensor.dims() == shape, format!("{shape:?}"))?;
        check.device(name, &tensor.device(), &device)?;
    }
    for (name, moment) in [("first", &first), ("second", &second)] {
        check.dtype(name, moment, &[DType::F32])?;
    }
    if let Some(scale) = &scale {
        check.shape("scale", &scale.dims(), scale.dims() == [1], "[1]")?;
        check.dtype("scale", scale, &[DType::F32])?;
        check.device("scale", &scale.device(), &device)?;
    }
    options.check()?;
    let of = Moving { value, first, second };
    let moved = match shape.iter().product() {
        0 => of,
        elements => match policy::choose(OP, elements, &grad)? {
            #[cfg(feature = "cube")]
            Choice::Fused => backend::fused(of, grad, scale, options),
            Choice::Reference => reference::adamw(of, grad, scale, options),
        },
    };
    Ok(match tracked {
        true => Moving { value: moved.value.autodiff(), ..moved },
        false => moved,
    })
}
