//! newton_schulz on every device: shapes and views, singular values, matrices of zeros and NaN, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Int, Tensor};
use kiln_ops::newton_schulz::oracle;
use kiln_ops::prelude::*;

const POLAR_EXPRESS: NewtonSchulzOptions =
    NewtonSchulzOptions { steps: 5, coefficients: Coefficients::PolarExpress };

fn steps(steps: usize) -> NewtonSchulzOptions {
    NewtonSchulzOptions { steps, ..Default::default() }
}

fn check(
    shape: [usize; 3],
    options: NewtonSchulzOptions,
    turned: bool,
    dtype: DType,
    device: &Device,
) {
    let [batches, m, n] = shape;
    let count = batches * m * n;
    let stored = if turned { [batches, n, m] } else { shape };
    let (g, held) = tensor(&numbers(count, 1, 0.2), stored, dtype, device);
    let (g, held) = match turned {
        false => (g, held),
        true => {
            let at = |i: usize| i / (m * n) * m * n + i % n * m + i / n % m;
            (g.swap_dims(1, 2), (0..count).map(|i| held[at(i)]).collect())
        }
    };
    poison(count, dtype, device);
    let y = newton_schulz(g.clone(), options).unwrap();
    let what = format!("{shape:?}, {options:?}, turned {turned}, {device:?}");
    assert_eq!((y.dims(), y.dtype()), (shape, dtype), "{what}");
    let found = values(&y);
    let expected = oracle::forward(&held, shape, options);
    // Steps multiply what was rounded before them; the first of Polar Express takes large numbers from each other.
    let first = if options.coefficients == Coefficients::Muon { 4 } else { 16 };
    let growth = if options.steps == 0 { 1 } else { first * 4u32.pow(options.steps as u32 - 1) };
    assert_near(&found, &expected, dtype, growth, &what);
    assert!(found == values(&newton_schulz(g, options).unwrap()), "{what} repeats");
}

#[test]
fn agrees_with_the_oracle() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let most = if dtype == DType::F32 { 5 } else { 1 };
            for shape in [[1, 1, 1], [1, 1, 13], [2, 9, 9], [1, 24, 65], [3, 65, 24]] {
                for turned in [false, true] {
                    check(shape, steps(0), turned, dtype, &device);
                    check(shape, steps(1), turned, dtype, &device);
                    check(shape, steps(most), turned, dtype, &device);
                    let options = NewtonSchulzOptions { steps: most, ..POLAR_EXPRESS };
                    check(shape, options, turned, dtype, &device);
                }
            }
        }
    }
}

/// The eigenvalues of a symmetric matrix, by Jacobi's rotations.
fn eigenvalues(mut a: Vec<f64>, n: usize) -> Vec<f64> {
    for _ in 0..30 {
        for p in 0..n {
            for q in p + 1..n {
                let theta = 0.5 * (2.0 * a[p * n + q]).atan2(a[q * n + q] - a[p * n + p]);
                let (sin, cos) = theta.sin_cos();
                for i in 0..n {
                    let (x, y) = (a[i * n + p], a[i * n + q]);
                    (a[i * n + p], a[i * n + q]) = (cos * x - sin * y, sin * x + cos * y);
                }
                for i in 0..n {
                    let (x, y) = (a[p * n + i], a[q * n + i]);
                    (a[p * n + i], a[q * n + i]) = (cos * x - sin * y, sin * x + cos * y);
                }
            }
        }
    }
    (0..n).map(|i| a[i * n + i]).collect()
}

/// Of what the specification of Muon says for singular values of 0.01 of the norm and more, and of Polar Express's
/// error of five steps, in every element type.
#[test]
fn singular_values_come_near_to_one() {
    let (m, n) = (20, 50);
    for device in devices() {
        for dtype in dtypes(&device) {
            let (g, _) = tensor(&numbers(m * n, 3, 0.0), [m, n], dtype, &device);
            for (options, low, high) in [(steps(5), 0.68, 1.14), (POLAR_EXPRESS, 0.85, 1.15)] {
                let y = values(&newton_schulz(g.clone(), options).unwrap());
                let gram = (0..m * m)
                    .map(|i| (0..n).map(|x| y[i / m * n + x] * y[i % m * n + x]).sum::<f64>());
                for square in eigenvalues(gram.collect(), m) {
                    // Beside them what 16 bits round.
                    let margin = if dtype == DType::F32 { 1e-3 } else { 0.03 };
                    let value = square.max(0.0).sqrt();
                    let fits = (low - margin..high + margin).contains(&value);
                    assert!(fits, "{value} of {options:?}, {dtype:?}, {device:?}");
                }
            }
        }
    }
}

#[test]
fn matrices_of_zeros_nan_and_nothing_stay_by_themselves() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let mut numbers = numbers(3 * 6, 5, 0.1);
            numbers[..6].fill(0.0);
            numbers[8] = f64::NAN;
            let (g, _) = tensor(&numbers, [3, 2, 3], dtype, &device);
            let y = values(&newton_schulz(g, NewtonSchulzOptions::default()).unwrap());
            assert!(y[..6].iter().all(|y| *y == 0.0), "{y:?}");
            assert!(y[6..12].iter().all(|y| y.is_nan()), "{y:?}");
            assert!(y[12..].iter().all(|y| y.is_finite()), "{y:?}");
            for shape in [[0, 2, 3], [2, 0, 3], [2, 3, 0]] {
                let empty = Tensor::<3>::zeros(shape, (&device, dtype));
                let y = newton_schulz(empty, NewtonSchulzOptions::default()).unwrap();
                assert_eq!(y.dims(), shape);
            }
        }
    }
}

#[test]
fn no_gradient_flows() {
    for device in devices() {
        let (g, _) = tensor(&numbers(12, 7, 0.1), [3, 4], DType::F32, &device);
        let g = g.autodiff().require_grad();
        let y = newton_schulz(g.clone(), NewtonSchulzOptions::default()).unwrap();
        let ones = y.ones_like();
        let grads = pull(y * g.clone(), &ones).backward();
        let expected = values(&newton_schulz(g.clone().inner(), Default::default()).unwrap());
        assert_eq!(values(&g.grad(&grads).unwrap()), expected);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let device = devices().remove(0);
    let error = |g: Result<Tensor<1>, kiln_ops::OpError>| g.unwrap_err().to_string();
    let vector = Tensor::<1>::ones([5], &device);
    assert_eq!(
        error(newton_schulz(vector, NewtonSchulzOptions::default())),
        "newton_schulz: `g` has shape [5], expected [..., M, N] of rank 2 or more"
    );
    let integers = Tensor::<1, Int>::ones([5], &device).float().cast(DType::F64);
    let found = error(newton_schulz(integers, NewtonSchulzOptions::default()));
    assert_eq!(found, "newton_schulz: `g` is F64, expected F32, BF16 or F16");
}
