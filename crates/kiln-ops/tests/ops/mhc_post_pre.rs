//! mhc_post_pre on every device: its streams are those of mhc_post, the rest and the gradients are near to float64.

use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::device;
use kiln_ops::launch::plans;
use kiln_ops::mhc_post_pre::oracle::{self, Inputs};
use kiln_ops::mhc_pre::MhcPreOptions;
use kiln_ops::prelude::*;

/// `[B, S, n, D]` and repeats of Sinkhorn: one element, primes, a ragged last sixteen of tokens, two cubes for a token,
/// columns beyond the last, more streams than Hopper's kernel takes, one stream and the most, more tokens than all rings of such a GPU hold.
const CASES: &[([usize; 4], usize)] = &[
    ([1, 1, 1, 1], 1),
    ([1, 5, 2, 7], 0),
    ([2, 3, 3, 33], 20),
    ([1, 36, 4, 80], 10),
    ([1, 20, 4, 328], 2),
    ([3, 4, 2, 136], 2),
    ([1, 24, 3, 200], 3),
    ([1, 4, 5, 72], 1),
    ([1, 2, 8, 768], 1),
    ([1, 40, 1, 72], 2),
    ([1, 40, 5, 72], 2),
    ([1, 18000, 2, 8], 1),
];

/// Of x, f, h_post, h_res, φ, α, bias and γ.
const INPUTS: usize = 8;

struct Case {
    post: MhcPost,
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
    gamma: Option<Tensor<2>>,
    cotangents: MhcPre,
    held: [Vec<f64>; INPUTS],
    held_cotangents: [Vec<f64>; 4],
    n: usize,
    options: MhcPreOptions,
}

/// The outputs, and the gradients of the inputs that have one.
type Found = ([Vec<f64>; 4], [Option<Vec<f64>>; INPUTS]);

impl Case {
    fn new(
        ([b, s, n, d], sinkhorn): ([usize; 4], usize),
        gamma: bool,
        dtype: DType,
        seed: u64,
        device: &Device,
    ) -> Self {
        let (tokens, rows) = (b * s, n * n + 2 * n);
        let drawn = |at: u64, count: usize, mean: f64| numbers(count, 20 * seed + at, mean);
        let (x, x_held) = tensor(&drawn(0, tokens * n * d, 0.2), [b, s, n, d], dtype, device);
        let (f, f_held) = tensor(&drawn(1, tokens * d, -0.1), [b, s, d], dtype, device);
        let f32 = DType::F32;
        let (h_post, post) = tensor(&drawn(2, tokens * n, 0.7), [b, s, n], f32, device);
        let (h_res, res) = tensor(&drawn(3, tokens * n * n, 0.3), [b, s, n, n], f32, device);
        // Logits of the size of 1: sigmoids that are not saturated.
        let scale = 1.0 / ((n * d) as f64).sqrt();
        let phi: Vec<f64> = drawn(4, rows * n * d, 0.0).iter().map(|x| x * scale).collect();
        let (phi, phi_held) = tensor(&phi, [rows, n * d], f32, device);
        let (alpha, alpha_held) = tensor(&drawn(5, 3, 1.0), [3], f32, device);
        let (bias, bias_held) = tensor(&drawn(6, rows, 0.1), [rows], f32, device);
        let (scales, mut gamma_held) = tensor(&drawn(7, n * d, 1.0), [n, d], f32, device);
        if !gamma {
            gamma_held.clear();
        }
        let (dy, dy_held) = tensor(&drawn(8, tokens * n * d, 0.1), [b, s, n, d], dtype, device);
        let (dh_in, in_held) = tensor(&drawn(9, tokens * d, 0.1), [b, s, d], dtype, device);
        let (dpost, dpost_held) = tensor(&drawn(10, tokens * n, 0.1), [b, s, n], f32, device);
        let (dres, dres_held) = tensor(&drawn(11, tokens * n * n, 0.1), [b, s, n, n], f32, device);
        Self {
            post: MhcPost { x, f, h_post, h_res },
            phi,
            alpha,
            bias,
            gamma: gamma.then_some(scales),
            cotangents: MhcPre { x: dy, h_in: dh_in, h_post: dpost, h_res: dres },
            held: [x_held, f_held, post, res, phi_held, alpha_held, bias_held, gamma_held],
            held_cotangents: [dy_held, in_held, dpost_held, dres_held],
            n,
            options: MhcPreOptions { sinkhorn, ..MhcPreOptions::default() },
        }
    }

