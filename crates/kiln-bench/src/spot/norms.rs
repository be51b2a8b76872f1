//! The gradient of a norm's weight: a sum over all rows.

use super::Spot;
use super::stored::Lines;
use kiln_ops::oracle::{Bounded, Number};
use kiln_ops::rms_norm::oracle;
use rayon::prelude::*;

/// Columns that have bounds of their own.
const COLUMNS: usize = 16;
/// Rows that a thread takes at a time.
const ROWS: usize = 64;

/// What some rows add.
struct Part {
    /// To every column.
    sums: Vec<f64>,
    /// The scales of the rows, and the columns that have bounds.
    scales: Vec<Bounded>,
    x: Vec<Bounded>,
    dy: Vec<Bounded>,
}

/// Checks the gradient of the weight, a `result`, from the rows of what is normalised and of the cotangent: some
/// columns within their bounds, all others within twice the largest of these.
///
/// # Errors
///
/// One line if it is wrong or cannot be read.
pub(crate) fn of_weight(
    spot: &Spot<'_>,
    result: usize,
    x: impl Fn(usize) -> Vec<Bounded> + Sync,
    dy: Lines<'_>,
    eps: f64,
) -> Result<(), String> {
    let (rows, width, rounding) = (dy.count(), dy.width(), spot.rounding);
    let columns = spot.sample(width, COLUMNS);
    let part = |from: usize| {
        let rows = from..rows.min(from + ROWS);
        let x: Vec<Vec<Bounded>> = rows.clone().map(&x).collect();
        let scales: Vec<Bounded> = x.iter().map(|row| oracle::scale(row, eps)).collect();
        let dy: Vec<f64> = rows.flat_map(|row| dy.row(row)).collect();
        let chosen = |row: usize| columns.iter().map(move |j| row * width + j);
        let all: Vec<Bounded> = x.concat();
        let values = |of: &[Bounded]| -> Vec<f64> { of.iter().map(|x| x.value()).collect() };
        let places: Vec<usize> = (0..scales.len()).flat_map(chosen).collect();
        Part {
            sums: oracle::of_weight(&values(&all), &values(&scales), &dy, width),
            x: places.iter().map(|i| all[*i]).collect(),
            dy: places.iter().map(|i| rounding.number(dy[*i])).collect(),
            scales,
        }
    };
    let starts: Vec<usize> = (0..rows).step_by(ROWS).collect();
    let parts: Vec<Part> = starts.into_par_iter().map(part).collect();

    let of = |part: fn(&Part) -> &Vec<Bounded>| -> Vec<Bounded> {
        parts.iter().flat_map(part).copied().collect()
    };
    let (x, scales, dy) = (of(|part| &part.x), of(|part| &part.scales), of(|part| &part.dy));
    let bounded = oracle::of_weight(&x, &scales, &dy, columns.len());
    let stored: Vec<Bounded> = bounded.iter().map(|dw| dw.stored()).collect();
    spot.compare(result, &[0], &columns, &stored)?;

    let most = bounded.iter().map(Bounded::bound).fold(0.0, f64::max);
    let found = spot.result(result)?.values().to_vec();
    for (column, found) in found.into_iter().enumerate() {
        let expected: f64 = parts.iter().map(|part| part.sums[column]).sum();
        let allowed = 2.0 * (most + rounding.number(expected).stored().bound());
        spot.within(result, &format!(" at column {column}"), found - expected, allowed)?;
    }
    Ok(())
}
