//! The sites of a unit: α and β from a, b, c and z.

use super::complex::{Complex, limited};
use super::{LARGEST, Matrix, SITES};
use crate::scan::Span;
use crate::scan::runs::{
    self, Across, of_plane, own_run, put_across, read_across, run, to_runs, together, write_run,
};
use cubecl::prelude::*;

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
    /// The same, but the compiler does not know it: loops over it stay loops.
    pub(super) number: usize,
}

#[cube]
pub(super) fn alpha(sites: &Sites, e: usize) -> Complex {
    Complex { re: sites.alpha[e], im: sites.imaginary }
}

/// Element `i` of a row of couplings, 0 behind the last.
#[cube]
pub(super) fn coupling(values: &[f32], row: usize, i: usize, length: usize) -> f32 {
    // Loads always, within the buffer; with one site its content is dropped.
    let last = max(length, 2usize) - 2;
    select(i + 1 < length, values[row + min(i, last)], 0.0f32)
}

/// Re α and β of a unit's sites, without its neighbours.
#[cube]
fn alone(
    alpha: &mut Array<f32>,
    beta: &mut Array<f32>,
    matrix: &Matrix,
    span: &Span,
    re: f32,
    #[comptime] count: usize,
) {
    let vectors = comptime!(matrix.options.vectors);
    let vectors_of_a = comptime!(matrix.options.vectors_of_a);
    let first = span.first;
    let a_row = span.sequence * matrix.a_stride;
    let b_row = span.sequence * matrix.b_stride;
    let c_row = span.sequence * matrix.c_stride;
    // All but the last units have a neighbour behind each site.
    if first + count < matrix.length {
        let a = run(&matrix.a, a_row + first, count, vectors_of_a);
        let b = run(&matrix.b, b_row + first, count, vectors);
        let c = run(&matrix.c, c_row + first, count, vectors);
        #[unroll]
        for e in 0..count {
            alpha[e] = a[e] - re;
            beta[e] = b[e] * c[e];
        }
    } else {
        #[unroll]
        for e in 0..count {
            let i = first + e;
            let a = matrix.a[a_row + min(i, matrix.length - 1)];
            alpha[e] = select(i < matrix.length, a - re, 1.0f32);
            let b = coupling(&matrix.b, b_row, i, matrix.length);
            beta[e] = b * coupling(&matrix.c, c_row, i, matrix.length);
        }
    }
}

/// The sites of a unit; `memory` has twice [`runs::shared`] f32 for each of the cube's.
#[cube]
pub(super) fn sites(
    matrix: &Matrix,
    span: &Span,
    memory: &mut [f32],
    #[comptime] count: usize,
) -> Sites {
    let vectors = comptime!(matrix.options.vectors);
    let vectors_of_a = comptime!(matrix.options.vectors_of_a);
    let narrow = comptime!(matrix.options.narrow);
    let z = span.sequence * matrix.z_stride;
    let (re, im) = (matrix.z[z], matrix.z[z + 1]);
    let mut alpha = Array::<f32>::new(count);
    let mut beta = Array::<f32>::new(count);
    let first = span.first;
    let a_row = span.sequence * matrix.a_stride;
    let b_row = span.sequence * matrix.b_stride;
    let c_row = span.sequence * matrix.c_stride;
    if comptime!(span.lanes > 0) {
        let at = of_plane(span, comptime!(2 * runs::shared(count)));
        let half = at + comptime!(span.lanes as usize * runs::shared(count));
        if together(span, count) {
            let across = comptime!(Across::new(count, span.lanes, vectors_of_a, narrow));
            let across_couplings = comptime!(Across::new(count, span.lanes, vectors, narrow));
            let mut own = read_across(&matrix.a, a_row + first, across);
            let b = read_across(&matrix.b, b_row + first, across_couplings);
            let c = read_across(&matrix.c, c_row + first, across_couplings);
            let mut products = Array::<f32>::new(count);
            #[unroll]
            for e in 0..count {
                own[e] -= re;
                products[e] = b[e] * c[e];
            }
            put_across(&mut memory[at..half], &own, across);
            let end = half + comptime!(span.lanes as usize * runs::shared(count));
            beta = to_runs(&mut memory[half..end], &products, across_couplings);
            alpha = run(&*memory, own_run(at, comptime!(span.lanes), count), count, true);
        } else {
            alone(&mut alpha, &mut beta, matrix, span, re, count);
            let own = runs_of(span, count);
            write_run(memory, own.alpha, &alpha, 0usize, count, true);
            write_run(memory, own.beta, &beta, 0usize, count, true);
        }
    } else {
        alone(&mut alpha, &mut beta, matrix, span, re, count);
    }
    let mut largest = f32::abs(im);
    #[unroll]
    for e in 0..count {
        largest = max(largest, max(f32::abs(alpha[e]), f32::abs(beta[e])));
    }
    let mut imaginary = -im;
    if largest > f32::new(LARGEST) {
        limit(&mut alpha, &mut beta, count);
        imaginary = limited(imaginary, LARGEST);
    }
    let number = matrix.number * comptime!(count / SITES);
    Sites { alpha, beta, imaginary, largest, count, number }
}

/// A copy for loops over sites. What they index is in memory: with that, what is rarely done takes no registers of
/// what always is.
#[cube]
pub(super) fn in_memory(sites: &Sites) -> Sites {
    let count = comptime!(sites.count);
    let alpha = copy(&sites.alpha, count);
    let beta = copy(&sites.beta, count);
    let (imaginary, largest, number) = (sites.imaginary, sites.largest, sites.number);
    Sites { alpha, beta, imaginary, largest, count, number }
}

#[cube]
pub(super) fn copy(values: &Array<f32>, #[comptime] size: usize) -> Array<f32> {
    let mut copy = Array::<f32>::new(size);
    #[unroll]
    for k in 0..size {
        copy[k] = values[k];
    }
    copy
}

/// Where the unit's own runs lie.
#[derive(CubeType)]
struct Runs {
    alpha: usize,
    beta: usize,
}

#[cube]
fn runs_of(span: &Span, #[comptime] count: usize) -> Runs {
    let alpha =
        own_run(of_plane(span, comptime!(2 * runs::shared(count))), comptime!(span.lanes), count);
    Runs { alpha, beta: alpha + comptime!(span.lanes as usize * runs::shared(count)) }
}

/// Reads the sites again from where [`sites`] left them in `memory`, so that they take no registers in between. A barrier
/// has to lie in between too, else the compiler keeps them.
#[cube]
pub(super) fn reread(sites: &mut Sites, span: &Span, memory: &[f32]) {
    let count = comptime!(sites.count);
    if comptime!(span.lanes > 0) {
        let own = runs_of(span, count);
        let alpha = run(memory, own.alpha, count, true);
        let beta = run(memory, own.beta, count, true);
        #[unroll]
        for e in 0..count {
            sites.alpha[e] = alpha[e];
            sites.beta[e] = beta[e];
        }
        if sites.largest > f32::new(LARGEST) {
            limit(&mut sites.alpha, &mut sites.beta, count);
        }
    }
}

#[cube]
fn limit(alpha: &mut Array<f32>, beta: &mut Array<f32>, #[comptime] count: usize) {
    #[unroll]
    for e in 0..count {
        alpha[e] = limited(alpha[e], LARGEST);
        beta[e] = limited(beta[e], LARGEST);
    }
}
