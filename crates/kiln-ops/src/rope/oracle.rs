//! RoPE in float64.

use super::{RopeLayout, RopeOptions};

/// y for x of shape `[B·H, T, D]`.
pub fn forward(
    x: &[f64],
    [length, width]: [usize; 2],
    options: &RopeOptions,
    offset: usize,
) -> Vec<f64> {
    turn(x, [length, width], options, offset, 1.0)
}

/// dx from the cotangent `dy`.
pub fn backward(
    dy: &[f64],
    [length, width]: [usize; 2],
    options: &RopeOptions,
    offset: usize,
) -> Vec<f64> {
    turn(dy, [length, width], options, offset, -1.0)
}

fn turn(
    x: &[f64],
    [length, width]: [usize; 2],
    options: &RopeOptions,
    offset: usize,
    sign: f64,
) -> Vec<f64> {
    let frequencies = options.frequencies(width);
    let mut y = vec![0.0; x.len()];
    for (row, (x, y)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
        let position = (row % length + offset) as f64;
        for (k, frequency) in frequencies.iter().enumerate() {
            let (i, j) = match options.layout {
                RopeLayout::Half => (k, k + width / 2),
                RopeLayout::Interleaved => (2 * k, 2 * k + 1),
            };
            let (sin, cos) = (position * frequency).sin_cos();
            y[i] = x[i] * cos + sign * x[j] * sin;
            y[j] = -sign * x[i] * sin + x[j] * cos;
        }
    }
    y
}
