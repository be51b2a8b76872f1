//! mhc_post on every device: values and gradients against float64, layouts, autodiff, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::device;
use kiln_ops::mhc_post::{MAX_STREAMS, oracle};
use kiln_ops::policy::{self, Implementation};
use kiln_ops::prelude::*;

/// `[B, S, n, D]`: one element, primes, rows that CUDA pitches, several tokens a cube, more columns than units.
const SHAPES: &[[usize; 4]] = &[
    [1, 1, 1, 1],
    [1, 5, 2, 7],
    [2, 3, 3, 33],
    [3, 11, 4, 80],
    [1, 3, 4, 2100],
    [2, 2, 5, 257],
    [1, 2, 8, 768],
];

/// Inputs on the device and as they are there, with the cotangent of y last.
struct Case {
    x: Tensor<4>,
    f: Tensor<3>,
    h_post: Tensor<3>,
    h_res: Tensor<4>,
    dy: Tensor<4>,
    held: [Vec<f64>; 5],
    n: usize,
}

impl Case {
    fn new([b, s, n, d]: [usize; 4], dtype: DType, seed: u64, device: &Device) -> Self {
        let drawn = |at: u64, count: usize| numbers(count, 10 * seed + at, 0.2);
        let tokens = b * s;
        let (x, x_held) = tensor(&drawn(0, tokens * n * d), [b, s, n, d], dtype, device);
        let (f, f_held) = tensor(&drawn(1, tokens * d), [b, s, d], dtype, device);
        let (h_post, post) = tensor(&drawn(2, tokens * n), [b, s, n], DType::F32, device);
        let (h_res, res) = tensor(&drawn(3, tokens * n * n), [b, s, n, n], DType::F32, device);
        let (dy, dy_held) = tensor(&drawn(4, tokens * n * d), [b, s, n, d], dtype, device);
        Self { x, f, h_post, h_res, dy, held: [x_held, f_held, post, res, dy_held], n }
    }

    fn expected(&self) -> (Vec<f64>, [Vec<f64>; 4]) {
        let [x, f, post, res, dy] = &self.held;
        let y = oracle::forward(x, f, post, res, self.n);
        (y, oracle::backward(x, f, post, res, self.n, dy))
    }

    /// y, and the gradients of those inputs that are wanted.
    fn run(&self, wanted: [bool; 4]) -> (Vec<f64>, [Option<Vec<f64>>; 4]) {
        fn leaf<const D: usize>(of: &Tensor<D>, wanted: bool) -> Tensor<D> {
            let of = of.clone().autodiff();
            if wanted { of.require_grad() } else { of }
        }
        let (x, f) = (leaf(&self.x, wanted[0]), leaf(&self.f, wanted[1]));
        let (h_post, h_res) = (leaf(&self.h_post, wanted[2]), leaf(&self.h_res, wanted[3]));
        let y = mhc_post(x.clone(), f.clone(), h_post.clone(), h_res.clone()).unwrap();
        if wanted == [false; 4] {
            assert!(!y.is_tracked());
            return (values(&y), [const { None }; 4]);
        }
        let grads = pull(y.clone(), &self.dy.clone().autodiff()).backward();
        let found = [
            x.grad(&grads).map(|g| values(&g)),
            f.grad(&grads).map(|g| values(&g)),
            h_post.grad(&grads).map(|g| values(&g)),
            h_res.grad(&grads).map(|g| values(&g)),
        ];
        (values(&y), found)
    }

    fn check(&self, wanted: [bool; 4], dtype: DType, what: &str) {
        let (y, gradients) = self.run(wanted);
        let (expected, of) = self.expected();
        assert_near(&y, &expected, dtype, 2, &format!("y of {what}"));
        for (i, (found, expected)) in gradients.iter().zip(&of).enumerate() {
            assert_eq!(found.is_some(), wanted[i], "gradient {i} of {what}");
            // Those of h_post and h_res are f32, of inputs that are exact.
            let dtype = if i < 2 { dtype } else { DType::F32 };
            if let Some(found) = found {
                assert_near(found, expected, dtype, 100, &format!("gradient {i} of {what}"));
            }
        }
    }
}

#[test]
fn matches_float64() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (i, shape) in SHAPES.iter().enumerate() {
                poison(shape.iter().product(), dtype, &device);
                let case = Case::new(*shape, dtype, i as u64, &device);
                case.check([true; 4], dtype, &format!("{shape:?}, {dtype:?}, {device:?}"));
            }
        }
    }
}

/// Every set of inputs whose gradients somebody wants.
#[test]
fn frozen_inputs() {
    for device in devices() {
        let case = Case::new([2, 5, 4, 48], DType::F32, 3, &device);
        for set in 0..16 {
            let wanted = [0, 1, 2, 3].map(|i| set >> i & 1 == 1);
            case.check(wanted, DType::F32, &format!("{wanted:?} on {device:?}"));
        }
    }
}

#[test]
fn repeats_bit_for_bit() {
    for device in kernel_devices() {
        let case = Case::new([3, 41, 4, 515], DType::F32, 5, &device);
        let first = case.run([true; 4]);
        assert!(first == case.run([true; 4]), "{device:?}");
    }
}

