//! The matrix product in float64.

use crate::oracle::{Number, product};

/// alpha · A·B for a stack of `batches` pairs.
pub fn forward<N: Number>(a: &[N], b: &[N], [batches, m, k, n]: [usize; 4], alpha: f64) -> Vec<N> {
    let mut y = Vec::with_capacity(batches * m * n);
    for z in 0..batches {
        let (a, b) = (&a[z * m * k..][..m * k], &b[z * k * n..][..k * n]);
        y.extend(scaled(product(a, b, m, k, n, false, false), alpha));
    }
    y
}

/// dA and dB from the cotangent `dy`.
pub fn backward<N: Number>(
    a: &[N],
    b: &[N],
    [batches, m, k, n]: [usize; 4],
    alpha: f64,
    dy: &[N],
) -> (Vec<N>, Vec<N>) {
    let (mut da, mut db) = (vec![], vec![]);
    for z in 0..batches {
        let (a, b) = (&a[z * m * k..][..m * k], &b[z * k * n..][..k * n]);
        let dy = &dy[z * m * n..][..m * n];
        da.extend(scaled(product(dy, b, m, n, k, false, true), alpha));
        db.extend(scaled(product(a, dy, k, m, n, true, false), alpha));
    }
    (da, db)
}

/// Times alpha, and stored. Kernels multiply by what f32 makes of alpha: that is off for all elements alike.
fn scaled<N: Number>(y: Vec<N>, alpha: f64) -> impl Iterator<Item = N> {
    let alpha = f64::from(alpha as f32);
    y.into_iter().map(move |y| if alpha == 1.0 { y } else { y * alpha }.stored())
}
