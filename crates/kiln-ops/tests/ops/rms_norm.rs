//! rms_norm on every device: values and gradients against float64, layouts, autodiff, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::device;
use kiln_ops::policy::{self, Implementation};
use kiln_ops::prelude::*;
use kiln_ops::rms_norm::oracle;

const EPS: f64 = 1e-5;

/// With one column dx is only what eps leaves of it: a large one keeps that from cancelling.
fn eps(width: usize) -> f64 {
    if width == 1 { 0.5 } else { EPS }
}

/// Widths: one element, primes, odd, ragged tails, rows that CUDA pitches, more than one vector a
/// unit, rows too wide for registers.
const SHAPES: &[[usize; 2]] = &[
    [1, 1],
    [5, 1],
    [3, 2],
    [7, 3],
    [1, 17],
    [33, 31],
    [4, 64],
    [129, 80],
    [2, 96],
    [9, 127],
    [5, 257],
    [3, 768],
    [2, 1000],
    [6, 1024],
    [2, 4099],
    [1, 8192],
    [3, 12_288],
];

/// Columns on either side of rows that are cut out of wider ones: none; as many as Burn keeps a view of
/// in every element type, on CUDA and on wgpu; an odd number, where it copies.
const CUTS: [usize; 3] = [0, VIEWED, 3];
const VIEWED: usize = 256;

struct Case {
    x: Vec<f64>,
    weight: Vec<f64>,
    dy: Vec<f64>,
    y: Vec<f64>,
    dx: Vec<f64>,
    dw: Vec<f64>,
}

/// Forward and backward of a fresh case; x is cut out of a tensor with `cut` more columns on either side.
fn run(shape: [usize; 2], dtype: DType, seed: u64, cut: usize, device: &Device) -> Case {
    let ([rows, width], pad) = (shape, 2 * cut);
    let (x_leaf, x_held) =
        tensor(&numbers(rows * (width + pad), seed, 0.3), [rows, width + pad], dtype, device);
    let (weight, weight_held) = tensor(&numbers(width, seed + 1, 1.0), [width], dtype, device);
    let (dy, dy_held) = tensor(&numbers(rows * width, seed + 2, 0.1), shape, dtype, device);
    let inner = |held: &[f64]| -> Vec<f64> {
        held.chunks(width + pad).flat_map(|row| row[cut..cut + width].to_vec()).collect()
    };
    let x_leaf = x_leaf.autodiff().require_grad();
    let weight = weight.autodiff().require_grad();
    let x = x_leaf.clone().narrow(1, cut, width);
    let y = rms_norm(x, weight.clone(), eps(width)).unwrap();
    let grads = pull(y.clone(), &dy.autodiff()).backward();
    Case {
        x: inner(&x_held),
        dx: inner(&values(&x_leaf.grad(&grads).unwrap())),
        dw: values(&weight.grad(&grads).unwrap()),
        y: values(&y),
        weight: weight_held,
        dy: dy_held,
    }
}

fn check(case: &Case, dtype: DType, what: &str) {
    let eps = eps(case.weight.len());
    let y = oracle::forward(&case.x, &case.weight, eps);
    let (dx, dw) = oracle::backward(&case.x, &case.weight, eps, &case.dy);
    assert_near(&case.y, &y, dtype, 1, &format!("y of {what}"));
    assert_near(&case.dx, &dx, dtype, 1, &format!("dx of {what}"));
    assert_near(&case.dw, &dw, dtype, 1, &format!("dweight of {what}"));
}

#[test]
fn matches_float64() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (i, shape) in SHAPES.iter().enumerate() {
                for cut in CUTS {
                    poison(shape[0] * shape[1], dtype, &device);
                    let case = run(*shape, dtype, 10 * i as u64, cut, &device);
                    check(&case, dtype, &format!("{shape:?}, cut {cut}, {device:?}"));
                }
            }
        }
    }
}

/// Distance of the rows that an operator is handed, on devices with kernels.
mod probe {
    use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
    use burn::tensor::Tensor;
    use burn_cubecl::CubeBackend;
    use std::sync::atomic::{AtomicUsize, Ordering};

    static SEEN: AtomicUsize = AtomicUsize::new(0);

    #[backend_extension(Cube, Fusion)]
    pub trait ProbeOps: Backend {
        #[fusion(dtype = x, shape = x)]
        fn probe(x: FloatTensor<Self>) -> FloatTensor<Self>;
    }