    fn inputs(&self) -> Inputs<'_, f64> {
        let [x, f, h_post, h_res, phi, alpha, bias, gamma] = &self.held;
        Inputs { x, f, h_post, h_res, phi, alpha, bias, gamma }
    }

    /// The gradients from the cotangents of those outputs that are `pulled`.
    fn expected(&self, pulled: [bool; 4]) -> ([Vec<f64>; 4], [Vec<f64>; INPUTS]) {
        let cotangents = [0, 1, 2, 3].map(|i| match pulled[i] {
            true => self.held_cotangents[i].clone(),
            false => vec![0.0; self.held_cotangents[i].len()],
        });
        let outputs = oracle::forward(self.inputs(), self.n, self.options);
        let of = cotangents.each_ref().map(|of| &of[..]);
        (outputs, oracle::backward(self.inputs(), self.n, self.options, of))
    }

    fn call(&self, post: MhcPost) -> MhcPre {
        let (phi, alpha, bias) = (self.phi.clone(), self.alpha.clone(), self.bias.clone());
        mhc_post_pre(post, phi, alpha, bias, self.gamma.clone(), self.options).unwrap()
    }

    fn run(&self, wanted: [bool; INPUTS], pulled: [bool; 4]) -> Found {
        fn leaf<const D: usize>(of: &Tensor<D>, wanted: bool) -> Tensor<D> {
            let of = of.clone().autodiff();
            if wanted { of.require_grad() } else { of }
        }
        let MhcPost { x, f, h_post, h_res } = &self.post;
        let (x, f) = (leaf(x, wanted[0]), leaf(f, wanted[1]));
        let (post, res) = (leaf(h_post, wanted[2]), leaf(h_res, wanted[3]));
        let phi = leaf(&self.phi, wanted[4]);
        let (alpha, bias) = (leaf(&self.alpha, wanted[5]), leaf(&self.bias, wanted[6]));
        let gamma = self.gamma.as_ref().map(|gamma| leaf(gamma, wanted[7]));
        let of = MhcPost { x: x.clone(), f: f.clone(), h_post: post.clone(), h_res: res.clone() };
        let weights = (phi.clone(), alpha.clone(), bias.clone(), gamma.clone());
        let next =
            mhc_post_pre(of, weights.0, weights.1, weights.2, weights.3, self.options).unwrap();
        let MhcPre { x: y, h_in, h_post, h_res } = next;
        let outputs = [values(&y), values(&h_in), values(&h_post), values(&h_res)];
        let of = self.cotangents.clone();
        let mut terms = vec![];
        if pulled[0] {
            terms.push(pull(y, &of.x.autodiff()));
        }
        if pulled[1] {
            terms.push(pull(h_in, &of.h_in.autodiff()));
        }
        if pulled[2] {
            terms.push(pull(h_post, &of.h_post.autodiff()));
        }
        if pulled[3] {
            terms.push(pull(h_res, &of.h_res.autodiff()));
        }
        let Some(loss) = terms.into_iter().reduce(|a, b| a + b) else {
            return (outputs, [const { None }; INPUTS]);
        };
        let grads = loss.backward();
        let found = [
            x.grad(&grads).map(|g| values(&g)),
            f.grad(&grads).map(|g| values(&g)),
            post.grad(&grads).map(|g| values(&g)),
            res.grad(&grads).map(|g| values(&g)),
            phi.grad(&grads).map(|g| values(&g)),
            alpha.grad(&grads).map(|g| values(&g)),
            bias.grad(&grads).map(|g| values(&g)),
            gamma.and_then(|gamma| gamma.grad(&grads)).map(|g| values(&g)),
        ];
        (outputs, found)
    }

    fn check(&self, wanted: [bool; INPUTS], pulled: [bool; 4], dtype: DType, what: &str) {
        let (outputs, gradients) = self.run(wanted, pulled);
        let (expected, of) = self.expected(pulled);
        for (i, (found, expected)) in outputs.iter().zip(&expected).enumerate() {
            // The weights are made of streams that have been rounded.
            assert_near(found, expected, dtype, 100, &format!("output {i} of {what}"));
        }
        for (i, (found, expected)) in gradients.iter().zip(&of).enumerate() {
            let there = wanted[i] && !expected.is_empty();
            assert_eq!(found.is_some(), there, "gradient {i} of {what}");
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
                case.check([true; INPUTS], [true; 4], dtype, &what);
            }
        }
    }
}

