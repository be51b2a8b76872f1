//! The sum and its RMSNorm in float64.

use crate::oracle::Number;
use crate::rms_norm::oracle as rms_norm;

/// The sum and its norm.
pub fn forward<N: Number>(x: &[N], residual: &[N], weight: &[N], eps: f64) -> (Vec<N>, Vec<N>) {
    let sum = sum(x, residual);
    let y = rms_norm::forward(&sum, weight, eps);
    (sum, y)
}

/// dx (which is dresidual too) and dw from the cotangents of the sum and of y.
pub fn backward<N: Number>(
    x: &[N],
    residual: &[N],
    weight: &[N],
    eps: f64,
    dsum: &[N],
    dy: &[N],
) -> (Vec<N>, Vec<N>) {
    let (dx, dw) = rms_norm::gradients(&sum(x, residual), weight, eps, dy, Some(dsum));
    let stored = |gradient: Vec<N>| gradient.into_iter().map(N::stored).collect();
    (stored(dx), stored(dw))
}

/// What is normalised, as it is stored.
pub fn sum<N: Number>(x: &[N], residual: &[N]) -> Vec<N> {
    x.iter().zip(residual).map(|(a, b)| (*a + *b).stored()).collect()
}
