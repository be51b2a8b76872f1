//! The check of what is timed.
//!
//! The gate's cases are small: a plan takes other tiles there than at the shapes that are timed, cuts K into
//! other parts and a loss into other chunks. So before a call is timed its own results are looked at: those that
//! the last call of a burst left, a recorded one included. All of them is too much for an oracle, so
//!
//! * operators whose rows stand for themselves are compared with their oracle at some rows, a sum over all rows at
//!   some columns, and a mean loss as a whole;
//! * products of matrices are compared at some rows and columns, and every block of the result in sums with random
//!   signs, which one lost tile, one lost part of K and one wrong tile show;
//! * what several products in a row make is compared at some rows and columns, and every block with that of the
//!   reference in f32.
//!
//! Bounds are those of the gate.

mod attention;
mod blocks;
mod classes;
mod embedding;
mod hyper;
mod kasmina;
mod kasmina_mlp;
mod mlp;
mod newton_schulz;
mod norms;
mod products;
mod rows;
mod squares;
mod stored;
#[cfg(test)]
mod tests;
mod whole;

pub(crate) use attention::check as attention;
pub(crate) use classes::{cross_entropy, linear_cross_entropy};
pub(crate) use embedding::check as embedding;
pub(crate) use hyper::{check as mhc_pre, check_after as mhc_post_pre};
pub(crate) use kasmina::check as kasmina;
pub(crate) use kasmina_mlp::check as kasmina_mlp;
pub(crate) use mlp::check as swiglu_mlp;
pub(crate) use newton_schulz::check as newton_schulz;
pub(crate) use norms::of_weight;
pub(crate) use products::{Product, stored_sum};
pub(crate) use rows::check as rows;
pub(crate) use squares::check as sum_squares;

use crate::host;
use crate::operator::{Call, Dims, Spec};
use burn::tensor::Tensor;
use kiln_ops::oracle::{Bounded, Comparison, Place, Rounding, Worst, compare};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use stored::Stored;

/// Rows of an operator that are compared.
pub(crate) const ROWS: usize = 24;

/// A call and what it left on the device.
#[derive(Debug)]
pub struct Spot<'a> {
    /// The call, without autodiff.
    pub call: Call<'a>,
    /// Cotangents of the outputs; none of a forward.
    pub cotangents: &'a [Tensor<1>],
    /// The outputs, or the gradients of the float inputs.
    pub results: &'a [Tensor<1>],
    /// Where the implementation rounds.
    pub rounding: Rounding,
    spec: &'static Spec,
    dims: Dims,
}

impl<'a> Spot<'a> {
    /// Of a call of the operator with this spec.
    ///
    /// # Errors
    ///
    /// One line if the results are not as many, or not as large, as they should be.
    pub fn new(
        spec: &'static Spec,
        call: Call<'a>,
        cotangents: &'a [Tensor<1>],
        results: &'a [Tensor<1>],
        rounding: Rounding,
    ) -> Result<Self, String> {
        let shapes: Vec<Vec<usize>> = call.inputs.iter().map(|i| i.shape().to_vec()).collect();
        let dims = spec.dims(&shapes)?;
        let spot = Self { call, cotangents, results, rounding, spec, dims };
        let expected = match spot.backward() {
            true => spec.float_inputs().count(),
            false => spec.outputs.len(),
        };
        if results.len() != expected {
            return Err(format!("there are {} results, not {expected}", results.len()));
        }
        for (i, result) in results.iter().enumerate() {
            let (found, shape) = (result.dims()[0], spot.shape(i));
            if found != shape.iter().product::<usize>() {
                return Err(format!("`{}` has {found} elements, not {shape:?}", spot.name(i)));
            }
        }
        Ok(spot)
    }

    /// Whether the results are gradients.
    pub fn backward(&self) -> bool {
        !self.cotangents.is_empty()
    }

    /// The input that a gradient is of.
    fn input_of(&self, result: usize) -> usize {
        self.spec.float_inputs().nth(result).expect("there is one for each float input")
    }

    /// Name of a result.
    fn name(&self, result: usize) -> String {
        match self.backward() {
            true => format!("grad.{}", self.spec.inputs[self.input_of(result)].name),
            false => self.spec.outputs[result].name.to_string(),
        }
    }

    /// Shape of a result.
    fn shape(&self, result: usize) -> Vec<usize> {
        match self.backward() {
            true => self.call.inputs[self.input_of(result)].shape().to_vec(),
            false => self.spec.output_shape(&self.spec.outputs[result], &self.dims),
        }
    }

    /// A float input as a whole.
    pub(crate) fn input(&self, input: usize) -> Result<Stored, String> {
        Stored::read(&self.call.rows(input), self.call.inputs[input].shape())
    }

    /// A cotangent as a whole.
    pub(crate) fn cotangent(&self, output: usize) -> Result<Stored, String> {
        let shape = self.spec.output_shape(&self.spec.outputs[output], &self.dims);
        Stored::read(&self.cotangents[output], &shape)
    }

