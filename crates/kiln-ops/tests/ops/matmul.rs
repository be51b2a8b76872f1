//! matmul on every device: storage orders, views, broadcasts, what is added, gradients, errors.

use crate::common::families::families;
use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::matmul::oracle;
use kiln_ops::policy::{Implementation, force};
use kiln_ops::prelude::*;
use kiln_ops::tile;

const PLAIN: MatmulOptions = MatmulOptions {
    alpha: 1.0,
    beta: 1.0,
    dtype: None,
    precision: F32Precision::Highest,
    symmetric: false,
};
const SYMMETRIC: MatmulOptions = MatmulOptions { symmetric: true, ..PLAIN };

/// A row-major matrix of these numbers, transposed.
fn turned(values: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..cols).flat_map(|j| (0..rows).map(move |i| values[i * cols + j])).collect()
}

#[test]
fn views_are_read_in_place() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let [m, k, n] = [37, 40, 56];
            let (a, a_held) = tensor(&numbers(m * k, 1, 0.1), [m, k], dtype, &device);
            let (b, b_held) = tensor(&numbers(k * n, 2, 0.1), [k, n], dtype, &device);
            let expected = oracle::forward(&a_held, &b_held, [1, m, k, n], 1.0);
            let (at, _) = tensor(&turned(&a_held, m, k), [k, m], dtype, &device);
            let (bt, _) = tensor(&turned(&b_held, k, n), [n, k], dtype, &device);
            // Cut out of wider tensors: odd offsets and strides.
            let wide = |t: Tensor<2>| {
                let [rows, cols] = t.dims();
                let side = Tensor::full([rows, 3], f32::NAN, (&device, dtype));
                Tensor::cat(vec![side.clone(), t, side], 1).slice([0..rows, 3..3 + cols])
            };
            for (name, a, b) in [
                ("nn", a.clone(), b.clone()),
                ("nt", a.clone(), bt.clone().transpose()),
                ("tn", at.clone().transpose(), b.clone()),
                ("tt", at.clone().transpose(), bt.clone().transpose()),
                ("cut", wide(a), wide(b)),
                ("cut and transposed", wide(at).transpose(), wide(bt).transpose()),
            ] {
                poison(m * n, dtype, &device);
                let y = matmul(a, b, PLAIN).unwrap();
                assert_near(&values(&y), &expected, dtype, 1, &format!("{name}, {device:?}"));
            }
        }
    }
}

#[test]
fn stacks_broadcast_and_their_gradients_are_summed() {
    for device in devices() {
        let dtype = DType::F32;
        let [m, k, n] = [5, 19, 6];
        for (left, right) in
            [([2, 3], [2, 3]), ([2, 3], [1, 1]), ([2, 1], [1, 3]), ([1, 1], [2, 3])]
        {
            let (x, z) = (left[0] * left[1], right[0] * right[1]);
            let (a, a_held) =
                tensor(&numbers(x * m * k, 1, 0.1), [left[0], left[1], m, k], dtype, &device);
            let (b, b_held) =
                tensor(&numbers(z * k * n, 2, 0.1), [right[0], right[1], k, n], dtype, &device);
            let (dy, dy_held) = tensor(&numbers(6 * m * n, 3, 0.1), [2, 3, m, n], dtype, &device);
            let [a, b] = [a, b].map(|t| t.autodiff().require_grad());
            let y = matmul(a.clone(), b.clone(), PLAIN).unwrap();
            let grads = pull(y.clone(), &dy.autodiff()).backward();

            let index = |at: usize, dims: [usize; 2]| {
                (at / 3).min(dims[0] - 1) * dims[1] + (at % 3).min(dims[1] - 1)
            };
            let (mut expected, mut da, mut db) =
                (vec![], vec![0.0; x * m * k], vec![0.0; z * k * n]);
            for at in 0..6 {
                let (i, j) = (index(at, left) * m * k, index(at, right) * k * n);
                let (one, other) = (&a_held[i..][..m * k], &b_held[j..][..k * n]);
                let dy = &dy_held[at * m * n..][..m * n];
                expected.extend(oracle::forward(one, other, [1, m, k, n], 1.0));
                let (ga, gb) = oracle::backward(one, other, [1, m, k, n], 1.0, dy);
                da[i..].iter_mut().zip(ga).for_each(|(sum, g)| *sum += g);
                db[j..].iter_mut().zip(gb).for_each(|(sum, g)| *sum += g);
            }
            let what = format!("{left:?} and {right:?} on {device:?}");
            assert_near(&values(&y), &expected, dtype, 1, &what);
            assert_near(&values(&a.grad(&grads).unwrap()), &da, dtype, 1, &format!("da, {what}"));
            assert_near(&values(&b.grad(&grads).unwrap()), &db, dtype, 1, &format!("db, {what}"));
        }
    }
}