    impl ProbeOps for CubeBackend {
        fn probe(x: FloatTensor<Self>) -> FloatTensor<Self> {
            SEEN.store(x.meta.strides()[0], Ordering::SeqCst);
            x
        }
    }

    pub fn stride(x: Tensor<2>) -> usize {
        let x = <Dispatch as ProbeOps>::probe(x.into_dispatch());
        let _ = Tensor::<2>::from_dispatch(x).into_data(); // it has run
        SEEN.load(Ordering::SeqCst)
    }
}

#[test]
fn a_kernel_sees_the_distance_of_rows_that_are_cut() {
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            for width in [7, 48] {
                let wide = [5, width + 2 * VIEWED];
                let (x, _) = tensor(&numbers(wide[0] * wide[1], 1, 0.0), wide, dtype, &device);
                let seen = probe::stride(x.narrow(1, VIEWED, width));
                assert!(seen >= wide[1], "{dtype:?}, {width}: {seen}, it was copied");
            }
        }
    }
}

#[test]
fn kernel_and_reference_agree_in_both_orders() {
    for device in kernel_devices() {
        for (first, second) in [
            (Implementation::Fused, Implementation::Reference),
            (Implementation::Reference, Implementation::Fused),
        ] {
            for (seed, implementation) in [(1, first), (2, second), (3, first)] {
                let case =
                    policy::force(implementation, || run([37, 515], DType::F32, seed, 0, &device));
                check(&case, DType::F32, &format!("{implementation} of order {first}, {second}"));
            }
        }
    }
}

#[test]
fn repeats_bit_for_bit() {
    for device in kernel_devices() {
        let once = run([301, 768], DType::F32, 5, 0, &device);
        let again = run([301, 768], DType::F32, 5, 0, &device);
        assert!(once.y == again.y && once.dx == again.dx && once.dw == again.dw, "{device:?}");
    }
}

#[test]
fn every_rank_and_stride() {
    for device in devices() {
        let (x, held) =
            tensor(&numbers(2 * 3 * 4 * 16, 1, 0.0), [2, 3, 4, 16], DType::F32, &device);
        let (weight, w) = tensor(&numbers(16, 2, 1.0), [16], DType::F32, &device);
        let expected = oracle::forward(&held, &w, EPS);
        let y = rms_norm(x.clone(), weight.clone(), EPS).unwrap();
        assert_near(&values(&y), &expected, DType::F32, 1, "rank 4");
        let y = rms_norm(x.clone().swap_dims(1, 2), weight.clone(), EPS).unwrap().swap_dims(1, 2);
        assert_near(&values(&y), &expected, DType::F32, 1, "swapped leading dimensions");
        let y = rms_norm(x.clone().swap_dims(2, 3).swap_dims(2, 3), weight.clone(), EPS).unwrap();
        assert_near(&values(&y), &expected, DType::F32, 1, "swapped twice");
        let row = x.clone().slice([0..1, 0..1, 0..1, 0..16]).reshape([16]);
        let y = rms_norm(row, weight.clone(), EPS).unwrap();
        assert_near(&values(&y), &expected[..16], DType::F32, 1, "rank 1");
        let (t, th) = tensor(&numbers(16 * 5, 3, 0.5), [16, 5], DType::F32, &device);
        let transposed: Vec<f64> = (0..80).map(|i| th[(i % 16) * 5 + i / 16]).collect();
        let y = rms_norm(t.transpose(), weight.clone(), EPS).unwrap();
        assert_near(
            &values(&y),
            &oracle::forward(&transposed, &w, EPS),
            DType::F32,
            1,
            "transposed",
        );
        let none = Tensor::<2>::zeros([0, 16], &device);
        assert_eq!(rms_norm(none, weight, EPS).unwrap().dims(), [0, 16]);
    }
}

