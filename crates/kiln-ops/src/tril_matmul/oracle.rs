//! The triangular product in float64.

use crate::oracle::Number;

/// Y for a stack of `batches` pairs of N×N matrices.
pub fn forward<N: Number>(a: &[N], b: &[N], [batches, n]: [usize; 2]) -> Vec<N> {
    let mut y = vec![N::exact(0.0); batches * n * n];
    for z in 0..batches {
        let at = |i: usize, j: usize| (z * n + i) * n + j;
        for i in 0..n {
            for j in 0..=i {
                y[at(i, j)] = N::dot((j..=i).map(|k| (a[at(i, k)], b[at(k, j)]))).stored();
            }
        }
    }
    y
}

/// dA and dB from the cotangent `dy`.
pub fn backward<N: Number>(
    a: &[N],
    b: &[N],
    [batches, n]: [usize; 2],
    dy: &[N],
) -> (Vec<N>, Vec<N>) {
    let zeros = vec![N::exact(0.0); batches * n * n];
    let (mut da, mut db) = (zeros.clone(), zeros);
    for z in 0..batches {
        let at = |i: usize, j: usize| (z * n + i) * n + j;
        for i in 0..n {
            for k in 0..=i {
                da[at(i, k)] = N::dot((0..=k).map(|j| (dy[at(i, j)], b[at(k, j)]))).stored();
            }
        }
        for k in 0..n {
            for j in 0..=k {
                db[at(k, j)] = N::dot((k..n).map(|i| (a[at(i, k)], dy[at(i, j)]))).stored();
            }
        }
    }
    (da, db)
}
