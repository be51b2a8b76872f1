//! Every block of a product in sums with random signs (R. Freivalds, Probabilistic Machines Can Use Less Running
//! Time, 1977).
//!
//! For a block of C = A·B and signs u and v, uᵀ·C·v should be (uᵀ·A)·(B·v). That costs K operations a block, not K an
//! element, once the rows of A and the columns of B are added up. A block that is off by a matrix E shows uᵀ·E·v,
//! which is of the size of ‖E‖ = √(Σ e²): 64 lost terms of size 1 are 8 an element, beside roundings of 0.3 for
//! 8192 terms in bf16. One such sum may happen to be near 0, so there are several signs for each side, and all their
//! pairs.
//!
//! A right block may be off by the sum of two things:
//!
//! * λ·√(Σ deviation²): roundings, which are independent of each other;
//! * t·√(Σ bias²): what may point one way. It is a matrix B that knows nothing of the signs, and for any such
//!   P(|uᵀ·B·v| > t·‖B‖) ≤ 2·√(e·t)·e^(−t), which is 2·10⁻¹² for t = 30. (Given u the tail is that of a normal number
//!   with variance ‖Bᵀ·u‖²; E[e^(θ·uᵀ·B·v)] ≤ (1 − θ²)^-½ for ‖B‖ = 1, where B of rank one is the worst.)
//!
//! Both sums follow from the squares of C and of all products, and those from the squares of A and B added up:
//! Σ‖t‖² = Σ_k (Σ a²)·(Σ b²), for [`block_errors`].

use super::products::Single;
use super::stored::Matrix;
use kiln_ops::oracle::{Format, LAMBDA, Number, Rounding, block_errors};
use rand::{Rng, RngExt};
use rayon::prelude::*;
use std::ops::Range;

/// Side of a block; tiles of kernels are whole ones or several.
pub(super) const BLOCK: usize = 64;
/// Signs of each row and column.
const SIGNS: usize = 4;
/// t.
const CHANCE: f64 = 30.0;

/// The signs of a row or a column.
type Signs = [f64; SIGNS];
/// What a block has at one place along K: its numbers added up with each of the signs, and their squares.
type Sums = [f64; SIGNS + 1];
/// A sum for each pair of signs.
type Pairs = [Signs; SIGNS];

/// A block and its largest error over what is allowed.
struct Block {
    rows: Range<usize>,
    columns: Range<usize>,
    error: f64,
    allowed: f64,
}

impl Block {
    fn ratio(&self) -> f64 {
        match self.error {
            0.0 => 0.0,
            error if error.is_nan() => f64::INFINITY,
            error => error / self.allowed,
        }
    }
}

impl std::fmt::Display for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rows, columns, error, allowed } = self;
        let [rows, columns] = [rows, columns].map(|of| format!("{} to {}", of.start, of.end - 1));
        let ratio = self.ratio();
        write!(
            f,
            "{error:.2e} off in a sum with signs over rows {rows}, columns {columns} where \
             {allowed:.2e} is allowed ({ratio:.2} times)"
        )
    }
}

/// Checks all blocks.
pub(super) fn check(
    product: &Single<'_>,
    rounding: Rounding,
    rng: &mut impl Rng,
) -> Result<(), String> {
    let [m, n] = product.out.size();
    let (u, v) = (signs(m, rng), signs(n, rng));
    let added_up: Vec<[Vec<Vec<Sums>>; 2]> =
        product.terms.iter().map(|[a, b]| [add_up(a, &u), add_up(&b.transposed(), &v)]).collect();
    let across = n.div_ceil(BLOCK);
    let block = |i: usize| {
        let (i, j) = (i / across, i % across);
        let (rows, columns) = (span(i, m), span(j, n));
        let found = Found::new(product, &rows, &columns, &u, &v, rounding);
        let (error, allowed) = if found.above != 0.0 {
            (found.above, 0.0)
        } else if !found.squares.is_finite() {
            (found.squares, 0.0)
        } else {
            let mut expected = Expected::default();
            // Above the diagonal there is nothing.
            if !product.lower || j <= i {
                for ([a, b], [left, right]) in product.terms.iter().zip(&added_up) {
                    expected.take(&left[i], &right[j]);
                    if product.lower && i == j {
                        expected.take_triangle(a, &b.transposed(), &rows, &u, &v);
                    } else {
                        expected.take_pairs(&left[i], &right[j]);
                    }
                }
            }
            (found.error(&expected, product.alpha), found.allowed(&expected, product, rounding))
        };
        Block { rows, columns, error, allowed }
    };
    let blocks = (0..m.div_ceil(BLOCK) * across).into_par_iter().map(block);
    match blocks.max_by(|a, b| a.ratio().total_cmp(&b.ratio())) {
        Some(worst) if worst.ratio() > 1.0 => Err(worst.to_string()),
        _ => Ok(()),
    }
}

fn signs(n: usize, rng: &mut impl Rng) -> Vec<Signs> {
    let mut sign = || if rng.random_bool(0.5) { 1.0 } else { -1.0 };
    (0..n).map(|_| std::array::from_fn(|_| sign())).collect()
}

