//! Linear cross-entropy in float64.

use crate::cross_entropy::{CrossEntropyOptions, oracle as cross_entropy};
use crate::oracle::product;

/// The mean loss; sizes are `[M, D, V]`.
pub fn forward(
    x: &[f64],
    weight: &[f64],
    targets: &[i64],
    [rows, width, classes]: [usize; 3],
    options: &CrossEntropyOptions,
) -> f64 {
    let logits = product(x, weight, rows, width, classes, false, false);
    cross_entropy::forward(&logits, targets, classes, options)
}

/// dx and dweight for the cotangent `dloss`.
pub fn backward(
    x: &[f64],
    weight: &[f64],
    targets: &[i64],
    [rows, width, classes]: [usize; 3],
    options: &CrossEntropyOptions,
    dloss: f64,
) -> (Vec<f64>, Vec<f64>) {
    let logits = product(x, weight, rows, width, classes, false, false);
    let grad = cross_entropy::backward(&logits, targets, classes, options, dloss);
    (
        product(&grad, weight, rows, classes, width, false, true),
        product(x, &grad, width, rows, classes, true, false),
    )
}
