//! Losses over classes: rows of logits, and sums over all rows.

use super::products::tiles;
use super::whole::{self, Typical};
use super::{ROWS, Spot};
use crate::host;
use crate::operator::Operator;
use burn::tensor::{DType, Tensor};
use kiln_ops::cross_entropy::{CrossEntropyOptions, oracle};
use kiln_ops::linear_cross_entropy::oracle as linear;
use kiln_ops::matmul::{MatmulOptions, matmul};
use kiln_ops::oracle::{Bounded, Number};
use rayon::prelude::*;

/// Classes of dweight, and columns of x, that are compared.
const CLASSES: usize = 8;
const COLUMNS: usize = 16;
/// Rows whose logits stand on the device at once.
const CHUNK: usize = 1024;

/// Checks a loss of logits and targets, or its gradient.
///
/// # Errors
///
/// One line if a result is wrong or cannot be read.
pub(crate) fn cross_entropy(spot: &Spot<'_>, options: CrossEntropyOptions) -> Result<(), String> {
    let targets = spot.integers(1)?;
    let classes = spot.call.inputs[0].shape()[1];
    let rows = spot.sample(targets.len(), ROWS);
    let logits = spot.numbers(&spot.input_rows(0, &rows)?);
    let some: Vec<i64> = rows.iter().map(|row| targets[*row]).collect();
    let counted = oracle::count(&targets, &options);
    if spot.backward() {
        let dloss = spot.rounding.number(spot.cotangent(0)?.values().at(0));
        let expected = oracle::backward_rows(&logits, &some, classes, &options, dloss / counted);
        return spot.compare_rows(0, &rows, &expected);
    }
    let all = spot.input(0)?;
    let all = all.lines();
    let loss = |(row, target): (usize, &i64)| {
        oracle::forward(&all.row(row), &[*target], classes, &options)
    };
    let losses: Vec<f64> = targets.par_iter().enumerate().map(loss).collect();
    let most = largest_bound(&logits, &some, classes, &options);
    let mean = Bounded::sum(spot.numbers(&losses)) / counted;
    of_mean(spot, mean, most)
}

/// Checks a loss of x·weight and targets, or its gradients: dx at some rows and columns, dweight at some classes, and
/// all blocks.
///
/// That needs the log-sum-exp of all rows: from plain operations of Burn in f32, which are themselves checked at
/// some rows.
///
/// # Errors
///
/// One line if a result is wrong or cannot be read.
pub(crate) fn linear_cross_entropy<O: Operator + ?Sized>(
    op: &O,
    spot: &Spot<'_>,
    options: CrossEntropyOptions,
) -> Result<(), String> {
    let targets = spot.integers(2)?;
    let (width, classes) = (spot.call.inputs[0].shape()[1], spot.call.inputs[1].shape()[1]);
    let (x, weight) = (spot.input(0)?, spot.input(1)?);
    let (x, weight) = (x.stack().matrix(0), weight.stack().matrix(0));
    let rounding = spot.rounding;
    let logits = |rows: &[usize], columns: &[usize]| -> Vec<Bounded> {
        let along: Vec<usize> = (0..width).collect();
        tiles(rows, columns, width, |rows, columns| {
            let x = rounding.numbers(&x.part(rows, &along));
            let weight = rounding.numbers(&weight.part(&along, columns));
            linear::logits(&x, &weight, [rows.len(), width, columns.len()])
        })
    };
    let rows = spot.sample(targets.len(), ROWS);
    let all: Vec<usize> = (0..targets.len()).collect();
    let every: Vec<usize> = (0..classes).collect();
    let some_logits = logits(&rows, &every);
    let some: Vec<i64> = rows.iter().map(|row| targets[*row]).collect();

    let device = Normalisers::new(spot)?;
    let counted = oracle::count(&targets, &options);
    if !spot.backward() {
        let losses: Vec<f64> = targets
            .iter()
            .zip(device.lse.iter().zip(&device.picked))
            .map(|(target, (lse, x))| if *target == options.ignore_index { 0.0 } else { lse - x })
            .collect();
        let most = largest_bound(&some_logits, &some, classes, &options);
        for (row, logits) in rows.iter().zip(some_logits.chunks_exact(classes)) {
            let expected = oracle::forward(logits, &[targets[*row]], classes, &options);
            agrees(*row, losses[*row], expected)?;
        }
        let mean = linear::mean(Bounded::sum(spot.numbers(&losses)) / counted);
        return of_mean(spot, mean, most);
    }

    let dloss = rounding.number(spot.cotangent(0)?.values().at(0));
    let columns = spot.sample(width, COLUMNS);
    let of_columns = spot.numbers(&spot.input_rows(1, &columns)?);
    let dx = |(logits, target): (&[Bounded], &i64)| {
        let sizes = [1, columns.len(), classes];
        linear::backward_input(logits, &of_columns, &[*target], sizes, &options, dloss, counted)
    };
    let dx: Vec<Vec<Bounded>> = some_logits.par_chunks_exact(classes).zip(&some).map(dx).collect();
    let dx = dx.concat();
    spot.compare(0, &rows, &columns, &dx)?;

    let mut error = Bounded::exact(0.0);
    for (row, logits) in rows.iter().zip(some_logits.chunks_exact(classes)) {
        let expected = oracle::log_sum_exp(logits);
        agrees(*row, device.lse[*row], expected)?;
        if expected.bound() >= error.bound() {
            error = expected - expected.value();
        }
    }
    // Any row's is off by no more than twice what some are, and the device's is another.
    let lse = |lse: &f64| rounding.number(*lse) + error * 4.0;
    let lse: Vec<Bounded> = device.lse.iter().map(lse).collect();
    let chosen = spot.sample(classes, CLASSES);
    let of_chosen = logits(&all, &chosen);
    let x = spot.numbers(&x.part(&all, &columns));
    let logits = &of_chosen;
    let dweight =
        linear::backward_weight(&x, logits, &lse, &targets, &chosen, classes, &options, dloss);
    spot.compare(1, &columns, &chosen, &dweight)?;
    whole::check(op, spot, &[Typical::of(&dx), Typical::of(&dweight)])
}

