//! cross_entropy on every device: values and gradients against float64, layouts, autodiff, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Int, IntDType, Tensor, TensorData};
use kiln_ops::cross_entropy::oracle;
use kiln_ops::device;
use kiln_ops::policy::{self, Implementation};
use kiln_ops::prelude::*;

/// One class, primes, ragged tails, rows that CUDA pitches, several groups of vectors, the odd
/// vocabulary of GPT-2.
const SHAPES: &[[usize; 2]] = &[
    [1, 1],
    [5, 2],
    [13, 7],
    [33, 31],
    [4, 64],
    [129, 80],
    [5, 257],
    [7, 1000],
    [3, 4099],
    [2, 8192],
    [2, 50_257],
];

const PLAIN: CrossEntropyOptions = CrossEntropyOptions {
    ignore_index: -100,
    check_targets: true,
    label_smoothing: 0.0,
    z_loss: 0.0,
};

/// Every option, alone and together.
const OPTIONS: [CrossEntropyOptions; 4] = [
    PLAIN,
    CrossEntropyOptions { label_smoothing: 0.1, ..PLAIN },
    CrossEntropyOptions { z_loss: 0.01, ignore_index: -1, ..PLAIN },
    CrossEntropyOptions { label_smoothing: 0.3, z_loss: 0.002, check_targets: false, ..PLAIN },
];

/// Columns on either side of rows that are cut from wider ones: Burn cuts such without a copy.
const PAD: usize = 256;

struct Case {
    logits: Vec<f64>,
    targets: Vec<i64>,
    loss: f64,
    gradient: Vec<f64>,
}

fn int(targets: &[i64], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::from(targets), device)
}

/// Classes, every fifth row ignored.
fn targets([rows, classes]: [usize; 2], ignore_index: i64) -> Vec<i64> {
    let class = |row: usize| if row % 5 == 3 { ignore_index } else { (row * 37 % classes) as i64 };
    (0..rows).map(class).collect()
}

/// The cotangent of the loss: as large as the rows are many, or f16 gradients would be subnormal.
fn dloss(rows: usize) -> f64 {
    0.75 * rows as f64
}

/// Forward and backward of a fresh case; `wide` cuts the logits from wider rows.
fn run(
    [rows, classes]: [usize; 2],
    options: CrossEntropyOptions,
    dtype: DType,
    seed: u64,
    wide: bool,
    device: &Device,
) -> Case {
    let pad = if wide { PAD } else { 0 };
    let width = classes + 2 * pad;
    let (leaf, held) = tensor(&numbers(rows * width, seed, 0.5), [rows, width], dtype, device);
    let cut = |held: &[f64]| -> Vec<f64> {
        held.chunks(width).flat_map(|row| row[pad..pad + classes].to_vec()).collect()
    };
    let targets = targets([rows, classes], options.ignore_index);
    let leaf = leaf.autodiff().require_grad();
    let logits = leaf.clone().narrow(1, pad, classes);
    let loss = cross_entropy(logits, int(&targets, device), options).unwrap();
    assert_eq!(loss.dtype(), DType::F32);
    let (dy, _) = tensor(&[dloss(rows)], [1], DType::F32, device);
    let grads = pull(loss.clone(), &dy.autodiff()).backward();
    Case {
        logits: cut(&held),
        targets,
        loss: values(&loss)[0],
        gradient: cut(&values(&leaf.grad(&grads).unwrap())),
    }
}

fn check(case: &Case, options: &CrossEntropyOptions, dtype: DType, what: &str) {
    let rows = case.targets.len();
    let classes = case.logits.len() / rows;
    let loss = oracle::forward(&case.logits, &case.targets, classes, options);
    let gradient = oracle::backward(&case.logits, &case.targets, classes, options, dloss(rows));
    // One class has a loss of 0 but for the z-loss, which sums and differences reach only nearly.
    if classes == 1 {
        assert!((case.loss - loss).abs() < 1e-6, "loss of {what}: {} and {loss}", case.loss);
    } else {
        assert_near(&[case.loss], &[loss], DType::F32, 1, &format!("loss of {what}"));
    }
    if classes == 1 {
        let error = case.gradient.iter().zip(&gradient).map(|(a, b)| (a - b).abs());
        assert!(error.fold(0.0, f64::max) < 1e-3, "gradient of {what}");
    } else {
        assert_near(&case.gradient, &gradient, dtype, 1, &format!("gradient of {what}"));
    }
    let ignored = case.targets.iter().map(|t| *t == options.ignore_index);
    for (row, ignored) in case.gradient.chunks(classes).zip(ignored) {
        assert!(!ignored || row.iter().all(|d| *d == 0.0), "an ignored row of {what}");
    }
}

