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
    let counts = targets.clone().not_equal_scalar(ignore_index);
    let class = targets.mask_fill(counts.clone().bool_not(), 0).unsqueeze_dim::<2>(1);
    let counts = counts.float().cast(DType::F32);
    let chosen = log_softmax(logits.cast(DType::F32), 1).gather(1, class).squeeze_dim::<1>(1);
    ((chosen * counts.clone()).sum().neg(), counts.sum())
}
