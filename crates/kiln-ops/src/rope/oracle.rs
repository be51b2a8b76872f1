//! RoPE in float64.

use super::{RopeLayout, RopeOptions};
use crate::oracle::Number;

/// y for x of shape `[B·H, T, D]`.
pub fn forward<N: Number>(
    x: &[N],
    [length, width]: [usize; 2],
    options: &RopeOptions,
    offset: usize,
) -> Vec<N> {
    rotate(x, [length, width], options, offset, 1.0)
}

/// dx from the cotangent `dy`.
pub fn backward<N: Number>(
    dy: &[N],
    [length, width]: [usize; 2],
    options: &RopeOptions,
    offset: usize,
) -> Vec<N> {
    rotate(dy, [length, width], options, offset, -1.0)
}

fn rotate<N: Number>(
    x: &[N],
    [length, width]: [usize; 2],
    options: &RopeOptions,
    offset: usize,
    sign: f64,
) -> Vec<N> {
    let frequencies: Vec<f64> =
        (0..width / 2).map(|pair| frequency(pair, width, options)).collect();
    let mut y = x.to_vec();
    for (row, (x, y)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
        let position = (row % length + offset) as f64;
        for (k, frequency) in frequencies.iter().enumerate() {
            let (i, j) = match options.layout {
                RopeLayout::Half => (k, k + width / 2),
                RopeLayout::Interleaved => (2 * k, 2 * k + 1),
            };
            // Tables are made in f64 and kept in f32. All vectors of a position have these roundings in common.
            let (sin, cos) = (position * frequency).sin_cos();
            let times = |x: N, held: f64| (x * N::exact(held)).off_by(1.0);
            y[i] = (times(x[i], cos) + times(x[j], sign * sin)).stored();
            y[j] = (times(x[j], cos) - times(x[i], sign * sin)).stored();
        }
    }
    y
}

/// By how much a pair turns from one position to the next; from the formulas, not from what fills the tables.
fn frequency(pair: usize, width: usize, options: &RopeOptions) -> f64 {
    let (pair, width) = (pair as f64, width as f64);
    let share = match options.truncated {
        false => 2.0 * pair / width,
        // A linspace from 0 to 1 over a quarter of the width; the other pairs stand still.
        true if pair < width / 4.0 => pair / (width / 4.0 - 1.0).max(1.0),
        true => return 0.0,
    };
    (-share * options.base.ln()).exp()
}
