//! embedding on every device: values and gradients against float64, element types, views, tokens that many or none
//! name, tokens that are no row, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_ops::OpError;
use kiln_ops::embedding::oracle;
use kiln_ops::prelude::*;

fn ints(tokens: &[i64], shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(tokens.to_vec(), shape), device)
}

/// Tokens of which some name one row, and those of a few rows at the end none at all.
fn tokens(count: usize, rows: usize, seed: u64) -> Vec<i64> {
    let named = (rows - rows / 4).max(1);
    let token = |x: f64| {
        let at = (x.abs() * 1e4) as usize;
        if at.is_multiple_of(3) { named / 2 } else { at % named }
    };
    numbers(count, seed, 0.0).into_iter().map(|x| token(x) as i64).collect()
}

const AS_IT_IS: EmbeddingOptions = EmbeddingOptions { dtype: None, check_tokens: true };

/// y and dweight of a table whose rows stand as in memory.
fn both(
    weight: &Tensor<2>,
    tokens: &Tensor<2, Int>,
    dy: &Tensor<3>,
    dtype: DType,
) -> [Vec<f64>; 2] {
    let weight = weight.clone().autodiff().require_grad();
    let options = EmbeddingOptions { dtype: Some(dtype), ..AS_IT_IS };
    let y = embedding(weight.clone(), tokens.clone(), options).unwrap();
    assert_eq!(y.dtype(), dtype);
    let found = values(&y);
    let grads = pull(y, &dy.clone().autodiff()).backward();
    let gradient = weight.grad(&grads).unwrap();
    assert_eq!(gradient.dtype(), weight.dtype());
    [found, values(&gradient)]
}

#[test]
fn agrees_with_the_oracle() {
    // One of everything; ragged rows; rows in pieces, and in parts; several cubes of rows; several batches of tokens.
    let shapes = [
        ([1, 1], [1, 1]),
        ([5, 13], [2, 3]),
        ([3, 80], [7, 60]),
        ([40, 1009], [1, 100]),
        ([700, 33], [3, 50]),
        ([300, 8], [2, 5000]),
    ];
    for device in devices() {
        for of_weight in dtypes(&device) {
            for of_y in dtypes(&device) {
                for (seed, ([rows, width], [batch, length])) in shapes.into_iter().enumerate() {
                    let what = format!("{rows}×{width}, {batch}×{length}, {of_y:?}, {device:?}");
                    let (seed, count) = (seed as u64, batch * length);
                    let given = numbers(rows * width, seed, 0.1);
                    let (weight, held) = tensor(&given, [rows, width], of_weight, &device);
                    let given = numbers(count * width, seed + 50, 0.1);
                    let (dy, held_dy) = tensor(&given, [batch, length, width], of_y, &device);
                    let tokens = tokens(count, rows, seed + 90);
                    let named = ints(&tokens, [batch, length], &device);
                    poison(rows * width, of_weight, &device);
                    let [y, gradient] = both(&weight, &named, &dy, of_y);
                    assert_near(&y, &oracle::forward(&held, width, &tokens), of_y, 1, &what);
                    let expected = oracle::backward(rows, width, &tokens, &held_dy);
                    assert_near(&gradient, &expected, of_weight, 1, &what);
                    let again = both(&weight, &named, &dy, of_y);
                    assert_eq!(again, [y, gradient], "{what}");
                }
            }
        }
    }
}

#[test]
fn one_row_may_be_named_by_all() {
    for device in devices() {
        let (rows, width, count) = (9, 24, 3000);
        let (weight, held) =
            tensor(&numbers(rows * width, 1, 0.1), [rows, width], DType::F32, &device);
        let (dy, held_dy) =
            tensor(&numbers(count * width, 2, 0.1), [1, count, width], DType::F32, &device);
        for row in [0, 5, 8] {
            let tokens = vec![row; count];
            let [y, gradient] = both(&weight, &ints(&tokens, [1, count], &device), &dy, DType::F32);
            assert_eq!(y, oracle::forward(&held, width, &tokens));
            let expected = oracle::backward(rows, width, &tokens, &held_dy);
            assert_near(&gradient, &expected, DType::F32, 1, &format!("row {row}, {device:?}"));
            let others = (0..rows).filter(|other| *other != row as usize);
            assert!(others.flat_map(|i| &gradient[i * width..][..width]).all(|g| *g == 0.0));
        }
    }
}

