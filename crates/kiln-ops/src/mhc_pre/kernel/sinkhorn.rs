//! Sinkhorn's iteration over one matrix in registers, there and back.
//!
//! The way back needs each matrix that was divided. They are not kept: the sums are, and the matrices made again by
//! multiplying with them. What goes back is h = g·a, of each element of a matrix a and its gradient g: a division by s leaves
//! (g − Σ g·a) / s of g, and h − a·Σ h of h, which takes fewer steps. On CUDA lines are multiplied with reciprocals: a
//! division takes ten instructions and a branch.

// A sum is a value; a variable itself would be handed over to change.
#![allow(clippy::identity_op)]

use crate::exponential::reciprocal;
use cubecl::prelude::*;

/// What [`over`] takes in the place of a sum.
#[cube]
fn divisor(sum: f32, #[comptime] ptx: bool) -> f32 {
    if comptime!(ptx) { reciprocal(sum) } else { sum + 0.0 }
}

/// x / sum.
#[cube]
fn over(x: f32, divisor: f32, #[comptime] ptx: bool) -> f32 {
    if comptime!(ptx) { x * divisor } else { x / divisor }
}

/// From logits to what `repeats` repeats, at least one, make of their exponentials.
#[cube]
pub(super) fn project(
    a: &mut Array<f32>,
    repeats: u32,
    eps: f32,
    #[comptime] n: usize,
    #[comptime] ptx: bool,
) {
    begin(a, eps, n, ptx);
    repeat(a, repeats - 1, eps, n, ptx);
}

/// What the first repeat makes.
#[cube]
pub(super) fn begin(a: &mut Array<f32>, eps: f32, #[comptime] n: usize, #[comptime] ptx: bool) {
    softmax(a, n, ptx);
    add(a, eps, n);
    let _ = divide(a, eps, n, false, ptx);
}

/// So many repeats more, after [`begin`].
#[cube]
pub(super) fn repeat(
    a: &mut Array<f32>,
    times: u32,
    eps: f32,
    #[comptime] n: usize,
    #[comptime] ptx: bool,
) {
    for _ in 0..times {
        let _ = divide(a, eps, n, true, ptx);
        let _ = divide(a, eps, n, false, ptx);
    }
}

/// Each row becomes its softmax.
#[cube]
pub(super) fn softmax(a: &mut Array<f32>, #[comptime] n: usize, #[comptime] ptx: bool) {
    #[unroll]
    for row in 0..n {
        let mut largest = a[comptime!(row * n)];
        #[unroll]
        for i in 1..n {
            largest = max(largest, a[comptime!(row * n + i)]);
        }
        let mut sum = f32::new(0.0);
        #[unroll]
        for i in 0..n {
            let exp = f32::exp(a[comptime!(row * n + i)] - largest);
            a[comptime!(row * n + i)] = exp;
            sum += exp;
        }
        let divisor = divisor(sum + 0.0, ptx);
        #[unroll]
        for i in 0..n {
            let at = comptime!(row * n + i);
            a[at] = over(a[at], divisor, ptx);
        }
    }
}

/// Adds eps to every element.
#[cube]
pub(super) fn add(a: &mut Array<f32>, eps: f32, #[comptime] n: usize) {
    #[unroll]
    for i in 0..comptime!(n * n) {
        a[i] += eps;
    }
}

/// The element of a row or a column.
fn place(line: usize, i: usize, n: usize, rows: bool) -> usize {
    if rows { line * n + i } else { i * n + line }
}

/// Divides rows, or columns, by their sums plus eps, and returns these.
#[cube]
pub(super) fn divide(
    a: &mut Array<f32>,
    eps: f32,
    #[comptime] n: usize,
    #[comptime] rows: bool,
    #[comptime] ptx: bool,
) -> Array<f32> {
    let mut sums = Array::<f32>::new(n);
    #[unroll]
    for line in 0..n {
        let mut sum = a[comptime!(place(line, 0, n, rows))];
        #[unroll]
        for i in 1..n {
            sum += a[comptime!(place(line, i, n, rows))];
        }
        sum += eps;
        sums[line] = sum;
        let divisor = divisor(sums[line], ptx);
        #[unroll]
        for i in 0..n {
            let at = comptime!(place(line, i, n, rows));
            a[at] = over(a[at], divisor, ptx);
        }
    }
    sums
}

/// h of the gradient, in its place.
#[cube]
pub(super) fn times(g: &mut Array<f32>, a: &Array<f32>, #[comptime] n: usize) {
    #[unroll]
    for i in 0..comptime!(n * n) {
        g[i] *= a[i];
    }
}

/// Takes h of what a division made to that of what was divided, and so the matrix.
#[cube]
pub(super) fn undivide(
    h: &mut Array<f32>,
    a: &mut Array<f32>,
    sums: &Array<f32>,
    #[comptime] n: usize,
    #[comptime] rows: bool,
) {
    #[unroll]
    for line in 0..n {
        let mut along = h[comptime!(place(line, 0, n, rows))];
        #[unroll]
        for i in 1..n {
            along += h[comptime!(place(line, i, n, rows))];
        }
        #[unroll]
        for i in 0..n {
            let at = comptime!(place(line, i, n, rows));
            h[at] = fma(-along, a[at], h[at]);
            a[at] *= sums[line];
        }
    }
}

/// Takes h of each row's softmax p plus eps to the gradient of the logits.
#[cube]
pub(super) fn unsoftmax(
    h: &mut Array<f32>,
    p: &Array<f32>,
    eps: f32,
    #[comptime] n: usize,
    #[comptime] ptx: bool,
) {
    #[unroll]
    for row in 0..n {
        let mut along = f32::new(0.0);
        #[unroll]
        for i in 0..n {
            let at = comptime!(row * n + i);
            // p·g. Where p and eps are 0 the quotient is none, and a was p: it is h.
            let sum = p[at] + eps;
            let part = over(p[at], divisor(sum, ptx), ptx);
            h[at] *= select(sum >= f32::MIN_POSITIVE, part, 1.0f32);
            along += h[at];
        }
        #[unroll]
        for i in 0..n {
            let at = comptime!(row * n + i);
            h[at] = fma(-along, p[at], h[at]);
        }
    }
}
