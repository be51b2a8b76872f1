//! Sums and products of matrices of bounded numbers, with what adding them up costs.
//!
//! In any order n terms t with sum S are off by at most n·u·Σ|t| (Higham 2002, (4.4)), and by chance by no
//! more than λ·u·√(Σ s²) over the partial sums s (the module [above](super::bounded)). These are at most
//! Σ|t| each. Added up in an order that knows nothing of their values, they also go from 0 to S as a bridge
//! does, with a mean square of S²/3 + ‖t‖²/6: allowed is (|S|/√3 + ‖t‖)²; of one bridge in 400 the
//! mean square is above 1 (Cramér and von Mises), and λ has room for those.
//!
//! Tensor cores multiply exactly, align the products of a block and the sum so far to the largest of them
//! and cut the rest off, and so the result: 16 products with 2 bits more than f32 on Hopper, 8 with 1 bit on
//! Ampere (F. Khattak and M. Mikaitis, Accurate Models of NVIDIA Tensor Cores, 2025, arXiv 2512.07004; M.
//! Fasi and others, Numerical Behavior of NVIDIA Tensor Cores, 2021). What is cut off points one way.

use super::bounded::{Bounded, Errors, LAMBDA, TINY, UNIT, product_errors};
use super::number::Number;
use super::rounding::{Products, Rounding};

/// Products of a block, and what a block is off in ULP of its largest number: 9 numbers cut off after one bit
/// more, and the result. Of Ampere; Hopper's is smaller.
const BLOCK: f64 = 8.0;
const BLOCK_ULP: f64 = 5.5;
/// The same of TF32, 5 numbers.
const TF32_BLOCK: f64 = 4.0;
const TF32_BLOCK_ULP: f64 = 3.5;
/// Of so few terms the errors are added as they are: they may have the same origin.
const FEW: usize = 3;
/// What a product of two numbers is off that have 10 bits of fraction, rounded or cut off.
const TF32: f64 = 1.0 / 512.0;

/// Terms as they are added up: their number, sum, Σ|t| and Σt².
#[derive(Clone, Copy, Debug, Default)]
struct Terms {
    count: f64,
    sum: f64,
    size: f64,
    squares: f64,
}

impl Terms {
    fn take(&mut self, term: f64) {
        if term != 0.0 {
            self.count += 1.0;
        }
        self.sum += term;
        self.size += term.abs();
        self.squares += term * term;
    }

    /// What adding them up costs; `products` if they are products, each with a rounding of its own and one
    /// more of a factor that is multiplied in.
    fn cost(&self, products: Option<Products>) -> Errors {
        let mut errors = Errors::default();
        let norm = self.squares.sqrt();
        let roundings = match products {
            Some(_) => self.count + 1.0,
            None => self.count - 1.0,
        };
        if self.count == 0.0 || roundings <= 0.0 {
            return errors;
        }
        let walk = self.size.min(self.sum.abs() / 3f64.sqrt() + norm);
        let (all, many) = (UNIT * roundings * self.size, UNIT * self.count.sqrt() * walk);
        if all <= LAMBDA * many {
            errors.hard = all;
        } else {
            errors.noise = many;
        }
        // What is below the smallest normal number may be taken for 0.
        errors.hard += TINY * self.count;
        // The mean size of partial sums, and the largest term.
        let held = self.size.min(self.sum.abs() / 2.0 + norm);
        let cut = |block: f64, ulp: f64| (self.count / block).ceil() * ulp * 2.0 * UNIT * held;
        match products {
            Some(Products::TensorCores) => errors.bias = cut(BLOCK, BLOCK_ULP),
            Some(Products::Tf32) => {
                // Cutting off takes about the same share of every term.
                errors.bias = cut(TF32_BLOCK, TF32_BLOCK_ULP) + TF32 * self.sum.abs();
                errors.noise = errors.noise.hypot(TF32 * norm);
            }
            Some(Products::F32) | None => {}
        }
        errors
    }
}

/// Errors that terms bring along, independent of each other.
#[derive(Clone, Copy, Debug, Default)]
struct Brought {
    bias: f64,
    hard: f64,
    /// Of `hard`, and of all roundings, of those of rows and of columns.
    hard_squares: f64,
    noise_squares: f64,
    row_squares: f64,
    column_squares: f64,
}

