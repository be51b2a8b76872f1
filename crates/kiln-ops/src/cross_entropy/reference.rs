//! Cross-entropy in plain Burn operations.

use burn::tensor::{DType, Int, Tensor, activation::log_softmax};

/// [`cross_entropy`](super::cross_entropy) without its checks.
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>, ignore_index: i64) -> Tensor<1> {
    let (sum, count) = sum_and_count(logits, targets, ignore_index);
    sum / count.clamp_min(1.0)
}

/// The summed loss of the targets that count, and their number.
pub(crate) fn sum_and_count(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    ignore_index: i64,
) -> (Tensor<1>, Tensor<1>) {
    let ignored = targets.clone().equal_scalar(ignore_index);
    let class = targets.mask_fill(ignored.clone(), 0).unsqueeze_dim::<2>(1);
    let counts = ignored.clone().bool_not().float().cast(DType::F32);
    // What stands in an ignored row, infinities and NaN included, is not looked at.
    let dims = logits.dims();
    let rows = ignored.clone().unsqueeze_dim::<2>(1).expand(dims);
    let logits = logits.cast(DType::F32).mask_fill(rows, 0.0);
    let chosen = log_softmax(logits, 1).gather(1, class).squeeze_dim::<1>(1);
    (chosen.mask_fill(ignored, 0.0).sum().neg(), counts.sum())
}
