//! embedding: some rows of the result, and of the gradient some, with those that most tokens name.

use super::{ROWS, Spot};
use kiln_ops::embedding::oracle;
use std::cmp::Reverse;

/// Rows that most tokens name, which are compared.
const FREQUENT: usize = 4;

pub(crate) fn check(spot: &Spot<'_>) -> Result<(), String> {
    let [table, width] = spot.call.inputs[0].shape() else { unreachable!("[V, D]") };
    let (table, width) = (*table, *width);
    let tokens = spot.integers(1)?;
    if !spot.backward() {
        let rows = spot.sample(tokens.len(), ROWS);
        let named: Vec<usize> = rows.iter().map(|row| tokens[*row] as usize).collect();
        let weight = spot.numbers(&spot.input_rows(0, &named)?);
        let own: Vec<i64> = (0..named.len() as i64).collect();
        return spot.compare_rows(0, &rows, &oracle::forward(&weight, width, &own));
    }
    let mut positions = vec![vec![]; table];
    for (position, token) in tokens.iter().enumerate() {
        positions[*token as usize].push(position);
    }
    let mut frequent: Vec<usize> = (0..table).collect();
    frequent.sort_by_key(|row| Reverse(positions[*row].len()));
    let mut rows = spot.sample(table, ROWS);
    rows.extend(frequent.into_iter().take(FREQUENT));
    rows.sort_unstable();
    rows.dedup();
    let mut expected = vec![];
    for row in &rows {
        let dy = spot.numbers(&spot.cotangent_rows(0, &positions[*row])?);
        expected.extend(oracle::backward(1, width, &vec![0; positions[*row].len()], &dy));
    }
    spot.compare_rows(0, &rows, &expected)
}