impl Brought {
    fn take(&mut self, errors: Errors) {
        self.bias += errors.bias;
        self.hard += errors.hard;
        self.hard_squares += errors.hard * errors.hard;
        self.noise_squares += errors.noise * errors.noise;
        self.row_squares += errors.row * errors.row;
        self.column_squares += errors.column * errors.column;
    }

    /// Few roundings as they are, many as noise.
    fn errors(&self) -> Errors {
        let few = self.hard <= LAMBDA * self.hard_squares.sqrt();
        let averaged = if few { 0.0 } else { self.hard_squares };
        Errors {
            bias: self.bias,
            hard: if few { self.hard } else { 0.0 },
            noise: (self.noise_squares + averaged).sqrt(),
            row: self.row_squares.sqrt(),
            column: self.column_squares.sqrt(),
        }
    }
}

/// Σ terms.
pub(super) fn sum(terms: impl IntoIterator<Item = Bounded>) -> Bounded {
    let (mut taken, mut brought, mut rounding) = (Terms::default(), Brought::default(), None);
    let (mut number, mut plain) = (0, Errors::default());
    for term in terms {
        taken.take(term.value());
        brought.take(term.errors());
        plain = plain.plus(term.errors());
        number += 1;
        rounding = rounding.or(term.rounding());
    }
    let brought = if number <= FEW { plain } else { brought.errors() };
    Bounded::new(taken.sum, brought.plus(taken.cost(None)), rounding)
}

/// Σ left · right.
pub(super) fn dot(terms: impl IntoIterator<Item = (Bounded, Bounded)>) -> Bounded {
    let (mut taken, mut brought, mut rounding) = (Terms::default(), Brought::default(), None);
    for (left, right) in terms {
        taken.take(left.value() * right.value());
        brought.take(product_errors(&left, &right));
        rounding = rounding.or(left.rounding()).or(right.rounding());
    }
    let cost = taken.cost(products(rounding));
    Bounded::new(taken.sum, brought.errors().plus(cost), rounding)
}

/// What adding up is off in a block of a product, in roots of the sums of squares over its elements: `sum` of
/// these themselves, `norm` of all their terms, of which each has `count`.
///
/// It follows from what one element is off, which grows with |S|, ‖t‖ and Σ|t| ≤ √n·‖t‖: the root of a sum
/// of squares of sums is at most the sum of those roots.
pub fn block_errors(products: Products, count: f64, sum: f64, norm: f64) -> Errors {
    let size = count.sqrt() * norm;
    Terms { count, sum, size, squares: norm * norm }.cost(Some(products))
}

fn products(rounding: Option<Rounding>) -> Option<Products> {
    Some(rounding.map_or(Products::F32, |rounding| rounding.products))
}

/// An operand of a product as plain numbers: a kind of error, or sizes.
struct Operand<'a> {
    numbers: &'a [Bounded],
    /// |x| and x².
    size: Vec<f64>,
    squares: Vec<f64>,
    transposed: bool,
    left: bool,
}

impl<'a> Operand<'a> {
    fn new(numbers: &'a [Bounded], transposed: bool, left: bool) -> Self {
        let of = |f: fn(f64) -> f64| numbers.iter().map(|x| f(x.value())).collect();
        Self { numbers, size: of(f64::abs), squares: of(|x| x * x), transposed, left }
    }

    fn plane(&self, of: impl Fn(&Bounded) -> f64) -> Vec<f64> {
        self.numbers.iter().map(of).collect()
    }

    fn inexact(&self) -> bool {
        self.numbers.iter().any(|x| x.errors() != Errors::default())
    }

    /// Errors that the elements have in common over which a sum goes.
    fn along(&self, errors: Errors) -> f64 {
        if self.left != self.transposed { errors.row } else { errors.column }
    }

    /// Those that they have in common across.
    fn across(&self, errors: Errors) -> f64 {
        if self.left != self.transposed { errors.column } else { errors.row }
    }
}

