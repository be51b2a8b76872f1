//! Products with one thin side: every width, side and storage order, ragged sizes, parts of K, stacks, what is
//! added, cut-out operands, gradients.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::matmul::oracle;
use kiln_ops::prelude::*;

const PLAIN: MatmulOptions = MatmulOptions {
    alpha: 1.0,
    beta: 1.0,
    dtype: None,
    precision: F32Precision::Highest,
    symmetric: false,
};
const WIDTHS: [usize; 11] = [1, 2, 3, 7, 8, 9, 16, 24, 33, 64, 80];
/// Which operands are stored transposed.
const ORDERS: [[bool; 2]; 4] = [[false, false], [false, true], [true, false], [true, true]];

/// Matrices `[batches, rows, cols]` of these numbers, stored transposed or not, and the numbers they hold.
fn stored(
    values: &[f64],
    [batches, rows, cols]: [usize; 3],
    transposed: bool,
    dtype: DType,
    device: &Device,
) -> (Tensor<3>, Vec<f64>) {
    let (plain, held) = tensor(values, [batches, rows, cols], dtype, device);
    if !transposed {
        return (plain, held);
    }
    let at = |z: usize, i: usize, j: usize| held[(z * rows + i) * cols + j];
    let across = |z| (0..cols).flat_map(move |j| (0..rows).map(move |i| at(z, i, j)));
    let transposed: Vec<f64> = (0..batches).flat_map(across).collect();
    (tensor(&transposed, [batches, cols, rows], dtype, device).0.swap_dims(1, 2), held)
}

/// The thin side is N, and M.
fn sides(large: usize, k: usize, thin: usize) -> [[usize; 3]; 2] {
    [[large, k, thin], [thin, k, large]]
}