#[test]
fn matches_float64() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (i, shape) in SHAPES.iter().enumerate() {
                for (options, wide) in OPTIONS.iter().zip([false, true, true, false]) {
                    poison(shape[0] * shape[1], dtype, &device);
                    let case = run(*shape, *options, dtype, 10 * i as u64, wide, &device);
                    let what = format!("{shape:?}, {options:?}, wide {wide}, {device:?}");
                    check(&case, options, dtype, &what);
                }
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
                let case = policy::force(implementation, || {
                    run([37, 515], OPTIONS[3], DType::F32, seed, false, &device)
                });
                let what = format!("{implementation} of order {first}, {second}");
                check(&case, &OPTIONS[3], DType::F32, &what);
            }
        }
    }
}

#[test]
fn repeats_bit_for_bit() {
    for device in kernel_devices() {
        let once = run([301, 768], PLAIN, DType::F32, 5, false, &device);
        let again = run([301, 768], PLAIN, DType::F32, 5, false, &device);
        assert!(once.loss == again.loss && once.gradient == again.gradient, "{device:?}");
    }
}

/// Loss and gradient of logits that are given.
fn of(logits: &[f64], shape: [usize; 2], targets: Tensor<1, Int>) -> (f64, Vec<f64>) {
    let device = targets.device();
    let leaf = tensor(logits, shape, DType::F32, &device).0.autodiff().require_grad();
    let loss = cross_entropy(leaf.clone(), targets, PLAIN).unwrap();
    let grads = loss.clone().backward();
    (values(&loss)[0], values(&leaf.grad(&grads).unwrap()))
}

#[test]
fn logits_far_from_zero() {
    let near = numbers(3 * 50, 1, 0.0);
    for device in devices() {
        let targets = [3i64, 49, 0];
        let expected = oracle::backward(&near, &targets, 50, &PLAIN, 1.0);
        for offset in [-900.0, 0.0, 900.0] {
            // Multiples of 2⁻¹², so that the offset takes no bits from them.
            let far: Vec<f64> =
                near.iter().map(|x| (x * 4096.0).round() / 4096.0 + offset).collect();
            let (loss, gradient) = of(&far, [3, 50], int(&targets, &device));
            let exact = oracle::forward(&far, &targets, 50, &PLAIN);
            assert!((loss - exact).abs() < 1e-5, "{loss}, {exact} at {offset}, {device:?}");
            let error = kiln_ops::oracle::distance(&gradient, &expected).relative;
            assert!(error < 3e-4, "{error} at {offset}, {device:?}");
        }
        // A class that is masked out.
        let mut masked = near.clone();
        masked[7] = f64::NEG_INFINITY;
        let (loss, gradient) = of(&masked, [3, 50], int(&targets, &device));
        assert_near(
            &[loss],
            &[oracle::forward(&masked, &targets, 50, &PLAIN)],
            DType::F32,
            1,
            "masked loss",
        );
        assert_eq!(gradient[7], 0.0);
        assert_near(
            &gradient,
            &oracle::backward(&masked, &targets, 50, &PLAIN, 1.0),
            DType::F32,
            1,
            "masked gradient",
        );
    }
}

#[test]
fn ignored_rows_are_not_looked_at() {
    for device in devices() {
        let mut logits = numbers(4 * 33, 1, 0.0);
        let kept = logits[33..66].to_vec();
        for (i, bad) in [(0, f64::NAN), (70, f64::INFINITY), (100, f64::NEG_INFINITY)] {
            logits[i] = bad;
        }
        let (loss, gradient) = of(&logits, [4, 33], int(&[-100, 5, -100, -100], &device));
        assert_near(&[loss], &[oracle::forward(&kept, &[5], 33, &PLAIN)], DType::F32, 1, "loss");
        let expected = oracle::backward(&kept, &[5], 33, &PLAIN, 1.0);
        assert_near(&gradient[33..66], &expected, DType::F32, 1, "gradient");
        let rest = gradient[..33].iter().chain(&gradient[66..]);
        assert!(rest.clone().all(|d| *d == 0.0), "{device:?}");
        let (loss, gradient) = of(&logits, [4, 33], int(&[-100; 4], &device));
        assert!(loss == 0.0 && gradient.iter().all(|d| *d == 0.0), "all ignored, {device:?}");
    }
}

#[test]
fn targets_of_every_type_and_stride() {
    let logits = numbers(6 * 40, 1, 0.3);
    let classes = [5i64, 39, -100, 0, 17, 22];
    let expected = oracle::forward(&logits, &classes, 40, &PLAIN);
    let near = |targets: Tensor<1, Int>, what: &str| {
        assert_near(&[of(&logits, [6, 40], targets).0], &[expected], DType::F32, 1, what);
    };
    for of in [IntDType::I32, IntDType::I64] {
        for device in those_with(DType::from(of)) {
            near(int(&classes, &device).cast(of), &format!("{of:?}, {device:?}"));
        }
    }
    for device in devices() {
        let doubled: Vec<i64> = classes.iter().flat_map(|t| [*t, 7]).collect();
        let column = int(&doubled, &device).reshape([6, 2]).slice([0..6, 0..1]).flatten(0, 1);
        near(column, "a column");
    }
}

