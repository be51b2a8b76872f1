//! mhc_pre on every device: values and gradients against float64, autodiff, errors.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::device;
use kiln_ops::launch::plans;
use kiln_ops::mhc_pre::oracle::{self, Inputs, Outputs};
use kiln_ops::mhc_pre::{MAX_SINKHORN, MhcPreOptions};
use kiln_ops::prelude::*;

/// `[B, S, n, D]` and repeats of Sinkhorn: one element, primes, rows that CUDA pitches, several tokens a cube, more
/// columns than units.
const CASES: &[([usize; 4], usize)] = &[
    ([1, 1, 1, 1], 1),
    ([1, 5, 2, 7], 0),
    ([2, 3, 3, 33], 20),
    ([3, 11, 4, 80], 10),
    ([1, 3, 4, 2100], 20),
    ([2, 2, 5, 257], 2),
    ([1, 2, 8, 768], 1),
    ([5, 30, 2, 16], 3),
    ([1, 1, 4, 257], 20),
    ([1, 3, 8, 31], 10),
];

/// Inputs on the device and as they are there, and the cotangents.
struct Case {
    x: Tensor<4>,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    gamma: Option<Tensor<2>>,
    cotangents: (Tensor<3>, Tensor<3>, Tensor<4>),
    held: [Vec<f64>; 5],
    held_cotangents: [Vec<f64>; 3],
    n: usize,
    options: MhcPreOptions,
}

/// What a call leaves: its outputs, and the gradients of the inputs that have one.
type Found = (Outputs<f64>, [Option<Vec<f64>>; 5]);

impl Case {
    fn new(
        ([b, s, n, d], sinkhorn): ([usize; 4], usize),
        gamma: bool,
        dtype: DType,
        seed: u64,
        device: &Device,
    ) -> Self {
        let (tokens, rows) = (b * s, n * n + 2 * n);
        let drawn = |at: u64, count: usize, mean: f64| numbers(count, 10 * seed + at, mean);
        let (x, x_held) = tensor(&drawn(0, tokens * n * d, 0.2), [b, s, n, d], dtype, device);
        // Logits of the size of 1: sigmoids that are not saturated.
        let scale = 1.0 / ((n * d) as f64).sqrt();
        let phi: Vec<f64> = drawn(1, rows * n * d, 0.0).iter().map(|x| x * scale).collect();
        let (phi, phi_held) = tensor(&phi, [rows, n * d], DType::F32, device);
        let (alpha, alpha_held) = tensor(&drawn(2, 3, 1.0), [3], DType::F32, device);
        let (bias, bias_held) = tensor(&drawn(3, rows, 0.1), [rows], DType::F32, device);
        let (scales, mut gamma_held) = tensor(&drawn(4, n * d, 1.0), [n, d], DType::F32, device);
        if !gamma {
            gamma_held.clear();
        }
        let (dh_in, in_held) = tensor(&drawn(5, tokens * d, 0.1), [b, s, d], dtype, device);
        let (dh_post, post) = tensor(&drawn(6, tokens * n, 0.1), [b, s, n], DType::F32, device);
        let (dh_res, res) =
            tensor(&drawn(7, tokens * n * n, 0.1), [b, s, n, n], DType::F32, device);
        Self {
            x,
            phi,
            alpha,
            bias,
            gamma: gamma.then_some(scales),
            cotangents: (dh_in, dh_post, dh_res),
            held: [x_held, phi_held, alpha_held, bias_held, gamma_held],
            held_cotangents: [in_held, post, res],
            n,
            options: MhcPreOptions { sinkhorn, ..MhcPreOptions::default() },
        }
    }

