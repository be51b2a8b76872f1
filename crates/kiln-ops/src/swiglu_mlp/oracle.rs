//! The SwiGLU MLP in float64.

use crate::oracle::product;
use crate::swiglu::oracle as swiglu;

/// y for `rows` rows of width `width` and inner width `inner`.
pub fn forward(
    x: &[f64],
    w_gate: &[f64],
    w_up: &[f64],
    w_down: &[f64],
    [rows, width, inner]: [usize; 3],
) -> Vec<f64> {
    let gate = product(x, w_gate, rows, width, inner, false, false);
    let up = product(x, w_up, rows, width, inner, false, false);
    product(&swiglu::forward(&gate, &up), w_down, rows, inner, width, false, false)
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
    let gate = product(x, w_gate, rows, width, inner, false, false);
    let up = product(x, w_up, rows, width, inner, false, false);
    let hidden = swiglu::forward(&gate, &up);
    let dhidden = product(dy, w_down, rows, width, inner, false, true);
    let (dgate, dup) = swiglu::backward(&gate, &up, &dhidden);
    let mut dx = product(&dgate, w_gate, rows, inner, width, false, true);
    for (dx, other) in dx.iter_mut().zip(product(&dup, w_up, rows, inner, width, false, true)) {
        *dx += other;
    }
    [
        dx,
        product(x, &dgate, width, rows, inner, true, false),
        product(x, &dup, width, rows, inner, true, false),
        product(&hidden, dy, inner, rows, width, true, false),
    ]
}