/// alpha·a·b + beta·c with its gradients, `c` of some shape that broadcasts.
fn check_add(c_shape: [usize; 2], [m, k, n]: [usize; 3], dtype: DType, device: &Device) {
    let options = MatmulOptions { alpha: 0.5, beta: -2.0, dtype: Some(DType::F32), ..PLAIN };
    let (a, a_held) = tensor(&numbers(m * k, 1, 0.1), [m, k], dtype, device);
    let (b, b_held) = tensor(&numbers(k * n, 2, 0.1), [k, n], dtype, device);
    let count = c_shape[0] * c_shape[1];
    let (c, c_held) = tensor(&numbers(count, 3, 0.1), c_shape, DType::F32, device);
    let (dy, dy_held) = tensor(&numbers(m * n, 4, 0.1), [m, n], dtype, device);
    let [a, b, c] = [a, b, c].map(|t| t.autodiff().require_grad());
    let y = matmul_add(a.clone(), b.clone(), c.clone(), options).unwrap();
    assert_eq!(y.dtype(), DType::F32);
    let grads = pull(y.clone(), &dy.autodiff()).backward();

    let index = |i: usize, j: usize| i.min(c_shape[0] - 1) * c_shape[1] + j.min(c_shape[1] - 1);
    let mut expected = oracle::forward(&a_held, &b_held, [1, m, k, n], 0.5);
    let mut dc = vec![0.0; count];
    for i in 0..m {
        for j in 0..n {
            expected[i * n + j] -= 2.0 * c_held[index(i, j)];
            dc[index(i, j)] -= 2.0 * dy_held[i * n + j];
        }
    }
    let (da, db) = oracle::backward(&a_held, &b_held, [1, m, k, n], 0.5, &dy_held);
    let what = format!("{c_shape:?}, {m}×{k}×{n} on {device:?}");
    // The result is f32, whatever the operands.
    assert_near(&values(&y), &expected, DType::F32, 1, &what);
    assert_near(&values(&a.grad(&grads).unwrap()), &da, dtype, 1, &format!("da, {what}"));
    assert_near(&values(&b.grad(&grads).unwrap()), &db, dtype, 1, &format!("db, {what}"));
    assert_near(&values(&c.grad(&grads).unwrap()), &dc, DType::F32, 1, &format!("dc, {what}"));
}

#[test]
fn bias_and_residual_are_added() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for size @ [m, _, n] in [[33, 20, 18], [16, 2056, 24]] {
                for c in [[m, n], [1, n], [m, 1], [1, 1]] {
                    check_add(c, size, dtype, &device);
                }
            }
        }
    }
}

/// C in memory that the result could take, if its only row stood where rows may stand.
#[test]
fn what_is_added_is_read_from_any_memory() {
    let options = MatmulOptions { dtype: Some(DType::F32), ..PLAIN };
    for device in devices() {
        for dtype in dtypes(&device) {
            let [b, k, n] = [3, 24, 33];
            let (x, x_held) = tensor(&numbers(b * k, 1, 0.1), [b, 1, k], dtype, &device);
            let (w, w_held) = tensor(&numbers(k * n, 2, 0.1), [1, k, n], dtype, &device);
            let (_, c_held) = tensor(&numbers(b * n, 3, 0.1), [b, n], DType::F32, &device);
            let mut expected = oracle::forward(&x_held, &w_held, [1, b, k, n], 1.0);
            expected.iter_mut().zip(&c_held).for_each(|(y, c)| *y += c);
            // A row of a matrix that was [1, b, n], one of its own, and one in a larger step.
            let swapped = tensor(&c_held, [1, b, n], DType::F32, &device).0.swap_dims(0, 1);
            let y = matmul_add(x.clone(), w.clone(), swapped, options).unwrap();
            assert_near(&values(&y), &expected, DType::F32, 1, &format!("swapped, {device:?}"));
            let (c, _) = tensor(&c_held[..n], [1, 1, n], DType::F32, &device);
            let y = matmul_add(x.clone().narrow(0, 0, 1), w.clone(), c, options).unwrap();
            assert_near(&values(&y), &expected[..n], DType::F32, 1, &format!("row, {device:?}"));
        }
    }
}