    fn inputs(&self) -> Inputs<'_, f64> {
        let [x, phi, alpha, bias, gamma] = &self.held;
        Inputs { x, phi, alpha, bias, gamma }
    }

    /// The gradients from the cotangents of those outputs that are `pulled`.
    fn expected(&self, pulled: [bool; 3]) -> (Outputs<f64>, [Vec<f64>; 5]) {
        let cotangents = [0, 1, 2].map(|i| match pulled[i] {
            true => self.held_cotangents[i].clone(),
            false => vec![0.0; self.held_cotangents[i].len()],
        });
        let [dh_in, dh_post, dh_res] = &cotangents;
        let outputs = oracle::forward(self.inputs(), self.n, self.options);
        let of = [&dh_in[..], dh_post, dh_res];
        (outputs, oracle::backward(self.inputs(), self.n, self.options, of))
    }

    fn run(&self, wanted: [bool; 5], pulled: [bool; 3]) -> Found {
        fn leaf<const D: usize>(of: &Tensor<D>, wanted: bool) -> Tensor<D> {
            let of = of.clone().autodiff();
            if wanted { of.require_grad() } else { of }
        }
        let x = leaf(&self.x, wanted[0]);
        let phi = leaf(&self.phi, wanted[1]);
        let (alpha, bias) = (leaf(&self.alpha, wanted[2]), leaf(&self.bias, wanted[3]));
        let gamma = self.gamma.as_ref().map(|gamma| leaf(gamma, wanted[4]));
        let inputs = (x.clone(), phi.clone(), alpha.clone(), bias.clone(), gamma.clone());
        let MhcPre { h_in, h_post, h_res, .. } =
            mhc_pre(inputs.0, inputs.1, inputs.2, inputs.3, inputs.4, self.options).unwrap();
        let outputs = [values(&h_in), values(&h_post), values(&h_res)];
        let (dh_in, dh_post, dh_res) = self.cotangents.clone();
        let mut terms = vec![];
        if pulled[0] {
            terms.push(pull(h_in, &dh_in.autodiff()));
        }
        if pulled[1] {
            terms.push(pull(h_post, &dh_post.autodiff()));
        }
        if pulled[2] {
            terms.push(pull(h_res, &dh_res.autodiff()));
        }
        let Some(loss) = terms.into_iter().reduce(|a, b| a + b) else {
            return (outputs, [const { None }; 5]);
        };
        let grads = loss.backward();
        let found = [
            x.grad(&grads).map(|g| values(&g)),
            phi.grad(&grads).map(|g| values(&g)),
            alpha.grad(&grads).map(|g| values(&g)),
            bias.grad(&grads).map(|g| values(&g)),
            gamma.and_then(|gamma| gamma.grad(&grads)).map(|g| values(&g)),
        ];
        (outputs, found)
    }

    fn check(&self, wanted: [bool; 5], pulled: [bool; 3], dtype: DType, what: &str) {
        let (outputs, gradients) = self.run(wanted, pulled);
        let (expected, of) = self.expected(pulled);
        for (i, (found, expected)) in outputs.iter().zip(&expected).enumerate() {
            let dtype = if i == 0 { dtype } else { DType::F32 };
            assert_near(found, expected, dtype, 100, &format!("output {i} of {what}"));
        }
        for (i, (found, expected)) in gradients.iter().zip(&of).enumerate() {
            let there = wanted[i] && !expected.is_empty();
            assert_eq!(found.is_some(), there, "gradient {i} of {what}");
            let dtype = if i == 0 { dtype } else { DType::F32 };
            if let Some(found) = found {
                assert_near(found, expected, dtype, 400, &format!("gradient {i} of {what}"));
            }
        }
    }
}

#[test]
fn matches_float64() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (i, shape) in CASES.iter().enumerate() {
                poison(shape.0.iter().product(), dtype, &device);
                let case = Case::new(*shape, i % 2 == 0, dtype, i as u64, &device);
                let what = format!("{shape:?}, {dtype:?}, {device:?}");
                case.check([true; 5], [true; 3], dtype, &what);
            }
        }
    }
}

