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
//! A model that multiplies in 16 bits gets p rounded to them in the same pass.
//!
//! Bytes that must move for each element: 24 for p, m and v in and out, those of g, and 2 for p rounded.

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
use burn::tensor::{DType, Device, Tensor};
use std::any::Any;

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
    /// p once more, rounded to bf16 or f16, as a model multiplies with it. The numbers that come are not read.
    pub copy: Option<Tensor<D>>,
}

/// The parameter and its moments after a step.
///
/// * `of`: any shape of rank 1 or more, f32; elements may be none.
/// * `grad`: the same shape, f32, bf16 or f16.
/// * `scale`: `[1]`, f32: s; none is 1.
///
/// On CUDA each of them is in the memory that it was in, if nobody else holds that and it has no gaps. For many parameters
/// there is [`AdamWBatch`].
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
    let mut batch = AdamWBatch::new(scale, options)?;
    batch.push(of, grad)?;
    Ok(batch.step().take().expect("one comes back for one"))
}

/// Parameters of any ranks and shapes that take a step with the same numbers: on CUDA up to 32 of them in one launch,
/// those whose gradients, and copies, are of one element type, and whose sizes and strides allow the same vectors, of
/// each 32 with copies, or without, that were added one after the other. It is one step: the next one is another batch, with the next `step` in its options.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use kiln_ops::prelude::*;
///
/// let device = Device::flex();
/// let mut batch = AdamWBatch::new(None, AdamWOptions::default())?;
/// let zeros = Tensor::<2>::zeros([3, 4], &device);
/// let weight = Moving { value: zeros.clone(), first: zeros.clone(), second: zeros.clone(), copy: None };
/// batch.push(weight, zeros + 1.0)?;
/// let zeros = Tensor::<1>::zeros([4], &device);
/// let bias = Moving { value: zeros.clone(), first: zeros.clone(), second: zeros.clone(), copy: None };
/// batch.push(bias, zeros - 1.0)?;
/// let mut moved = batch.step();
/// let weight: Moving<2> = moved.take().unwrap();
/// let bias: Moving<1> = moved.take().unwrap();
/// assert!(weight.value.max().into_scalar::<f32>() < 0.0);
/// assert!(bias.value.min().into_scalar::<f32>() > 0.0);
/// # }
/// # Ok::<(), kiln_ops::OpError>(())
/// ```
#[must_use = "the parameters that were added come back from a step"]
pub struct AdamWBatch {
    scale: Option<Tensor<1>>,
    options: AdamWOptions,
    /// Of all of them.
    device: Option<Device>,
    places: Vec<Place>,
    #[cfg(feature = "cube")]
    queue: Vec<backend::Single>,
}

/// A parameter of a batch.
enum Place {
    /// A [`Moving`] of its rank, after its step.
    Done(Box<dyn Any + Send>),
    /// The next one of the queue.
    #[cfg(feature = "cube")]
    Queued {
        /// Whether it comes back on the autodiff backend.
        tracked: bool,
        rank: usize,
    },
}

impl AdamWBatch {
    /// No parameters yet; `scale`, `[1]`, f32, is s, and none is 1.
    ///
    /// # Errors
    ///
    /// [`OpError`] on a wrong shape, element type or number.
    pub fn new(scale: Option<Tensor<1>>, options: AdamWOptions) -> Result<Self, OpError> {
        let check = Check(OP);
        let scale = scale.map(Tensor::inner);
        if let Some(scale) = &scale {
            check.shape("scale", &scale.dims(), scale.dims() == [1], "[1]")?;
            check.dtype("scale", scale, &[DType::F32])?;
        }
        options.check()?;
        Ok(Self {
            device: None,
            scale,
            options,
            places: vec![],
            #[cfg(feature = "cube")]
            queue: vec![],
        })
    }

    /// Adds a parameter, as [`adamw`] takes it.
    ///
    /// # Errors
    ///
    /// As there, and for a parameter on another device than those before; it is not added then, and gone.
    pub fn push<const D: usize>(&mut self, of: Moving<D>, grad: Tensor<D>) -> Result<(), OpError> {
        let check = Check(OP);
        let tracked = of.value.is_autodiff();
        let Moving { value, first, second, copy } = of;
        let [value, first, second] = [value, first, second].map(Tensor::inner);
        let (copy, grad) = (copy.map(Tensor::inner), grad.inner());
        check.dtype("value", &value, &[DType::F32])?;
        check.float("grad", &grad)?;
        let (shape, device) = (value.dims(), value.device());
        let tensors = [("grad", &grad), ("first", &first), ("second", &second)];
        for (name, tensor) in tensors.into_iter().chain(copy.as_ref().map(|copy| ("copy", copy))) {
            check.shape(name, &tensor.dims(), tensor.dims() == shape, format!("{shape:?}"))?;
            check.device(name, &tensor.device(), &device)?;
        }
        for (name, moment) in [("first", &first), ("second", &second)] {
            check.dtype(name, moment, &[DType::F32])?;
        }
        if let Some(copy) = &copy {
            check.dtype("copy", copy, &[DType::BF16, DType::F16])?;
        }
        if let Some(scale) = &self.scale {
            check.device("scale", &scale.device(), &device)?;
        }
        if let Some(of_batch) = &self.device {
            check.device("value", &device, of_batch)?;
        }
        let of = Moving { value, first, second, copy };
        let moved = match shape.iter().product() {
            0 => of,
            elements => match policy::choose(OP, elements, &grad)? {
                #[cfg(feature = "cube")]
                Choice::Fused => {
                    self.device = Some(device);
                    self.queue.push(backend::Single::new(of, grad));
                    self.places.push(Place::Queued { tracked, rank: D });
                    return Ok(());
                }
                Choice::Reference => reference::adamw(of, grad, self.scale.clone(), self.options),
            },
        };
        self.device = Some(device);
        self.places.push(Place::Done(Box::new(tracked_if(tracked, moved))));
        Ok(())
    }

    /// The parameters after the step, in the order in which they were added.
    pub fn step(self) -> AdamWMoved {
        AdamWMoved {
            places: self.places.into_iter(),
            #[cfg(feature = "cube")]
            queue: backend::fused(self.queue, self.scale, self.options, self.device.as_ref())
                .into_iter(),
        }
    }
}

fn tracked_if<const D: usize>(tracked: bool, moved: Moving<D>) -> Moving<D> {
    match tracked {
        true => {
            let copy = moved.copy.map(Tensor::autodiff);
            Moving { value: moved.value.autodiff(), copy, ..moved }
        }
        false => moved,
    }
}

/// The parameters of an [`AdamWBatch`] after its step. A value that came on the autodiff backend comes back on it, and its copy
/// too, but as no leaf: `require_grad` makes it one.
pub struct AdamWMoved {
    places: std::vec::IntoIter<Place>,
    #[cfg(feature = "cube")]
    queue: std::vec::IntoIter<backend::Done>,
}

const RANK: &str = "a parameter has the rank that it had";

impl AdamWMoved {
    /// The next parameter, none behind the last.
    ///
    /// # Panics
    ///
    /// If it has another rank than `D`.
    pub fn take<const D: usize>(&mut self) -> Option<Moving<D>> {
        Some(match self.places.next()? {
            Place::Done(moved) => *moved.downcast().expect(RANK),
            #[cfg(feature = "cube")]
            Place::Queued { tracked, rank } => {
                assert_eq!(rank, D, "{RANK}");
                let moved = self.queue.next().expect("all that were queued come back");
                tracked_if(tracked, moved.moving())
            }
        })
    }
}
