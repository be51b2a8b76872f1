//! The Newton-Schulz iteration in plain Burn operations.

use super::NewtonSchulzOptions;
use crate::matmul::reference::exact;
use burn::tensor::{DType, Tensor};

/// [`newton_schulz`](fn@super::newton_schulz) without its checks.
pub fn newton_schulz<const D: usize>(g: Tensor<D>, options: NewtonSchulzOptions) -> Tensor<D> {
    let transposed = |x: Tensor<D>| x.swap_dims(D - 2, D - 1);
    let (rows, columns) = (g.dims()[D - 2], g.dims()[D - 1]);
    let tall = rows > columns;
    let mut x = normalised(if tall { transposed(g) } else { g }, options);
    for step in 0..options.steps {
        let [a, b, c] = options.coefficients.of(step);
        let gram = multiply(x.clone(), transposed(x.clone()), 1.0, None);
        let polynomial = multiply(gram.clone(), gram.clone(), c, Some((gram, b)));
        x = multiply(polynomial, x.clone(), 1.0, Some((x, a)));
    }
    if tall { transposed(x) } else { x }
}

/// alpha · a·b + beta · c, of c and beta, stored in the element type of `a`.
fn multiply<const D: usize>(
    a: Tensor<D>,
    b: Tensor<D>,
    alpha: f64,
    add: Option<(Tensor<D>, f64)>,
) -> Tensor<D> {
    let dtype = a.dtype();
    let [a, b] = [a, b].map(|x| x.cast(DType::F32));
    let y = exact(a, b).mul_scalar(alpha);
    let y = match add {
        Some((c, beta)) => y + c.cast(DType::F32).mul_scalar(beta),
        None => y,
    };
    y.cast(dtype)
}

/// X₀, of the norm of each matrix in f32.
fn normalised<const D: usize>(g: Tensor<D>, options: NewtonSchulzOptions) -> Tensor<D> {
    let dtype = g.dtype();
    let g = g.cast(DType::F32);
    let norm = g.clone().square().sum_dim(D - 1).sum_dim(D - 2).sqrt();
    let divisor = norm.mul_scalar(options.coefficients.norm_scale()).add_scalar(1e-7);
    (g / divisor).cast(dtype)
}