/// The streams that are handed on are x, and what gradient they are given is added to that of the others.
#[test]
fn streams_are_handed_on_with_their_gradient() {
    for device in devices() {
        for dtype in dtypes(&device) {
            // On Hopper cubes take several turns, too.
            let hopper = device::hardware(&device).is_some_and(|it| it.wgmma);
            let long = hopper.then_some(([1, 2400, 4, 136], 1));
            for (i, shape) in CASES.iter().step_by(3).chain(&long).enumerate() {
                let case = Case::new(*shape, false, dtype, 60 + i as u64, &device);
                let count = case.held[0].len();
                let (dx, dx_held) =
                    tensor(&numbers(count, 70 + i as u64, 0.1), shape.0, dtype, &device);
                let (_, [of_others, ..]) = case.expected([true, false, true]);
                for others in [false, true] {
                    let x = case.x.clone().autodiff().require_grad();
                    let phi = case.phi.clone().autodiff().require_grad();
                    let (alpha, bias) = (case.alpha.clone(), case.bias.clone());
                    let (alpha, bias) = (alpha.autodiff(), bias.autodiff());
                    let of = mhc_pre(x.clone(), phi, alpha, bias, None, case.options).unwrap();
                    let what = format!("{shape:?}, {dtype:?}, {others}, {device:?}");
                    assert!(values(&of.x) == case.held[0], "{what}");
                    let mut loss = pull(of.x, &dx.clone().autodiff());
                    if others {
                        let (dh_in, _, dh_res) = case.cotangents.clone();
                        loss = loss + pull(of.h_in, &dh_in.autodiff());
                        loss = loss + pull(of.h_res, &dh_res.autodiff());
                    }
                    let found = values(&x.grad(&loss.backward()).unwrap());
                    if others {
                        let both = dx_held.iter().zip(&of_others).map(|(a, b)| a + b);
                        assert_near(&found, &both.collect::<Vec<_>>(), dtype, 400, &what);
                    } else {
                        assert!(found == dx_held, "{what}");
                    }
                }
            }
        }
    }
}

/// Streams of which one stands for all are what they are written out, bit for bit: in what is made of them here and by
/// mhc_post_pre, and in gradients.
#[test]
fn one_stream_may_stand_for_all() {
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            let hopper = device::hardware(&device).is_some_and(|it| it.wgmma);
            let large = hopper.then_some([1, 2400, 4, 256]);
            for [b, s, n, d] in [[2, 5, 3, 256], [1, 1, 2, 40]].into_iter().chain(large) {
                let case = Case::new(([b, s, n, d], 2), false, dtype, 80, &device);
                let run = |written: bool| {
                    let one = case.cotangents.0.clone().mul_scalar(0.5).autodiff().require_grad();
                    let x = one.clone().unsqueeze_dim::<4>(2).expand([b, s, n, d]);
                    let x = if written { x.add_scalar(0.0) } else { x };
                    let [phi, alpha, bias] =
                        [case.phi.clone().flatten(0, 1), case.alpha.clone(), case.bias.clone()]
                            .map(|of: Tensor<1>| of.autodiff().require_grad());
                    let of_phi: Tensor<2> = phi.clone().reshape(case.phi.dims());
                    let (a, b, options) = (alpha.clone(), bias.clone(), case.options);
                    let MhcPre { x, h_in, h_post, h_res } =
                        mhc_pre(x, of_phi.clone(), a.clone(), b.clone(), None, options).unwrap();
                    let first = [values(&h_in), values(&h_post), values(&h_res)];
                    let post = MhcPost { x, f: h_in, h_post, h_res };
                    let next = mhc_post_pre(post, of_phi, a, b, None, options).unwrap();
                    let second = [values(&next.x), values(&next.h_in)];
                    let loss = pull(next.x, &case.x.clone().autodiff())
                        + pull(next.h_in, &case.cotangents.0.clone().autodiff());
                    let grads = loss.backward();
                    let of = [phi, alpha, bias].map(|of| values(&of.grad(&grads).unwrap()));
                    (first, second, of, values(&one.grad(&grads).unwrap()))
                };
                let what = format!("{n} of {d}, {dtype:?}, {device:?}");
                let (found, plans) = plans::listen(|| run(false));
                assert!(found == run(true), "{what}");
                if hopper && dtype == DType::BF16 {
                    for kernel in ["mhc_pre once", "mhc_pre together"] {
                        let read =
                            |plan: &String| plan.starts_with(kernel) && plan.contains(", true)");
                        assert!(plans.iter().any(read), "{kernel} of {what}: {plans:?}");
                    }
                }
            }
        }
    }
}

/// Logits so far apart that softmax is 0 and 1, and no eps: what Sinkhorn leaves of a permutation, and goes back through.
#[test]
fn permutations_without_eps_go_back() {
    for device in devices() {
        let mut case = Case::new(([1, 5, 2, 16], 3), false, DType::F32, 12, &device);
        case.options.hc_eps = 0.0;
        let bias = [0.1, -0.2, 0.3, 0.4, -200.0, 0.0, 0.0, -200.0];
        (case.bias, case.held[3]) = tensor(&bias, [8], DType::F32, &device);
        case.check([true, true, true, true, false], [true; 3], DType::F32, &format!("{device:?}"));
    }
}

