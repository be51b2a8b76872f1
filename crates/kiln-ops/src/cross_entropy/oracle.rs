//! Cross-entropy in float64.

/// The mean loss for rows of `classes` logits.
pub fn forward(logits: &[f64], targets: &[i64], classes: usize, ignore_index: i64) -> f64 {
    let (mut sum, mut count) = (0.0, 0usize);
    for (row, target) in logits.chunks_exact(classes).zip(targets) {
        if *target != ignore_index {
            sum += logsumexp(row) - row[*target as usize];
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
    ignore_index: i64,
    dloss: f64,
) -> Vec<f64> {
    let count = targets.iter().filter(|t| **t != ignore_index).count().max(1) as f64;
    let mut grad = Vec::with_capacity(logits.len());
    for (row, target) in logits.chunks_exact(classes).zip(targets) {
        let lse = logsumexp(row);
        for (class, x) in row.iter().enumerate() {
            let onehot = f64::from(u8::from(class as i64 == *target));
            let counts = f64::from(u8::from(*target != ignore_index));
            grad.push(counts * ((x - lse).exp() - onehot) * dloss / count);
        }
    }
    grad
}

fn logsumexp(row: &[f64]) -> f64 {
    let max = row.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
    max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}
