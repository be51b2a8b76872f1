//! Products of the sites' matrices, and what they make of the vectors.

use super::SITES;
use super::complex::{
    Complex, chosen, complex_of, plus_times, scaled, set, size, times, times_less, unit_of,
};
use super::minors::{LEAST, PLAIN};
use super::sites::{Sites, alpha};
use super::vectors::{Pair, normalised, pair_of};
use crate::reduce::Combine;
use crate::scan::Acts;
use cubecl::prelude::*;

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
                let first = times(complex_of(later, comptime!(2 * i)), complex_of(earlier, j));
                let both = plus_times(
                    first,
                    complex_of(later, comptime!(2 * i + 1)),
                    complex_of(earlier, comptime!(2 + j)),
                );
                set(&mut product, comptime!(2 * i + j), both);
            }
        }
        let length = matrix_size(&product);
        scale_all(&mut product, unit_of(length));
        product
    }
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
        let at = pair_of(state, 0usize);
        let (above, below) = (complex_of(item, 1usize), complex_of(item, 2usize));
        let across = chosen(reverse, below, above);
        let down = chosen(reverse, above, below);
        let x = plus_times(times(complex_of(item, 0usize), at.x), across, at.y);
        let y = plus_times(times(down, at.x), complex_of(item, 3usize), at.y);
        state_of(normalised(Pair { x, y }).next)
    }
}

#[cube]
fn state_of(of: Pair) -> Array<f32> {
    let mut state = Array::<f32>::new(4usize);
    set(&mut state, 0usize, of.x);
    set(&mut state, 1usize, of.y);
    state
}

#[cube]
fn matrix_size(item: &Array<f32>) -> f32 {
    // As a tree: a chain of eight would be waited for at every level of the scan.
    let mut largest = Array::<f32>::new(4usize);
    #[unroll]
    for k in 0..4usize {
        largest[k] = size(complex_of(item, k));
    }
    max(max(largest[0], largest[1]), max(largest[2], largest[3]))
}

#[cube]
fn scale_all(item: &mut Array<f32>, by: f32) {
    #[unroll]
    for k in 0..8usize {
        item[k] *= by;
    }
}

/// M · item, unscaled.
#[cube]
fn step(item: &mut Array<f32>, alpha: Complex, beta: f32) {
    #[unroll]
    for j in 0..2usize {
        step_column(item, j, alpha, beta);
    }
}

#[cube]
fn step_column(item: &mut Array<f32>, #[comptime] j: usize, alpha: Complex, beta: f32) {
    let x = complex_of(&*item, j);
    let y = complex_of(&*item, comptime!(2 + j));
    set(item, j, times_less(alpha, x, y));
    set(item, comptime!(2 + j), scaled(x, beta));
}

/// The product of a unit's sites.
#[cube]
pub(super) fn product(sites: &Sites) -> Array<f32> {
    let mut all = Moebius::identity();
    #[unroll]
    for group in 0..comptime!(sites.count / SITES) {
        let first = comptime!(group * SITES);
        let mut tried = Array::<f32>::new(8usize);
        #[unroll]
        for k in 0..8usize {
            tried[k] = all[k];
        }
        #[unroll]
        for e in 0..SITES {
            let at = comptime!(first + e);
            if comptime!(at == 0) {
                // The first step itself.
                set(&mut tried, 0usize, alpha(sites, at));
                tried[2] = -1.0f32;
                tried[4] = sites.beta[at];
                tried[6] = 0.0f32;
            } else if comptime!(at == 1) {
                // The second column so far is (−1, 0).
                step_column(&mut tried, 0usize, alpha(sites, at), sites.beta[at]);
                set(&mut tried, 1usize, scaled(alpha(sites, at), -1.0f32));
                set(&mut tried, 3usize, Complex { re: -sites.beta[at], im: 0.0f32 });
            } else {
                step(&mut tried, alpha(sites, at), sites.beta[at]);
            }
        }
        let length = matrix_size(&tried);
        scale_all(&mut tried, unit_of(length));
        if sites.largest >= f32::new(PLAIN) || length < f32::new(LEAST) {
            #[unroll]
            for e in 0..SITES {
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
