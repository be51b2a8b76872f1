//! The matrix product in float64.

use crate::oracle::product;

/// alpha · A·B for a stack of `batches` pairs.
pub fn forward(a: &[f64], b: &[f64], [batches, m, k, n]: [usize; 4], alpha: f64) -> Vec<f64> {
    let mut y = Vec::with_capacity(batches * m * n);
    for z in 0..batches {
        let (a, b) = (&a[z * m * k..][..m * k], &b[z * k * n..][..k * n]);
        y.extend(product(a, b, m, k, n, false, false).into_iter().map(|v| alpha * v));
    }
    y
}

/// dA and dB from the cotangent `dy`.
pub fn backward(
    a: &[f64],
    b: &[f64],
    [batches, m, k, n]: [usize; 4],
    alpha: f64,
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut da, mut db) = (vec![], vec![]);
    for z in 0..batches {
        let (a, b) = (&a[z * m * k..][..m * k], &b[z * k * n..][..k * n]);
        let dy = &dy[z * m * n..][..m * n];
        da.extend(product(dy, b, m, n, k, false, true).into_iter().map(|v| alpha * v));
        db.extend(product(a, dy, k, m, n, true, false).into_iter().map(|v| alpha * v));
    }
    (da, db)
}