/// The gradient of a weight that no row has gone through is zero.
#[test]
fn no_rows_have_gradients_of_zero() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let (x, _) = tensor(&[], [0, 5], dtype, &device);
            let (w, _) = tensor(&numbers(15, 1, 0.1), [5, 3], dtype, &device);
            let (x, w) = (x.autodiff().require_grad(), w.autodiff().require_grad());
            let y = matmul(x.clone(), w.clone(), PLAIN).unwrap();
            let grads = y.cast(DType::F32).sum().backward();
            assert_eq!(values(&w.grad(&grads).unwrap()), [0.0; 15], "{dtype:?} on {device:?}");
        }
    }
}

/// Sums of two bf16 leave at most 3·2⁻¹⁸ of each term, TF32 would leave 2⁻¹¹; where there are no tensor
/// cores nothing changes.
#[test]
fn high_precision_is_that_of_three_products() {
    let options = MatmulOptions { precision: F32Precision::High, ..PLAIN };
    for device in devices() {
        for [m, k, n] in [[37, 40, 56], [33, 17, 65], [130, 513, 257]] {
            let (a, a_held) = tensor(&numbers(m * k, 1, 0.1), [m, k], DType::F32, &device);
            let (bt, _) =
                tensor(&turned(&numbers(k * n, 2, 0.1), k, n), [n, k], DType::F32, &device);
            let b_held = turned(&values(&bt), n, k);
            let (dy, dy_held) = tensor(&numbers(m * n, 3, 0.1), [m, n], DType::F32, &device);
            let expected = oracle::forward(&a_held, &b_held, [1, m, k, n], 1.0);
            let (da, db) = oracle::backward(&a_held, &b_held, [1, m, k, n], 1.0, &dy_held);
            let forced = families(&device, DType::BF16).into_iter().map(Some);
            for family in std::iter::once(None).chain(forced) {
                let run = || {
                    let a = a.clone().autodiff().require_grad();
                    let b = bt.clone().transpose().autodiff().require_grad();
                    let y = matmul(a.clone(), b.clone(), options).unwrap();
                    let grads = pull(y.clone(), &dy.clone().autodiff()).backward();
                    [values(&y), values(&a.grad(&grads).unwrap()), values(&b.grad(&grads).unwrap())]
                };
                let found = match family {
                    Some(family) => tile::force(family, run),
                    None => run(),
                };
                for (found, expected) in found.iter().zip([&expected, &da, &db]) {
                    let off: f64 =
                        found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
                    let all: f64 = expected.iter().map(|v| v * v).sum();
                    let error = (off / all).sqrt();
                    assert!(error < 2f64.powi(-16), "{error:e}, {m}×{k}×{n}, {family:?}");
                }
            }
        }
    }
}

/// What every family makes of some work, beside the family's name.
fn on_families<T>(device: &Device, dtype: DType, run: impl Fn() -> T) -> Vec<(String, T)> {
    let forced = families(device, dtype).into_iter();
    let mut made: Vec<_> =
        forced.map(|family| (family.to_string(), tile::force(family, &run))).collect();
    if made.is_empty() {
        made.push(("no family".into(), run()));
    }
    made
}

