//! mhc_pre: its outputs and dx at some tokens, the gradients of φ, α, bias and γ, which are sums over all tokens, at some
//! columns, and all blocks. And mhc_post_pre, whose streams are mixed first: the same, and the streams and the gradients of
//! what they are mixed of.

use super::whole::{self, Typical};
use super::{ROWS, Spot};
use crate::operator::Operator;
use kiln_ops::mhc_post::oracle as post;
use kiln_ops::mhc_post_pre::oracle as between;
use kiln_ops::mhc_pre::MhcPreOptions;
use kiln_ops::mhc_pre::oracle::{self, Inputs, Tokens};
use kiln_ops::oracle::{Bounded, Number};
use rayon::prelude::*;

/// Columns of each stream at which the gradients of φ and γ are compared.
const COLUMNS: usize = 4;

/// φ, α, bias and γ.
struct Weights<N>([Vec<N>; 4]);

impl<N: Number> Weights<N> {
    fn with<'a>(&'a self, x: &'a [N]) -> Inputs<'a, N> {
        let [phi, alpha, bias, gamma] = &self.0;
        Inputs { x, phi, alpha, bias, gamma }
    }
}

/// Checks the outputs, or the gradients, of mhc_pre.
///
/// # Errors
///
/// One line if a result is wrong or cannot be read.
pub(crate) fn check<O: Operator + ?Sized>(
    op: &O,
    spot: &Spot<'_>,
    options: MhcPreOptions,
) -> Result<(), String> {
    Check { op, spot, options, after: false }.run()
}

/// The same of mhc_post_pre, whose streams are made of its first four inputs.
///
/// # Errors
///
/// As [`check`].
pub(crate) fn check_after<O: Operator + ?Sized>(
    op: &O,
    spot: &Spot<'_>,
    options: MhcPreOptions,
) -> Result<(), String> {
    Check { op, spot, options, after: true }.run()
}

/// What is checked, and whether the streams are mixed first.
struct Check<'a, 'b, O: ?Sized> {
    op: &'a O,
    spot: &'a Spot<'b>,
    options: MhcPreOptions,
    after: bool,
}

impl<O: Operator + ?Sized> Check<'_, '_, O> {
    /// Where φ is among the inputs.
    fn phi(&self) -> usize {
        if self.after { 4 } else { 1 }
    }

    /// Where h_in is among the outputs.
    fn h_in(&self) -> usize {
        usize::from(self.after)
    }

    fn run(&self) -> Result<(), String> {
        let Self { op, spot, options, after } = *self;
        let [b, s, n, _] = spot.call.inputs[0].shape()[..] else { unreachable!("rank 4") };
        let phi = self.phi();
        let plain = (phi..phi + 4).map(|i| Ok(spot.input(i)?.values().to_vec()));
        let plain: Vec<Vec<f64>> = plain.collect::<Result<_, String>>()?;
        let plain: [Vec<f64>; 4] = plain.try_into().expect("four of them");
        let weights = Weights(plain.each_ref().map(|of| spot.numbers(of)));
        let tokens = spot.sample(b * s, ROWS);
        let streams: Vec<usize> =
            tokens.iter().flat_map(|token| token * n..(token + 1) * n).collect();
        // x, f, h_post and h_res; or x alone.
        let rows = [&streams, &tokens, &tokens, &streams];
        let inputs = rows.iter().take(phi).enumerate();
        let inputs = inputs.map(|(i, rows)| Ok(spot.numbers(&spot.input_rows(i, rows)?)));
        let inputs: Vec<Vec<Bounded>> = inputs.collect::<Result<_, String>>()?;
        let x = match &inputs[..] {
            [x, f, h_post, h_res] => post::forward(x, f, h_post, h_res, n),
            _ => inputs[0].clone(),
        };
        if !spot.backward() {
            let [h_in, h_post, h_res] = oracle::forward(weights.with(&x), n, options);
            let mut outputs = vec![(&streams, x), (&tokens, h_in), (&tokens, h_post)];
            outputs.push((&streams, h_res));
            let outputs = &outputs[1 - self.h_in()..];
            for (i, (rows, expected)) in outputs.iter().enumerate() {
                spot.compare_rows(i, rows, expected)?;
            }
            let typical: Vec<_> = outputs.iter().map(|(_, of)| Typical::of(of)).collect();
            return whole::check(op, spot, &typical);
        }

        let cotangent = |i, rows| Ok::<_, String>(spot.numbers(&spot.cotangent_rows(i, rows)?));
        let first = self.h_in();
        let (dh_in, dh_post) = (cotangent(first, &tokens)?, cotangent(first + 1, &tokens)?);
        let dh_res = cotangent(first + 2, &streams)?;
        let some = weights.with(&x);
        let back = oracle::tokens_backward(some, n, options, [&dh_in, &dh_post, &dh_res]);
        let of_inputs = match &inputs[..] {
            [x, f, h_post, h_res] => {
                let dy = cotangent(0, &streams)?;
                let dy = between::of_streams(some, n, &back, &dh_in, &dy);
                post::backward(x, f, h_post, h_res, n, &dy).to_vec()
            }
            _ => vec![oracle::of_x(some, n, &back, &dh_in)],
        };
        for (i, (gradient, rows)) in of_inputs.iter().zip(rows).enumerate() {
            spot.compare_rows(i, rows, gradient)?;
        }
        let of_weights = self.of_weights(&Weights(plain), &weights, back, after)?;
        let all = of_inputs.iter().chain(&of_weights);
        whole::check(op, spot, &all.map(|of| Typical::of(of)).collect::<Vec<_>>())
    }

