//! Tables of vectors.

use super::*;

/// A table whose rows begin beyond what 32 bits number, and its gradient, which is one of few rows.
#[test]
fn rows_of_a_table_beyond_two_to_the_32() {
    on_each(|device| {
        let width = 4096;
        let rows = rows(device, width);
        let named: Vec<usize> =
            places(rows, width).into_iter().flat_map(|first| first..first + ROWS).collect();
        // One beyond, too, so often that it is cut.
        let often = rows - 2 * ROWS - 1;
        let tokens = named.iter().copied().chain(vec![often; 1100]);
        let tokens: Vec<i64> = tokens.map(|row| row as i64).collect();
        let count = tokens.len();
        let tokens = Tensor::<1, Int>::from_data(tokens.as_slice(), device).unsqueeze::<2>();
        let weight = random(rows, width, device);
        let leaf = weight.clone().autodiff().require_grad();
        let options = EmbeddingOptions::default();
        let y = embedding(leaf.clone(), tokens.autodiff(), options).unwrap();
        let dy = random(count, width, device);
        let found = y.clone().inner().reshape([count, width]);
        let of_table =
            leaf.grad(&(y * dy.clone().unsqueeze().autodiff()).sum().backward()).unwrap();
        for (i, first) in places(rows, width).into_iter().enumerate() {
            let what = format!("{ROWS} of {rows} rows from {first} on, {device:?}");
            assert_eq!(values(&cut(&found, i * ROWS)), values(&distinct(&weight, first)), "{what}");
            let gradient = values(&cut(&of_table, first));
            assert_eq!(gradient, values(&cut(&dy, i * ROWS)), "gradient of {what}");
        }
        let mut sum = vec![0.0; width];
        for (i, dy) in values(&dy).iter().enumerate().skip(named.len() * width) {
            sum[i % width] += dy;
        }
        let found = values(&of_table.clone().narrow(0, often, 1));
        assert_near(&found, &sum, dtype(device), 1, &format!("row {often} of {rows}, {device:?}"));
        // Beside them there is none.
        for beside in [ROWS, rows - 2 * ROWS] {
            assert!(values(&cut(&of_table, beside)).iter().all(|of| *of == 0.0), "{device:?}");
        }
    });
}

/// Tokens of few rows, so many that their vectors are more than 32 bits number; the gradient is that of a few of them.
#[test]
fn vectors_of_tokens_beyond_two_to_the_32() {
    on_each(|device| {
        // A prime: where 32 bits of a place lead there is another token.
        let (width, vocabulary) = (4096, 61);
        let rows = rows(device, width);
        let places = places(rows, width);
        let tokens = Tensor::<1, Int>::arange(0..rows as i64, device);
        let tokens = tokens.remainder_scalar(vocabulary as i64);
        let weight = random(vocabulary, width, device);
        let dy = cotangent(rows, width, &places, device);
        let leaf = weight.clone().autodiff().require_grad();
        let options = EmbeddingOptions::default();
        let y = embedding(leaf.clone(), tokens.clone().unsqueeze::<2>().autodiff(), options);
        let y = y.unwrap().reshape([rows, width]);
        let found = y.clone().inner();
        let of_table = leaf.grad(&(y * dy.clone().autodiff()).sum().backward()).unwrap();
        let mut sums = vec![0.0; vocabulary * width];
        for first in places {
            let tokens = tokens.clone().narrow(0, first, ROWS);
            let vectors = weight.clone().select(0, tokens.clone());
            let what = format!("{ROWS} of {rows} vectors from {first} on, {device:?}");
            assert_eq!(values(&distinct(&found, first)), values(&vectors), "{what}");
            let tokens = tokens.into_data().convert::<i64>().try_into_vec::<i64>().unwrap();
            for (i, dy) in values(&distinct(&dy, first)).iter().enumerate() {
                sums[tokens[i / width] as usize * width + i % width] += dy;
            }
        }
        let what = format!("gradient of a table, {device:?}");
        assert_near(&values(&of_table), &sums, dtype(device), 1, &what);
    });
}
