//! attention: y and dq at some queries, dk and dv at some keys, of the first and the last group of heads, and all
//! blocks.

use super::whole::{self, Typical};
use super::{ROWS, Spot};
use crate::host::Input;
use crate::operator::{Call, Operator};
use burn::tensor::Tensor;
use kiln_ops::attention::oracle::{Dims, Query, Rule, of_keys};
use kiln_ops::oracle::{Bounded, Number};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::ops::Range;

/// Keys of a group at which dk and dv are compared.
const KEYS: usize = 4;

/// Scores of a head from which on one group is compared.
const LONG: usize = 1 << 26;
/// Its keys are chosen from this part of the sequence, the last.
const LAST: usize = 16;

/// Scores that the reference is to hold at a time: 1 GiB of f32.
const SCORES: usize = 1 << 28;

/// Checks y, or the gradients.
///
/// # Errors
///
/// One line if a result is wrong or cannot be read.
pub(crate) fn check<O: Operator + ?Sized>(
    op: &O,
    spot: &Spot<'_>,
    d: Dims,
    rule: &Rule,
) -> Result<(), String> {
    let mut typical = vec![];
    // Rows of q and y that read the same keys.
    let queries = d.heads / d.kv_heads * d.queries;
    let groups = d.batch * d.kv_heads;
    // Of the longest one is enough to compute.
    let last = if d.queries * d.keys < LONG { groups - 1 } else { 0 };
    for group in BTreeSet::from([0, last]) {
        let all = |rows: usize| -> Vec<usize> { (group * rows..(group + 1) * rows).collect() };
        let q = spot.numbers(&spot.input_rows(0, &all(queries))?);
        let k = spot.numbers(&spot.input_rows(1, &all(d.keys))?);
        let v = spot.numbers(&spot.input_rows(2, &all(d.keys))?);
        let query = |row: usize| Query::new(&q, &k, row, d, rule);
        let rows = spot.sample(queries, ROWS);
        let places: Vec<usize> = rows.iter().map(|row| group * queries + row).collect();
        if !spot.backward() {
            let y = |row: &usize| query(*row).output(&v);
            let y: Vec<Vec<Bounded>> = rows.par_iter().map(y).collect();
            let y = y.concat();
            spot.compare_rows(0, &places, &y)?;
            typical = vec![Typical::of(&y)];
            continue;
        }
        let dy = spot.numbers(&spot.cotangent_rows(0, &all(queries))?);
        let scores =
            |query: &Query<Bounded>, row: usize| query.scores(&v, &dy[row * d.width..][..d.width]);
        let dq = |row: &usize| {
            let query = query(*row);
            query.gradient(&k, &scores(&query, *row))
        };
        let dq: Vec<Vec<Bounded>> = rows.par_iter().map(dq).collect();
        let dq = dq.concat();
        spot.compare_rows(0, &places, &dq)?;

        // What every query gives a few keys. Of the longest sequences the last ones, which few queries see: the
        // scores of all would take minutes.
        let from = match d.queries * d.keys < LONG {
            true => 0,
            false => d.keys - d.keys.div_ceil(LAST),
        };
        let chosen: Vec<_> =
            spot.sample(d.keys - from, KEYS).into_iter().map(|key| from + key).collect();
        let unseen = |row: usize| {
            rule.causal && chosen.iter().all(|key| row % d.queries + d.keys < key + d.queries)
        };
        let given = |row: usize| {
            if unseen(row) {
                let nothing = vec![Bounded::exact(0.0); chosen.len()];
                return (nothing.clone(), nothing);
            }
            let query = query(row);
            let (p, ds) = (query.probabilities(), query.stored(scores(&query, row)));
            let cut = |of: Vec<Bounded>| chosen.iter().map(|s| of[*s]).collect::<Vec<_>>();
            (cut(p), cut(ds))
        };
        let given: Vec<_> = (0..queries).into_par_iter().map(given).collect();
        let (p, ds): (Vec<_>, Vec<_>) = given.into_iter().unzip();
        let places: Vec<usize> = chosen.iter().map(|key| group * d.keys + key).collect();
        let dk = of_keys(&ds.concat(), &q, chosen.len(), d);
        let dv = of_keys(&p.concat(), &dy, chosen.len(), d);
        spot.compare_rows(1, &places, &dk)?;
        spot.compare_rows(2, &places, &dv)?;
        typical = [&dq, &dk, &dv].map(|of| Typical::of(of)).into();
    }
    for heads in parts(d) {
        part(op, spot, d, &heads, &typical)?;
    }
    Ok(())
}

/// KV heads that the reference takes at a time, counted through all batches; no part has heads of two.
fn parts(d: Dims) -> Vec<Range<usize>> {
    let scores = (d.heads / d.kv_heads * d.queries * d.keys).max(1);
    let most = (SCORES / scores).clamp(1, d.kv_heads);
    let of_batch = |batch: usize| {
        let (first, end) = (batch * d.kv_heads, (batch + 1) * d.kv_heads);
        (first..end).step_by(most).map(move |head| head..end.min(head + most))
    };
    (0..d.batch).flat_map(of_batch).collect()
}

/// Checks all blocks of some KV heads and their query heads.
fn part<O: Operator + ?Sized>(
    op: &O,
    spot: &Spot<'_>,
    d: Dims,
    heads: &Range<usize>,
    typical: &[Typical],
) -> Result<(), String> {
    let group = d.heads / d.kv_heads;
    let of_queries = (group, d.queries);
    let of = |input: usize| if input == 0 { of_queries } else { (1, d.keys) };
    let rows = |(heads_of, length): (usize, usize)| {
        (heads.start * heads_of * length, heads.len() * heads_of * length)
    };
    let inputs = spot.call.inputs.iter().enumerate().map(|(i, input)| match input {
        Input::Float { rows: all, .. } => {
            let ((first, count), (heads_of, length)) = (rows(of(i)), of(i));
            let mut input = Input::of(all.clone().narrow(0, first, count));
            if let Input::Float { shape, .. } = &mut input {
                *shape = vec![1, heads.len() * heads_of, length, d.width];
            }
            input
        }
        integers => integers.clone(),
    });
    let inputs: Vec<Input> = inputs.collect();
    let flat = |of: &Tensor<1>, (first, count): (usize, usize)| {
        of.clone().narrow(0, first * d.width, count * d.width)
    };
    let cotangents: Vec<_> = spot.cotangents.iter().map(|dy| flat(dy, rows(of_queries))).collect();
    let results = spot.results.iter().enumerate().map(|(i, x)| flat(x, rows(of(i))));
    let results: Vec<_> = results.collect();
    let call = Call { inputs: &inputs, attributes: spot.call.attributes };
    let part = Spot::new(spot.spec, call, &cotangents, &results, spot.rounding)?;
    whole::check(op, &part, typical).map_err(|what| format!("{what}, of KV heads {heads:?}"))
}
