//! Float64 oracles of all operators: the formulas with plain loops, knowing nothing of the kernels.
//!
//! Tensors are row-major slices of `f64`. A backward takes the inputs and the cotangents and
//! returns the gradients in the order of the inputs.

pub use crate::add_rms_norm::oracle as add_rms_norm;
pub use crate::attention::oracle as attention;
pub use crate::cross_entropy::oracle as cross_entropy;
pub use crate::linear_cross_entropy::oracle as linear_cross_entropy;
pub use crate::rms_norm::oracle as rms_norm;
pub use crate::rope::oracle as rope;
pub use crate::swiglu::oracle as swiglu;
pub use crate::swiglu_mlp::oracle as swiglu_mlp;

/// C = op(A) · op(B) for row-major A and B; `[m, k] · [k, n]` after the transposes.
pub(crate) fn matmul(a: &[f64], b: &[f64], m: usize, k: usize, n: usize, ta: bool, tb: bool) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for x in 0..k {
            let left = if ta { a[x * m + i] } else { a[i * k + x] };
            for j in 0..n {
                let right = if tb { b[j * k + x] } else { b[x * n + j] };
                c[i * n + j] += left * right;
            }
        }
    }
    c
}
