//! Complex numbers, and the two recurrences.

use super::lanes::{self, Across, number, run};
use super::{LARGEST, Matrix, SMALLEST};
use crate::exponential::reciprocal;
use crate::reduce::Combine;
use crate::scan::{Acts, Span};
use cubecl::prelude::*;

/// A complex number.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Complex {
    pub(super) re: f32,
    pub(super) im: f32,
}

#[cube]
pub(super) fn times(a: Complex, b: Complex) -> Complex {
    Complex { re: a.re * b.re - a.im * b.im, im: a.re * b.im + a.im * b.re }
}

/// sum + a·b, as fused multiply-adds.
#[cube]
pub(super) fn plus_times(sum: Complex, a: Complex, b: Complex) -> Complex {
    let re = sum.re + a.re * b.re;
    let im = sum.im + a.re * b.im;
    Complex { re: re - a.im * b.im, im: im + a.im * b.re }
}

/// a·b − less.
#[cube]
fn times_less(a: Complex, b: Complex, less: Complex) -> Complex {
    let re = a.re * b.re - less.re;
    let im = a.re * b.im - less.im;
    Complex { re: re - a.im * b.im, im: im + a.im * b.re }
}

#[cube]
pub(super) fn plus(a: Complex, b: Complex) -> Complex {
    Complex { re: a.re + b.re, im: a.im + b.im }
}

#[cube]
pub(super) fn scaled(a: Complex, by: f32) -> Complex {
    Complex { re: a.re * by, im: a.im * by }
}

#[cube]
fn chosen(condition: bool, then: Complex, or_else: Complex) -> Complex {
    Complex {
        re: select(condition, then.re, or_else.re),
        im: select(condition, then.im, or_else.im),
    }
}

/// The larger of |re| and |im|.
#[cube]
pub(super) fn size(a: Complex) -> f32 {
    max(f32::abs(a.re), f32::abs(a.im))
}

/// Within ±`limit`; NaN stays.
#[cube]
pub(super) fn limited(x: f32, #[comptime] limit: f32) -> f32 {
    let most = f32::new(limit);
    let low = select(x < -most, -most, x);
    select(x > most, most, low)
}

#[cube]
pub(super) fn both_limited(a: Complex, #[comptime] limit: f32) -> Complex {
    Complex { re: limited(a.re, limit), im: limited(a.im, limit) }
}

/// The power of two that brings a number of this size into [½, 1), as far as f32 has one.
#[cube]
pub(super) fn unit_of(size: f32) -> f32 {
    let exponent = min(u32::reinterpret(size) & 0x7F80_0000u32, 0x7E00_0000u32);
    f32::reinterpret(0x7E80_0000u32 - exponent)
}

/// 1/x.
#[cube]
pub(super) fn over(x: f32, #[comptime] ptx: bool) -> f32 {
    if comptime!(ptx) { reciprocal(x) } else { 1.0f32 / x }
}

/// 1/a, for an a of at most about 1 that is taken for no smaller than [`SMALLEST`].
#[cube]
pub(super) fn inverse(a: Complex, #[comptime] ptx: bool) -> Complex {
    let least = f32::new(SMALLEST);
    let small = size(a) < least;
    // Its direction is noise.
    let re = select(small, least, a.re);
    let im = select(small, 0.0f32, a.im);
    let factor = over(re * re + im * im, ptx);
    Complex { re: re * factor, im: -im * factor }
}

/// The sites of a unit. Past the end of a row come sites of their own, with α = 1 − i·Im z.
#[derive(CubeType)]
pub(super) struct Sites {
    /// Re α.
    pub(super) alpha: Array<f32>,
    pub(super) beta: Array<f32>,
    /// Im α, of all.
    pub(super) imaginary: f32,
    /// The largest of their numbers.
    pub(super) largest: f32,
    #[cube(comptime)]
    pub(super) count: usize,
}

#[cube]
pub(super) fn alpha(sites: &Sites, #[comptime] e: usize) -> Complex {
    Complex { re: sites.alpha[e], im: sites.imaginary }
}

/// Element `i` of a row of couplings, 0 behind the last.
#[cube]
pub(super) fn coupling(values: &[f32], row: usize, i: usize, length: usize) -> f32 {
    // Loads always, within the buffer; with one site its content is dropped.
    let last = max(length, 2usize) - 2;
    select(i + 1 < length, values[row + min(i, last)], 0.0f32)
}

/// Whether a whole plane's sites have neighbours behind them, and it may take them together.
#[cube]
pub(super) fn together(span: &Span, #[comptime] count: usize) -> bool {
    let behind = comptime!(span.lanes as usize) - UNIT_POS_PLANE as usize;
    span.first + behind * count < span.end
}

/// The plane's own part of a cube's memory, of `size` f32 for each of its units.
#[cube]
pub(super) fn of_plane(span: &Span, size: usize) -> usize {
    (UNIT_POS / comptime!(span.lanes)) as usize * comptime!(span.lanes as usize) * size
}

