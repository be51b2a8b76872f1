//! kasmina_mlp: seeds with rows as in kasmina; some seeds with an MLP are compared, at some rows, and all gradients of some hidden units.

use super::{ROWS, Spot};
use crate::host;
use burn::tensor::Tensor;
use kiln_ops::kasmina::{Blend, SeedState, chunk};
use kiln_ops::kasmina_mlp::oracle::{Hidden, Mlp, of_units};
use kiln_ops::oracle::{Bounded, Number};
use rayon::prelude::*;

/// Seeds that are looked at, and hidden units of an MLP.
const SEEDS: usize = 3;
const UNITS: usize = 3;

/// Of a hidden unit: of its first weights, its bias, and its second weights.
type Gradients = (Vec<Bounded>, Bounded, Vec<Bounded>);

/// A seed that blends an MLP.
struct Seed {
    number: usize,
    columns: Vec<usize>,
    mlp: usize,
    alpha: Bounded,
    trains: bool,
}

/// Compares y or dx of some seeds at some rows, alpha's gradient, and the gradients of units of an MLP.
///
/// # Errors
///
/// One line if a result is wrong or cannot be read.
pub(crate) fn check(spot: &Spot<'_>) -> Result<(), String> {
    super::kasmina(spot)?;
    let x = spot.call.rows(0);
    let [count, features] = x.dims();
    let alpha = spot.numbers(&spot.input_rows(1, &[0])?);
    let codes = [3, 4, 5].map(|input| spot.integers(input));
    let [lifecycle, blueprint_id, blend] = codes;
    let (lifecycle, blueprint_id, blend) = (lifecycle?, blueprint_id?, blend?);
    let [mlps, rows_of, widest] = spot.call.float::<3>(6).dims();
    let weights = spot.input_rows(6, &(0..mlps * rows_of).collect::<Vec<_>>())?;
    let weights = spot.numbers(&weights);
    let blended = |number: usize| {
        let state = SeedState::ALL[lifecycle[number] as usize];
        (state.contributes() && blend[number] == Blend::Mlp.code()).then(|| Seed {
            number,
            columns: chunk(number, features, alpha.len()).collect(),
            mlp: blueprint_id[number] as usize,
            alpha: alpha[number],
            trains: state.trains(),
        })
    };
    let seeds: Vec<Seed> = (0..alpha.len()).filter_map(blended).collect();
    if seeds.is_empty() {
        return Err("not checked: no seed blends an MLP".into());
    }
    let mlp_of = |seed: &Seed| {
        let own = &weights[seed.mlp * rows_of * widest..][..rows_of * widest];
        Mlp::new(own, widest, seed.columns.len())
    };
    let cut = |of: &Tensor<2>, seed: &Seed| -> Result<Vec<Vec<Bounded>>, String> {
        let size = seed.columns.len();
        let values = host::download(&of.clone().narrow(1, seed.columns[0], size))?;
        Ok(spot.numbers(&values).chunks_exact(size).map(<[Bounded]>::to_vec).collect())
    };
    let rows = spot.sample(count, ROWS);
    let blend = |alpha: Bounded, x: &[Bounded], out: &[Bounded]| -> Vec<Bounded> {
        x.iter().zip(out).map(|(x, out)| ((-alpha + 1.0) * *x + alpha * *out).stored()).collect()
    };
    let dy = match spot.backward() {
        true => Some(spot.cotangents[0].clone().reshape([count, features])),
        false => None,
    };
    for (nth, seed) in spot.sample(seeds.len(), SEEDS).into_iter().map(|i| &seeds[i]).enumerate() {
        let (mlp, x) = (mlp_of(seed), cut(&x, seed)?);
        let Some(dy) = &dy else {
            let y = |row: &usize| blend(seed.alpha, &x[*row], &mlp.forward(&x[*row]));
            let y: Vec<Vec<Bounded>> = rows.par_iter().map(y).collect();
            spot.compare(0, &rows, &seed.columns, &y.concat())?;
            continue;
        };
        let dy = cut(dy, seed)?;
        let dx = |row: &usize| {
            let hidden = mlp.hidden(&x[*row], &dy[*row]);
            blend(seed.alpha, &dy[*row], &mlp.back(&hidden))
        };
        let dx: Vec<Vec<Bounded>> = rows.par_iter().map(dx).collect();
        spot.compare(0, &rows, &seed.columns, &dx.concat())?;
        // All rows of all hidden units take their time.
        if nth > 0 {
            continue;
        }
        let both: Vec<_> = x.iter().zip(&dy).collect();
        let terms = both.par_iter().map(|(x, dy)| mlp.of_alpha(x, dy, &mlp.hidden(x, dy)));
        let dalpha = Number::sum(terms.collect::<Vec<Bounded>>());
        spot.compare(1, &[0], &[seed.number], &[Number::stored(dalpha)])?;
    }
    let (Some(dy), Some(trained)) = (dy, seeds.iter().find(|seed| seed.trains)) else {
        return Ok(());
    };
    // Every seed that trains this MLP adds to the gradients of its units.
    let size = trained.columns.len();
    let units = spot.sample(2 * size, UNITS);
    let mut added: Vec<Vec<(Bounded, Gradients)>> = vec![];
    for seed in seeds.iter().filter(|seed| seed.trains && seed.mlp == trained.mlp) {
        let (x, dy) = (cut(&x, seed)?, cut(&dy, seed)?);
        let own: Vec<usize> =
            units.iter().copied().filter(|j| *j < 2 * seed.columns.len()).collect();
        let mlp = mlp_of(seed).cut(&own);
        let both: Vec<_> = x.iter().zip(&dy).collect();
        let hidden: Vec<Vec<Hidden<Bounded>>> =
            both.par_iter().map(|(x, dy)| mlp.hidden(x, dy)).collect();
        let of = of_units(&x, &dy, &hidden);
        added.push(of.into_iter().map(|of| (seed.alpha, of)).collect());
    }
    let columns: Vec<usize> = (0..size).collect();
    let sum = |at: usize, of: &dyn Fn(&Gradients) -> Option<Bounded>| {
        let parts = added.iter().filter_map(|seed| seed.get(at));
        let parts = parts.filter_map(|(alpha, gradients)| Some(*alpha * of(gradients)?));
        Number::stored(Number::sum(parts.collect::<Vec<Bounded>>()))
    };
    let first_row = trained.mlp * rows_of;
    for (at, unit) in units.iter().enumerate() {
        let expected: Vec<Bounded> =
            columns.iter().map(|i| sum(at, &|of| of.0.get(*i).copied())).collect();
        spot.compare(3, &[first_row + unit], &columns, &expected)?;
        let expected: Vec<Bounded> =
            columns.iter().map(|i| sum(at, &|of| of.2.get(*i).copied())).collect();
        spot.compare(3, &[first_row + 2 * widest + unit], &columns, &expected)?;
        let (row, column) = (first_row + 4 * widest + unit / widest, unit % widest);
        spot.compare(3, &[row], &[column], &[sum(at, &|of| Some(of.1))])?;
    }
    Ok(())
}