/// Gradients beyond what f16 holds, as losses are scaled for it, and far below 1.
#[test]
fn gradients_of_f16_may_be_large_or_small() {
    for device in those_with(DType::F16) {
        for scale in [1e5, 1e-5] {
            let mut case = Case::new(([2, 5, 4, 48], 5), false, DType::F16, 4, &device);
            // h_in's stays 0, the others are f32.
            case.cotangents.1 = case.cotangents.1.clone().mul_scalar(scale);
            case.cotangents.2 = case.cotangents.2.clone().mul_scalar(scale);
            case.held_cotangents[1] = values(&case.cotangents.1);
            case.held_cotangents[2] = values(&case.cotangents.2);
            let wanted = [false, true, true, true, false];
            case.check(wanted, [false, true, true], DType::F16, &format!("{scale}, {device:?}"));
        }
    }
}

/// Inputs whose gradients nobody wants, and outputs that nothing depends on.
#[test]
fn frozen_inputs_and_unused_outputs() {
    for device in devices() {
        let case = Case::new(([2, 5, 4, 48], 5), true, DType::F32, 3, &device);
        for set in 1..32 {
            let wanted = [0, 1, 2, 3, 4].map(|i| set >> i & 1 == 1);
            case.check(wanted, [true; 3], DType::F32, &format!("{wanted:?} on {device:?}"));
        }
        // Every output depends on every input: on x, φ and γ through y, on α and the bias in their parts.
        for set in 1..8 {
            let pulled = [0, 1, 2].map(|i| set >> i & 1 == 1);
            case.check([true; 5], pulled, DType::F32, &format!("{pulled:?} on {device:?}"));
        }
    }
}

#[test]
fn repeats_bit_for_bit() {
    for device in kernel_devices() {
        let case = Case::new(([3, 41, 4, 130], 7), true, DType::F32, 5, &device);
        let first = case.run([true; 5], [true; 3]);
        assert!(first == case.run([true; 5], [true; 3]), "{device:?}");
    }
}

/// Hopper's kernel: tokens that come one after the other through the same cubes are as tokens by themselves. Clusters of two
/// and of eight, cubes that are one group and take places of their workspace again, and clusters of three whose warps repeat for
/// the tokens of some turns while others pass.
#[test]
fn tokens_do_not_depend_on_those_before() {
    let hopper = |device: &Device| device::hardware(device).is_some_and(|it| it.wgmma);
    for device in kiln_test::or_skip("wgmma", devices().into_iter().filter(hopper)) {
        for (tokens, n, d) in [(6000, 3, 520), (1300, 4, 2560), (300, 6, 4232), (14_500, 4, 768)] {
            let case = Case::new(([1, tokens, n, d], 3), false, DType::BF16, 1, &device);
            let call = |x: Tensor<4>| {
                let (phi, alpha, bias) = (case.phi.clone(), case.alpha.clone(), case.bias.clone());
                let found = mhc_pre(x, phi, alpha, bias, None, case.options).unwrap();
                (values(&found.h_in), values(&found.h_post), values(&found.h_res))
            };
            let (all, plans) = plans::listen(|| call(case.x.clone()));
            assert!(plans.iter().any(|plan| plan.starts_with("mhc_pre once")), "{plans:?}");
            let passes = plans.iter().any(|plan| plan.contains("repeats while tokens pass"));
            assert_eq!(passes, tokens == 14_500, "{plans:?}");
            // Of many sixteens some.
            let step = 16 * tokens.div_ceil(16 * 400);
            for first in (0..tokens).step_by(step).chain([tokens - 1]) {
                let last = tokens.min(first + 16);
                let some = call(case.x.clone().slice([0..1, first..last]));
                let part = |of: &[f64], width: usize| of[first * width..last * width].to_vec();
                let expected = (part(&all.0, d), part(&all.1, n), part(&all.2, n * n));
                assert!(some == expected, "tokens from {first} of {n} streams of {d}");
            }
        }
    }
}

