//! linear_cross_entropy on every device, of a weight and of a table: the loss and its gradients against float64, whatever is
//! frozen, and in several chunks.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_ops::launch::limits::{Limits, limited};
use kiln_ops::linear_cross_entropy::oracle;
use kiln_ops::prelude::*;

/// Cotangent of the loss.
const DLOSS: f64 = 24.0;

fn check(
    sizes: [usize; 3],
    trained: [bool; 2],
    options: CrossEntropyOptions,
    dtype: DType,
    device: &Device,
) {
    let [rows, width, classes] = sizes;
    let (x, x_held) = tensor(&numbers(rows * width, 1, 0.1), [rows, width], dtype, device);
    let scale = 1.0 / (width as f64).sqrt();
    let weight: Vec<f64> = numbers(width * classes, 2, 0.0).iter().map(|w| w * scale).collect();
    let (weight, weight_held) = tensor(&weight, [width, classes], dtype, device);
    let class =
        |row: usize| if row % 5 == 3 { options.ignore_index } else { (row * 37 % classes) as i64 };
    let targets: Vec<i64> = (0..rows).map(class).collect();
    let target = || Tensor::from_data(TensorData::from(targets.as_slice()), device);
    let what = format!("{sizes:?}, {trained:?}, {options:?}, {dtype:?}, {device:?}");

    let expected = oracle::forward(&x_held, &weight_held, &targets, sizes, &options);
    let near = |loss: Tensor<1>| assert_near(&values(&loss), &[expected], dtype, 1, &what);
    poison(rows * classes, dtype, device);
    near(linear_cross_entropy(x.clone(), weight.clone(), target(), options).unwrap());
    let table = Tensor::from_data(weight.clone().transpose().to_data(), (device, dtype));
    near(linear_cross_entropy_of_table(x.clone(), table.clone(), target(), options).unwrap());

    let mut wanted = trained.into_iter();
    let [x, weight] = [x, weight].map(|t| {
        let t = t.autodiff();
        if wanted.next() == Some(true) { t.require_grad() } else { t }
    });
    let table = table.autodiff();
    let table = if trained[1] { table.require_grad() } else { table };
    let loss = linear_cross_entropy(x.clone(), weight.clone(), target(), options).unwrap();
    near(loss.clone());
    let of_table =
        linear_cross_entropy_of_table(x.clone(), table.clone(), target(), options).unwrap();
    near(of_table.clone());
    if !trained.contains(&true) {
        assert!(!loss.is_tracked(), "{what}");
        return;
    }
    let (dloss, _) = tensor(&[DLOSS], [1], DType::F32, device);
    let dloss = dloss.autodiff();
    let (dx, dw) = oracle::backward(&x_held, &weight_held, &targets, sizes, &options, DLOSS);
    let grads = pull(loss, &dloss).backward();
    let mut gradients = vec![(0, x.grad(&grads)), (1, weight.grad(&grads))];
    let grads = pull(of_table, &dloss).backward();
    gradients.extend([(0, x.grad(&grads)), (1, table.grad(&grads).map(Tensor::transpose))]);
    for (i, gradient) in gradients {
        assert_eq!(gradient.is_some(), trained[i], "gradient {i} of {what}");
        if let Some(gradient) = gradient {
            assert_eq!(gradient.dtype(), dtype, "gradient {i} of {what}");
            let expected = if i == 0 { &dx } else { &dw };
            assert_near(&values(&gradient), expected, dtype, 4, &format!("gradient {i} of {what}"));
        }
    }
}

#[test]
fn matches_float64_whatever_is_frozen() {
    let _others = crate::beside_others();
    for device in devices() {
        for dtype in dtypes(&device) {
            for trained in [[true, true], [true, false], [false, true], [false, false]] {
                for sizes in [[1, 1, 2], [13, 7, 5], [33, 48, 257]] {
                    check(sizes, trained, CrossEntropyOptions::default(), dtype, &device);
                }
            }
        }
    }
}

/// The gradient of the weight is added up over three chunks, the last one short.
#[test]
fn chunks_add_up_with_every_option() {
    let _alone = crate::alone();
    let plain = CrossEntropyOptions::default();
    let all = [
        plain,
        CrossEntropyOptions { label_smoothing: 0.1, ignore_index: 3, ..plain },
        CrossEntropyOptions { label_smoothing: 0.3, z_loss: 0.002, ..plain },
    ];
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            for options in all {
                // As few as are taken together at least, 128.
                let limits = Limits { chunk_bytes: Some(1), ..Limits::default() };
                limited(limits, || check([300, 24, 65], [true; 2], options, dtype, &device));
            }
        }
    }
}
