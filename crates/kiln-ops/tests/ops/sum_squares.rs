//! sum_squares on every device: values against float64, views, sums that somebody else holds, what is no number, errors.

use crate::common::*;
use burn::tensor::{DType, Tensor};
use kiln_ops::OpError;
use kiln_ops::prelude::*;
use kiln_ops::sum_squares::{CHUNK, oracle};

/// One element, a ragged row, a whole chunk, one element more, several chunks a sum.
const SIZES: &[[usize; 2]] =
    &[[1, 1], [7, 31], [2, CHUNK / 2], [1, CHUNK + 1], [96, 80], [130, 257], [9, 4099]];

#[test]
fn agrees_with_the_oracle() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (seed, &shape) in SIZES.iter().enumerate() {
                for count in [1, 4, 64] {
                    let n = shape[0] * shape[1];
                    let (x, x_held) = tensor(&numbers(n, seed as u64, 0.1), shape, dtype, &device);
                    let given = numbers(count, 90 + seed as u64, 1.0);
                    let (sums, held) = tensor(&given, [count], DType::F32, &device);
                    poison(count, DType::F32, &device);
                    let found = sum_squares(x.clone(), sums.clone()).unwrap();
                    let expected = oracle::forward(&x_held, &held);
                    let what = format!("{shape:?}, {count} sums, {device:?}");
                    assert_near(&values(&found), &expected, DType::F32, 1, &what);
                    // Somebody else held them: they are what they were.
                    assert_eq!(values(&sums), held, "{what}");
                    // Now nobody does.
                    let again = sum_squares(x, sums).unwrap();
                    assert_eq!(values(&again), values(&found), "{what}");
                }
            }
        }
    }
}

#[test]
fn views_count_in_their_own_order() {
    for device in devices() {
        let (x, held) = tensor(&numbers(40 * 300, 3, 0.1), [40, 300], DType::F32, &device);
        let at = |i: usize, j: usize| held[i * 300 + j];
        let turned: Vec<f64> = (0..300).flat_map(|j| (0..40).map(move |i| at(i, j))).collect();
        let part: Vec<f64> = (0..40).flat_map(|i| (4..260).map(move |j| at(i, j))).collect();
        let sums = || Tensor::<1>::zeros([3], &device);
        for (view, expected) in [
            (x.clone().transpose(), turned),
            (x.clone().narrow(1, 4, 256), part),
            (x.clone().narrow(0, 7, 20), held[7 * 300..27 * 300].to_vec()),
        ] {
            let found = sum_squares(view, sums()).unwrap();
            let expected = oracle::forward(&expected, &[0.0; 3]);
            assert_near(&values(&found), &expected, DType::F32, 1, &format!("{device:?}"));
        }
    }
}

#[test]
fn tensors_one_after_the_other_are_one_norm() {
    for device in devices() {
        let mut sums = Tensor::<1>::zeros([16], &device);
        let mut expected = 0.0;
        for (seed, size) in [3, 5000, 40_000, 1].into_iter().enumerate() {
            let (x, held) = tensor(&numbers(size, seed as u64, 0.2), [size], DType::F32, &device);
            expected += held.iter().map(|x| x * x).sum::<f64>();
            sums = sum_squares(x, sums).unwrap();
        }
        let found = sums.sum().into_scalar::<f32>() as f64;
        assert!((found - expected).abs() < 1e-5 * expected, "{found}, expected {expected}");
    }
}

#[test]
fn what_is_no_number_shows_and_nothing_changes_nothing() {
    for device in devices() {
        for wrong in [f64::NAN, f64::INFINITY] {
            let mut given = numbers(3 * CHUNK, 1, 0.0);
            given[CHUNK + 5] = wrong;
            let (x, _) = tensor(&given, [3 * CHUNK], DType::F32, &device);
            let found = values(&sum_squares(x, Tensor::zeros([3], &device)).unwrap());
            let finite: Vec<bool> = found.iter().map(|sum| sum.is_finite()).collect();
            assert_eq!(finite, [true, false, true]);
        }
        let (sums, held) = tensor(&[1.0, 2.0], [2], DType::F32, &device);
        let none = Tensor::<2>::zeros([0, 3], &device);
        assert_eq!(values(&sum_squares(none, sums).unwrap()), held);
    }
}

#[test]
fn no_gradient_flows() {
    for device in devices() {
        let x = Tensor::<1>::ones([5], &device).autodiff().require_grad();
        let sums = Tensor::zeros([1], &device).autodiff();
        let y = sum_squares(x.clone(), sums).unwrap();
        assert_eq!(values(&y), [5.0]);
        let grads = pull(y * x.clone().sum(), &Tensor::ones([1], &device).autodiff()).backward();
        assert_eq!(values(&x.grad(&grads).unwrap()), [5.0; 5]);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = devices().remove(0);
    let error = |found: Result<Tensor<1>, OpError>| found.unwrap_err().to_string();
    let ones = |dtype: DType| Tensor::<1>::ones([5], &device).cast(dtype);
    assert_eq!(
        error(sum_squares(ones(DType::F32), Tensor::zeros([0], &device))),
        "sum_squares: `sums` has shape [0], expected [L], L at least 1"
    );
    assert_eq!(
        error(sum_squares(ones(DType::F64), ones(DType::F32))),
        "sum_squares: `x` is F64, expected F32, BF16 or F16"
    );
    assert_eq!(
        error(sum_squares(ones(DType::F32), ones(DType::F64))),
        "sum_squares: `sums` is F64, expected F32"
    );
}

/// More tensors than a launch takes, of several ranks and element types, some of them views: their chunks are counted on.
#[test]
fn a_batch_is_one_tensor_after_the_other() {
    for device in devices() {
        for count in [1, 5, 1024] {
            let mut batch = SumSquaresBatch::new();
            let (sums, mut expected) =
                tensor(&numbers(count, 9, 1.0), [count], DType::F32, &device);
            let mut chunks = 0;
            for dtype in dtypes(&device) {
                for k in 0..40 {
                    let size = [k * 312 + 8, 4096, 12_344][k % 3];
                    let (x, mut held) =
                        tensor(&numbers(size, k as u64, 0.1), [2, size / 2], dtype, &device);
                    let x = match k % 4 {
                        // The second half of each row.
                        1 => {
                            let rows = held.chunks(size / 2).map(|row| row[size / 4..].to_vec());
                            held = rows.collect::<Vec<_>>().concat();
                            x.narrow(1, size / 4, size / 2 - size / 4)
                        }
                        _ => x,
                    };
                    match k % 2 {
                        0 => batch.push(x.flatten::<1>(0, 1)).unwrap(),
                        _ => batch.push(x).unwrap(),
                    }
                    expected.rotate_left(chunks % count);
                    expected = oracle::forward(&held, &expected);
                    expected.rotate_right(chunks % count);
                    chunks += held.len().div_ceil(CHUNK);
                }
                batch.push(Tensor::<2>::zeros([0, 3], &device).cast(dtype)).unwrap();
            }
            let found = values(&batch.sum(sums).unwrap());
            assert_near(&found, &expected, DType::F32, 8, &format!("{count} sums, {device:?}"));
        }
    }
}