/// Streams that lie elsewhere: dimensions that have been swapped, and cut out of wider tensors.
#[test]
fn every_stride() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let case = Case::new(([3, 4, 2, 64], 3), false, dtype, 7, &device);
            let ([expected, ..], _) = case.expected([true; 3]);
            let near = |x: Tensor<4>, phi: Tensor<2>, what: &str| {
                let (alpha, bias) = (case.alpha.clone(), case.bias.clone());
                let of = mhc_pre(x, phi, alpha, bias, None, case.options).unwrap();
                let what = format!("{what}, {dtype:?}, {device:?}");
                assert_near(&values(&of.h_in), &expected, dtype, 20, &what);
                assert!(values(&of.x) == case.held[0], "streams, {what}");
            };
            // The same numbers, the dimensions in another order in memory.
            let across = case.x.clone().swap_dims(0, 1).to_data();
            let across = Tensor::<4>::from_data(across, (&device, dtype)).swap_dims(0, 1);
            near(across, case.phi.clone(), "swapped");
            let wide = Tensor::cat(vec![case.x.clone().zeros_like(), case.x.clone()], 3);
            near(wide.narrow(3, 64, 64), case.phi.clone(), "cut");
            let turned = Tensor::<2>::from_data(case.phi.clone().transpose().to_data(), &device);
            near(case.x.clone(), turned.transpose(), "phi turned");
        }
    }
}

#[test]
fn gradient_checkpointing() {
    for device in devices() {
        let case = Case::new(([2, 3, 4, 40], 5), false, DType::F32, 11, &device);
        let (_, [dx, ..]) = case.expected([true, false, false]);
        // The streams that are handed on have a gradient, too.
        let dx: Vec<f64> = dx.iter().zip(&case.held[0]).map(|(dx, x)| dx + x).collect();
        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        let x = Tensor::<4>::from_data(case.x.to_data(), &checkpointing).require_grad();
        let phi = Tensor::<2>::from_data(case.phi.to_data(), &checkpointing);
        let alpha = Tensor::<1>::from_data(case.alpha.to_data(), &checkpointing);
        let bias = Tensor::<1>::from_data(case.bias.to_data(), &checkpointing);
        let doubled = x.clone().mul_scalar(2.0).mul_scalar(0.5);
        let of = mhc_pre(doubled, phi, alpha, bias, None, case.options).unwrap();
        let dh_in = Tensor::<3>::from_data(case.cotangents.0.to_data(), &checkpointing);
        let dx_of_streams = Tensor::<4>::from_data(case.x.to_data(), &checkpointing);
        let loss = pull(of.h_in.mul_scalar(1.0), &dh_in) + pull(of.x, &dx_of_streams);
        let grads = loss.backward();
        assert_near(&values(&x.grad(&grads).unwrap()), &dx, DType::F32, 100, "dx");
    }
}

/// Rows and columns of h_res add up to 1: columns, which are divided last, at once, rows after some repeats.
#[test]
fn sinkhorn_makes_rows_and_columns_that_add_up_to_1() {
    for device in devices() {
        let shape = [1, 1024, 4, 64];
        let mut case = Case::new((shape, 0), false, DType::F32, 5, &device);
        (case.x, _) = tensor(&numbers(4 * 64 * 1024, 50, 0.0), shape, DType::F32, &device);
        // Logits of variance 3.9, and nothing beside.
        case.alpha = Tensor::from_floats([1.0, 1.0, 2.0], &device);
        case.bias = Tensor::zeros([24], &device);
        // A column is off by eps over its sum, which may be small before the first division. Of rows the middle one
        // counts: single ones converge late. In float64 it is some 2e-4 off after ten repeats and 1e-6 after twenty.
        for (sinkhorn, columns_within, rows_within) in
            [(1, 2e-4, 1.0), (10, 2e-6, 3e-4), (20, 2e-6, 1.5e-6)]
        {
            case.options.sinkhorn = sinkhorn;
            let (x, phi) = (case.x.clone(), case.phi.clone());
            let of =
                mhc_pre(x, phi, case.alpha.clone(), case.bias.clone(), None, case.options).unwrap();
            let [columns, rows] = [2, 3].map(|dim| {
                let mut off = values(&of.h_res.clone().sum_dim(dim).sub_scalar(1.0).abs());
                off.sort_by(f64::total_cmp);
                off
            });
            let (columns, rows) = (columns[columns.len() - 1], rows[rows.len() / 2]);
            eprintln!("{sinkhorn} repeats: columns {columns:.1e}, rows {rows:.1e}");
            assert!(columns < columns_within, "columns after {sinkhorn}: {columns}");
            assert!(rows < rows_within, "rows after {sinkhorn}: {rows}");
            assert!(sinkhorn > 1 || rows > 0.1, "one repeat leaves rows as they were: {rows}");
        }
    }
}