/// Streams that lie elsewhere: dimensions that have been swapped, and cut out of wider tensors.
#[test]
fn every_stride() {
    for device in devices() {
        let case = Case::new([3, 4, 2, 64], DType::F32, 7, &device);
        let (expected, _) = case.expected();
        let near = |y: Tensor<4>, what: &str| {
            assert_near(&values(&y), &expected, DType::F32, 2, what);
        };
        let (f, post, res) = (case.f.clone(), case.h_post.clone(), case.h_res.clone());
        let across = case.x.clone().swap_dims(0, 1);
        // The same numbers, the dimensions in another order in memory.
        let across = Tensor::<4>::from_data(across.to_data(), &device).swap_dims(0, 1);
        near(mhc_post(across, f.clone(), post.clone(), res.clone()).unwrap(), "swapped");
        let wide = Tensor::cat(vec![case.x.clone().zeros_like(), case.x.clone()], 3);
        let cut = wide.narrow(3, 64, 64);
        near(mhc_post(cut, f.clone(), post.clone(), res.clone()).unwrap(), "cut");
        let turned = Tensor::<4>::from_data(res.swap_dims(2, 3).to_data(), &device);
        near(mhc_post(case.x.clone(), f, post, turned.swap_dims(2, 3)).unwrap(), "h_res turned");
    }
}

#[test]
fn no_tokens() {
    for device in devices() {
        let zeros = |shape: [usize; 4]| Tensor::<4>::zeros(shape, &device);
        let x = zeros([2, 0, 4, 8]).autodiff().require_grad();
        let f = Tensor::<3>::zeros([2, 0, 8], &device).autodiff();
        let h_post = Tensor::<3>::zeros([2, 0, 4], &device).autodiff();
        let y = mhc_post(x.clone(), f, h_post, zeros([2, 0, 4, 4]).autodiff()).unwrap();
        assert_eq!(y.dims(), [2, 0, 4, 8]);
        // Burn's slices of nothing, of which the reference is made, are not tracked.
        if device::is_cube(&device) {
            assert_eq!(x.grad(&y.sum().backward()).unwrap().dims(), [2, 0, 4, 8]);
        }
    }
}

#[test]
fn gradient_checkpointing() {
    for device in devices() {
        let case = Case::new([2, 3, 4, 40], DType::F32, 11, &device);
        let (_, [dx, ..]) = case.expected();
        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        let of = |x: &Tensor<4>| Tensor::<4>::from_data(x.to_data(), &checkpointing);
        let of_3 = |x: &Tensor<3>| Tensor::<3>::from_data(x.to_data(), &checkpointing);
        let x = of(&case.x).require_grad();
        let doubled = x.clone().mul_scalar(2.0).mul_scalar(0.5);
        let y = mhc_post(doubled, of_3(&case.f), of_3(&case.h_post), of(&case.h_res)).unwrap();
        let grads = pull(y.mul_scalar(1.0), &of(&case.dy)).backward();
        assert_near(&values(&x.grad(&grads).unwrap()), &dx, DType::F32, 4, "dx");
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
                let case = Case::new([2, 19, 4, 130], DType::F32, seed, &device);
                policy::force(implementation, || {
                    let what = format!("{implementation} of order {first}, {second}");
                    case.check([true; 4], DType::F32, &what);
                });
            }
        }
    }
}

#[test]
fn wrong_calls_are_named() {
    for device in devices() {
        let four = |shape: [usize; 4]| Tensor::<4>::ones(shape, (&device, DType::F32));
        let three = |shape: [usize; 3]| Tensor::<3>::ones(shape, (&device, DType::F32));
        let right = || (four([2, 3, 4, 8]), three([2, 3, 8]), three([2, 3, 4]), four([2, 3, 4, 4]));
        let error = |(x, f, post, res)| mhc_post(x, f, post, res).unwrap_err().to_string();
        let (x, f, post, res) = right();
        assert_eq!(
            error((four([2, 3, MAX_STREAMS + 1, 8]), f.clone(), post.clone(), res.clone())),
            "mhc_post: `x` has shape [2, 3, 9, 8], expected [B, S, n, D] with n from 1 to 8 and D at least 1"
        );
        assert_eq!(
            error((x.clone(), three([2, 3, 4]), post.clone(), res.clone())),
            "mhc_post: `f` has shape [2, 3, 4], expected [2, 3, 8]"
        );
        assert_eq!(
            error((x.clone(), f.clone(), three([2, 3, 8]), res.clone())),
            "mhc_post: `h_post` has shape [2, 3, 8], expected [2, 3, 4]"
        );
        assert_eq!(
            error((x.clone(), f.clone(), post.clone(), four([2, 3, 4, 8]))),
            "mhc_post: `h_res` has shape [2, 3, 4, 8], expected [2, 3, 4, 4]"
        );
        for dtype in dtypes(&device).into_iter().filter(|dtype| *dtype != DType::F32) {
            let of = error((x.clone(), f.clone().cast(dtype), post.clone(), res.clone()));
            assert_eq!(of, format!("mhc_post: `f` is {dtype:?}, expected F32"));
            let of = error((x.clone(), f.clone(), post.clone(), res.clone().cast(dtype)));
            assert_eq!(of, format!("mhc_post: `h_res` is {dtype:?}, expected F32"));
        }
    }
}
