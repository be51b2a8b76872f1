//! Results against the numbers of an oracle: element by element, and by lines.
//!
//! An element is right if |out − ref| ≤ bound. That lets a gradient pass that is 2 % off in all elements
//! where a bound is wider than that. So lines are looked at too: with e = out − ref and weights w,
//!
//! |Σ w·e| ≤ Σ|w|·bias + λ·(Σ|w|·shared + √(Σ w²·deviation²))
//!
//! where roundings average out but for those that the line shares, as a row does those of its norm or its
//! log-sum-exp. With w = 1 that is the mean error of a line, with w = ref by how much the line as a whole is
//! too large or too small. Lines are the rows, the columns, and all elements at once.

use super::bounded::{Bounded, Errors, LAMBDA};
use super::number::Number;

/// Where a comparison is nearest to its bound, or furthest over it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Worst {
    /// The error over what is allowed: over 1 is too much.
    pub ratio: f64,
    /// Where.
    pub place: Place,
    /// The error.
    pub error: f64,
    /// What is allowed.
    pub allowed: f64,
}

/// A place in a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Row and column of an element.
    Element(usize, usize),
    /// A row.
    Row(usize),
    /// A column.
    Column(usize),
    /// Everywhere.
    All,
}

/// The outcome of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Comparison {
    /// Of the elements; none if there are none.
    pub elements: Option<Worst>,
    /// Of the lines.
    pub lines: Option<Worst>,
    /// Elements over their bound.
    pub wrong: usize,
    /// Elements that are infinite or not a number where the oracle is finite.
    pub not_finite: usize,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Element(row, column) => write!(f, "row {row}, column {column}"),
            Self::Row(row) => write!(f, "row {row}"),
            Self::Column(column) => write!(f, "column {column}"),
            Self::All => f.write_str("all elements"),
        }
    }
}

impl Worst {
    fn new(error: f64, allowed: f64, place: Place) -> Self {
        // Where nothing is allowed, nothing is right; NaN is over everything.
        let ratio = match error.abs() {
            0.0 => 0.0,
            size if size.is_nan() || allowed.is_nan() => f64::INFINITY,
            size if size.is_infinite() && allowed.is_infinite() => 1.0,
            size => size / allowed,
        };
        Self { ratio, place, error, allowed }
    }

    /// Whether it is too much.
    pub fn exceeds(&self) -> bool {
        self.ratio > 1.0
    }

    fn or(self, other: Option<Self>) -> Option<Self> {
        Some(other.filter(|other| other.ratio >= self.ratio).unwrap_or(self))
    }
}

impl std::fmt::Display for Worst {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { ratio, place, error, allowed } = self;
        write!(f, "{error:.2e} off at {place} where {allowed:.2e} is allowed ({ratio:.2} times)")
    }
}

impl Comparison {
    /// Whether every element and every line is within what is allowed.
    pub fn passes(&self) -> bool {
        [self.elements, self.lines].iter().flatten().all(|worst| !worst.exceeds())
    }
}

/// Compares `out` with what an oracle made of a matrix with rows of `columns` elements.
///
/// # Panics
///
/// If there are not as many of the one as of the other.
pub fn compare(out: &[f64], reference: &[Bounded], columns: usize) -> Comparison {
    assert_eq!(out.len(), reference.len(), "elements of a result and of its reference");
    let mut found = Comparison::default();
    if out.is_empty() {
        return found;
    }
    let columns = columns.max(1);
    let mut places = Vec::with_capacity(out.len());
    for (i, (out, reference)) in out.iter().zip(reference).enumerate() {
        let value = reference.value();
        let same = *out == value || (out.is_nan() && value.is_nan());
        let error = if same { 0.0 } else { out - value };
        let place = Place::Element(i / columns, i % columns);
        let worst = Worst::new(error, reference.bound(), place);
        found.wrong += usize::from(worst.exceeds());
        found.not_finite += usize::from(!out.is_finite() && value.is_finite());
        found.elements = worst.or(found.elements);
        let counts = out.is_finite() && value.is_finite() && reference.bound().is_finite();
        places.push(counts.then_some((error, reference)));
    }
    found.lines = lines(&places, columns);
    found
}

/// An element of a line: what it is off, and what it should be. None where that is not finite.
type Element<'a> = Option<(f64, &'a Bounded)>;

