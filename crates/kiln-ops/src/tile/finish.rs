//! The end of a product: what happens to a sum before it is rounded and stored.

use super::problem::Problem;
use cubecl::prelude::*;

/// What happens; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Linear {
    /// Times alpha.
    pub(crate) scaled: bool,
    /// Times a number on the device, C too.
    pub(crate) device_scale: bool,
    /// Plus beta · C.
    pub(crate) add: bool,
}

impl Linear {
    /// In a kernel that makes the result, or in one that makes parts of it.
    pub(crate) fn of(problem: &Problem, parts: bool) -> Self {
        let alpha = &problem.alpha;
        Self {
            scaled: (alpha.number != 1.0 || alpha.scales.is_some()) && !parts,
            device_scale: alpha.scales.is_some() && !parts,
            add: problem.add.is_some() && !parts,
        }
    }
}

/// alpha, beta, and the distances of C's matrices, rows and columns.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Finish {
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
    pub(crate) batch: usize,
    pub(crate) row: usize,
    pub(crate) col: usize,
}

impl FinishLaunch {
    pub(crate) fn of(problem: &Problem) -> Self {
        Self::with_strides(problem, problem.add_strides())
    }

    /// With these distances of C's matrices, rows and columns.
    pub(crate) fn with_strides(problem: &Problem, [batch, row, col]: [usize; 3]) -> Self {
        Self::new(problem.alpha.number as f32, problem.beta() as f32, batch, row, col)
    }
}

#[cube]
impl Finish {
    /// alpha of a product of the batch.
    pub(crate) fn alpha(&self, scales: &[f32], product: usize, #[comptime] linear: Linear) -> f32 {
        let mut alpha = self.alpha;
        if comptime!(linear.device_scale) {
            alpha *= scales[product];
        }
        alpha
    }

    /// beta likewise.
    pub(crate) fn beta(&self, scales: &[f32], product: usize, #[comptime] linear: Linear) -> f32 {
        if comptime!(linear.device_scale) { self.beta * scales[product] } else { self.beta }
    }

    /// alpha · x + beta · C of an element of the result.
    pub(crate) fn element<C: Float>(
        &self,
        x: f32,
        alpha: f32,
        beta: f32,
        c: &[C],
        product: usize,
        row: usize,
        col: usize,
        #[comptime] linear: Linear,
    ) -> f32 {
        let mut x = x;
        if comptime!(linear.scaled) {
            x *= alpha;
        }
        if comptime!(linear.add) {
            let at = product * self.batch + row * self.row + col * self.col;
            x += beta * f32::cast_from(c[at]);
        }
        x
    }
}