/// The sites of a unit; `memory` has twice [`lanes::shared`] f32 for each of the cube's.
#[cube]
pub(super) fn sites(
    matrix: &Matrix,
    span: &Span,
    memory: &mut [f32],
    #[comptime] count: usize,
) -> Sites {
    let vectors = comptime!(matrix.options.vectors);
    let z = span.sequence * matrix.z_stride;
    let (re, im) = (matrix.z[z], matrix.z[z + 1]);
    let mut alpha = Array::<f32>::new(count);
    let mut beta = Array::<f32>::new(count);
    let first = span.first;
    let a_row = span.sequence * matrix.a_stride;
    let b_row = span.sequence * matrix.b_stride;
    let c_row = span.sequence * matrix.c_stride;
    let mut taken = false;
    if comptime!(span.lanes > 0) {
        taken = together(span, count);
        if taken {
            let across = comptime!(Across::new(count, span.lanes, vectors));
            let width = comptime!(across.width);
            let start = first - UNIT_POS_PLANE as usize * count;
            #[unroll]
            for k in 0..comptime!(across.steps()) {
                let i = start + number(k, across);
                let a = run(&matrix.a, a_row + i, width, vectors);
                let b = run(&matrix.b, b_row + i, width, vectors);
                let c = run(&matrix.c, c_row + i, width, vectors);
                #[unroll]
                for j in 0..width {
                    alpha[comptime!(k * width + j)] = a[j] - re;
                    beta[comptime!(k * width + j)] = b[j] * c[j];
                }
            }
            let size = comptime!(2 * lanes::shared(count));
            let at = of_plane(span, size);
            let half = comptime!(span.lanes as usize * lanes::shared(count));
            lanes::put_across(&mut memory[at..at + half], &alpha, across);
            beta = lanes::to_runs(&mut memory[at + half..at + 2 * half], &beta, across);
            let own = at + UNIT_POS_PLANE as usize * comptime!(lanes::shared(count));
            alpha = run(&*memory, own, count, true);
        }
    }
    // All but the last units have a neighbour behind each site.
    if !taken && first + count < matrix.length {
        let a = run(&matrix.a, a_row + first, count, vectors);
        let b = run(&matrix.b, b_row + first, count, vectors);
        let c = run(&matrix.c, c_row + first, count, vectors);
        #[unroll]
        for e in 0..count {
            alpha[e] = a[e] - re;
            beta[e] = b[e] * c[e];
        }
    } else if !taken {
        #[unroll]
        for e in 0..count {
            let i = first + e;
            let a = matrix.a[a_row + min(i, matrix.length - 1)];
            alpha[e] = select(i < matrix.length, a - re, 1.0f32);
            let b = coupling(&matrix.b, b_row, i, matrix.length);
            beta[e] = b * coupling(&matrix.c, c_row, i, matrix.length);
        }
    }
    let mut largest = f32::abs(im);
    #[unroll]
    for e in 0..count {
        largest = max(largest, max(f32::abs(alpha[e]), f32::abs(beta[e])));
    }
    let mut imaginary = -im;
    if largest > f32::new(LARGEST) {
        #[unroll]
        for e in 0..count {
            alpha[e] = limited(alpha[e], LARGEST);
            beta[e] = limited(beta[e], LARGEST);
        }
        imaginary = limited(imaginary, LARGEST);
    }
    Sites { alpha, beta, imaginary, largest, count }
}

/// A vector of one of the recurrences, up to a factor.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Pair {
    pub(super) x: Complex,
    pub(super) y: Complex,
}

/// The next vector, and the power of two that it was scaled by.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Step {
    pub(super) next: Pair,
    pub(super) scale: f32,
}

#[cube]
pub(super) fn normalised(of: Pair) -> Step {
    let scale = unit_of(max(size(of.x), size(of.y)));
    Step { next: Pair { x: scaled(of.x, scale), y: scaled(of.y, scale) }, scale }
}

/// (αx − y, βx).
#[cube]
pub(super) fn from_left(at: Pair, alpha: Complex, beta: f32) -> Step {
    let x = times_less(alpha, at.x, at.y);
    normalised(Pair { x, y: scaled(at.x, beta) })
}

/// (αx + βy, −x).
#[cube]
pub(super) fn from_right(at: Pair, alpha: Complex, beta: f32) -> Pair {
    let x = plus_times(scaled(at.y, beta), alpha, at.x);
    normalised(Pair { x, y: scaled(at.x, -1.0f32) }).next
}

#[cube]
fn complex_at(item: &Array<f32>, #[comptime] at: usize) -> Complex {
    Complex { re: item[at], im: item[comptime!(at + 1)] }
}

#[cube]
fn put(item: &mut Array<f32>, #[comptime] at: usize, value: Complex) {
    item[at] = value.re;
    item[comptime!(at + 1)] = value.im;
}

