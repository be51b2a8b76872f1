//! swiglu_mlp on every device and family: values, gradients, frozen inputs, views of weights.

use crate::common::families::families;
use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::prelude::*;
use kiln_ops::swiglu_mlp::oracle;
use kiln_ops::tile::force;

/// The families of a device, or the one way that there is.
fn on_each_family(device: &Device, dtype: DType, f: impl Fn(&str)) {
    let families = families(device, dtype);
    if families.is_empty() {
        f("no kernels");
    }
    for family in families {
        force::<()>(family, || f(family.name()));
    }
}

/// Gradients of the inputs that are not frozen; a turned weight is stored with its rows side by side.
fn check(
    [rows, width, inner]: [usize; 3],
    trained: [bool; 4],
    turned: [bool; 3],
    dtype: DType,
    device: &Device,
) {
    let input = |seed, shape: [usize; 2], turned: bool| {
        let scale = 1.0 / (shape[0] as f64).sqrt();
        let values = numbers(shape[0] * shape[1], seed, 0.1);
        let values: Vec<f64> =
            if seed > 1 { values.iter().map(|v| v * scale).collect() } else { values };
        let (tensor, held) = tensor(&values, shape, dtype, device);
        let tensor = if turned { tensor.transpose().mul_scalar(1.0).transpose() } else { tensor };
        (tensor, held)
    };
    let (x, x_held) = input(1, [rows, width], false);
    let (gate, gate_held) = input(2, [width, inner], turned[0]);
    let (up, up_held) = input(3, [width, inner], turned[1]);
    let (down, down_held) = input(4, [inner, width], turned[2]);
    let (dy, dy_held) = tensor(&numbers(rows * width, 5, 0.1), [rows, width], dtype, device);
    let sizes = [rows, width, inner];
    let y = oracle::forward(&x_held, &gate_held, &up_held, &down_held, sizes);
    let grads = oracle::backward(&x_held, &gate_held, &up_held, &down_held, sizes, &dy_held);
    on_each_family(device, dtype, |family| {
        let what = format!("{sizes:?}, {trained:?}, {turned:?}, {family} on {device:?}");
        poison(rows * inner.max(width), dtype, device);
        let plain = swiglu_mlp(x.clone(), gate.clone(), up.clone(), down.clone()).unwrap();
        assert_near(&values(&plain), &y, dtype, 3, &what);

        let mut wanted = trained.into_iter();
        let inputs = [x.clone(), gate.clone(), up.clone(), down.clone()].map(|t| {
            let t = t.autodiff();
            if wanted.next() == Some(true) { t.require_grad() } else { t }
        });
        let [x, gate, up, down] = inputs.clone();
        let tracked = swiglu_mlp(x, gate, up, down).unwrap();
        assert_near(&values(&tracked), &y, dtype, 3, &what);
        if !trained.contains(&true) {
            assert!(!tracked.is_tracked());
            return;
        }
        let found = pull(tracked, &dy.clone().autodiff()).backward();
        for (i, (input, expected)) in inputs.iter().zip(&grads).enumerate() {
            let gradient = input.grad(&found);
            assert_eq!(gradient.is_some(), trained[i], "{what}: gradient {i}");
            if let Some(gradient) = gradient {
                assert_near(
                    &values(&gradient),
                    expected,
                    dtype,
                    6,
                    &format!("gradient {i}, {what}"),
                );
            }
        }
    });
}

#[test]
fn values_and_gradients() {
    for device in devices() {
        for dtype in dtypes(&device) {
            // Odd and ragged, one row, more than one tile both ways and of each half of a pair.
            for sizes in [
                [5, 3, 7],
                [4, 1, 9],
                [1, 16, 8],
                [33, 40, 56],
                [130, 72, 264],
                [257, 136, 129],
                [40, 72, 520],
            ] {
                check(sizes, [true; 4], [false; 3], dtype, &device);
            }
        }
    }
}

#[test]
fn frozen_inputs_get_no_gradient() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for bits in 0..16 {
                let trained = [0, 1, 2, 3].map(|i| bits >> i & 1 == 1);
                check([34, 24, 40], trained, [false; 3], dtype, &device);
            }
        }
    }
}

#[test]
fn weights_in_either_order() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for turned in [[true; 3], [true, false, false], [false, true, true]] {
                check([70, 48, 136], [true; 4], turned, dtype, &device);
            }
        }
    }
}

#[test]
fn inputs_of_any_rank_and_of_no_rows() {
    for device in devices() {
        let ones = |shape: [usize; 2]| Tensor::<2>::ones(shape, &device);
        let x = Tensor::<3>::ones([2, 3, 4], &device);
        let y = swiglu_mlp(x, ones([4, 6]), ones([4, 6]), ones([6, 4])).unwrap();
        assert_eq!(y.dims(), [2, 3, 4]);
        let (none, _) = tensor(&[], [0, 4], DType::F32, &device);
        let weight = |shape| ones(shape).autodiff().require_grad();
        let (gate, up, down) = (weight([4, 6]), weight([4, 6]), weight([6, 4]));
        let y = swiglu_mlp(none.autodiff(), gate.clone(), up, down).unwrap();
        assert_eq!(y.dims(), [0, 4]);
        let grads = y.sum().backward();
        assert_eq!(values(&gate.grad(&grads).unwrap()), [0.0; 24], "{device:?}");
    }
}
