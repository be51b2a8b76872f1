//! Rows of a table in float64.

use crate::oracle::Number;

/// weight\[tokens\] for rows of `width` numbers.
pub fn forward<N: Number>(weight: &[N], width: usize, tokens: &[i64]) -> Vec<N> {
    let row = |token: &i64| weight[*token as usize * width..][..width].iter().map(|w| w.stored());
    tokens.iter().flat_map(row).collect()
}

/// dweight of `rows` rows.
pub fn backward<N: Number>(rows: usize, width: usize, tokens: &[i64], dy: &[N]) -> Vec<N> {
    let mut of_row = vec![vec![]; rows];
    for (i, token) in tokens.iter().enumerate() {
        of_row[*token as usize].push(i);
    }
    let sum = |positions: &[usize], d: usize| {
        N::sum(positions.iter().map(|i| dy[i * width + d])).stored()
    };
    of_row.iter().flat_map(|of| (0..width).map(move |d| sum(of, d))).collect()
}