/// op(A) · op(B).
///
/// Every kind of error is a product of its own, of f64: Σ|a|·bias(b), Σa²·noise(b)² and so on. What A's
/// elements are off a row of the result has in common, and what B's are a column.
pub(super) fn product(
    a: &[Bounded],
    b: &[Bounded],
    sizes: [usize; 3],
    transposed: [bool; 2],
) -> Vec<Bounded> {
    let values = |numbers: &[Bounded]| -> Vec<f64> { numbers.iter().map(|x| x.value()).collect() };
    let multiply = |a: &[f64], b: &[f64]| f64::product(a, b, sizes, transposed);
    let Some(rounding) = a.iter().chain(b).find_map(Bounded::rounding) else {
        // Nobody asks for errors.
        let product = multiply(&values(a), &values(b));
        return product.into_iter().map(Bounded::exact).collect();
    };
    let terms = added_up(&values(a), &values(b), sizes, transposed);
    let (a, b) = (Operand::new(a, transposed[0], true), Operand::new(b, transposed[1], false));
    let mut errors: Vec<Errors> =
        terms.iter().map(|terms| terms.cost(Some(rounding.products))).collect();
    if a.inexact() {
        let with = |plane: &[f64], squared: bool| {
            multiply(plane, if squared { &b.squares } else { &b.size })
        };
        take_along(&mut errors, &a, with);
    }
    if b.inexact() {
        let with = |plane: &[f64], squared: bool| {
            multiply(if squared { &a.squares } else { &a.size }, plane)
        };
        take_along(&mut errors, &b, with);
    }
    if a.inexact() && b.inexact() {
        let both = multiply(&a.plane(Bounded::bound), &b.plane(Bounded::bound));
        errors.iter_mut().zip(both).for_each(|(errors, both)| errors.bias += both);
    }
    let pairs = terms.into_iter().zip(errors);
    pairs.map(|(terms, errors)| Bounded::new(terms.sum, errors, Some(rounding))).collect()
}

/// The terms of all elements of op(A) · op(B).
fn added_up(
    a: &[f64],
    b: &[f64],
    [m, k, n]: [usize; 3],
    [transposed_a, transposed_b]: [bool; 2],
) -> Vec<Terms> {
    let transposed: Option<Vec<f64>> =
        transposed_b.then(|| (0..k * n).map(|i| b[i % n * k + i / n]).collect());
    let b = transposed.as_deref().unwrap_or(b);
    let mut all = Vec::with_capacity(m * n);
    let (mut sums, mut sizes, mut squares) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
    for i in 0..m {
        [&mut sums, &mut sizes, &mut squares].into_iter().for_each(|plane| plane.fill(0.0));
        for x in 0..k {
            let left = if transposed_a { a[x * m + i] } else { a[i * k + x] };
            let right = &b[x * n..(x + 1) * n];
            for (((right, sum), size), square) in
                right.iter().zip(&mut sums).zip(&mut sizes).zip(&mut squares)
            {
                let term = left * right;
                *sum += term;
                *size += term.abs();
                *square += term * term;
            }
        }
        // Zeros cost nothing, but only those of a row are told apart.
        let count =
            (0..k).filter(|x| a[if transposed_a { x * m + i } else { i * k + x }] != 0.0).count();
        all.extend((0..n).map(|j| Terms {
            count: count as f64,
            sum: sums[j],
            size: sizes[j],
            squares: squares[j],
        }));
    }
    all
}

/// Adds what one operand's errors become; `with` multiplies a plane of them by the other's sizes or squares.
fn take_along(
    errors: &mut [Errors],
    operand: &Operand<'_>,
    with: impl Fn(&[f64], bool) -> Vec<f64>,
) {
    let plane = |of: &dyn Fn(Errors) -> f64, squared: bool| -> Option<Vec<f64>> {
        let plane = operand.plane(|x| of(x.errors()));
        plane.iter().any(|x| *x > 0.0).then(|| with(&plane, squared))
    };
    let bias = plane(&|e| e.bias, false);
    let hard = plane(&|e| e.hard, false);
    let hard_squares = plane(&|e| e.hard * e.hard, true);
    let noise_squares = plane(&|e| e.noise * e.noise, true);
    let common = plane(&|e| operand.along(e), false);
    let across = plane(&|e| operand.across(e) * operand.across(e), true);
    let at = |plane: &Option<Vec<f64>>, i: usize| plane.as_ref().map_or(0.0, |plane| plane[i]);
    for (i, errors) in errors.iter_mut().enumerate() {
        let brought = Brought {
            bias: at(&bias, i),
            hard: at(&hard, i),
            hard_squares: at(&hard_squares, i),
            noise_squares: at(&noise_squares, i),
            ..Brought::default()
        };
        let mut more = brought.errors();
        more.noise += at(&common, i);
        let all = (brought.hard_squares + brought.noise_squares).sqrt() + at(&common, i);
        let others = at(&across, i).sqrt();
        (more.row, more.column) = if operand.left { (all, others) } else { (others, all) };
        *errors = errors.plus(more);
    }
}