/// A pair of four f32.
#[cube]
pub(super) fn pair(state: &Array<f32>) -> Pair {
    Pair { x: complex_at(state, 0usize), y: complex_at(state, 2usize) }
}

#[cube]
fn state_of(of: Pair) -> Array<f32> {
    let mut state = Array::<f32>::new(4usize);
    put(&mut state, 0usize, of.x);
    put(&mut state, 2usize, of.y);
    state
}

#[cube]
impl Acts for Moebius {
    const STATE: usize = 4;

    fn start() -> Array<f32> {
        let mut one = Array::<f32>::new(4usize);
        one[0] = 1.0f32;
        one
    }

    fn end() -> Array<f32> {
        let mut one = Array::<f32>::new(4usize);
        one[0] = 1.0f32;
        one
    }

    // A column on the right of the matrix, or a row on its left.
    fn act(state: &Array<f32>, item: &Array<f32>, reverse: bool) -> Array<f32> {
        let at = pair(state);
        let (above, below) = (complex_at(item, 2usize), complex_at(item, 4usize));
        let across = chosen(reverse, below, above);
        let down = chosen(reverse, above, below);
        let x = plus_times(times(complex_at(item, 0usize), at.x), across, at.y);
        let y = plus_times(times(down, at.x), complex_at(item, 6usize), at.y);
        state_of(normalised(Pair { x, y }).next)
    }
}

#[cube]
fn matrix_size(item: &Array<f32>) -> f32 {
    let mut largest = f32::abs(item[0]);
    #[unroll]
    for k in 1..8usize {
        largest = max(largest, f32::abs(item[k]));
    }
    largest
}

#[cube]
fn scale_all(item: &mut Array<f32>, by: f32) {
    #[unroll]
    for k in 0..8usize {
        item[k] *= by;
    }
}

/// Complex 2×2 matrices up to a factor, later · earlier, the largest component in [½, 1).
pub(super) struct Moebius;

#[cube]
impl Combine for Moebius {
    const REGISTERS: usize = 8;
    const COMMUTATIVE: bool = false;

    fn identity() -> Array<f32> {
        let mut one = Array::<f32>::new(8usize);
        one[0] = 1.0f32;
        one[6] = 1.0f32;
        one
    }

    fn combine(earlier: &Array<f32>, later: &Array<f32>) -> Array<f32> {
        let mut product = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..2usize {
            #[unroll]
            for j in 0..2usize {
                let first = times(
                    complex_at(later, comptime!(4 * i)),
                    complex_at(earlier, comptime!(2 * j)),
                );
                let both = plus_times(
                    first,
                    complex_at(later, comptime!(4 * i + 2)),
                    complex_at(earlier, comptime!(4 + 2 * j)),
                );
                put(&mut product, comptime!(4 * i + 2 * j), both);
            }
        }
        let length = matrix_size(&product);
        scale_all(&mut product, unit_of(length));
        product
    }
}

/// M · item, unscaled.
#[cube]
fn step(item: &mut Array<f32>, alpha: Complex, beta: f32) {
    #[unroll]
    for j in 0..2usize {
        let x = complex_at(&*item, comptime!(2 * j));
        let y = complex_at(&*item, comptime!(4 + 2 * j));
        put(item, comptime!(2 * j), times_less(alpha, x, y));
        put(item, comptime!(4 + 2 * j), scaled(x, beta));
    }
}

/// Steps without scaling in between.
const PLAIN_STEPS: usize = 8;
/// Numbers up to which they are tried, and the size of a product from which on it holds: 8 steps make of 1 no more than
/// 2⁹⁷, and had all been below 2⁻¹⁰², where f32 begins to lose digits, they would be below this still.
pub(super) const PLAIN: f32 = (1u64 << 12) as f32;
const LEAST: f32 = 1.0 / (1u64 << 16) as f32;

/// The product of a unit's sites.
#[cube]
pub(super) fn product(sites: &Sites) -> Array<f32> {
    let mut all = Moebius::identity();
    #[unroll]
    for group in 0..comptime!(sites.count / PLAIN_STEPS) {
        let first = comptime!(group * PLAIN_STEPS);
        let mut tried = Array::<f32>::new(8usize);
        #[unroll]
        for k in 0..8usize {
            tried[k] = all[k];
        }
        #[unroll]
        for e in 0..PLAIN_STEPS {
            let at = comptime!(first + e);
            step(&mut tried, alpha(sites, at), sites.beta[at]);
        }
        let length = matrix_size(&tried);
        scale_all(&mut tried, unit_of(length));
        if sites.largest > f32::new(PLAIN) || length < f32::new(LEAST) {
            #[unroll]
            for e in 0..PLAIN_STEPS {
                let at = comptime!(first + e);
                step(&mut all, alpha(sites, at), sites.beta[at]);
                let length = matrix_size(&all);
                scale_all(&mut all, unit_of(length));
            }
        } else {
            #[unroll]
            for k in 0..8usize {
                all[k] = tried[k];
            }
        }
    }
    all
}
