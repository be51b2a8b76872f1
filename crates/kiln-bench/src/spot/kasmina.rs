//! kasmina: some seeds are compared, each as a call of its own with the features of its chunk.

use super::{ROWS, Spot};
use crate::host;
use kiln_ops::kasmina::{Blend, SeedState, chunk, oracle};

/// Elements of a chunk up to which it is looked at: the oracle has some hundred bytes for each.
const MOST: usize = 1 << 22;
/// Seeds that are looked at.
const SEEDS: usize = 6;

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
    for seed in chosen {
        let columns = chunk(seed, features, seeds);
        let size = columns.len();
        if count * size > MOST {
            return Err(format!("not checked: seed {seed} has {} elements", count * size));
        }
        let columns: Vec<usize> = columns.collect();
        let cut = |of: burn::tensor::Tensor<2>| host::download(&of.narrow(1, columns[0], size));
        let x = spot.numbers(&cut(x.clone())?);
        let rows_of = blueprints.chunks_exact(features);
        let own: Vec<f64> =
            rows_of.flat_map(|row| columns.iter().map(|column| row[*column])).collect();
        let (own, alpha) = (spot.numbers(&own), spot.numbers(&alpha[seed..seed + 1]));
        let call = oracle::Call {
            x: &x,
            blueprints: &own,
            alpha: &alpha,
            lifecycle: &lifecycle[seed..seed + 1],
            blueprint_id: &blueprint_id[seed..seed + 1],
            blend: &blend[seed..seed + 1],
            features: size,
        };
        let at_rows = |of: &[kiln_ops::oracle::Bounded]| {
            rows.iter()
                .flat_map(|row| of[row * size..(row + 1) * size].to_vec())
                .collect::<Vec<_>>()
        };
        if !spot.backward() {
            let outputs = oracle::forward(&call);
            spot.compare(0, &rows, &columns, &at_rows(&outputs.y))?;
            spot.compare(1, &[0], &[seed], &outputs.mean)?;
            spot.compare(2, &[0], &[seed], &outputs.variance)?;
            continue;
        }
        let dy = cut(spot.cotangents[0].clone().reshape([count, features]))?;
        let [dx, dalpha, dblueprints] = oracle::backward(&call, &spot.numbers(&dy));
        spot.compare(0, &rows, &columns, &at_rows(&dx))?;
        spot.compare(1, &[0], &[seed], &dalpha)?;
        spot.compare(2, &table, &columns, &dblueprints)?;
    }
    Ok(())
}
