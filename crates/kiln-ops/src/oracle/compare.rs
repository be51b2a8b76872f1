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

use super::bounded::{Bounded, LAMBDA};
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
    let mut lines = Lines::new(out.len() / columns, columns);
    for (i, (out, reference)) in out.iter().zip(reference).enumerate() {
        let place = (i / columns, i % columns);
        let value = reference.value();
        let same = *out == value || (out.is_nan() && value.is_nan());
        let error = if same { 0.0 } else { out - value };
        let worst = Worst::new(error, reference.bound(), Place::Element(place.0, place.1));
        found.wrong += usize::from(worst.exceeds());
        found.not_finite += usize::from(!out.is_finite() && value.is_finite());
        found.elements = worst.or(found.elements);
        if out.is_finite() && value.is_finite() && reference.bound().is_finite() {
            lines.take(place, error, reference);
        }
    }
    found.lines = lines.worst();
    found
}

/// What is added up along a line, for one weight.
#[derive(Clone, Copy, Default)]
struct Line {
    error: f64,
    bias: f64,
    shared: f64,
    squares: f64,
    /// Σ|w|·bound: more than that no line is off.
    most: f64,
}

impl Line {
    fn take(&mut self, weight: f64, error: f64, of: &Bounded, shared: f64) {
        let (size, errors) = (weight.abs(), of.errors());
        self.error += weight * error;
        self.bias += size * errors.bias;
        self.shared += size * shared;
        self.squares += (size * errors.deviation()).powi(2);
        self.most += size * errors.bound();
    }

    fn allowed(&self) -> f64 {
        self.most.min(self.bias + LAMBDA * (self.shared + self.squares.sqrt()))
    }
}

/// All lines: by each weight, rows and columns.
struct Lines {
    rows: [Vec<Line>; 2],
    columns: [Vec<Line>; 2],
}

impl Lines {
    fn new(rows: usize, columns: usize) -> Self {
        let of = |count: usize| [0, 1].map(|_| vec![Line::default(); count]);
        Self { rows: of(rows), columns: of(columns) }
    }

    fn take(&mut self, (row, column): (usize, usize), error: f64, of: &Bounded) {
        for (i, weight) in [1.0, of.value()].into_iter().enumerate() {
            self.rows[i][row].take(weight, error, of, of.errors().row);
            self.columns[i][column].take(weight, error, of, of.errors().column);
        }
    }

    fn worst(&self) -> Option<Worst> {
        let mut worst = None;
        for (lines, place) in [
            (&self.rows, Place::Row as fn(usize) -> Place),
            (&self.columns, Place::Column as fn(usize) -> Place),
        ] {
            for (at, line) in lines.iter().flat_map(|lines| lines.iter().enumerate()) {
                worst = Worst::new(line.error, line.allowed(), place(at)).or(worst);
            }
        }
        for (rows, columns) in self.rows.iter().zip(&self.columns) {
            worst = self.all(rows, columns).or(worst);
        }
        worst
    }

    /// All elements: what a row shares is independent of what the next one does.
    fn all(&self, rows: &[Line], columns: &[Line]) -> Worst {
        let total = |of: fn(&Line) -> f64| rows.iter().map(of).sum::<f64>();
        let shared = |lines: &[Line]| lines.iter().map(|l| l.shared * l.shared).sum::<f64>().sqrt();
        let roundings = shared(rows) + shared(columns) + total(|l| l.squares).sqrt();
        let allowed = total(|l| l.most).min(total(|l| l.bias) + LAMBDA * roundings);
        Worst::new(total(|l| l.error), allowed, Place::All)
    }
}
