//! The sum and its RMSNorm in float64.

use crate::rms_norm::oracle as rms_norm;

/// The sum and its norm.
pub fn forward(x: &[f64], residual: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let sum: Vec<f64> = x.iter().zip(residual).map(|(a, b)| a + b).collect();
    let y = rms_norm::forward(&sum, weight, eps);
    (sum, y)
}

/// dx (which is dresidual too) and dw from the cotangents of the sum and of y.
pub fn backward(
    x: &[f64],
    residual: &[f64],
    weight: &[f64],
    eps: f64,
    dsum: &[f64],
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let sum: Vec<f64> = x.iter().zip(residual).map(|(a, b)| a + b).collect();
    let (mut dx, dw) = rms_norm::backward(&sum, weight, eps, dy);
    for (dx, dsum) in dx.iter_mut().zip(dsum) {
        *dx += dsum;
    }
    (dx, dw)
}
