//! The Newton-Schulz iteration in float64.

use super::NewtonSchulzOptions;
use crate::oracle::{Number, product};

/// The iteration of a stack of `batches` matrices `[m, n]`.
pub fn forward<N: Number>(
    g: &[N],
    [batches, m, n]: [usize; 3],
    options: NewtonSchulzOptions,
) -> Vec<N> {
    (0..batches).flat_map(|z| iterate(&g[z * m * n..][..m * n], [m, n], options)).collect()
}

fn iterate<N: Number>(g: &[N], [m, n]: [usize; 2], options: NewtonSchulzOptions) -> Vec<N> {
    let transposed = |x: &[N], [m, n]: [usize; 2]| -> Vec<N> {
        (0..m * n).map(|i| x[i % m * n + i / m]).collect()
    };
    if m > n {
        return transposed(&iterate(&transposed(g, [m, n]), [n, m], options), [n, m]);
    }
    let mut x = normalised(g, options);
    // A matrix times one number: products that are rounded alike.
    if m == 1 || options.steps == 0 {
        x.iter_mut().for_each(|x| *x = x.of_row());
    }
    for step in 0..options.steps {
        let [a, b, c] = options.coefficients.of(step);
        let stored = |y: N| y.stored();
        let gram: Vec<N> = product(&x, &x, m, n, m, false, true).into_iter().map(stored).collect();
        let square = product(&gram, &gram, m, m, m, false, false);
        let sum = |(square, gram): (N, &N)| (square * c + *gram * b).stored();
        let polynomial: Vec<N> = square.into_iter().zip(&gram).map(sum).collect();
        let moved = product(&polynomial, &x, m, m, n, false, false);
        x = moved.into_iter().zip(&x).map(|(y, x)| (y + *x * a).stored()).collect();
    }
    x
}

fn normalised<N: Number>(g: &[N], options: NewtonSchulzOptions) -> Vec<N> {
    let squares = N::sum(g.iter().map(|g| *g * *g));
    if squares.value() == 0.0 {
        return g.to_vec();
    }
    let norm = squares * squares.rsqrt();
    let divisor = (norm * options.coefficients.norm_scale() + 1e-7).of_row();
    g.iter().map(|g| (*g / divisor).stored()).collect()
}
