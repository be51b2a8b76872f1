//! mhc_pre: its outputs and dx at some tokens, the gradients of φ, α, bias and γ, which are sums over all tokens, at some
//! columns, and all blocks.

use super::whole::{self, Typical};
use super::{ROWS, Spot};
use crate::operator::Operator;
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

/// Checks the outputs, or the gradients.
///
/// # Errors
///
/// One line if a result is wrong or cannot be read.
pub(crate) fn check<O: Operator + ?Sized>(
    op: &O,
    spot: &Spot<'_>,
    options: MhcPreOptions,
) -> Result<(), String> {
    let [b, s, n, d] = spot.call.inputs[0].shape()[..] else { unreachable!("rank 4") };
    let (count, width) = (b * s, n * d);
    let plain: Vec<Vec<f64>> =
        (1..5).map(|i| Ok(spot.input(i)?.values().to_vec())).collect::<Result<_, String>>()?;
    let plain: [Vec<f64>; 4] = plain.try_into().expect("four of them");
    let weights = Weights(plain.each_ref().map(|of| spot.numbers(of)));
    let plain = Weights(plain);

    let tokens = spot.sample(count, ROWS);
    let streams = |of: &[usize]| -> Vec<usize> {
        of.iter().flat_map(|token| token * n..(token + 1) * n).collect()
    };
    let of_tokens = streams(&tokens);
    let x = spot.numbers(&spot.input_rows(0, &of_tokens)?);
    if !spot.backward() {
        let outputs = oracle::forward(weights.with(&x), n, options);
        for (i, (expected, rows)) in outputs.iter().zip([&tokens, &tokens, &of_tokens]).enumerate()
        {
            spot.compare_rows(i, rows, expected)?;
        }
        return whole::check(op, spot, &outputs.map(|of| Typical::of(&of)));
    }

    let cotangent = |i, rows| Ok::<_, String>(spot.numbers(&spot.cotangent_rows(i, rows)?));
    let (dh_in, dh_post) = (cotangent(0, &tokens)?, cotangent(1, &tokens)?);
    let dh_res = cotangent(2, &of_tokens)?;
    let some = weights.with(&x);
    let mut back = oracle::tokens_backward(some, n, options, [&dh_in, &dh_post, &dh_res]);
    let dx = oracle::of_x(some, n, &back, &dh_in);
    spot.compare_rows(0, &of_tokens, &dx)?;

    // Of all tokens, without errors: added up they are no more than twice what those of some say.
    let all = spot.input(0)?;
    let all = all.lines();
    let cotangents = [spot.cotangent(0)?, spot.cotangent(1)?, spot.cotangent(2)?];
    let [dh_in, dh_post, dh_res] = cotangents.each_ref().map(|of| of.lines());
    let within = spot.sample(d, COLUMNS);
    let columns: Vec<usize> =
        (0..n).flat_map(|i| within.iter().map(move |at| i * d + at)).collect();
    let of_token = |token: usize| {
        let rows = token * n..(token + 1) * n;
        let x: Vec<f64> = rows.clone().flat_map(|row| all.row(row)).collect();
        let dh_res: Vec<f64> = rows.flat_map(|row| dh_res.row(row)).collect();
        let cotangents = [&dh_in.row(token)[..], &dh_post.row(token), &dh_res];
        let back = oracle::tokens_backward(plain.with(&x), n, options, cotangents);
        (columns.iter().map(|at| x[*at]).collect::<Vec<_>>(), back)
    };
    let every: Vec<(Vec<f64>, Tokens<f64>)> =
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
    let x: Vec<f64> = every.iter().flat_map(|(x, _)| x).copied().collect();
    let x = spot.numbers(&x);
    let cut = |of: &[Bounded]| -> Vec<Bounded> {
        of.chunks_exact(width).flat_map(|row| columns.iter().map(|at| row[*at])).collect()
    };
    let [phi, alpha, bias, gamma] = &weights.0;
    let [phi, gamma] = [phi, gamma].map(|of| cut(of));
    let of_columns = Inputs { x: &x, phi: &phi, alpha, bias, gamma: &gamma };
    let [dphi, dalpha, dbias, dgamma] = oracle::over_tokens(of_columns, n, &back);
    let every_row: Vec<usize> = (0..rows).collect();
    spot.compare(1, &every_row, &columns, &dphi)?;
    spot.compare_rows(2, &[0], &dalpha)?;
    spot.compare_rows(3, &[0], &dbias)?;
    if !gamma.is_empty() {
        let streams: Vec<usize> = (0..n).collect();
        spot.compare(4, &streams, &within, &dgamma)?;
    }
    whole::check(op, spot, &[&dx, &dphi, &dalpha, &dbias, &dgamma].map(|of| Typical::of(of)))
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
