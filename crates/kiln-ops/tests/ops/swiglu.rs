//! swiglu on every device: values and gradients against float64, layouts, autodiff, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::device;
use kiln_ops::policy::{self, Implementation};
use kiln_ops::prelude::*;
use kiln_ops::swiglu::oracle;

/// One element, primes, ragged tails, rows that CUDA pitches, more than one cube.
const SHAPES: &[[usize; 2]] = &[
    [1, 1],
    [5, 1],
    [13, 7],
    [33, 31],
    [4, 64],
    [129, 80],
    [2, 96],
    [5, 257],
    [37, 768],
    [7, 1000],
    [2, 4099],
    [3, 12_288],
];

struct Case {
    gate: Vec<f64>,
    up: Vec<f64>,
    dy: Vec<f64>,
    y: Vec<f64>,
    dgate: Vec<f64>,
    dup: Vec<f64>,
}

/// gate and up as two tensors, or as the halves of one.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Inputs {
    Two,
    Halves,
}

/// Forward and backward of a fresh case.
fn run(
    [rows, width]: [usize; 2],
    dtype: DType,
    seed: u64,
    inputs: Inputs,
    device: &Device,
) -> Case {
    let n = rows * width;
    let leaf = |values: &[f64], width: usize| {
        let (tensor, held) = tensor(values, [rows, width], dtype, device);
        (tensor.autodiff().require_grad(), held)
    };
    let (dy, dy_held) = tensor(&numbers(n, seed + 2, 0.1), [rows, width], dtype, device);
    let dy = dy.autodiff();
    if inputs == Inputs::Two {
        let (gate, gate_held) = leaf(&numbers(n, seed, 0.1), width);
        let (up, up_held) = leaf(&numbers(n, seed + 1, 0.2), width);
        let y = swiglu(gate.clone(), up.clone()).unwrap();
        let grads = pull(y.clone(), &dy).backward();
        return Case {
            gate: gate_held,
            up: up_held,
            dy: dy_held,
            y: values(&y),
            dgate: values(&gate.grad(&grads).unwrap()),
            dup: values(&up.grad(&grads).unwrap()),
        };
    }
    let (both, held) = leaf(&numbers(2 * n, seed, 0.1), 2 * width);
    let half = |values: &[f64], i: usize| -> Vec<f64> {
        values.chunks(2 * width).flat_map(|row| row[i * width..(i + 1) * width].to_vec()).collect()
    };
    let (gate, up) = (both.clone().narrow(1, 0, width), both.clone().narrow(1, width, width));
    let y = swiglu(gate, up).unwrap();
    let grads = pull(y.clone(), &dy).backward();
    let gradient = values(&both.grad(&grads).unwrap());
    Case {
        gate: half(&held, 0),
        up: half(&held, 1),
        dy: dy_held,
        y: values(&y),
        dgate: half(&gradient, 0),
        dup: half(&gradient, 1),
    }
}

fn check(case: &Case, dtype: DType, what: &str) {
    let y = oracle::forward(&case.gate, &case.up);
    let (dgate, dup) = oracle::backward(&case.gate, &case.up, &case.dy);
    assert_near(&case.y, &y, dtype, 1, &format!("y of {what}"));
    assert_near(&case.dgate, &dgate, dtype, 1, &format!("dgate of {what}"));
    assert_near(&case.dup, &dup, dtype, 1, &format!("dup of {what}"));
}

#[test]
fn matches_float64() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (i, shape) in SHAPES.iter().enumerate() {
                for inputs in [Inputs::Two, Inputs::Halves] {
                    poison(shape[0] * shape[1], dtype, &device);
                    let case = run(*shape, dtype, 10 * i as u64, inputs, &device);
                    check(&case, dtype, &format!("{shape:?}, {inputs:?}, {device:?}"));
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
                    run([37, 515], DType::F32, seed, Inputs::Two, &device)
                });
                check(&case, DType::F32, &format!("{implementation} of order {first}, {second}"));
            }
        }
    }
}

#[test]
fn repeats_bit_for_bit() {
    for device in kernel_devices() {
        let once = run([301, 768], DType::F32, 5, Inputs::Halves, &device);
        let again = run([301, 768], DType::F32, 5, Inputs::Halves, &device);
        assert!(once.y == again.y && once.dgate == again.dgate && once.dup == again.dup);
    }
}

#[test]
fn every_rank_and_stride() {
    for device in devices() {
        let n = 2 * 3 * 4 * 16;
        let (gate, g) = tensor(&numbers(n, 1, 0.1), [2, 3, 4, 16], DType::F32, &device);
        let (up, u) = tensor(&numbers(n, 2, 0.2), [2, 3, 4, 16], DType::F32, &device);
        let expected = oracle::forward(&g, &u);
        let near = |y: &Tensor<4>, what: &str| {
            assert_near(&values(y), &expected, DType::F32, 1, what);
        };
        near(&swiglu(gate.clone(), up.clone()).unwrap(), "rank 4");
        let swapped = |i, j| {
            let y = swiglu(gate.clone().swap_dims(i, j), up.clone().swap_dims(i, j));
            y.unwrap().swap_dims(i, j)
        };
        near(&swapped(0, 1), "swapped leading dimensions");
        near(&swapped(2, 3), "transposed");
        let flat = swiglu(gate.clone().flatten::<1>(0, 3), up.clone().flatten::<1>(0, 3)).unwrap();
        assert_near(&values(&flat), &expected, DType::F32, 1, "rank 1");
        // One row of gates for all rows of up.
        let row = gate.clone().slice([0..1, 0..1, 0..1, 0..16]).expand([2, 3, 4, 16]);
        let rows: Vec<f64> = (0..n).map(|i| g[i % 16]).collect();
        let y = swiglu(row, up).unwrap();
        assert_near(&values(&y), &oracle::forward(&rows, &u), DType::F32, 1, "broadcast gates");
        for shape in [[0, 16], [16, 0]] {
            let none = Tensor::<2>::zeros(shape, &device).autodiff().require_grad();
            let y = swiglu(none.clone(), none.clone()).unwrap();
            assert_eq!(y.dims(), shape);
            let grads = y.sum().backward();
            assert_eq!(none.grad(&grads).unwrap().dims(), shape);
        }
    }
}