#[test]
fn views_are_read_where_they_are() {
    for device in devices() {
        let (rows, width) = (64, 300);
        let (wide, held) =
            tensor(&numbers(rows * width, 3, 0.1), [rows, width], DType::F32, &device);
        let at = |i: usize, j: usize| held[i * width + j];
        let turned: Vec<f64> = (0..width).flat_map(|j| (0..rows).map(move |i| at(i, j))).collect();
        let part: Vec<f64> = (0..rows).flat_map(|i| (0..256).map(move |j| at(i, j))).collect();
        let tokens = tokens(70, 60, 4);
        for (view, expected) in
            [(wide.clone().transpose(), turned), (wide.clone().narrow(1, 0, 256), part)]
        {
            let width = view.dims()[1];
            // Every second of these tokens.
            let all: Vec<i64> = tokens.iter().flat_map(|token| [*token, 0]).collect();
            let strided = ints(&all, [70, 2], &device).narrow(1, 0, 1).transpose();
            let (dy, held_dy) =
                tensor(&numbers(70 * width, 5, 0.1), [70, 1, width], DType::F32, &device);
            let [y, gradient] = both(&view, &strided, &dy.swap_dims(0, 1), DType::F32);
            assert_eq!(y, oracle::forward(&expected, width, &tokens));
            let expected = oracle::backward(view.dims()[0], width, &tokens, &held_dy);
            assert_near(&gradient, &expected, DType::F32, 1, &format!("{device:?}"));
        }
    }
}

/// The gradient that the table's next reader leaves gets those of the rows added where it stands.
#[test]
fn a_tied_table_gathers_both_gradients() {
    // No token for most rows, rows in pieces, one in parts.
    let shapes =
        [([1, 1], [1, 1]), ([700, 33], [3, 50]), ([300, 8], [2, 5000]), ([40, 1009], [1, 100])];
    for device in devices() {
        for dtype in dtypes(&device) {
            for (seed, ([rows, width], [batch, length])) in shapes.into_iter().enumerate() {
                let what = format!("{rows}×{width}, {batch}×{length}, {dtype:?}, {device:?}");
                let (seed, count) = (seed as u64, batch * length);
                let made = |seed, shape: &[usize]| numbers(shape.iter().product(), seed, 0.1);
                let shape = [rows, width];
                let (weight, held) = tensor(&made(seed, &shape), shape, dtype, &device);
                let (dtable, held_dtable) = tensor(&made(seed + 30, &shape), shape, dtype, &device);
                let of_y = [batch, length, width];
                let (dy, held_dy) = tensor(&made(seed + 50, &of_y), of_y, dtype, &device);
                let tokens = tokens(count, rows, seed + 90);
                let named = ints(&tokens, [batch, length], &device);
                let expected: Vec<f64> = oracle::backward(rows, width, &tokens, &held_dy)
                    .iter()
                    .zip(&held_dtable)
                    .map(|(sum, other)| sum + other)
                    .collect();
                for [of_rows, of_table] in [[true, true], [true, false], [false, true]] {
                    let weight = weight.clone().autodiff().require_grad();
                    let (y, table) =
                        tied_embedding(weight.clone(), named.clone(), AS_IT_IS).unwrap();
                    assert_eq!(values(&y), oracle::forward(&held, width, &tokens), "{what}");
                    assert_eq!(values(&table), held, "{what}");
                    let mut pulled = vec![];
                    // Its gradient is the table's too: one tensor.
                    let other = weight.clone().inner().autodiff().require_grad();
                    if of_table {
                        let both = table.clone() + other.clone();
                        pulled.push(pull(both, &dtable.clone().autodiff()));
                    }
                    if of_rows {
                        pulled.push(pull(y, &dy.clone().autodiff()));
                    }
                    let loss = pulled.into_iter().reduce(|sum, of| sum + of).unwrap();
                    let grads = loss.backward();
                    if of_table {
                        assert_eq!(values(&other.grad(&grads).unwrap()), held_dtable, "{what}");
                    }
                    drop(other);
                    let gradient = values(&weight.grad(&grads).unwrap());
                    let expected: Vec<f64> = match (of_rows, of_table) {
                        (true, true) => expected.clone(),
                        (true, false) => oracle::backward(rows, width, &tokens, &held_dy),
                        (false, _) => held_dtable.clone(),
                    };
                    assert_near(&gradient, &expected, dtype, 1, &what);
                }
                // Somebody else's numbers stay what they were.
                assert_eq!(values(&dtable), held_dtable, "{what}");
            }
        }
    }
}