/// Few tiles and a long K, which is cut into parts; the sum of parts has one order.
#[test]
fn long_sums_are_cut_into_parts() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for [batches, m, k, n] in
                [[1, 140, 1100, 72], [3, 140, 1100, 72], [3, 40, 2056, 264], [2, 16, 8200, 8]]
            {
                let (a, a_held) =
                    tensor(&numbers(batches * m * k, 1, 0.1), [batches, m, k], dtype, &device);
                let (b, b_held) =
                    tensor(&numbers(batches * k * n, 2, 0.1), [batches, k, n], dtype, &device);
                let (c, c_held) = tensor(&numbers(m * n, 3, 0.1), [1, m, n], DType::F32, &device);
                let mut expected = oracle::forward(&a_held, &b_held, [batches, m, k, n], 0.5);
                for (i, y) in expected.iter_mut().enumerate() {
                    *y -= 2.0 * c_held[i % (m * n)];
                }
                let options = MatmulOptions { alpha: 0.5, beta: -2.0, ..PLAIN };
                let made = on_families(&device, dtype, || {
                    poison(batches * m * n, dtype, &device);
                    let y = matmul_add(a.clone(), b.clone(), c.clone(), options);
                    values(&y.unwrap())
                });
                let again = on_families(&device, dtype, || {
                    let y = matmul_add(a.clone(), b.clone(), c.clone(), options);
                    values(&y.unwrap())
                });
                for ((family, y), (_, again)) in made.iter().zip(again) {
                    let what = format!("{batches}×{m}×{k}×{n} on {family} of {device:?}");
                    assert_near(y, &expected, dtype, 1, &what);
                    assert!(*y == again, "two runs differ: {what}");
                }

                // Added to what may be the result's memory: `alone` sees whether it is.
                let full = numbers(batches * m * n, 4, 0.1);
                let mut expected = oracle::forward(&a_held, &b_held, [batches, m, k, n], 1.0);
                let options = MatmulOptions { dtype: Some(DType::F32), ..PLAIN };
                let made = on_families(&device, dtype, || {
                    let (c, held) = tensor(&full, [batches, m, n], DType::F32, &device);
                    (values(&matmul_add(a.clone(), b.clone(), c * 1.0, options).unwrap()), held)
                });
                expected.iter_mut().zip(&made[0].1.1).for_each(|(y, c)| *y += c);
                for (family, (y, _)) in made {
                    let what = format!("added to, {batches}×{m}×{k}×{n} on {family}, {device:?}");
                    assert_near(&y, &expected, DType::F32, 1, &what);
                }
            }
        }
    }
}

/// C is read with beta = 0 too: what is no number in it is none in the result, and nothing else is.
#[test]
fn what_is_no_number_in_c_stays_so() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let [m, k, n] = [72, 40, 136];
            let (a, a_held) = tensor(&numbers(m * k, 1, 0.1), [m, k], dtype, &device);
            let (b, b_held) = tensor(&numbers(k * n, 2, 0.1), [k, n], dtype, &device);
            let product = oracle::forward(&a_held, &b_held, [1, m, k, n], 1.0);
            let options = MatmulOptions { beta: 0.0, ..PLAIN };
            for rows in [m, 1] {
                let spoiled = (rows - 1) * n + 5;
                let mut c = numbers(rows * n, 3, 0.1);
                c[spoiled] = f64::NAN;
                let (c, _) = tensor(&c, [rows, n], DType::F32, &device);
                let made = on_families(&device, dtype, || {
                    values(&matmul_add(a.clone(), b.clone(), c.clone(), options).unwrap())
                });
                for (family, mut y) in made {
                    let mut expected = product.clone();
                    for (i, y) in y.iter_mut().enumerate() {
                        let is_spoiled = i % (rows * n) == spoiled;
                        assert_eq!(y.is_nan(), is_spoiled, "{rows} rows of c, {i}, on {family}");
                        if is_spoiled {
                            (*y, expected[i]) = (0.0, 0.0);
                        }
                    }
                    let what = format!("{rows} rows of c on {family} of {device:?}");
                    assert_near(&y, &expected, dtype, 1, &what);
                }
            }
        }
    }
}

