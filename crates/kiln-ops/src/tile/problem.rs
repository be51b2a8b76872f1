//! What is multiplied, as data: operands by their strides, what is added, what is known of the result.

use super::view::MatrixView;
use burn_cubecl::tensor::CubeTensor;

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

/// alpha: the same for every product, or times a number for each of them that stands on the device; that one multiplies
/// beta too.
#[derive(Clone)]
pub(crate) struct Alpha {
    pub(crate) number: f64,
    /// f32, one for each product of the batch.
    pub(crate) scales: Option<CubeTensor>,
}

impl Alpha {
    pub(crate) fn new(number: f64) -> Self {
        Self { number, scales: None }
    }
}

/// What a family of kernels launches: alpha · A·B + beta · C for a batch of products.
pub(crate) struct Problem {
    /// Operator, for the audit.
    pub(crate) op: &'static str,
    pub(crate) a: MatrixView,
    pub(crate) b: MatrixView,
    /// C and beta.
    pub(crate) add: Option<(MatrixView, f64)>,
    pub(crate) batches: usize,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) alpha: Alpha,
    pub(crate) triangles: Triangles,
    /// The result is known to be symmetric: a family may make half of it.
    pub(crate) symmetric: bool,
    /// The result is stored transposed.
    pub(crate) transposed: bool,
}

impl Problem {
    /// A·B of a batch of one.
    pub(crate) fn new(op: &'static str, a: MatrixView, b: MatrixView) -> Self {
        Self {
            op,
            batches: 1,
            m: a.rows,
            n: b.cols,
            k: a.cols,
            a,
            b,
            add: None,
            alpha: Alpha::new(1.0),
            triangles: Triangles::default(),
            symmetric: false,
            transposed: false,
        }
    }

    /// beta, or nothing.
    pub(crate) fn beta(&self) -> f64 {
        self.add.as_ref().map_or(0.0, |(_, beta)| *beta)
    }

    /// Distances of C's matrices, rows and columns.
    pub(crate) fn add_strides(&self) -> [usize; 3] {
        self.add.as_ref().map_or([0; 3], |(add, _)| {
            let (row, col) = add.strides();
            [add.batch_step(), row, col]
        })
    }

    /// The same result by the product of the transposes, Bᵀ·Aᵀ, stored transposed; of whole matrices.
    pub(crate) fn transpose(&mut self) {
        std::mem::swap(&mut self.a, &mut self.b);
        let add = self.add.as_mut().map(|(add, _)| add);
        [&mut self.a, &mut self.b].into_iter().chain(add).for_each(MatrixView::transpose);
        (self.m, self.n) = (self.n, self.m);
        self.transposed = !self.transposed;
    }

    /// One B for a batch: a single product of all rows of A, if they follow each other.
    pub(crate) fn fold(&mut self) {
        let a = &self.a;
        let rows = a.row_major() && a.batch_stride == a.rows * a.ld && a.batches > 1;
        let whole = !self.triangles.masked() && !self.symmetric && self.alpha.scales.is_none();
        if rows && self.b.batches == 1 && self.add.is_none() && whole {
            self.m *= self.batches;
            self.a.rows = self.m;
            (self.batches, self.a.batches) = (1, 1);
        }
    }
}
