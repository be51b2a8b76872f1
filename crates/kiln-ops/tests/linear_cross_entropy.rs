//! linear_cross_entropy on every device: the loss and its gradients against float64, whatever is frozen.

mod common;

use burn::tensor::{DType, Device, Tensor, TensorData};
use common::*;
use kiln_ops::linear_cross_entropy::oracle;
use kiln_ops::prelude::*;

/// Cotangent of the loss.
const DLOSS: f64 = 24.0;

fn check(sizes: [usize; 3], trained: [bool; 2], dtype: DType, device: &Device) {
    let [rows, width, classes] = sizes;
    let options = CrossEntropyOptions::default();
    let (x, x_held) = tensor(&numbers(rows * width, 1, 0.1), [rows, width], dtype, device);
    let scale = 1.0 / (width as f64).sqrt();
    let weight: Vec<f64> = numbers(width * classes, 2, 0.0).iter().map(|w| w * scale).collect();
    let (weight, weight_held) = tensor(&weight, [width, classes], dtype, device);
    let class = |row: usize| if row % 5 == 3 { -100 } else { (row * 37 % classes) as i64 };
    let targets: Vec<i64> = (0..rows).map(class).collect();
    let target = || Tensor::from_data(TensorData::from(targets.as_slice()), device);
    let what = format!("{sizes:?}, {trained:?}, {device:?}");

    let expected = oracle::forward(&x_held, &weight_held, &targets, sizes, &options);
    let near = |loss: Tensor<1>| assert_near(&values(&loss), &[expected], dtype, 1, &what);
    poison(rows * classes, dtype, device);
    near(linear_cross_entropy(x.clone(), weight.clone(), target(), options).unwrap());

    let mut wanted = trained.into_iter();
    let inputs = [x, weight].map(|t| {
        let t = t.autodiff();
        if wanted.next() == Some(true) { t.require_grad() } else { t }
    });
    let [x, weight] = inputs.clone();
    let loss = linear_cross_entropy(x, weight, target(), options).unwrap();
    near(loss.clone());
    if !trained.contains(&true) {
        assert!(!loss.is_tracked(), "{what}");
        return;
    }
    let (dloss, _) = tensor(&[DLOSS], [1], DType::F32, device);
    let grads = pull(loss, &dloss.autodiff()).backward();
    let (dx, dw) = oracle::backward(&x_held, &weight_held, &targets, sizes, &options, DLOSS);
    for (i, (input, expected)) in inputs.iter().zip([dx, dw]).enumerate() {
        let gradient = input.grad(&grads);
        assert_eq!(gradient.is_some(), trained[i], "gradient {i} of {what}");
        if let Some(gradient) = gradient {
            let what = format!("gradient {i} of {what}");
            assert_near(&values(&gradient), &expected, dtype, 4, &what);
        }
    }
}

#[test]
fn matches_float64_whatever_is_frozen() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for trained in [[true, true], [true, false], [false, true], [false, false]] {
                for sizes in [[1, 1, 2], [13, 7, 5], [33, 48, 257]] {
                    check(sizes, trained, dtype, &device);
                }
            }
        }
    }
}
