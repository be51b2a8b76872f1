//! The Newton-Schulz iteration in plain Burn operations.

use super::NewtonSchulzOptions;
use crate::matmul::MatmulOptions;
use crate::matmul::reference::exact;
use burn::tensor::{DType, Tensor};

/// [`newton_schulz`](fn@super::newton_schulz) without its checks.
pub fn newton_schulz<const D: usize>(g: Tensor<D>, options: NewtonSchulzOptions) -> Tensor<D> {
    iterate(g, options, |a, b, c, MatmulOptions { alpha, beta, .. }| {
        let dtype = a.dtype();
        let [a, b] = [a, b].map(|x| x.cast(DType::F32));
        let y = exact(a, b).mul_scalar(alpha);
        match c {
            Some(c) => y + c.cast(DType::F32).mul_scalar(beta),
            None => y,
        }
        .cast(dtype)
    })
}

/// The iteration, by whatever multiplies: alpha · a·b + beta · c, stored in the element type of `a`.
pub(crate) fn iterate<const D: usize>(
    g: Tensor<D>,
    options: NewtonSchulzOptions,
    multiply: impl Fn(Tensor<D>, Tensor<D>, Option<Tensor<D>>, MatmulOptions) -> Tensor<D>,
) -> Tensor<D> {
    let transposed = |x: Tensor<D>| x.swap_dims(D - 2, D - 1);
    let (rows, columns) = (g.dims()[D - 2], g.dims()[D - 1]);
    let tall = rows > columns;
    let mut x = normalised(if tall { transposed(g) } else { g }, options);
    let symmetric = MatmulOptions { symmetric: true, ..MatmulOptions::default() };
    for step in 0..options.steps {
        let [a, b, c] = options.coefficients.of(step);
        let gram = multiply(x.clone(), transposed(x.clone()), None, symmetric);
        let factors = MatmulOptions { alpha: c, beta: b, ..symmetric };
        let polynomial = multiply(gram.clone(), gram.clone(), Some(gram), factors);
        let factors = MatmulOptions { beta: a, ..MatmulOptions::default() };
        x = multiply(polynomial, x.clone(), Some(x), factors);
    }
    if tall { transposed(x) } else { x }
}

/// X₀, of the norm of each matrix in f32.
fn normalised<const D: usize>(g: Tensor<D>, options: NewtonSchulzOptions) -> Tensor<D> {
    let dtype = g.dtype();
    let g = g.cast(DType::F32);
    let norm = g.clone().square().sum_dim(D - 1).sum_dim(D - 2).sqrt();
    let divisor = norm.mul_scalar(options.coefficients.norm_scale()).add_scalar(1e-7);
    (g / divisor).cast(dtype)
}