/// alpha·A·Aᵀ + beta·C, told that it is symmetric: right, and to the bit the same on both sides.
#[test]
fn symmetric_products() {
    let options = MatmulOptions { alpha: 0.5, beta: -2.0, ..SYMMETRIC };
    for device in devices() {
        for dtype in dtypes(&device) {
            for [batches, m, k] in [
                [1, 1, 3],
                [1, 63, 20],
                [1, 130, 40],
                [2, 200, 24],
                // With tiles of 192 and of 256 columns, and by cubes in pairs.
                [9, 520, 16],
                [1, 2112, 16],
                [20, 392, 16],
                [1, 264, 2056],
            ] {
                let (a, a_held) =
                    tensor(&numbers(batches * m * k, 1, 0.1), [batches, m, k], dtype, &device);
                let half = numbers(m * m, 2, 0.1);
                let both: Vec<_> = (0..m * m).map(|i| half[i] + half[i % m * m + i / m]).collect();
                let (_, c_held) = tensor(&both, [1, m, m], dtype, &device);
                let at: Vec<_> =
                    a_held.chunks(m * k).flat_map(|matrix| turned(matrix, m, k)).collect();
                let mut expected = oracle::forward(&a_held, &at, [batches, m, k, m], 0.5);
                for (i, y) in expected.iter_mut().enumerate() {
                    *y -= 2.0 * c_held[i % (m * m)];
                }
                let [a_size, at_size] =
                    [&a_held, &at].map(|x| x.iter().map(|x| x.abs()).collect::<Vec<_>>());
                let sizes = oracle::forward(&a_size, &at_size, [batches, m, k, m], 0.5);
                let results =
                    if dtype == DType::F32 { vec![dtype] } else { vec![dtype, DType::F32] };
                for result in results {
                    let options = MatmulOptions { dtype: Some(result), ..options };
                    let made = on_families(&device, dtype, || {
                        poison(batches * m * m, result, &device);
                        let transposed = a.clone().swap_dims(1, 2);
                        // Nobody else holds it: the result may take its memory.
                        let (c, _) = tensor(&both, [1, m, m], dtype, &device);
                        values(&matmul_add(a.clone(), transposed, c, options).unwrap())
                    });
                    for (family, y) in made {
                        let what = format!("{batches}×{m}×{k} {dtype:?} on {family} of {device:?}");
                        if result == dtype {
                            assert_near(&y, &expected, result, 1, &what);
                        } else {
                            // Tensor cores cut each of K / 16 sums off at 2⁻²³; C and the end round.
                            let terms = (k.div_ceil(16) + 4) as f64 * 2f64.powi(-23);
                            for (i, (y, e)) in y.iter().zip(&expected).enumerate() {
                                let bound = terms * (sizes[i] + 2.0 * c_held[i % (m * m)].abs());
                                assert!((y - e).abs() <= bound, "{what}: {y} for {e} at {i}");
                            }
                        }
                        for matrix in y.chunks(m * m) {
                            assert!(matrix == turned(matrix, m, m), "not symmetric: {what}");
                        }
                    }
                }
            }
        }
    }
}

/// The gradient of a symmetric product is that of any: both operands have one.
#[test]
fn gradients_of_symmetric_products() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let [m, k] = [70, 24];
            let (a, a_held) = tensor(&numbers(m * k, 1, 0.1), [m, k], dtype, &device);
            let (dy, dy_held) = tensor(&numbers(m * m, 2, 0.1), [m, m], dtype, &device);
            let at = turned(&a_held, m, k);
            let (left, right) = oracle::backward(&a_held, &at, [1, m, k, m], 1.0, &dy_held);
            let right = turned(&right, k, m);
            let expected: Vec<_> = left.iter().zip(right).map(|(l, r)| l + r).collect();
            let leaf = a.autodiff().require_grad();
            let y = matmul(leaf.clone(), leaf.clone().transpose(), SYMMETRIC).unwrap();
            let grads = pull(y, &dy.autodiff()).backward();
            let found = values(&leaf.grad(&grads).unwrap());
            assert_near(&found, &expected, dtype, 2, &format!("{dtype:?} on {device:?}"));
        }
    }
}