/// The streams are those that mhc_post makes, bit for bit, and what mhc_pre makes of them is near.
#[test]
fn is_post_and_then_pre() {
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            for (i, shape) in CASES.iter().enumerate() {
                let case = Case::new(*shape, false, dtype, 40 + i as u64, &device);
                let MhcPost { x, f, h_post, h_res } = case.post.clone();
                let next = case.call(case.post.clone());
                let expected = mhc_post(x, f, h_post, h_res).unwrap();
                let what = format!("{shape:?}, {dtype:?}, {device:?}");
                assert!(values(&next.x) == values(&expected), "streams of {what}");
                let (phi, alpha, bias) = (case.phi.clone(), case.alpha.clone(), case.bias.clone());
                let of = mhc_pre(next.x, phi, alpha, bias, None, case.options).unwrap();
                let near = |found: Vec<f64>, expected: Vec<f64>, dtype, name: &str| {
                    assert_near(&found, &expected, dtype, 100, &format!("{name} of {what}"));
                };
                near(values(&next.h_in), values(&of.h_in), dtype, "h_in");
                near(values(&next.h_post), values(&of.h_post), DType::F32, "h_post");
                near(values(&next.h_res), values(&of.h_res), DType::F32, "h_res");
            }
        }
    }
}

/// Inputs whose gradients nobody wants, and outputs that nothing depends on.
#[test]
fn frozen_inputs_and_unused_outputs() {
    for device in devices() {
        for dtype in dtypes(&device) {
            let case = Case::new(([1, 5, 3, 16], 2), true, dtype, 3, &device);
            let on = format!("{dtype:?} on {device:?}");
            // By turns, and each input by itself.
            let frozen = (0..8).map(|i| 255 ^ 1 << i);
            for set in (1..256).step_by(31).chain(frozen) {
                let wanted = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| set >> i & 1 == 1);
                case.check(wanted, [true; 4], dtype, &format!("{wanted:?}, {on}"));
            }
            for set in 1..16 {
                let pulled = [0, 1, 2, 3].map(|i| set >> i & 1 == 1);
                // The streams by themselves depend on what mhc_post takes.
                let mut wanted = [pulled[1] || pulled[2] || pulled[3]; INPUTS];
                wanted[..4].fill(true);
                case.check(wanted, pulled, dtype, &format!("{pulled:?}, {on}"));
            }
            // Where kernels make them, the others are zero then.
            let (_, found) = case.run([true; INPUTS], [true, false, false, false]);
            for of in found[4..].iter().flatten() {
                assert!(of.iter().all(|x| *x == 0.0), "{on}");
            }
        }
    }
}

#[test]
fn repeats_bit_for_bit() {
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            let case = Case::new(([3, 44, 4, 136], 7), true, dtype, 5, &device);
            let first = case.run([true; INPUTS], [true; 4]);
            let second = case.run([true; INPUTS], [true; 4]);
            assert!(first == second, "{dtype:?}, {device:?}");
        }
    }
}

