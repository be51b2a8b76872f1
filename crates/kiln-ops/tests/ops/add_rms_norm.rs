//! add_rms_norm on every device: values and gradients against float64, unused outputs, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::add_rms_norm::oracle;
use kiln_ops::prelude::*;

const EPS: f64 = 1e-5;

/// Which outputs the loss depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Used {
    Both,
    Sum,
    Norm,
}

fn check(shape: [usize; 2], dtype: DType, used: Used, device: &Device) {
    let n = shape[0] * shape[1];
    let (x, x_held) = tensor(&numbers(n, 1, 0.3), shape, dtype, device);
    let (r, r_held) = tensor(&numbers(n, 2, -0.1), shape, dtype, device);
    let (w, w_held) = tensor(&numbers(shape[1], 3, 1.0), [shape[1]], dtype, device);
    let (dsum, mut dsum_held) = tensor(&numbers(n, 4, 0.1), shape, dtype, device);
    let (dy, mut dy_held) = tensor(&numbers(n, 5, 0.2), shape, dtype, device);
    let [x, r] = [x, r].map(|t| t.autodiff().require_grad());
    let w = w.autodiff().require_grad();
    poison(n, dtype, device);
    let (sum, y) = add_rms_norm(x.clone(), r.clone(), w.clone(), EPS).unwrap();
    let (expected_sum, expected_y) = oracle::forward(&x_held, &r_held, &w_held, EPS);
    let what = format!("{shape:?}, {used:?}, {device:?}");
    assert_near(&values(&sum), &expected_sum, dtype, 1, &format!("sum of {what}"));
    assert_near(&values(&y), &expected_y, dtype, 2, &format!("y of {what}"));

    let (a, b) = (pull(sum, &dsum.autodiff()), pull(y, &dy.autodiff()));
    let grads = match used {
        Used::Both => (a + b).backward(),
        Used::Sum => a.backward(),
        Used::Norm => b.backward(),
    };
    if used == Used::Norm {
        dsum_held.fill(0.0);
    }
    if used == Used::Sum {
        dy_held.fill(0.0);
    }
    let (dx, dw) = oracle::backward(&x_held, &r_held, &w_held, EPS, &dsum_held, &dy_held);
    assert_near(&values(&x.grad(&grads).unwrap()), &dx, dtype, 2, &format!("dx of {what}"));
    assert_near(&values(&r.grad(&grads).unwrap()), &dx, dtype, 2, &format!("dresidual of {what}"));
    match w.grad(&grads) {
        Some(found) => assert_near(&values(&found), &dw, dtype, 2, &format!("dweight of {what}")),
        None => assert!(used == Used::Sum, "no dweight of {what}"),
    }
}

#[test]
fn matches_float64_whichever_outputs_are_used() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for shape in [[1, 16], [5, 31], [33, 80], [7, 768], [2, 4099]] {
                for used in [Used::Both, Used::Sum, Used::Norm] {
                    check(shape, dtype, used, &device);
                }
            }
        }
    }
}

#[test]
fn frozen_parts_and_untracked_calls() {
    for device in devices() {
        let (x, x_held) = tensor(&numbers(4 * 24, 1, 0.3), [4, 24], DType::F32, &device);
        let (r, r_held) = tensor(&numbers(4 * 24, 2, 0.3), [4, 24], DType::F32, &device);
        let (w, w_held) = tensor(&numbers(24, 3, 1.0), [24], DType::F32, &device);
        let (dy, dy_held) = tensor(&numbers(4 * 24, 4, 0.0), [4, 24], DType::F32, &device);
        let zeros = vec![0.0; 4 * 24];
        let (dx, dw) = oracle::backward(&x_held, &r_held, &w_held, EPS, &zeros, &dy_held);

        let leaf = x.clone().autodiff().require_grad();
        let (_, y) =
            add_rms_norm(leaf.clone(), r.clone().autodiff(), w.clone().autodiff(), EPS).unwrap();
        let grads = pull(y, &dy.clone().autodiff()).backward();
        assert_near(&values(&leaf.grad(&grads).unwrap()), &dx, DType::F32, 2, "only x");

        let leaf = w.clone().autodiff().require_grad();
        let (_, y) =
            add_rms_norm(x.clone().autodiff(), r.clone().autodiff(), leaf.clone(), EPS).unwrap();
        let grads = pull(y, &dy.clone().autodiff()).backward();
        assert_near(&values(&leaf.grad(&grads).unwrap()), &dw, DType::F32, 2, "only weight");

        // With a cotangent of the sum too, of a weight that is frozen.
        let (dsum, dsum_held) = tensor(&numbers(4 * 24, 5, 0.0), [4, 24], DType::F32, &device);
        let (dx, _) = oracle::backward(&x_held, &r_held, &w_held, EPS, &dsum_held, &dy_held);
        let leaf = x.clone().autodiff().require_grad();
        let (sum, y) =
            add_rms_norm(leaf.clone(), r.clone().autodiff(), w.clone().autodiff(), EPS).unwrap();
        let grads = (pull(sum, &dsum.autodiff()) + pull(y, &dy.autodiff())).backward();
        assert_near(&values(&leaf.grad(&grads).unwrap()), &dx, DType::F32, 2, "both, only x");

        let (sum, y) = add_rms_norm(x.autodiff(), r.autodiff(), w.autodiff(), EPS).unwrap();
        assert!(!sum.is_tracked() && !y.is_tracked());
    }
}

#[test]
fn wrong_calls_are_named() {
    let device = devices().remove(0);
    let ones = |shape: [usize; 2]| Tensor::<2>::ones(shape, &device);
    let weight = Tensor::<1>::ones([4], &device);
    let error = add_rms_norm(ones([2, 4]), ones([3, 4]), weight.clone(), EPS).unwrap_err();
    assert_eq!(error.to_string(), "add_rms_norm: `residual` has shape [3, 4], expected [2, 4]");
    let half = ones([2, 4]).cast(DType::F16);
    let error = add_rms_norm(ones([2, 4]), half, weight, EPS).unwrap_err();
    assert_eq!(error.to_string(), "add_rms_norm: `residual` is F16, expected F32");
}