/// What a loss of these rows may be off at most.
fn largest_bound(
    logits: &[Bounded],
    targets: &[i64],
    classes: usize,
    options: &CrossEntropyOptions,
) -> f64 {
    let bound = |(row, target): (&[Bounded], &i64)| {
        oracle::forward(row, &[*target], classes, options).bound()
    };
    logits.chunks_exact(classes).zip(targets).map(bound).fold(0.0, f64::max)
}

/// Checks a mean of losses that are each off by at most twice what some of them are, and as much again where they
/// are from the device.
fn of_mean(spot: &Spot<'_>, mean: Bounded, most: f64) -> Result<(), String> {
    let found = spot.result(0)?.values().at(0);
    spot.within(0, "", found - mean.value(), mean.bound() + 4.0 * most)
}

/// Whether a number of a row that Burn made, to check others with, is right.
fn agrees(row: usize, found: f64, expected: Bounded) -> Result<(), String> {
    let (error, allowed) = (found - expected.value(), expected.bound());
    match error.abs() <= allowed {
        true => Ok(()),
        false => Err(format!(
            "not checked: Burn's own of row {row} is {error:.2e} off, {allowed:.2e} is allowed"
        )),
    }
}

/// Of every row the log-sum-exp of x·weight, and the logit of the target.
struct Normalisers {
    lse: Vec<f64>,
    picked: Vec<f64>,
}

impl Normalisers {
    fn new(spot: &Spot<'_>) -> Result<Self, String> {
        let (x, targets) = (spot.call.rows(0), spot.call.int(2));
        let weight = spot.call.rows(1).cast(DType::F32);
        let rows = x.dims()[0];
        let (mut lse, mut picked) = (vec![], vec![]);
        for from in (0..rows).step_by(CHUNK) {
            let length = CHUNK.min(rows - from);
            let x = x.clone().narrow(0, from, length).cast(DType::F32);
            let logits: Tensor<2> =
                matmul(x, weight.clone(), MatmulOptions::default()).map_err(|e| e.to_string())?;
            let most = logits.clone().max_dim(1);
            let sums = (logits.clone() - most.clone()).exp().sum_dim(1).log() + most;
            lse.extend(host::download(&sums)?);
            // An ignored target is no class.
            let targets = targets.clone().narrow(0, from, length).clamp_min(0);
            picked.extend(host::download(&logits.gather(1, targets.reshape([length, 1])))?);
        }
        Ok(Self { lse, picked })
    }
}