/// Hopper's kernel: tokens that come one after the other through the same cubes are as tokens by themselves. Clusters of
/// three, and ten cubes that hand sums around in a workspace.
#[test]
fn tokens_do_not_depend_on_those_before() {
    let hopper = |device: &Device| device::hardware(device).is_some_and(|it| it.wgmma);
    for device in kiln_test::or_skip("wgmma", devices().into_iter().filter(hopper)) {
        for (tokens, n, d) in [(6000, 4, 768), (1300, 4, 2560), (1300, 3, 1792)] {
            let case = Case::new(([1, tokens, n, d], 3), false, DType::BF16, 1, &device);
            let call = |first: usize, last: usize| {
                let MhcPost { x, f, h_post, h_res } = case.post.clone();
                let next = case.call(MhcPost {
                    x: x.slice([0..1, first..last]),
                    f: f.slice([0..1, first..last]),
                    h_post: h_post.slice([0..1, first..last]),
                    h_res: h_res.slice([0..1, first..last]),
                });
                [values(&next.x), values(&next.h_in), values(&next.h_post), values(&next.h_res)]
            };
            let (all, plans) = plans::listen(|| call(0, tokens));
            assert!(plans.iter().any(|plan| plan.starts_with("mhc_post_pre once")), "{plans:?}");
            for first in (0..tokens).step_by(16) {
                let last = tokens.min(first + 16);
                let some = call(first, last);
                for (i, width) in [n * d, d, n, n * n].into_iter().enumerate() {
                    let expected = &all[i][first * width..last * width];
                    assert!(some[i] == expected, "{i} of tokens from {first}, {n} of {d}");
                }
            }
        }
    }
}

/// Hopper's kernel before the head of a model, which reads no streams: the layer takes dx back in the pass. Two cubes for a
/// token, whose rings go round.
#[test]
fn takes_back_what_h_in_gives_alone() {
    let hopper = |device: &Device| device::hardware(device).is_some_and(|it| it.wgmma);
    for device in kiln_test::or_skip("wgmma", devices().into_iter().filter(hopper)) {
        for shape in [[1, 5400, 2, 264], [1, 6400, 4, 136], [1, 7000, 1, 520]] {
            let case = Case::new((shape, 1), false, DType::BF16, 1, &device);
            let pulled = [false, true, false, false];
            let check = || case.check([true; INPUTS], pulled, DType::BF16, &format!("{shape:?}"));
            let ((), plans) = plans::listen(check);
            let alone = |plan: &&String| {
                plan.starts_with("mhc_pre together") && plan.contains("also: false")
            };
            assert!(plans.iter().any(|plan| alone(&plan)), "{plans:?}");
        }
    }
}

/// Streams, a layer's output and weights that are cut out of wider tensors or lie in another order.
#[test]
fn every_stride() {
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            let mut case = Case::new(([2, 8, 4, 64], 3), true, dtype, 7, &device);
            let (expected, of_all) = case.run([true; INPUTS], [true; 4]);
            let plain = case.post.clone();
            let MhcPost { x, f, h_post, h_res } = plain.clone();
            let across = Tensor::<4>::from_data(x.swap_dims(0, 1).to_data(), (&device, dtype));
            let wide = Tensor::cat(vec![f.clone().zeros_like(), f], 2).narrow(2, 64, 64);
            let later = Tensor::cat(vec![h_post.clone(), h_post], 0).narrow(0, 2, 2);
            let one = h_res.clone().narrow(1, 0, 1);
            let behind = Tensor::cat(vec![one, h_res], 1).narrow(1, 1, 8);
            for (what, post) in [
                ("x swapped", MhcPost { x: across.swap_dims(0, 1), ..plain.clone() }),
                ("f cut", MhcPost { f: wide, ..plain.clone() }),
                ("h_post behind others", MhcPost { h_post: later, ..plain.clone() }),
                ("h_res behind others", MhcPost { h_res: behind, ..plain.clone() }),
            ] {
                case.post = post;
                let (outputs, gradients) = case.run([true; INPUTS], [true; 4]);
                let what = format!("{what}, {dtype:?}, {device:?}");
                assert!(outputs[0] == expected[0], "streams, {what}");
                for (found, expected) in outputs[1..].iter().zip(&expected[1..]) {
                    assert_near(found, expected, dtype, 100, &what);
                }
                for (i, (found, expected)) in gradients.iter().zip(&of_all).enumerate() {
                    let (found, expected) = (found.as_ref().unwrap(), expected.as_ref().unwrap());
                    assert_near(found, expected, dtype, 100, &format!("gradient {i}, {what}"));
                }
            }
        }
    }
}

