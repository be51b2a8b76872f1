//! What a dual GEMM has beside a single product, as data.

use crate::tile::view::MatrixView;
use burn_cubecl::tensor::CubeTensor;

/// How the two products of a dual GEMM belong together; comptime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(crate) enum Dual {
    /// There is one product only.
    #[default]
    None,
    /// A·B₀ and A·B₁ side by side in a tile, of which an [`Epilogue`](crate::tile::epilogue::Epilogue) makes one result;
    /// the two products are stored too if `keep`.
    Joined { keep: bool },
    /// A₀·B₀ + A₁·B₁.
    Sum,
}

impl Dual {
    pub(crate) fn joins(self) -> bool {
        matches!(self, Self::Joined { .. })
    }

    /// Columns of the result that a tile of `n` makes: of joined products half of it belongs to either.
    pub(crate) fn columns(self, n: usize) -> usize {
        if self.joins() { n / 2 } else { n }
    }
}

/// What a dual GEMM has beside a single product.
pub(crate) struct Second {
    /// B₁.
    pub(crate) b: MatrixView,
    pub(crate) dual: Dual,
    /// Where the joined result goes.
    pub(crate) joined: Option<CubeTensor>,
}
