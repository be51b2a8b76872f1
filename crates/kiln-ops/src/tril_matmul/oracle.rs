//! The triangular product in float64.

/// Y for a stack of `batches` pairs of N×N matrices.
pub fn forward(a: &[f64], b: &[f64], [batches, n]: [usize; 2]) -> Vec<f64> {
    let mut y = vec![0.0; batches * n * n];
    for z in 0..batches {
        let at = |i: usize, j: usize| (z * n + i) * n + j;
        for i in 0..n {
            for j in 0..=i {
                y[at(i, j)] = (j..=i).map(|k| a[at(i, k)] * b[at(k, j)]).sum();
            }
        }
    }
    y
}

/// dA and dB from the cotangent `dy`.
pub fn backward(
    a: &[f64],
    b: &[f64],
    [batches, n]: [usize; 2],
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut da, mut db) = (vec![0.0; a.len()], vec![0.0; b.len()]);
    for z in 0..batches {
        let at = |i: usize, j: usize| (z * n + i) * n + j;
        for i in 0..n {
            for k in 0..=i {
                da[at(i, k)] = (0..=k).map(|j| dy[at(i, j)] * b[at(k, j)]).sum();
            }
        }
        for k in 0..n {
            for j in 0..=k {
                db[at(k, j)] = (k..n).map(|i| a[at(i, k)] * dy[at(i, j)]).sum();
            }
        }
    }
    (da, db)
}
