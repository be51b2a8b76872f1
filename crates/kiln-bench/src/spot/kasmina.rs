//! kasmina: some seeds are compared, each as a call of its own with the features of its chunk.

use super::{ROWS, Spot};
use crate::host;
use burn::tensor::Tensor;
use kiln_ops::kasmina::{self, Blend, SeedState, chunk};
use rayon::prelude::*;

/// Elements of a chunk up to which it is looked at: the oracle has some hundred bytes for each.
const MOST: usize = 1 << 22;
/// Chunks that the oracle has at a time.
const TOGETHER: usize = 4;
/// Seeds that are looked at.
const SEEDS: usize = 6;

/// What a seed sees.
struct Chunk {
    seed: usize,
    columns: Vec<usize>,
    x: Vec<f64>,
    /// Of a backward.
    dy: Option<Vec<f64>>,
}

/// Compares some seeds with the oracle: y or dx at some rows, what is a sum over rows as a whole.
pub(crate) fn check(spot: &Spot<'_>) -> Result<(), String> {
    let x = spot.call.rows(0);
    let [count, features] = x.dims();
    let alpha = spot.input_rows(1, &[0])?;
    let table: Vec<usize> = (0..spot.call.rows(2).dims()[0]).collect();
    let blueprints = spot.input_rows(2, &table)?;
    let codes = [3, 4, 5].map(|input| spot.integers(input));
    let [lifecycle, blueprint_id, blend] = codes;
    let (lifecycle, blueprint_id, blend) = (lifecycle?, blueprint_id?, blend?);
    let seeds = alpha.len();
    let rows = spot.sample(count, ROWS);
    // Some, and one of each state that contributes; none that blends an MLP.
    let of_rows = |seed: &usize| blend[*seed] != Blend::Mlp.code();
    let mut chosen = spot.sample(seeds, SEEDS);
    chosen.retain(of_rows);
    let contributing = SeedState::ALL.into_iter().filter(|state| state.contributes());
    let first = |state: SeedState| {
        (0..seeds).find(|seed| of_rows(seed) && lifecycle[*seed] == state.code())
    };
    chosen.extend(contributing.filter_map(first));
    chosen.sort_unstable();
    chosen.dedup();
    let dy = match spot.backward() {
        true => Some(spot.cotangents[0].clone().reshape([count, features])),
        false => None,
    };
    let cut = |of: &Tensor<2>, columns: &[usize]| {
        host::download(&of.clone().narrow(1, columns[0], columns.len()))
    };
    let read = |seed: usize| -> Result<Chunk, String> {
        let columns: Vec<usize> = chunk(seed, features, seeds).collect();
        let elements = count * columns.len();
        if elements > MOST {
            return Err(format!("not checked: seed {seed} has {elements} elements"));
        }
        let dy = dy.as_ref().map(|dy| cut(dy, &columns)).transpose()?;
        Ok(Chunk { seed, x: cut(&x, &columns)?, dy, columns })
    };
    let oracle = |of: &Chunk| {
        let (seed, size) = (of.seed, of.columns.len());
        let rows_of = blueprints.chunks_exact(features);
        let own: Vec<f64> =
            rows_of.flat_map(|row| of.columns.iter().map(|column| row[*column])).collect();
        let (x, own) = (spot.numbers(&of.x), spot.numbers(&own));
        let alpha = spot.numbers(&alpha[seed..seed + 1]);
        let call = kasmina::oracle::Call {
            x: &x,
            blueprints: &own,
            alpha: &alpha,
            lifecycle: &lifecycle[seed..seed + 1],
            blueprint_id: &blueprint_id[seed..seed + 1],
            blend: &blend[seed..seed + 1],
            features: size,
        };
        let mut found = match &of.dy {
            None => {
                let outputs = kasmina::oracle::forward(&call);
                [outputs.y, outputs.mean, outputs.variance]
            }
            Some(dy) => kasmina::oracle::backward(&call, &spot.numbers(dy)),
        };
        let at = |row: &usize| found[0][row * size..(row + 1) * size].to_vec();
        found[0] = rows.iter().flat_map(at).collect();
        found
    };
    for some in chosen.chunks(TOGETHER) {
        let some = some.iter().map(|seed| read(*seed)).collect::<Result<Vec<_>, _>>()?;
        let expected: Vec<_> = some.par_iter().map(oracle).collect();
        for (Chunk { seed, columns, dy, .. }, [first, second, third]) in some.iter().zip(&expected)
        {
            // y or dx; the mean or the gradient of alpha.
            spot.compare(0, &rows, columns, first)?;
            spot.compare(1, &[0], &[*seed], second)?;
            match dy {
                None => spot.compare(2, &[0], &[*seed], third)?,
                Some(_) => spot.compare(2, &table, columns, third)?,
            }
        }
    }
    Ok(())
}
