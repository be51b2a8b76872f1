//! Cross-entropy in plain Burn operations.

use super::CrossEntropyOptions;
use burn::tensor::{DType, Int, Tensor};

/// [`cross_entropy`](super::cross_entropy) without its checks.
pub fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    options: &CrossEntropyOptions,
) -> Tensor<1> {
    let (sum, count) = sum_and_count(logits, targets, options);
    sum / count.clamp_min(1.0)
}

/// The summed loss of the targets that count, and their number.
pub(crate) fn sum_and_count(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    options: &CrossEntropyOptions,
) -> (Tensor<1>, Tensor<1>) {
    let [length, classes] = logits.dims();
    let ignored = targets.clone().equal_scalar(options.ignore_index);
    let outside = targets
        .clone()
        .lower_scalar(0)
        .bool_or(targets.clone().greater_equal_scalar(classes as i64));
    let class = targets.mask_fill(outside.clone(), 0).mask_fill(ignored.clone(), 0);
    let class = class.unsqueeze_dim::<2>(1);
    let counts = ignored.clone().bool_not().float().cast(DType::F32);
    // What stands in an ignored row, infinities and NaN included, is not looked at.
    let rows = ignored.clone().unsqueeze_dim::<2>(1).expand([length, classes]);
    let logits = logits.cast(DType::F32).mask_fill(rows, 0.0);
    // Relative to the largest logit, through which no gradient has to flow.
    let largest = logits.clone().detach().max_dim(1);
    let logits = logits - largest.clone();
    let log = logits.clone().exp().sum_dim(1).log();
    let mut loss = log.clone() - logits.clone().gather(1, class);
    if options.label_smoothing > 0.0 {
        let mean = log.clone() - logits.mean_dim(1);
        let smoothing = options.label_smoothing;
        loss = loss.mul_scalar(1.0 - smoothing) + mean.mul_scalar(smoothing);
    }
    if options.z_loss > 0.0 {
        loss = loss + (log + largest).square().mul_scalar(options.z_loss);
    }
    let loss = loss.squeeze_dim::<1>(1).mask_fill(outside, f32::NAN).mask_fill(ignored, 0.0);
    (loss.sum(), counts.sum())
}