#[test]
fn an_f32_weight_scales_a_half_input() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let (x, x_held) = tensor(&numbers(6 * 40, 1, 0.2), [6, 40], dtype, &device);
            let (w, w_held) = tensor(&numbers(40, 2, 1.0), [40], DType::F32, &device);
            let (dy, dy_held) = tensor(&numbers(6 * 40, 3, 0.0), [6, 40], dtype, &device);
            let (x, w) = (x.autodiff().require_grad(), w.autodiff().require_grad());
            let y = rms_norm(x.clone(), w.clone(), EPS).unwrap();
            assert_eq!(y.dtype(), dtype);
            let grads = pull(y, &dy.autodiff()).backward();
            let (dx, dw) = oracle::backward(&x_held, &w_held, EPS, &dy_held);
            assert_near(&values(&x.grad(&grads).unwrap()), &dx, dtype, 1, "dx");
            let dw_found = w.grad(&grads).unwrap();
            assert_eq!(dw_found.dtype(), DType::F32);
            assert_near(&values(&dw_found), &dw, DType::F32, 1, "dweight");
        }
    }
}

/// One gradient, none, frozen parts, gradient checkpointing, surroundings that Burn fuses.
#[test]
fn autodiff_in_every_setting() {
    for device in devices() {
        let (x, x_held) = tensor(&numbers(5 * 48, 1, 0.2), [5, 48], DType::F32, &device);
        let (w, w_held) = tensor(&numbers(48, 2, 1.0), [48], DType::F32, &device);
        let (dy, dy_held) = tensor(&numbers(5 * 48, 3, 0.0), [5, 48], DType::F32, &device);
        let y = oracle::forward(&x_held, &w_held, EPS);
        let (dx, dw) = oracle::backward(&x_held, &w_held, EPS, &dy_held);
        let near = |found: Option<Tensor<2>>, what: &str| {
            assert_near(&values(&found.unwrap()), &dx, DType::F32, 1, what);
        };

        let leaf = x.clone().autodiff().require_grad();
        let out = rms_norm(leaf.clone(), w.clone().autodiff(), EPS).unwrap();
        let grads = pull(out, &dy.clone().autodiff()).backward();
        near(leaf.grad(&grads), "only x");

        let leaf = w.clone().autodiff().require_grad();
        let out = rms_norm(x.clone().autodiff(), leaf.clone(), EPS).unwrap();
        let grads = pull(out, &dy.clone().autodiff()).backward();
        assert_near(&values(&leaf.grad(&grads).unwrap()), &dw, DType::F32, 1, "only weight");

        let out = rms_norm(x.clone().autodiff(), w.clone().autodiff(), EPS).unwrap();
        assert!(!out.is_tracked());
        assert_near(&values(&out), &y, DType::F32, 1, "tracked by nobody");

        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        let leaf = Tensor::<2>::from_data(x.to_data(), &checkpointing).require_grad();
        let weight = Tensor::<1>::from_data(w.to_data(), &checkpointing).require_grad();
        let dy = Tensor::<2>::from_data(dy.to_data(), &checkpointing);
        let doubled = leaf.clone().mul_scalar(2.0).exp().log().mul_scalar(0.5);
        let out = rms_norm(doubled, weight, EPS).unwrap().mul_scalar(1.0);
        let grads = pull(out, &dy).backward();
        let found = values(&leaf.grad(&grads).unwrap());
        let error = kiln_ops::oracle::distance(&found, &dx).relative;
        assert!(error < 1e-4, "checkpointing between fused elementwise operations: {error}");
    }
}

#[test]
fn wrong_calls_are_named() {
    let device = devices().remove(0);
    let x = Tensor::<2>::ones([2, 4], &device);
    let weight = |n: usize| Tensor::<1>::ones([n], &device);
    let message = |r: Result<Tensor<2>, OpError>| r.unwrap_err().to_string();
    assert_eq!(
        message(rms_norm(x.clone(), weight(5), EPS)),
        "rms_norm: `weight` has shape [5], expected [4]"
    );
    assert_eq!(
        message(rms_norm(Tensor::<2>::ones([2, 0], &device), weight(0), EPS)),
        "rms_norm: `x` has shape [2, 0], expected [..., D] with D at least 1"
    );
    assert_eq!(
        message(rms_norm(x.clone(), weight(4), -1.0)),
        "rms_norm: eps = -1, expected a number of at least 0"
    );
    assert!(message(rms_norm(x.clone(), weight(4), f64::NAN)).contains("eps = NaN"));
    if !device::is_cube(&device) {
        let refused = policy::force(Implementation::Fused, || rms_norm(x, weight(4), EPS));
        assert!(message(refused).starts_with("rms_norm: the fused kernel cannot run on cpu"));
    }
}