#[test]
fn gradients_of_several_uses_add_up() {
    for device in devices() {
        let (weight, held) = tensor(&numbers(12, 6, 0.1), [4, 3], DType::F32, &device);
        let weight = weight.autodiff().require_grad();
        let rows = embedding(weight.clone(), ints(&[1, 3, 1], [1, 3], &device), AS_IT_IS).unwrap();
        let grads = (rows.sum() + weight.clone().square().sum()).backward();
        let named = [0.0, 2.0, 0.0, 1.0];
        let expected: Vec<f64> = (0..12).map(|i| named[i / 3] + 2.0 * held[i]).collect();
        let gradient = values(&weight.grad(&grads).unwrap());
        assert_near(&gradient, &expected, DType::F32, 1, &format!("{device:?}"));
    }
}

/// Rows of about as many tokens as a piece has, or a lot of pieces, beginning at the ends of those and in them, with tokens
/// between that name no row; and one in several parts.
#[test]
fn rows_are_cut_where_pieces_and_lots_end() {
    let unchecked = EmbeddingOptions { check_tokens: false, ..AS_IT_IS };
    let rows = 4;
    let all = |lengths: &[usize], before: &[usize]| -> Vec<[usize; 3]> {
        lengths.iter().flat_map(|l| before.iter().map(move |b| [*l, *b, 5])).collect()
    };
    let of_pieces = all(&[31, 32, 33, 63, 64, 65, 97, 300], &[0, 1, 31, 32, 33, 40]);
    let of_lots = all(&[1023, 1024, 1025, 2049], &[0, 991, 992, 993, 1023, 1024, 1025]);
    let cases = [of_pieces, of_lots, vec![[1100, 992, 1300]]].concat();
    for device in devices() {
        for [length, before, width] in cases.clone() {
            let counts = [before, length, 40, 1];
            let named = (0..4).flat_map(|row| vec![row as i64; counts[row as usize]]);
            let mut tokens: Vec<i64> = named.chain([-1, 4, 7, -9]).collect();
            let count = tokens.len();
            // In some order; of whole numbers, whose sums are exact.
            let mut places = numbers(count, length as u64, 0.0).into_iter();
            tokens.sort_by_cached_key(|_| (places.next().unwrap() * 1e6) as i64);
            let dy: Vec<f64> = (0..count * width).map(|i| (i % 13) as f64 - 6.0).collect();
            let mut expected = vec![0.0; rows * width];
            for (i, token) in tokens.iter().enumerate() {
                if let Some(row) = usize::try_from(*token).ok().filter(|row| *row < rows) {
                    (0..width).for_each(|d| expected[row * width + d] += dy[i * width + d]);
                }
            }
            let weight = Tensor::<2>::ones([rows, width], &device).autodiff().require_grad();
            let tokens = ints(&tokens, [1, count], &device);
            let (dy, _) = tensor(&dy, [1, count, width], DType::F32, &device);
            poison(2 * count * width, DType::F32, &device);
            let y = embedding(weight.clone(), tokens, unchecked).unwrap();
            let grads = pull(y, &dy.autodiff()).backward();
            let found = values(&weight.grad(&grads).unwrap());
            assert_eq!(found, expected, "{length} of {width} after {before}, {device:?}");
        }
    }
}