#[test]
fn gradient_checkpointing() {
    for device in devices() {
        let case = Case::new(([2, 3, 4, 40], 5), false, DType::F32, 11, &device);
        let (_, [dx, ..]) = case.expected([true, true, false, false]);
        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        fn on<const D: usize>(of: &Tensor<D>, device: &Device) -> Tensor<D> {
            Tensor::from_data(of.to_data(), device)
        }
        let MhcPost { x, f, h_post, h_res } = &case.post;
        let x = on(x, &checkpointing).require_grad();
        let post = MhcPost {
            x: x.clone().mul_scalar(2.0).mul_scalar(0.5),
            f: on(f, &checkpointing),
            h_post: on(h_post, &checkpointing),
            h_res: on(h_res, &checkpointing),
        };
        let (phi, alpha) = (on(&case.phi, &checkpointing), on(&case.alpha, &checkpointing));
        let bias = on(&case.bias, &checkpointing);
        let next = mhc_post_pre(post, phi, alpha, bias, None, case.options).unwrap();
        let of = &case.cotangents;
        let loss = pull(next.x.mul_scalar(1.0), &on(&of.x, &checkpointing))
            + pull(next.h_in.mul_scalar(1.0), &on(&of.h_in, &checkpointing));
        let grads = loss.backward();
        assert_near(&values(&x.grad(&grads).unwrap()), &dx, DType::F32, 100, "dx");
    }
}

#[test]
fn no_tokens() {
    for device in devices() {
        let f32 = DType::F32;
        let post = MhcPost {
            x: Tensor::zeros([2, 0, 4, 8], (&device, f32)),
            f: Tensor::zeros([2, 0, 8], (&device, f32)),
            h_post: Tensor::zeros([2, 0, 4], (&device, f32)),
            h_res: Tensor::zeros([2, 0, 4, 4], (&device, f32)),
        };
        let (phi, alpha) = (Tensor::zeros([24, 32], &device), Tensor::zeros([3], &device));
        let bias = Tensor::zeros([24], &device);
        let options = MhcPreOptions::default();
        let next = mhc_post_pre(post, phi, alpha, bias, None, options).unwrap();
        assert_eq!(next.x.dims(), [2, 0, 4, 8]);
        assert_eq!(next.h_in.dims(), [2, 0, 8]);
        assert_eq!(next.h_post.dims(), [2, 0, 4]);
        assert_eq!(next.h_res.dims(), [2, 0, 4, 4]);
    }
}

#[test]
fn wrong_calls_are_named() {
    for device in devices() {
        let case = Case::new(([2, 3, 4, 8], 1), true, DType::F32, 1, &device);
        let error = |post: MhcPost, phi: Tensor<2>, options: MhcPreOptions| {
            let (alpha, bias) = (case.alpha.clone(), case.bias.clone());
            mhc_post_pre(post, phi, alpha, bias, None, options).unwrap_err().to_string()
        };
        let post = MhcPost { f: Tensor::ones([2, 3, 9], &device), ..case.post.clone() };
        assert_eq!(
            error(post, case.phi.clone(), case.options),
            "mhc_post_pre: `f` has shape [2, 3, 9], expected [2, 3, 8]"
        );
        assert_eq!(
            error(case.post.clone(), Tensor::ones([32, 24], &device), case.options),
            "mhc_post_pre: `phi` has shape [32, 24], expected [24, 32]"
        );
        let many = MhcPreOptions { sinkhorn: 33, ..case.options };
        assert_eq!(
            error(case.post.clone(), case.phi.clone(), many),
            "mhc_post_pre: sinkhorn = 33, expected 0 to 32"
        );
    }
}
