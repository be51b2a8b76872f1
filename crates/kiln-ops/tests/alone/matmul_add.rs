//! matmul_add where C is as the operands are, on every device: in several tiles and beyond their ends, by one cube and by
//! many.

use crate::common::families::families;
use crate::common::*;
use burn::tensor::DType;
use kiln_ops::launch::limits;
use kiln_ops::matmul::oracle;
use kiln_ops::prelude::*;
use kiln_ops::tile;

#[test]
fn what_is_added_comes_as_operands_do() {
    let _alone = crate::alone();
    for device in devices() {
        for dtype in dtypes(&device) {
            // Blocks of K and two of C go round a ring of 4 or 6.
            for [batches, m, k, n] in [
                [1, 140, 100, 72],
                [3, 140, 72, 264],
                [2, 200, 40, 200],
                [1, 72, 264, 1032],
                [5, 260, 136, 136],
                [3, 130, 200, 320],
            ] {
                let numbers = |count, seed| numbers(count, seed, 0.1);
                let (a, a_held) =
                    tensor(&numbers(batches * m * k, 1), [batches, m, k], dtype, &device);
                let (b, b_held) =
                    tensor(&numbers(batches * k * n, 2), [batches, k, n], dtype, &device);
                let (c, c_held) =
                    tensor(&numbers(batches * m * n, 3), [batches, m, n], dtype, &device);
                let mut expected = oracle::forward(&a_held, &b_held, [batches, m, k, n], 0.5);
                expected.iter_mut().zip(&c_held).for_each(|(y, c)| *y -= 2.0 * c);
                for result in [dtype, DType::F32] {
                    let options = MatmulOptions {
                        alpha: 0.5,
                        beta: -2.0,
                        dtype: Some(result),
                        ..MatmulOptions::default()
                    };
                    let make = || {
                        poison(batches * m * n, result, &device);
                        let y = matmul_add(a.clone(), b.clone(), c.clone(), options);
                        values(&y.unwrap())
                    };
                    let what = format!("{batches}×{m}×{k}×{n} {result:?} of {device:?}");
                    assert_near(&make(), &expected, result, 1, &what);
                    let leaf = c.clone().autodiff().require_grad();
                    let y = matmul_add(
                        a.clone().autodiff(),
                        b.clone().autodiff(),
                        leaf.clone(),
                        options,
                    );
                    let y = y.unwrap();
                    let ones = y.ones_like();
                    let dc = values(&leaf.grad(&pull(y, &ones).backward()).unwrap());
                    assert!(dc.iter().all(|dc| *dc == -2.0), "{what}");
                    for family in families(&device, dtype) {
                        // One cube makes tile after tile, or as many as there are.
                        for multiprocessors in [Some(1), None] {
                            let limits = limits::Limits { multiprocessors, ..Default::default() };
                            let y = limits::limited(limits, || tile::force(family, make));
                            let what = format!("{multiprocessors:?}, {family}, {what}");
                            assert_near(&y, &expected, result, 1, &what);
                        }
                    }
                }
            }
        }
    }
}
