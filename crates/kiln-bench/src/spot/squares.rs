//! sum_squares: every sum.

use super::Spot;
use kiln_ops::oracle::Bounded;
use kiln_ops::sum_squares::{CHUNK, oracle};

pub(crate) fn check(spot: &Spot<'_>) -> Result<(), String> {
    let (x, sums) = (spot.input(0)?, spot.input(1)?);
    let (x, sums) = (x.values(), spot.numbers(&sums.values().to_vec()));
    let expected = (0..sums.len()).flat_map(|l| {
        // What counts to this one, chunk after chunk.
        let firsts = (l * CHUNK..x.len()).step_by(sums.len() * CHUNK);
        let own = firsts.flat_map(|first| first..(first + CHUNK).min(x.len()));
        let own: Vec<f64> = own.map(|i| x.at(i)).collect();
        oracle::forward(&spot.numbers(&own), &sums[l..=l])
    });
    let expected: Vec<Bounded> = expected.collect();
    spot.compare_rows(0, &[0], &expected)
}