/// Where e^-gate overflows or vanishes, nothing becomes NaN.
#[test]
fn saturates() {
    for device in devices() {
        let gates = [-1000.0, -200.0, -89.0, -30.0, -1e-30, 0.0, 30.0, 89.0, 200.0, 1000.0];
        let (gate, g) = tensor(&gates, [10], DType::F32, &device);
        let (up, u) = tensor(&[1.5; 10], [10], DType::F32, &device);
        let (gate, up) = (gate.autodiff().require_grad(), up.autodiff().require_grad());
        let y = swiglu(gate.clone(), up.clone()).unwrap();
        let grads = y.clone().sum().backward();
        let (dgate, dup) = oracle::backward(&g, &u, &[1.0; 10]);
        assert_near(&values(&y), &oracle::forward(&g, &u), DType::F32, 1, "y");
        assert_near(&values(&gate.grad(&grads).unwrap()), &dgate, DType::F32, 1, "dgate");
        assert_near(&values(&up.grad(&grads).unwrap()), &dup, DType::F32, 1, "dup");
    }
}

/// One gradient, none, gradient checkpointing, surroundings that Burn fuses.
#[test]
fn autodiff_in_every_setting() {
    for device in devices() {
        let (gate, g) = tensor(&numbers(5 * 48, 1, 0.1), [5, 48], DType::F32, &device);
        let (up, u) = tensor(&numbers(5 * 48, 2, 0.2), [5, 48], DType::F32, &device);
        let (dy, d) = tensor(&numbers(5 * 48, 3, 0.0), [5, 48], DType::F32, &device);
        let (dgate, dup) = oracle::backward(&g, &u, &d);

        let leaf = gate.clone().autodiff().require_grad();
        let out = swiglu(leaf.clone(), up.clone().autodiff()).unwrap();
        let grads = pull(out, &dy.clone().autodiff()).backward();
        assert_near(&values(&leaf.grad(&grads).unwrap()), &dgate, DType::F32, 1, "only gate");

        let leaf = up.clone().autodiff().require_grad();
        let out = swiglu(gate.clone().autodiff(), leaf.clone()).unwrap();
        let grads = pull(out, &dy.clone().autodiff()).backward();
        assert_near(&values(&leaf.grad(&grads).unwrap()), &dup, DType::F32, 1, "only up");

        let out = swiglu(gate.clone().autodiff(), up.clone().autodiff()).unwrap();
        assert!(!out.is_tracked());
        assert_near(&values(&out), &oracle::forward(&g, &u), DType::F32, 1, "tracked by nobody");

        let leaf = gate.clone().autodiff().require_grad();
        let grads = swiglu(leaf.clone(), leaf.clone()).unwrap().sum().backward();
        let (one, other) = oracle::backward(&g, &g, &[1.0; 5 * 48]);
        let twice: Vec<f64> = one.iter().zip(&other).map(|(a, b)| a + b).collect();
        assert_near(
            &values(&leaf.grad(&grads).unwrap()),
            &twice,
            DType::F32,
            1,
            "one tensor twice",
        );

        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        let leaf = Tensor::<2>::from_data(gate.to_data(), &checkpointing).require_grad();
        let up = Tensor::<2>::from_data(up.to_data(), &checkpointing).require_grad();
        let dy = Tensor::<2>::from_data(dy.to_data(), &checkpointing);
        let doubled = leaf.clone().mul_scalar(2.0).exp().log().mul_scalar(0.5);
        let out = swiglu(doubled, up).unwrap().mul_scalar(1.0);
        let grads = pull(out, &dy).backward();
        let found = values(&leaf.grad(&grads).unwrap());
        let error = kiln_ops::oracle::distance(&found, &dgate).relative;
        assert!(error < 1e-4, "checkpointing between fused elementwise operations: {error}");
    }
}

#[test]
fn wrong_calls_are_named() {
    let device = devices().remove(0);
    let ones = |shape: [usize; 2]| Tensor::<2>::ones(shape, &device);
    let message = |r: Result<Tensor<2>, OpError>| r.unwrap_err().to_string();
    assert_eq!(
        message(swiglu(ones([2, 4]), ones([2, 5]))),
        "swiglu: `up` has shape [2, 5], expected [2, 4]"
    );
    assert_eq!(
        message(swiglu(ones([2, 4]), ones([2, 4]).cast(DType::F16))),
        "swiglu: `up` is F16, expected F32"
    );
    if !device::is_cube(&device) {
        let refused = policy::force(Implementation::Fused, || swiglu(ones([2, 4]), ones([2, 4])));
        assert!(message(refused).starts_with("swiglu: the fused kernel cannot run on cpu"));
    }
}