/// The worst of the rows, the columns and all elements.
fn lines(elements: &[Element<'_>], columns: usize) -> Option<Worst> {
    let mut rows = vec![[Line::default(); 2]; elements.len().div_ceil(columns)];
    let mut cols = vec![[Line::default(); 2]; columns];
    let alike = alike(elements);
    let mut alone = vec![true; elements.len()];
    alike.iter().for_each(|i| alone[*i] = false);
    let row_by_row = elements.chunks(columns).zip(alone.chunks(columns)).zip(&mut rows);
    for ((elements, alone), row) in row_by_row {
        for ((element, alone), col) in elements.iter().zip(alone).zip(&mut cols) {
            let Some((error, of)) = element else { continue };
            for (lines, of_row) in [(&mut *row, true), (col, false)] {
                for (line, weight) in lines.iter_mut().zip([1.0, of.value()]) {
                    line.take(weight, *error, of.errors(), of_row);
                    if *alone {
                        line.round_alone(weight, of.errors());
                    }
                }
            }
        }
    }
    for i in alike {
        let Some((_, of)) = elements[i] else { continue };
        for lines in [&mut rows[i / columns], &mut cols[i % columns]] {
            for (line, weight) in lines.iter_mut().zip([1.0, of.value()]) {
                line.round_alike(of.value(), weight, of.errors());
            }
        }
    }
    rows.iter_mut().chain(&mut cols).flatten().for_each(Line::settle);
    let of = |lines: &[[Line; 2]], place: fn(usize) -> Place| -> Option<Worst> {
        let each = lines.iter().enumerate().flat_map(|(i, both)| both.iter().map(move |l| (i, l)));
        let worst = each.map(|(i, line)| Worst::new(line.error, line.allowed(), place(i)));
        worst.reduce(|worst, other| other.or(Some(worst)).unwrap_or(other))
    };
    let all = [0, 1].map(|weight| all(&rows, &cols, weight));
    let worst = all[0].or(Some(all[1]));
    let worst = worst.and_then(|worst| worst.or(of(&cols, Place::Column)));
    worst.and_then(|worst| worst.or(of(&rows, Place::Row)))
}

/// Elements of which there are others that should be the same number; those follow each other.
fn alike(elements: &[Element<'_>]) -> Vec<usize> {
    let mut order: Vec<(f64, usize)> = vec![];
    for (i, element) in elements.iter().enumerate() {
        order.extend(element.map(|(_, of)| (of.value(), i)));
    }
    order.sort_unstable_by(|(a, _), (b, _)| a.total_cmp(b));
    let same = order.chunk_by(|(a, _), (b, _)| a == b).filter(|same| same.len() > 1);
    same.flatten().map(|(_, i)| *i).collect()
}

/// What is added up along a line, for one weight.
///
/// Elements that should be the same number are made in the same way from the same numbers and are rounded alike:
/// 50257 logits in bf16 have some hundred values. They count as one rounding, as often as they are there.
#[derive(Clone, Copy, Default)]
struct Line {
    error: f64,
    bias: f64,
    shared: f64,
    squares: f64,
    /// Σ|w|·bound: more than that no line is off.
    most: f64,
    /// The number that the last elements should be that are alike, and what they are rounded by together.
    value: f64,
    rounded: f64,
}

impl Line {
    /// Takes an element in, but for what it is rounded by.
    fn take(&mut self, weight: f64, error: f64, errors: Errors, of_row: bool) {
        let size = weight.abs();
        self.error += weight * error;
        self.bias += size * errors.bias;
        self.shared += size * if of_row { errors.row } else { errors.column };
        self.most += size * errors.bound();
    }

    /// What an element is rounded by, independently of all others.
    fn round_alone(&mut self, weight: f64, errors: Errors) {
        self.squares += (weight * errors.deviation()).powi(2);
    }

    /// What an element is rounded by as others are that should be the same number, after all that should be less.
    fn round_alike(&mut self, value: f64, weight: f64, errors: Errors) {
        if value != self.value {
            self.settle();
            self.value = value;
        }
        self.rounded += weight.abs() * errors.deviation();
    }

    /// The next elements are rounded independently of those before.
    fn settle(&mut self) {
        self.squares += self.rounded * self.rounded;
        self.rounded = 0.0;
    }

    fn allowed(&self) -> f64 {
        self.most.min(self.bias + LAMBDA * (self.shared + self.squares.sqrt()))
    }
}

/// All elements: what a row shares is independent of what the next one does.
fn all(rows: &[[Line; 2]], columns: &[[Line; 2]], weight: usize) -> Worst {
    let total = |of: fn(&Line) -> f64| rows.iter().map(|both| of(&both[weight])).sum::<f64>();
    let shared = |lines: &[[Line; 2]]| {
        lines.iter().map(|both| both[weight].shared.powi(2)).sum::<f64>().sqrt()
    };
    let roundings = shared(rows) + shared(columns) + total(|l| l.squares).sqrt();
    let allowed = total(|l| l.most).min(total(|l| l.bias) + LAMBDA * roundings);
    Worst::new(total(|l| l.error), allowed, Place::All)
}