/// A long row at every place of the rows that one group adds up, among rows of several tokens and of none; the last group has
/// fewer. A table that is read, too, gets its sums where its other gradient stands.
#[test]
fn a_long_row_may_be_anywhere() {
    let unchecked = EmbeddingOptions { check_tokens: false, ..AS_IT_IS };
    let (rows, width) = (7, 40);
    for device in devices() {
        for (long, length) in (0..rows).flat_map(|long| [33, 70].map(|length| (long, length))) {
            let mut counts = [3, 0, 6, 32, 0, 1, 9];
            counts[long] = length;
            let mut tokens: Vec<i64> =
                (0..rows).flat_map(|row| vec![row as i64; counts[row]]).collect();
            let count = tokens.len();
            let mut places = numbers(count, long as u64, 0.0).into_iter();
            tokens.sort_by_cached_key(|_| (places.next().unwrap() * 1e6) as i64);
            // Whole numbers, whose sums are exact.
            let dy: Vec<f64> = (0..count * width).map(|i| (i % 13) as f64 - 6.0).collect();
            let other: Vec<f64> = (0..rows * width).map(|i| (i % 7) as f64).collect();
            let expected = oracle::backward(rows, width, &tokens, &dy);
            let what = format!("{length} of row {long}, {device:?}");
            let named = ints(&tokens, [1, count], &device);
            let dy = tensor(&dy, [1, count, width], DType::F32, &device).0.autodiff();
            let weight = Tensor::<2>::ones([rows, width], &device).autodiff().require_grad();
            poison(2 * count * width, DType::F32, &device);
            let y = embedding(weight.clone(), named.clone(), unchecked).unwrap();
            let grads = pull(y, &dy.clone()).backward();
            assert_eq!(values(&weight.grad(&grads).unwrap()), expected, "{what}");
            let (y, table) = tied_embedding(weight.clone(), named, unchecked).unwrap();
            let dtable = tensor(&other, [rows, width], DType::F32, &device).0.autodiff();
            let grads = (pull(y, &dy) + (table * dtable).sum()).backward();
            let both: Vec<f64> = expected.iter().zip(&other).map(|(a, b)| a + b).collect();
            assert_eq!(values(&weight.grad(&grads).unwrap()), both, "a table, {what}");
        }
    }
}

#[test]
fn what_is_no_row_is_no_number_and_has_no_gradient() {
    let unchecked = EmbeddingOptions { check_tokens: false, ..AS_IT_IS };
    for device in devices() {
        let weight = Tensor::<2>::ones([5, 2], &device).autodiff().require_grad();
        for wrong in [-1, 5, i64::from(i32::MIN), i64::from(i32::MAX)] {
            let y = embedding(weight.clone(), ints(&[4, wrong, 0], [1, 3], &device), unchecked)
                .unwrap();
            let finite: Vec<bool> = values(&y).iter().map(|y| y.is_finite()).collect();
            assert_eq!(finite, [true, true, false, false, true, true], "{wrong}, {device:?}");
            let grads = y.slice([0..1, 0..3, 0..1]).sum().backward();
            let expected = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0];
            assert_eq!(values(&weight.grad(&grads).unwrap()), expected, "{wrong}, {device:?}");
        }
        let none = embedding(weight.clone(), Tensor::empty([2, 0], &device), AS_IT_IS).unwrap();
        assert_eq!(none.dims(), [2, 0, 2]);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = devices().remove(0);
    let error = |found: Result<Tensor<3>, OpError>| found.unwrap_err().to_string();
    let weight = || Tensor::<2>::ones([5, 2], &device);
    let one = || ints(&[0], [1, 1], &device);
    assert_eq!(
        error(embedding(Tensor::zeros([5, 0], &device), one(), AS_IT_IS)),
        "embedding: `weight` has shape [5, 0], expected [V, D] with V, D at least 1"
    );
    assert_eq!(
        error(embedding(weight().cast(DType::F64), one(), AS_IT_IS)),
        "embedding: `weight` is F64, expected F32, BF16 or F16"
    );
    let wide = EmbeddingOptions { dtype: Some(DType::F64), ..AS_IT_IS };
    assert_eq!(
        error(embedding(weight(), one(), wide)),
        "embedding: `y` is F64, expected F32, BF16 or F16"
    );
    assert_eq!(
        error(embedding(weight(), ints(&[0, 4, 5], [1, 3], &device), AS_IT_IS)),
        "embedding: token 5 at position 2, expected 0 to 4"
    );
}