/// Rows or columns of a block.
pub(super) fn span(block: usize, n: usize) -> Range<usize> {
    block * BLOCK..n.min((block + 1) * BLOCK)
}

/// The rows of every block added up, at every column.
fn add_up(of: &Matrix<'_>, signs: &[Signs]) -> Vec<Vec<Sums>> {
    let [rows, columns] = of.size();
    let at = |rows: Range<usize>, k: usize| {
        let mut sums = [0.0; SIGNS + 1];
        for i in rows {
            let x = of.at(i, k);
            for (sum, sign) in sums.iter_mut().zip(&signs[i]) {
                *sum += sign * x;
            }
            sums[SIGNS] += x * x;
        }
        sums
    };
    let block = |i: usize| -> Vec<Sums> { (0..columns).map(|k| at(span(i, rows), k)).collect() };
    (0..rows.div_ceil(BLOCK)).into_par_iter().map(block).collect()
}

/// What the operands make of a block.
#[derive(Default)]
struct Expected {
    pairs: Pairs,
    /// Products of an element.
    count: f64,
    /// Σ of their squares over the block.
    squares: f64,
}

impl Expected {
    fn take(&mut self, left: &[Sums], right: &[Sums]) {
        for (left, right) in left.iter().zip(right) {
            let squares = left[SIGNS] * right[SIGNS];
            self.count += if squares > 0.0 { 1.0 } else { 0.0 };
            self.squares += squares;
        }
    }

    fn take_pairs(&mut self, left: &[Sums], right: &[Sums]) {
        for (left, right) in left.iter().zip(right) {
            for (pairs, left) in self.pairs.iter_mut().zip(left) {
                for (pair, right) in pairs.iter_mut().zip(right) {
                    *pair += left * right;
                }
            }
        }
    }

    /// Of a block on the diagonal its lower triangle: row i meets the columns up to i.
    fn take_triangle(
        &mut self,
        a: &Matrix<'_>,
        b: &Matrix<'_>,
        rows: &Range<usize>,
        u: &[Signs],
        v: &[Signs],
    ) {
        for k in 0..a.size()[1] {
            let mut columns = [0.0; SIGNS];
            for i in rows.clone() {
                let (x, y) = (a.at(i, k), b.at(i, k));
                for (sum, sign) in columns.iter_mut().zip(&v[i]) {
                    *sum += sign * y;
                }
                for (pairs, sign) in self.pairs.iter_mut().zip(&u[i]) {
                    for (pair, column) in pairs.iter_mut().zip(&columns) {
                        *pair += sign * x * column;
                    }
                }
            }
        }
    }
}

/// What stands in a block.
#[derive(Default)]
struct Found {
    pairs: Pairs,
    /// Σ of the squares of its elements.
    squares: f64,
    /// Σ of the squares of what storing them is off, of roundings and of what may point one way.
    rounded: f64,
    biased: f64,
    /// Σ of the sizes of what stands above the diagonal where nothing should.
    above: f64,
}

impl Found {
    fn new(
        product: &Single<'_>,
        rows: &Range<usize>,
        columns: &Range<usize>,
        u: &[Signs],
        v: &[Signs],
        rounding: Rounding,
    ) -> Self {
        let mut found = Self::default();
        for i in rows.clone() {
            let mut sums = [0.0; SIGNS];
            for j in columns.clone() {
                let x = product.out.at(i, j);
                for (sum, sign) in sums.iter_mut().zip(&v[j]) {
                    *sum += sign * x;
                }
                found.squares += x * x;
                let storing = rounding.number(x).stored().errors();
                found.rounded += storing.deviation().powi(2);
                found.biased += storing.bias.powi(2);
                if product.lower && j > i {
                    found.above += x.abs();
                }
            }
            for (pairs, sign) in found.pairs.iter_mut().zip(&u[i]) {
                for (pair, sum) in pairs.iter_mut().zip(&sums) {
                    *pair += sign * sum;
                }
            }
        }
        found
    }

    /// The largest error of a pair.
    fn error(&self, expected: &Expected, alpha: f64) -> f64 {
        let pairs = self.pairs.iter().flatten().zip(expected.pairs.iter().flatten());
        pairs.map(|(found, expected)| (found - alpha * expected).abs()).fold(0.0, f64::max)
    }

    fn allowed(&self, expected: &Expected, product: &Single<'_>, rounding: Rounding) -> f64 {
        let (size, norm) = (self.squares.sqrt(), product.alpha.abs() * expected.squares.sqrt());
        let errors = block_errors(rounding.products, expected.count, size, norm);
        let mut rounded = self.rounded;
        if product.terms.len() > 1 && rounding.format != Format::F32 {
            // Products that are added up are stored before. They are no larger than their sum and what they may
            // differ by, which is of the size of their terms.
            let part = rounding.format.unit() * (size + norm);
            rounded += product.terms.len() as f64 * part * part;
        }
        let deviation = errors.deviation().hypot(rounded.sqrt());
        LAMBDA * deviation + CHANCE * (errors.bias + self.biased.sqrt())
    }
}
