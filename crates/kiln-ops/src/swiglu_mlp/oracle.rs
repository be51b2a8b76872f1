//! The SwiGLU MLP in float64.

use crate::oracle::matmul;
use crate::swiglu::oracle as swiglu;

/// y for `rows` rows of width `width` and inner width `inner`.
pub fn forward(
    x: &[f64],
    w_gate: &[f64],
    w_up: &[f64],
    w_down: &[f64],
    [rows, width, inner]: [usize; 3],
) -> Vec<f64> {
    let gate = matmul(x, w_gate, rows, width, inner, false, false);
    let up = matmul(x, w_up, rows, width, inner, false, false);
    matmul(&swiglu::forward(&gate, &up), w_down, rows, inner, width, false, false)
}

/// dx, dw_gate, dw_up, dw_down from the cotangent `dy`.
pub fn backward(
    x: &[f64],
    w_gate: &[f64],
    w_up: &[f64],
    w_down: &[f64],
    [rows, width, inner]: [usize; 3],
    dy: &[f64],
) -> [Vec<f64>; 4] {
    let gate = matmul(x, w_gate, rows, width, inner, false, false);
    let up = matmul(x, w_up, rows, width, inner, false, false);
    let hidden = swiglu::forward(&gate, &up);
    let dhidden = matmul(dy, w_down, rows, width, inner, false, true);
    let (dgate, dup) = swiglu::backward(&gate, &up, &dhidden);
    let mut dx = matmul(&dgate, w_gate, rows, inner, width, false, true);
    for (dx, other) in dx.iter_mut().zip(matmul(&dup, w_up, rows, inner, width, false, true)) {
        *dx += other;
    }
    [
        dx,
        matmul(x, &dgate, width, rows, inner, true, false),
        matmul(x, &dup, width, rows, inner, true, false),
        matmul(&hidden, dy, inner, rows, width, true, false),
    ]
}
