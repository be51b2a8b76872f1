//! tril_matmul on every device: NaN above the diagonals, zeros in the result, views, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::prelude::*;
use kiln_ops::tril_matmul::oracle;

/// The same numbers with NaN above the diagonal.
fn poisoned(values: &[f64], n: usize) -> Vec<f64> {
    let above = |i: usize| i % n > i / n % n;
    values.iter().enumerate().map(|(i, v)| if above(i) { f64::NAN } else { *v }).collect()
}

fn check(batches: usize, n: usize, transposed: bool, dtype: DType, device: &Device) {
    let (shape, count) = ([batches, n, n], batches * n * n);
    let make = |seed| {
        let (_, held) = tensor(&numbers(count, seed, 0.1), shape, dtype, device);
        let values = poisoned(&held, n);
        let leaf = if transposed {
            // Stored with columns side by side.
            let turned: Vec<f64> =
                (0..count).map(|i| values[i / (n * n) * n * n + i % n * n + i / n % n]).collect();
            tensor(&turned, shape, dtype, device).0.swap_dims(1, 2)
        } else {
            tensor(&values, shape, dtype, device).0
        };
        (leaf.autodiff().require_grad(), held)
    };
    let ((a, a_held), (b, b_held)) = (make(1), make(2));
    let (dy, dy_held) = tensor(&numbers(count, 3, 0.1), shape, dtype, device);
    poison(count, dtype, device);
    let y = tril_matmul(a.clone(), b.clone()).unwrap();
    let what = format!("{batches}×{n}, transposed {transposed}, {device:?}");
    let expected = oracle::forward(&a_held, &b_held, [batches, n]);
    let found = values(&y);
    assert_near(&found, &expected, dtype, 1, &what);
    for (i, v) in found.iter().enumerate() {
        assert!(i % n <= i / n % n || *v == 0.0, "{what}: {v} above the diagonal, at {i}");
    }
    let grads = pull(y, &dy.autodiff()).backward();
    let (da, db) = oracle::backward(&a_held, &b_held, [batches, n], &dy_held);
    assert_near(&values(&a.grad(&grads).unwrap()), &da, dtype, 1, &format!("da of {what}"));
    assert_near(&values(&b.grad(&grads).unwrap()), &db, dtype, 1, &format!("db of {what}"));
}

#[test]
fn what_stands_above_the_diagonals_is_never_read() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (batches, n) in [(1, 1), (1, 9), (3, 40), (1, 136), (2, 300)] {
                for transposed in [false, true] {
                    check(batches, n, transposed, dtype, &device);
                }
            }
        }
    }
}

#[test]
fn wrong_calls_are_named() {
    let device = devices().remove(0);
    let ones = |shape: [usize; 2]| Tensor::<2>::ones(shape, &device);
    let error = tril_matmul(ones([2, 3]), ones([2, 3])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tril_matmul: `a` has shape [2, 3], expected [..., N, N] of rank 2 or more, N at least 1"
    );
    let error = tril_matmul(ones([3, 3]), ones([2, 2])).unwrap_err();
    assert_eq!(error.to_string(), "tril_matmul: `b` has shape [2, 2], expected [3, 3]");
}