    /// A result as a whole.
    pub(crate) fn result(&self, result: usize) -> Result<Stored, String> {
        Stored::read(&self.results[result], &self.shape(result))
    }

    /// An integer input.
    pub(crate) fn integers(&self, input: usize) -> Result<Vec<i64>, String> {
        let data = self.call.int(input).try_to_data();
        let data = data.map_err(|e| host::one_line(&format!("{e:?}")))?;
        Ok(data.iter::<i64>().collect())
    }

    /// Some rows of an input.
    pub(crate) fn input_rows(&self, input: usize, rows: &[usize]) -> Result<Vec<f64>, String> {
        let matrix = self.call.rows(input);
        let width = matrix.dims()[1];
        some_rows(matrix, width, rows)
    }

    /// Some rows of a cotangent.
    pub(crate) fn cotangent_rows(&self, output: usize, rows: &[usize]) -> Result<Vec<f64>, String> {
        let shape = self.spec.output_shape(&self.spec.outputs[output], &self.dims);
        some_rows(self.cotangents[output].clone(), width(&shape), rows)
    }

    /// Some rows of a result.
    fn result_rows(&self, result: usize, rows: &[usize]) -> Result<Vec<f64>, String> {
        some_rows(self.results[result].clone(), width(&self.shape(result)), rows)
    }

    /// Numbers of the implementation.
    pub(crate) fn numbers(&self, values: &[f64]) -> Vec<Bounded> {
        self.rounding.numbers(values)
    }

    /// The first, the last and some others of `n`.
    pub(crate) fn sample(&self, n: usize, count: usize) -> Vec<usize> {
        sample(n, count, &mut generator())
    }

    /// Compares some rows of a result with what they should be.
    pub(crate) fn compare_rows(
        &self,
        result: usize,
        rows: &[usize],
        expected: &[Bounded],
    ) -> Result<(), String> {
        let columns: Vec<usize> = (0..width(&self.shape(result))).collect();
        self.compare(result, rows, &columns, expected)
    }

    /// Compares a result at some rows and columns with what it should be there.
    pub(crate) fn compare(
        &self,
        result: usize,
        rows: &[usize],
        columns: &[usize],
        expected: &[Bounded],
    ) -> Result<(), String> {
        let width = width(&self.shape(result)).max(1);
        let found = self.result_rows(result, rows)?;
        let row = |row: &[f64]| -> Vec<f64> { columns.iter().map(|j| row[*j]).collect() };
        let found: Vec<f64> = found.chunks_exact(width).flat_map(row).collect();
        self.named(result, compared(&found, expected, rows, columns))
    }

    /// Whether a number of a result is off by no more than is allowed.
    fn within(&self, result: usize, place: &str, error: f64, allowed: f64) -> Result<(), String> {
        if error.abs() <= allowed {
            return Ok(());
        }
        let what = format!("{error:.2e} off{place} where {allowed:.2e} is allowed");
        self.named(result, Err(what))
    }

    /// What is wrong, of which result.
    fn named(&self, result: usize, checked: Result<(), String>) -> Result<(), String> {
        checked.map_err(|what| format!("`{}` is {what}", self.name(result)))
    }
}

/// The same numbers in every run.
fn generator() -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(23)
}

/// The first, the last, and one of each of `count` equal parts of `n`.
fn sample(n: usize, count: usize, rng: &mut impl Rng) -> Vec<usize> {
    let parts = count.min(n);
    let one = |i: usize| rng.random_range(i * n / parts..(i + 1) * n / parts);
    let mut chosen: Vec<usize> = (0..parts).map(one).collect();
    chosen.extend([0, n.saturating_sub(1)].into_iter().filter(|i| *i < n));
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// Elements of a row.
fn width(shape: &[usize]) -> usize {
    shape.last().copied().unwrap_or(1)
}

fn some_rows<const D: usize>(
    tensor: Tensor<D>,
    width: usize,
    rows: &[usize],
) -> Result<Vec<f64>, String> {
    let count = tensor.shape().num_elements() / width.max(1);
    let matrix: Tensor<2> = tensor.reshape([count, width]);
    let mut values = Vec::with_capacity(rows.len() * width);
    for together in rows.chunk_by(|a, b| a + 1 == *b) {
        values.extend(host::download(&matrix.clone().narrow(0, together[0], together.len()))?);
    }
    Ok(values)
}

/// Compares a part of a matrix with what it should be; the error says where in the whole.
fn compared(
    found: &[f64],
    expected: &[Bounded],
    rows: &[usize],
    columns: &[usize],
) -> Result<(), String> {
    let Comparison { elements, lines, .. } = compare(found, expected, columns.len());
    match [elements, lines].into_iter().flatten().find(Worst::exceeds) {
        Some(worst) => {
            let place = match worst.place {
                Place::Element(i, j) => Place::Element(rows[i], columns[j]),
                Place::Row(i) => Place::Row(rows[i]),
                Place::Column(j) => Place::Column(columns[j]),
                Place::All => Place::All,
            };
            Err(Worst { place, ..worst }.to_string())
        }
        None => Ok(()),
    }
}