/// What `mhc_post` makes of the outputs: the whole of a layer without a layer in it.
#[test]
fn pre_and_post_make_a_layer() {
    for device in devices() {
        let case = Case::new(([2, 3, 4, 16], 20), true, DType::F32, 8, &device);
        let of = mhc_pre(
            case.x.clone(),
            case.phi.clone(),
            case.alpha.clone(),
            case.bias.clone(),
            case.gamma.clone(),
            case.options,
        )
        .unwrap();
        let y = mhc_post(case.x.clone(), of.h_in.clone(), of.h_post, of.h_res).unwrap();
        // Columns of h_res add up to 1 over the streams that are written, so the sum over them is kept.
        let (x, y): (Tensor<4>, Tensor<4>) = (case.x.clone().sum_dim(2), y.sum_dim(2));
        let [h_in, h_post, _] = case.expected([true; 3]).0;
        let spread = |token: usize| h_post[token * 4..][..4].iter().sum::<f64>();
        let added: Vec<f64> = (0..h_in.len()).map(|i| spread(i / 16) * h_in[i]).collect();
        let expected: Vec<f64> = values(&x).iter().zip(&added).map(|(x, f)| x + f).collect();
        assert_near(&values(&y), &expected, DType::F32, 100, &format!("{device:?}"));
    }
}

#[test]
fn no_tokens() {
    for device in devices() {
        let x = Tensor::<4>::zeros([2, 0, 4, 8], &device);
        let (phi, alpha) = (Tensor::zeros([24, 32], &device), Tensor::zeros([3], &device));
        let bias = Tensor::zeros([24], &device);
        let of = mhc_pre(x, phi, alpha, bias, None, MhcPreOptions::default()).unwrap();
        assert_eq!(of.x.dims(), [2, 0, 4, 8]);
        assert_eq!(of.h_in.dims(), [2, 0, 8]);
        assert_eq!(of.h_post.dims(), [2, 0, 4]);
        assert_eq!(of.h_res.dims(), [2, 0, 4, 4]);
    }
}

#[test]
fn wrong_calls_are_named() {
    for device in devices() {
        let ones = |shape: [usize; 2]| Tensor::<2>::ones(shape, (&device, DType::F32));
        let row = |size: usize| Tensor::<1>::ones([size], (&device, DType::F32));
        let x = |shape: [usize; 4]| Tensor::<4>::ones(shape, (&device, DType::F32));
        struct Call(Tensor<4>, Tensor<2>, Tensor<1>, Tensor<1>, Option<Tensor<2>>);
        let right = || Call(x([2, 3, 4, 8]), ones([24, 32]), row(3), row(24), Some(ones([4, 8])));
        let error = |Call(x, phi, alpha, bias, gamma): Call, options: MhcPreOptions| {
            mhc_pre(x, phi, alpha, bias, gamma, options).unwrap_err().to_string()
        };
        let options = MhcPreOptions::default();
        for (call, expected) in [
            (
                Call { 0: x([2, 3, 9, 8]), ..right() },
                "mhc_pre: `x` has shape [2, 3, 9, 8], expected [B, S, n, D] with n from 1 to 8 and D at least 1",
            ),
            (
                Call { 1: ones([32, 24]), ..right() },
                "mhc_pre: `phi` has shape [32, 24], expected [24, 32]",
            ),
            (Call { 2: row(2), ..right() }, "mhc_pre: `alpha` has shape [2], expected [3]"),
            (Call { 3: row(3), ..right() }, "mhc_pre: `bias` has shape [3], expected [24]"),
            (
                Call { 4: Some(ones([8, 4])), ..right() },
                "mhc_pre: `gamma` has shape [8, 4], expected [4, 8]",
            ),
        ] {
            assert_eq!(error(call, options), expected);
        }
        let many = MhcPreOptions { sinkhorn: MAX_SINKHORN + 1, ..options };
        assert_eq!(error(right(), many), "mhc_pre: sinkhorn = 33, expected 0 to 32");
        let negative = MhcPreOptions { norm_eps: -1.0, ..options };
        assert_eq!(
            error(right(), negative),
            "mhc_pre: norm_eps = -1, expected a number of at least 0"
        );
    }
}
