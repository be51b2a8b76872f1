//! AdamW in Burn operations: what the kernel is compared with, and what runs where there is none.

use super::{AdamWOptions, Moving};
use burn::tensor::Tensor;

/// One step, in the element type of the parameter; checks are the caller's.
pub fn adamw<const D: usize>(
    of: Moving<D>,
    grad: Tensor<D>,
    scale: Option<Tensor<1>>,
    options: AdamWOptions,
) -> Moving<D> {
    let AdamWOptions { beta1, beta2, eps, .. } = options;
    let dtype = of.value.dtype();
    let grad = grad.cast(dtype);
    let grad = match scale {
        Some(scale) => grad * scale.cast(dtype).unsqueeze(),
        None => grad,
    };
    let first = of.first.mul_scalar(beta1) + grad.clone().mul_scalar(1.0 - beta1);
    let second = of.second.mul_scalar(beta2) + grad.square().mul_scalar(1.0 - beta2);
    // The corrections are numbers: they cost no pass over the tensors.
    let root = second.clone().sqrt().mul_scalar(options.root());
    let update = first.clone().mul_scalar(options.rate()) / root.add_scalar(eps);
    let kept = options.kept();
    let value = if kept == 1.0 { of.value } else { of.value.mul_scalar(kept) };
    let value = value - update;
    let copy = of.copy.map(|copy| value.clone().cast(copy.dtype()));
    Moving { value, first, second, copy }
}