#[test]
fn every_width_and_order() {
    for device in devices() {
        for dtype in dtypes(&device) {
            // Whole vectors, but no whole tiles and blocks; and nothing whole.
            for (large, k) in [(328, 520), (323, 333)] {
                // The tiles of several columns take a software driver seconds to compile.
                let some = |thin: &usize| k % 8 != 0 || [2, 8, 16, 80].contains(thin);
                for (i, thin) in WIDTHS.into_iter().filter(some).enumerate() {
                    for size @ [m, k, n] in sides(large, k, thin) {
                        let a = numbers(m * k, 1, 0.1);
                        let b = numbers(k * n, 2, 0.1);
                        // All orders of some, two of the others.
                        let every = [3, 24].contains(&thin);
                        let orders =
                            (0..4).filter(|order| every || [0, 3].contains(order) == (i % 2 == 0));
                        for transposed in orders.map(|order| ORDERS[order]) {
                            let what = format!("{size:?}, {transposed:?} on {device:?}");
                            let (a, a_held) = stored(&a, [1, m, k], transposed[0], dtype, &device);
                            let (b, b_held) = stored(&b, [1, k, n], transposed[1], dtype, &device);
                            let expected = oracle::forward(&a_held, &b_held, [1, m, k, n], 1.0);
                            poison(m * n, dtype, &device);
                            let y = values(&matmul(a.clone(), b.clone(), PLAIN).unwrap());
                            assert_near(&y, &expected, dtype, 1, &what);
                            let again = values(&matmul(a, b, PLAIN).unwrap());
                            assert!(y == again, "two runs differ: {what}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn long_sums_are_cut_into_parts_and_added_to() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (batches, large, k, thin) in
                [(1, 96, 8200, 5), (1, 106, 4100, 24), (3, 200, 2056, 3), (2, 170, 2051, 40)]
            {
                for size @ [m, k, n] in sides(large, k, thin) {
                    let what = format!("{batches}×{size:?} on {device:?}");
                    let (a, a_held) = stored(
                        &numbers(batches * m * k, 1, 0.1),
                        [batches, m, k],
                        false,
                        dtype,
                        &device,
                    );
                    let (b, b_held) = stored(
                        &numbers(batches * k * n, 2, 0.1),
                        [batches, k, n],
                        false,
                        dtype,
                        &device,
                    );
                    let product = oracle::forward(&a_held, &b_held, [batches, m, k, n], 0.5);
                    let options =
                        MatmulOptions { alpha: 0.5, beta: -2.0, dtype: Some(DType::F32), ..PLAIN };
                    for c_shape @ [rows, cols] in [[m, n], [1, n], [m, 1]] {
                        let c = numbers(rows * cols, 3, 0.1);
                        let (c, c_held) = tensor(&c, [1, rows, cols], dtype, &device);
                        let at = |i: usize, j: usize| i.min(rows - 1) * cols + j.min(cols - 1);
                        let expected: Vec<f64> = (0..batches * m * n)
                            .map(|i| product[i] - 2.0 * c_held[at(i / n % m, i % n)])
                            .collect();
                        let run = || {
                            poison(batches * m * n, DType::F32, &device);
                            let y = matmul_add(a.clone(), b.clone(), c.clone(), options);
                            values(&y.unwrap())
                        };
                        let y = run();
                        assert_near(&y, &expected, DType::F32, 1, &format!("{c_shape:?}, {what}"));
                        assert!(y == run(), "two runs differ: {what}");
                    }
                    // Added to what may be the result's memory.
                    let c = numbers(batches * m * n, 4, 0.1);
                    let (c, c_held) = tensor(&c, [batches, m, n], DType::F32, &device);
                    let expected: Vec<f64> =
                        product.iter().zip(&c_held).map(|(y, c)| y - 2.0 * c).collect();
                    let y = values(&matmul_add(a.clone(), b.clone(), c * 1.0, options).unwrap());
                    assert_near(&y, &expected, DType::F32, 1, &format!("added to, {what}"));
                }
            }
        }
    }
}

#[test]
fn tiles_for_a_whole_device() {
    // On Hopper more than 32 columns go through wgmma where there are tiles enough, transposed if M is thin.
    for device in devices() {
        let z = if kiln_ops::device::is_cuda(&device) { 20 } else { 2 };
        // Whole vectors; and nothing whole, whose lines are copied and whose results are padded.
        for (thin, large, k) in [(64, 328, 328), (40, 328, 320), (77, 333, 331)] {
            for dtype in dtypes(&device) {
                for [m, k, n] in sides(large, k, thin) {
                    whole_device([z, m, k, n], dtype, &device);
                }
            }
        }
    }
}

/// A stack of products in all storage orders, plain and added to in f32.
fn whole_device([z, m, k, n]: [usize; 4], dtype: DType, device: &Device) {
    let (a, b) = (numbers(z * m * k, 1, 0.1), numbers(z * k * n, 2, 0.1));
    let held = |values, sizes| stored(values, sizes, false, dtype, device).1;
    let (a_held, b_held) = (held(&a, [z, m, k]), held(&b, [z, k, n]));
    let product = oracle::forward(&a_held, &b_held, [z, m, k, n], 0.5);
    let plain = MatmulOptions { alpha: 0.5, ..PLAIN };
    for (i, transposed) in ORDERS.into_iter().enumerate() {
        let what = format!("{z}×{:?}, {transposed:?} on {device:?}", [m, k, n]);
        let a = stored(&a, [z, m, k], transposed[0], dtype, device).0;
        let b = stored(&b, [z, k, n], transposed[1], dtype, device).0;
        poison(z * m * n, dtype, device);
        let y = values(&matmul(a.clone(), b.clone(), plain).unwrap());
        assert_near(&y, &product, dtype, 1, &what);

        let c_shape @ [c_z, rows, cols] = [[1, 1, n], [1, m, 1], [z, m, n], [1, m, n]][i];
        let c = numbers(c_z * rows * cols, 3, 0.1);
        let (c, c_held) = tensor(&c, c_shape, DType::F32, device);
        let at = |i: usize| {
            let (z, row, col) = (i / (m * n), i / n % m, i % n);
            (z.min(c_z - 1) * rows + row.min(rows - 1)) * cols + col.min(cols - 1)
        };
        let beta = if i == 2 { 1.0 } else { -2.0 };
        let expected: Vec<f64> =
            (0..z * m * n).map(|i| product[i] + beta * c_held[at(i)]).collect();
        poison(z * m * n, DType::F32, device);
        let options = MatmulOptions { beta, dtype: Some(DType::F32), ..plain };
        let y = values(&matmul_add(a, b, c, options).unwrap());
        assert_near(&y, &expected, DType::F32, 1, &format!("{c_shape:?} added, {what}"));
    }
}

#[test]
fn stacks_broadcast() {
    let [k, large, z] = [264, 136, 3];
    for device in devices() {
        for dtype in dtypes(&device) {
            for thin in [4, 20] {
                for [m, k, n] in sides(large, k, thin) {
                    for [x, y] in [[z, z], [z, 1], [1, z]] {
                        let (a, a_held) =
                            stored(&numbers(x * m * k, 1, 0.1), [x, m, k], false, dtype, &device);
                        let (b, b_held) =
                            stored(&numbers(y * k * n, 2, 0.1), [y, k, n], true, dtype, &device);
                        let expected: Vec<f64> = (0..z)
                            .flat_map(|i| {
                                let one = &a_held[i.min(x - 1) * m * k..][..m * k];
                                let other = &b_held[i.min(y - 1) * k * n..][..k * n];
                                oracle::forward(one, other, [1, m, k, n], 1.0)
                            })
                            .collect();
                        let found = values(&matmul(a, b, PLAIN).unwrap());
                        let what = format!("{x} and {y} of {m}×{k}×{n} on {device:?}");
                        assert_near(&found, &expected, dtype, 1, &what);
                    }
                }
            }
        }
    }
}

/// Cut out of wider tensors, at places where Burn keeps a view and where it may not.
#[test]
fn cut_out_operands() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for side in [512 / dtype.size(), 3] {
                let wide = |t: Tensor<3>| {
                    let [z, rows, cols] = t.dims();
                    let edge = Tensor::full([z, rows, side], f32::NAN, (&device, dtype));
                    let wide = Tensor::cat(vec![edge.clone(), t, edge], 2);
                    wide.slice([0..z, 0..rows, side..side + cols])
                };
                for thin in [6, 24] {
                    for [m, k, n] in sides(256, 512, thin) {
                        let (a, a_held) =
                            tensor(&numbers(m * k, 1, 0.1), [1, m, k], dtype, &device);
                        let (b, b_held) =
                            tensor(&numbers(k * n, 2, 0.1), [1, k, n], dtype, &device);
                        let expected = oracle::forward(&a_held, &b_held, [1, m, k, n], 1.0);
                        let transpose = |t: Tensor<3>| t.swap_dims(1, 2);
                        for (name, a, b) in [
                            ("cut", wide(a.clone()), wide(b.clone())),
                            (
                                "cut transposed",
                                transpose(wide(transpose(a.clone()))),
                                transpose(wide(transpose(b.clone()))),
                            ),
                        ] {
                            let y = values(&matmul(a, b, PLAIN).unwrap());
                            let what = format!("{name} at {side}, {m}×{k}×{n} on {device:?}");
                            assert_near(&y, &expected, dtype, 1, &what);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn gradients_of_a_thin_weight() {
    let [m, k] = [520, 264];
    for device in devices() {
        for dtype in dtypes(&device) {
            for n in [3, 24] {
                let (x, x_held) = tensor(&numbers(m * k, 1, 0.1), [m, k], dtype, &device);
                let (w, w_held) = tensor(&numbers(k * n, 2, 0.1), [k, n], dtype, &device);
                let (dy, dy_held) = tensor(&numbers(m * n, 3, 0.1), [m, n], dtype, &device);
                let [x, w] = [x, w].map(|t| t.autodiff().require_grad());
                let y = matmul(x.clone(), w.clone(), PLAIN).unwrap();
                let grads = pull(y, &dy.autodiff()).backward();
                let (dx, dw) = oracle::backward(&x_held, &w_held, [1, m, k, n], 1.0, &dy_held);
                let what = format!("{n} columns on {device:?}");
                assert_near(
                    &values(&x.grad(&grads).unwrap()),
                    &dx,
                    dtype,
                    1,
                    &format!("dx, {what}"),
                );
                assert_near(
                    &values(&w.grad(&grads).unwrap()),
                    &dw,
                    dtype,
                    1,
                    &format!("dw, {what}"),
                );
            }
        }
    }
}

/// Few columns are multiplied exactly; many as sums of bf16 where there are tensor cores.
#[test]
fn high_precision() {
    let options = MatmulOptions { precision: F32Precision::High, ..PLAIN };
    for device in devices() {
        for thin in [5, 24] {
            for [m, k, n] in sides(264, 520, thin) {
                let (a, a_held) = tensor(&numbers(m * k, 1, 0.1), [m, k], DType::F32, &device);
                let (b, b_held) = tensor(&numbers(k * n, 2, 0.1), [k, n], DType::F32, &device);
                let expected = oracle::forward(&a_held, &b_held, [1, m, k, n], 1.0);
                let y = values(&matmul(a, b, options).unwrap());
                let off: f64 = y.iter().zip(&expected).map(|(a, b)| (a - b).powi(2)).sum();
                let all: f64 = expected.iter().map(|v| v * v).sum();
                let error = (off / all).sqrt();
                assert!(error < 2f64.powi(-16), "{error:e}, {m}×{k}×{n} on {device:?}");
            }
        }
    }
}
