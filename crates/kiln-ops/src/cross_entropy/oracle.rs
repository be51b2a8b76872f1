//! Cross-entropy in float64.

use super::CrossEntropyOptions;

/// The mean loss for rows of `classes` logits.
pub fn forward(
    logits: &[f64],
    targets: &[i64],
    classes: usize,
    options: &CrossEntropyOptions,
) -> f64 {
    let (mut sum, mut count) = (0.0, 0usize);
    for (row, target) in logits.chunks_exact(classes).zip(targets) {
        if *target != options.ignore_index {
            let (lse, smoothing) = (logsumexp(row), options.label_smoothing);
            sum += lse - (1.0 - smoothing) * row[*target as usize];
            // Without smoothing a class may be masked out by −∞, which makes the mean −∞.
            if smoothing > 0.0 {
                sum -= smoothing * row.iter().sum::<f64>() / classes as f64;
            }
            sum += options.z_loss * lse * lse;
            count += 1;
        }
    }
    sum / count.max(1) as f64
}

/// The gradient of the logits for the cotangent `dloss`.
pub fn backward(
    logits: &[f64],
    targets: &[i64],
    classes: usize,
    options: &CrossEntropyOptions,
    dloss: f64,
) -> Vec<f64> {
    let count = targets.iter().filter(|t| **t != options.ignore_index).count().max(1) as f64;
    let mut grad = Vec::with_capacity(logits.len());
    for (row, target) in logits.chunks_exact(classes).zip(targets) {
        let (lse, smoothing) = (logsumexp(row), options.label_smoothing);
        for (class, x) in row.iter().enumerate() {
            let onehot = f64::from(u8::from(class as i64 == *target));
            let counts = f64::from(u8::from(*target != options.ignore_index));
            let wanted = (1.0 - smoothing) * onehot + smoothing / classes as f64;
            let softmax = (x - lse).exp() * (1.0 + 2.0 * options.z_loss * lse);
            grad.push(counts * (softmax - wanted) * dloss / count);
        }
    }
    grad
}

fn logsumexp(row: &[f64]) -> f64 {
    let max = row.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
    max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}