    /// Compares the gradients of φ, α, bias and γ, sums over all tokens, at some columns; `back` is of some tokens.
    fn of_weights(
        &self,
        plain: &Weights<f64>,
        weights: &Weights<Bounded>,
        mut back: Tokens<Bounded>,
        after: bool,
    ) -> Result<[Vec<Bounded>; 4], String> {
        let Self { spot, options, .. } = *self;
        let [b, s, n, d] = spot.call.inputs[0].shape()[..] else { unreachable!("rank 4") };
        let (count, width, first) = (b * s, n * d, self.h_in());
        // Of all tokens, without errors: added up they are no more than twice what those of some say.
        let inputs = (0..self.phi()).map(|i| spot.input(i));
        let inputs = inputs.collect::<Result<Vec<_>, String>>()?;
        let inputs: Vec<_> = inputs.iter().map(|of| of.lines()).collect();
        let cotangents =
            [spot.cotangent(first)?, spot.cotangent(first + 1)?, spot.cotangent(first + 2)?];
        let [dh_in, dh_post, dh_res] = cotangents.each_ref().map(|of| of.lines());
        let within = spot.sample(d, COLUMNS);
        let columns: Vec<usize> =
            (0..n).flat_map(|i| within.iter().map(move |at| i * d + at)).collect();
        let cut = |of: &[f64], columns: &[usize]| -> Vec<f64> {
            columns.iter().map(|at| of[*at]).collect()
        };
        let of_token = |token: usize| {
            let rows = token * n..(token + 1) * n;
            let of_streams = |of: usize| -> Vec<f64> {
                rows.clone().flat_map(|row| inputs[of].row(row)).collect()
            };
            let x = of_streams(0);
            let some = spot.numbers(&cut(&x, &columns));
            let (x, some) = match after {
                false => (x, some),
                true => {
                    let (f, h_post) = (inputs[1].row(token), inputs[2].row(token));
                    let h_res = of_streams(3);
                    let mixed = post::forward(&x, &f, &h_post, &h_res, n);
                    let [f, h_post, h_res] =
                        [&cut(&f, &within)[..], &h_post, &h_res].map(|of| spot.numbers(of));
                    (mixed, post::forward(&some, &f, &h_post, &h_res, n))
                }
            };
            let dh_res: Vec<f64> = rows.clone().flat_map(|row| dh_res.row(row)).collect();
            let cotangents = [&dh_in.row(token)[..], &dh_post.row(token), &dh_res];
            (some, oracle::tokens_backward(plain.with(&x), n, options, cotangents))
        };
        let every: Vec<(Vec<Bounded>, Tokens<f64>)> =
            (0..count).into_par_iter().with_min_len(16).map(of_token).collect();
        let rows = weights.0[2].len();
        let with_errors = |of: fn(&Tokens<f64>) -> &Vec<f64>, some: &[Bounded]| -> Vec<Bounded> {
            let errors: Vec<Bounded> = (0..rows).map(|j| typical_error(some, j, rows)).collect();
            let values = every.iter().flat_map(|(_, back)| of(back).iter().zip(&errors));
            values.map(|(value, error)| spot.rounding.number(*value) + *error * 2.0).collect()
        };
        back.dm = with_errors(|back| &back.dm, &back.dm);
        back.given = with_errors(|back| &back.given, &back.given);
        back.times_y = with_errors(|back| &back.times_y, &back.times_y);
        let x: Vec<Bounded> = every.iter().flat_map(|(x, _)| x).copied().collect();
        let of_columns = |of: &[Bounded]| -> Vec<Bounded> {
            of.chunks_exact(width).flat_map(|row| columns.iter().map(|at| row[*at])).collect()
        };
        let [phi, alpha, bias, gamma] = &weights.0;
        let [phi, gamma] = [phi, gamma].map(|of| of_columns(of));
        let of_columns = Inputs { x: &x, phi: &phi, alpha, bias, gamma: &gamma };
        let gradients = oracle::over_tokens(of_columns, n, &back);
        let [dphi, dalpha, dbias, dgamma] = &gradients;
        let every_row: Vec<usize> = (0..rows).collect();
        let first = self.phi();
        spot.compare(first, &every_row, &columns, dphi)?;
        spot.compare_rows(first + 1, &[0], dalpha)?;
        spot.compare_rows(first + 2, &[0], dbias)?;
        if !gamma.is_empty() {
            let streams: Vec<usize> = (0..n).collect();
            spot.compare(first + 3, &streams, &within, dgamma)?;
        }
        Ok(gradients)
    }
}

/// The error of a number of row `j`: of the one that may be furthest off, scaled to the root mean square of all.
fn typical_error(of: &[Bounded], j: usize, rows: usize) -> Bounded {
    let numbers = || of.iter().skip(j).step_by(rows);
    let most = numbers().max_by(|a, b| a.bound().total_cmp(&b.bound()));
    let most = most.expect("there are tokens");
    let squares: f64 = numbers().map(|x| x.bound().powi(2)).sum();
    let typical = (squares / numbers().count() as f64).sqrt();
    match most.bound() {
        0.0 => *most - most.value(),
        bound => (*most - most.value()) * (typical / bound),
    }
}
