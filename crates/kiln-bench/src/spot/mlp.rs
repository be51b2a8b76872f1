//! swiglu_mlp: y and dx at some rows, the gradients of the weights at some inner units, and all blocks.

use super::stored::Lines;
use super::whole::{self, Typical};
use super::{ROWS, Spot};
use crate::operator::Operator;
use kiln_ops::oracle::Bounded;
use kiln_ops::swiglu_mlp::oracle;
use rayon::prelude::*;

/// Inner units, and columns of x and dy, at which the gradients of the weights are compared.
const UNITS: usize = 4;
const COLUMNS: usize = 16;
/// Rows that a thread takes at a time.
const CHUNK: usize = 256;

/// Checks y, or the gradients.
///
/// # Errors
///
/// One line if a result is wrong or cannot be read.
pub(crate) fn check<O: Operator + ?Sized>(op: &O, spot: &Spot<'_>) -> Result<(), String> {
    let x = spot.input(0)?;
    let x = x.lines();
    let [count, width, inner] = [x.count(), x.width(), spot.call.inputs[1].shape()[1]];
    let rounding = spot.rounding;
    let [gate, up, down] = [spot.input(1)?, spot.input(2)?, spot.input(3)?];
    let [w_gate, w_up, w_down] =
        [&gate, &up, &down].map(|weight| rounding.numbers(&weight.values().to_vec()));
    let rows = spot.sample(count, ROWS);
    let sizes = [1, width, inner];
    if !spot.backward() {
        let y = |row: &usize| {
            let x = rounding.numbers(&x.row(*row));
            oracle::forward(&x, &w_gate, &w_up, &w_down, sizes)
        };
        let y: Vec<Vec<Bounded>> = rows.par_iter().map(y).collect();
        let y = y.concat();
        spot.compare_rows(0, &rows, &y)?;
        return whole::check(op, spot, &[Typical::of(&y)]);
    }

    let dy = spot.cotangent(0)?;
    let dy = dy.lines();
    let dx = |row: &usize| {
        let [x, dy] = [&x, &dy].map(|of| rounding.numbers(&of.row(*row)));
        let units = oracle::units(&x, &w_gate, &w_up, &w_down, sizes, &dy);
        oracle::of_input(&w_gate, &w_up, &units, sizes)
    };
    let dx: Vec<Vec<Bounded>> = rows.par_iter().map(dx).collect();
    let dx = dx.concat();
    spot.compare_rows(0, &rows, &dx)?;

    // Weights cut to a few units give the gradients of these.
    let chosen = spot.sample(inner, UNITS);
    let columns = spot.sample(width, COLUMNS);
    let every: Vec<usize> = (0..width).collect();
    let [w_gate, w_up] =
        [&gate, &up].map(|of| rounding.numbers(&of.stack().matrix(0).part(&every, &chosen)));
    let w_down = rounding.numbers(&down.stack().matrix(0).part(&chosen, &every));
    let part = |from: usize| {
        let rows = from..count.min(from + CHUNK);
        let read = |of: &Lines<'_>| {
            let values: Vec<f64> = rows.clone().flat_map(|row| of.row(row)).collect();
            rounding.numbers(&values)
        };
        let (x, dy) = (read(&x), read(&dy));
        let units =
            oracle::units(&x, &w_gate, &w_up, &w_down, [rows.len(), width, chosen.len()], &dy);
        let cut = |of: &[Bounded]| -> Vec<Bounded> {
            of.chunks_exact(width).flat_map(|row| columns.iter().map(move |j| row[*j])).collect()
        };
        (cut(&x), cut(&dy), units)
    };
    let starts: Vec<usize> = (0..count).step_by(CHUNK).collect();
    let parts: Vec<_> = starts.into_par_iter().map(part).collect();
    let (mut x, mut dy) = (vec![], vec![]);
    let mut units = oracle::Units { hidden: vec![], dgate: vec![], dup: vec![] };
    for (of_x, of_dy, part) in parts {
        x.extend(of_x);
        dy.extend(of_dy);
        units.hidden.extend(part.hidden);
        units.dgate.extend(part.dgate);
        units.dup.extend(part.dup);
    }
    let sizes = [count, columns.len(), chosen.len()];
    let [dw_gate, dw_up, dw_down] = oracle::of_weights(&x, &dy, &units, sizes);
    spot.compare(1, &columns, &chosen, &dw_gate)?;
    spot.compare(2, &columns, &chosen, &dw_up)?;
    spot.compare(3, &chosen, &columns, &dw_down)?;
    whole::check(op, spot, &[&dx, &dw_gate, &dw_up, &dw_down].map(|of| Typical::of(of)))
}