#[test]
fn frozen_operands_and_checkpoints() {
    for device in devices() {
        let (a, a_held) = tensor(&numbers(6 * 8, 1, 0.1), [6, 8], DType::F32, &device);
        let (b, b_held) = tensor(&numbers(8 * 4, 2, 0.1), [8, 4], DType::F32, &device);
        let (dy, dy_held) = tensor(&numbers(6 * 4, 3, 0.1), [6, 4], DType::F32, &device);
        let (da, db) = oracle::backward(&a_held, &b_held, [1, 6, 8, 4], 1.0, &dy_held);
        let dy = dy.autodiff();

        let leaf = a.clone().autodiff().require_grad();
        let y = matmul(leaf.clone(), b.clone().autodiff(), PLAIN).unwrap();
        let grads = pull(y, &dy).backward();
        assert_near(&values(&leaf.grad(&grads).unwrap()), &da, DType::F32, 1, "only a");

        let leaf = b.clone().autodiff().require_grad();
        let y = matmul(a.clone().autodiff(), leaf.clone(), PLAIN).unwrap();
        let grads = pull(y, &dy).backward();
        assert_near(&values(&leaf.grad(&grads).unwrap()), &db, DType::F32, 1, "only b");

        // Operands that are made again in the backward: 2·(a/2) and b + 0.
        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        let load = |x: &Tensor<2>| Tensor::<2>::from_data(x.to_data(), &checkpointing);
        let (left, right) = (load(&a).require_grad(), load(&b).require_grad());
        let operands =
            [left.clone().div_scalar(2.0).mul_scalar(2.0), right.clone().add_scalar(0.0)];
        let [left_made, right_made] = operands;
        let y = matmul(left_made, right_made, PLAIN).unwrap();
        let grads = pull(y.mul_scalar(1.0), &load(&dy.clone().inner())).backward();
        assert_near(&values(&left.grad(&grads).unwrap()), &da, DType::F32, 1, "a, made again");
        assert_near(&values(&right.grad(&grads).unwrap()), &db, DType::F32, 1, "b, made again");

        assert!(!matmul(a.autodiff(), b.autodiff(), PLAIN).unwrap().is_tracked());
    }
}

#[test]
fn nothing_times_something_is_nothing() {
    for device in devices() {
        for shape in [[0, 4, 5], [2, 0, 5]] {
            let (a, _) = tensor(&[], shape, DType::F32, &device);
            let y = matmul(a, Tensor::<3>::ones([1, 5, 6], &device), PLAIN).unwrap();
            assert_eq!(y.dims(), [shape[0], shape[1], 6]);
            assert_eq!(values(&y), [0.0; 0]);
        }
    }
}

#[test]
fn wrong_calls_are_named() {
    let device = devices().remove(0);
    let ones = |shape: [usize; 2]| Tensor::<2>::ones(shape, &device);
    for (error, expected) in [
        (
            matmul(ones([2, 4]), ones([3, 4]), PLAIN),
            "matmul: `b` has shape [3, 4], expected [4, N]",
        ),
        (
            matmul(ones([2, 4]), ones([4, 3]).cast(DType::F16), PLAIN),
            "matmul: `b` is F16, expected F32",
        ),
        (
            matmul(ones([2, 0]), ones([0, 3]), PLAIN),
            "matmul: `a` has shape [2, 0], expected [..., M, K] of rank 2 or more, K at least 1",
        ),
        (
            matmul(ones([2, 4]), ones([4, 3]), MatmulOptions { alpha: f64::NAN, ..PLAIN }),
            "matmul: alpha = NaN, expected a number",
        ),
        (
            matmul(ones([2, 4]), ones([4, 3]), SYMMETRIC),
            "matmul: `y` has shape [2, 3], expected [..., M, M], as a symmetric product has",
        ),
        (
            matmul_add(ones([2, 4]), ones([4, 3]), ones([2, 4]), PLAIN),
            "matmul: `c` has shape [2, 4], expected [2, 3] or 1 in place of any of them",
        ),
        (
            matmul_add(ones([2, 4]), ones([4, 2]), ones([1, 2]), SYMMETRIC),
            "matmul: `c` has shape [1, 2], expected [..., M, M] or [..., 1, 1], as a symmetric result needs",
        ),
    ] {
        assert_eq!(error.unwrap_err().to_string(), expected);
    }
    let cpu = kiln_ops::device::open("cpu").unwrap().device;
    let ones = Tensor::<2>::ones([2, 2], &cpu);
    let error = force(Implementation::Fused, || matmul(ones.clone(), ones.clone(), PLAIN));
    assert!(error.unwrap_err().to_string().starts_with("matmul: the fused kernel cannot run on"));
}