/// No gradient, gradient checkpointing, surroundings that Burn fuses.
#[test]
fn autodiff_in_every_setting() {
    for device in devices() {
        let (logits, held) = tensor(&numbers(5 * 48, 1, 0.2), [5, 48], DType::F32, &device);
        let classes = targets([5, 48], -100);
        let loss = oracle::forward(&held, &classes, 48, &PLAIN);
        let gradient = oracle::backward(&held, &classes, 48, &PLAIN, 1.0);

        for logits in [logits.clone(), logits.clone().autodiff()] {
            let out = cross_entropy(logits, int(&classes, &device), PLAIN).unwrap();
            assert!(!out.is_tracked());
            assert_near(&values(&out), &[loss], DType::F32, 1, "tracked by nobody");
        }

        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        let leaf = Tensor::<2>::from_data(logits.to_data(), &checkpointing).require_grad();
        let doubled = leaf.clone().mul_scalar(2.0).exp().log().mul_scalar(0.5);
        let targets = int(&classes, &checkpointing);
        let out = cross_entropy(doubled, targets, PLAIN).unwrap().mul_scalar(1.0);
        let grads = out.backward();
        let found = values(&leaf.grad(&grads).unwrap());
        let error = kiln_ops::oracle::distance(&found, &gradient).relative;
        assert!(error < 1e-4, "checkpointing between fused elementwise operations: {error}");
    }
}

/// A class that −∞ masks out costs nothing without smoothing, unless it is the target; spread over it the loss is ∞. WGSL has
/// no rule for infinities.
#[test]
fn classes_that_are_masked_out() {
    let wgsl = |device: &Device| device::is_cube(device) && !device::is_cuda(device);
    let defined = devices().into_iter().filter(|device| !wgsl(device));
    for device in kiln_test::or_skip("cuda", defined) {
        for (masked, label_smoothing, infinite) in
            [(1, 0.0, false), (2, 0.0, true), (1, 0.1, true), (2, 0.1, true)]
        {
            let mut logits = numbers(13, 3, 0.1);
            logits[masked] = f64::NEG_INFINITY;
            let (logits, held) = tensor(&logits, [1, 13], DType::F32, &device);
            let options = CrossEntropyOptions { label_smoothing, ..PLAIN };
            let loss = values(&cross_entropy(logits, int(&[2], &device), options).unwrap())[0];
            let what = format!("{masked}, smoothing {label_smoothing}, on {device:?}");
            assert_eq!(loss == f64::INFINITY, infinite, "{loss}, {what}");
            let expected: f64 = oracle::forward(&held, &[2], 13, &options);
            assert!(infinite == (expected == f64::INFINITY), "{expected}, {what}");
            assert!(infinite || (loss - expected).abs() < 1e-5, "{loss}, {expected}, {what}");
        }
    }
}

#[test]
fn wrong_calls_are_named() {
    for device in devices() {
        let logits = |shape: [usize; 2]| Tensor::<2>::ones(shape, &device);
        let call = |shape, targets: &[i64], options| {
            cross_entropy(logits(shape), int(targets, &device), options)
        };
        let message = |shape, targets: &[i64], options| {
            call(shape, targets, options).unwrap_err().to_string()
        };
        assert_eq!(
            message([2, 4], &[0], PLAIN),
            "cross_entropy: `targets` has shape [1], expected [2]"
        );
        assert_eq!(
            message([2, 4], &[0, 4], PLAIN),
            "cross_entropy: target 4 at position 1, expected 0 to 3 or -100 (ignored)"
        );
        assert_eq!(
            message([2, 4], &[-1, 0], PLAIN),
            "cross_entropy: target -1 at position 0, expected 0 to 3 or -100 (ignored)"
        );
        assert_eq!(
            message([2, 4], &[0, 1], CrossEntropyOptions { label_smoothing: 1.5, ..PLAIN }),
            "cross_entropy: label_smoothing = 1.5, expected a number from 0 to 1"
        );
        assert_eq!(
            message([2, 4], &[0, 1], CrossEntropyOptions { z_loss: -0.1, ..PLAIN }),
            "cross_entropy: z_loss = -0.1, expected a number of at least 0"
        );
        // Unchecked, a target that is no class is seen in the loss.
        let unchecked = CrossEntropyOptions { check_targets: false, ..PLAIN };
        for targets in [[0, 4], [-1, 0], [2, 1 << 20]] {
            assert!(values(&call([2, 4], &targets, unchecked).unwrap())[0].is_nan(), "{device:?}");
        }
        if !device::is_cube(&device) {
            let refused = policy::force(Implementation::Fused, || call([1, 4], &[0], PLAIN));
            let refused = refused.unwrap_err().to_string();
            assert!(refused.starts_with("cross_entropy: the fused kernel cannot run on cpu"));
        }
    }
}
