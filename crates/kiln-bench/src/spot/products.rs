//! Products of matrices: at some rows and columns, and in every block.

use super::blocks;
use super::stored::{Matrix, Stack};
use super::{Spot, compared, generator, sample};
use kiln_ops::matmul::oracle;
use kiln_ops::oracle::{Bounded, Number, Rounding};
use rand::Rng;
use rayon::prelude::*;

/// Rows and columns that are compared, beside the first and the last.
const LINES: usize = 2;
/// Elements of the operand that these are multiplied by: of larger ones a part.
const LARGEST: usize = 1 << 26;
/// Elements of an operand that a thread has as numbers with bounds.
const TILE: usize = 1 << 19;

/// A result that is a product, or products added up.
pub(crate) struct Product<'a> {
    /// Which result.
    pub(crate) result: usize,
    /// A and B of each product.
    pub(crate) terms: Vec<[Stack<'a>; 2]>,
    /// The result.
    pub(crate) out: Stack<'a>,
    /// Its factor.
    pub(crate) alpha: f64,
    /// Only the lower triangle is made, above it are zeros.
    pub(crate) lower: bool,
}

impl Product<'_> {
    /// Checks every matrix of the stack.
    ///
    /// # Errors
    ///
    /// One line that says where the result is wrong.
    pub(crate) fn check(&self, spot: &Spot<'_>) -> Result<(), String> {
        let mut rng = generator();
        for z in 0..self.out.batches {
            let single = Single {
                terms: self.terms.iter().map(|term| term.map(|of| of.matrix(z))).collect(),
                out: self.out.matrix(z),
                alpha: self.alpha,
                lower: self.lower,
            };
            let checked = single.check(LARGEST / self.out.batches, spot.rounding, &mut rng);
            let of_stack = |what: String| match self.out.batches {
                1 => what,
                _ => format!("{what}, in matrix {z}"),
            };
            spot.named(self.result, checked.map_err(of_stack))?;
        }
        Ok(())
    }
}

/// One of a stack.
pub(super) struct Single<'a> {
    pub(super) terms: Vec<[Matrix<'a>; 2]>,
    pub(super) out: Matrix<'a>,
    pub(super) alpha: f64,
    pub(super) lower: bool,
}

impl Single<'_> {
    pub(super) fn check(
        &self,
        largest: usize,
        rounding: Rounding,
        rng: &mut impl Rng,
    ) -> Result<(), String> {
        let [m, n] = self.out.size();
        if m * n == 0 {
            return Ok(());
        }
        let k = self.terms[0][0].size()[1].max(1);
        let many = (largest / k).max(64);
        for (rows, columns) in [(LINES, many), (many, LINES)] {
            let (rows, columns) = (sample(m, rows, rng), sample(n, columns, rng));
            let expected = self.expected(&rows, &columns, rounding);
            compared(&self.out.part(&rows, &columns), &expected, &rows, &columns)?;
        }
        blocks::check(self, rounding, rng)
    }

    /// The result at some rows and columns, by the oracle.
    fn expected(&self, rows: &[usize], columns: &[usize], rounding: Rounding) -> Vec<Bounded> {
        let k = self.terms[0][0].size()[1];
        tiles(rows, columns, k, |rows, columns| {
            let sizes = [1, rows.len(), k, columns.len()];
            let along: Vec<usize> = (0..k).collect();
            let parts = self.terms.iter().map(|[a, b]| {
                let a = rounding.numbers(&a.part(rows, &along));
                let b = rounding.numbers(&b.part(&along, columns));
                oracle::forward(&a, &b, sizes, self.alpha)
            });
            let mut sum = stored_sum(parts);
            if self.lower {
                let places = rows.iter().flat_map(|i| columns.iter().map(move |j| j > i));
                let above = sum.iter_mut().zip(places).filter(|(_, above)| *above);
                above.for_each(|(x, _)| *x = rounding.number(0.0));
            }
            sum
        })
    }
}

/// Σ of products that are stored before they are added.
pub(crate) fn stored_sum(parts: impl IntoIterator<Item = Vec<Bounded>>) -> Vec<Bounded> {
    let add = |sum: Vec<Bounded>, part: Vec<Bounded>| {
        sum.into_iter().zip(part).map(|(a, b)| (a + b).stored()).collect()
    };
    parts.into_iter().reduce(add).unwrap_or_default()
}

/// A product over `k` at some rows and columns, which all threads `make` in tiles.
pub(super) fn tiles(
    rows: &[usize],
    columns: &[usize],
    k: usize,
    make: impl Fn(&[usize], &[usize]) -> Vec<Bounded> + Sync,
) -> Vec<Bounded> {
    let side = (TILE / k.max(1)).clamp(1, 1024);
    let band = |rows: &[usize]| -> Vec<Bounded> {
        let parts: Vec<Vec<Bounded>> =
            columns.par_chunks(side).map(|columns| make(rows, columns)).collect();
        let mut band = Vec::with_capacity(rows.len() * columns.len());
        for i in 0..rows.len() {
            for (part, columns) in parts.iter().zip(columns.chunks(side)) {
                band.extend_from_slice(&part[i * columns.len()..][..columns.len()]);
            }
        }
        band
    };
    let bands: Vec<Vec<Bounded>> = rows.par_chunks(side).map(band).collect();
    bands.concat()
}
