//! Matrix products by tiles: what every operator that multiplies matrices is made of.
//!
//! A `Product` says what is multiplied: two stacks of matrices in any storage order, which of them
//! are triangular, what is added, the element type of the result. How is decided here: by which
//! [`Family`] of kernels, with which tile, in how many parts of K. All families compute the same and
//! stand behind the same tests.

mod family;
#[cfg(feature = "cuda")]
mod feed;
#[cfg(feature = "cuda")]
mod maps;
#[cfg(feature = "cuda")]
mod mask;
#[cfg(feature = "cuda")]
mod mma;
mod operand;
#[cfg(feature = "cuda")]
mod order;
#[cfg(feature = "cuda")]
mod precision;
mod product;
#[cfg(feature = "cuda")]
mod ptx;
#[cfg(feature = "cuda")]
mod schedule;
mod splits;
mod thin;
mod units;
#[cfg(feature = "cuda")]
mod wgmma;

#[cfg(feature = "cuda")]
use cubecl::prelude::*;
pub(crate) use family::forced;
pub use family::{Family, families, force};
pub(crate) use product::{Product, pairs, shape};
#[cfg(feature = "cuda")]
pub(crate) use product::{gate, sum};

/// Which part of a matrix counts; the rest is never read as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) enum Triangle {
    /// All of it.
    #[default]
    None,
    /// On and below the diagonal.
    Lower,
    /// On and above it.
    Upper,
}

/// The triangles of a product of square matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) struct Triangles {
    pub(crate) a: Triangle,
    pub(crate) b: Triangle,
    /// Only the lower triangle of the result is wanted, the rest is zero.
    pub(crate) out_lower: bool,
}

/// Which k of a line of an operand count, by the line's position along M or N.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Keep {
    All,
    /// k ≤ the position.
    UpTo,
    /// k ≥ the position.
    From,
}

impl Triangles {
    /// Whether anything is triangular.
    pub(crate) fn masked(&self) -> bool {
        *self != Self::default()
    }

    /// Of a row of A.
    pub(crate) fn a_keeps(&self) -> Keep {
        match self.a {
            Triangle::None => Keep::All,
            Triangle::Lower => Keep::UpTo,
            Triangle::Upper => Keep::From,
        }
    }

    /// Of a column of B.
    pub(crate) fn b_keeps(&self) -> Keep {
        match self.b {
            Triangle::None => Keep::All,
            Triangle::Lower => Keep::From,
            Triangle::Upper => Keep::UpTo,
        }
    }
}

/// How the matrices of two products belong together; comptime.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) enum Pair {
    /// There is one product only.
    #[default]
    None,
    /// silu(A·B₀) · (A·B₁); the two products are stored too if `keep`.
    Gate { keep: bool },
    /// A₀·B₀ + A₁·B₁.
    Sum,
}

#[cfg(feature = "cuda")]
impl Pair {
    pub(crate) fn gates(self) -> bool {
        matches!(self, Self::Gate { .. })
    }

    /// Columns of the result that a tile of `n` makes: of a gate, half of it belongs to either matrix.
    pub(crate) fn columns(self, n: usize) -> usize {
        if self.gates() { n / 2 } else { n }
    }
}

/// What happens to a sum before it is rounded and stored; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Epilogue {
    /// Times alpha.
    pub(crate) scaled: bool,
    /// Plus beta times another matrix.
    pub(crate) add: bool,
    /// Plus what the result's memory holds, f32.
    pub(crate) accumulate: bool,
}

/// C of a kernel: the distances of its matrices, rows and columns, and beta.
#[cfg(feature = "cuda")]
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Addend {
    pub(crate) batch: usize,
    pub(crate) row: usize,
    pub(crate) col: usize,
    pub(crate) beta: f32,
}
