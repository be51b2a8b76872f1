//! rope on every device: values and gradients against float64, layouts, autodiff, errors.

use crate::common::orders::{ORDERS, Order};
use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::device;
use kiln_ops::policy::{self, Implementation};
use kiln_ops::prelude::*;
use kiln_ops::rope::oracle;

/// One pair, odd pairs, heads that CUDA pitches, more heads than a unit takes, more than one cube.
const SHAPES: &[[usize; 4]] = &[
    [1, 1, 1, 2],
    [2, 3, 5, 6],
    [1, 2, 129, 80],
    [2, 1, 7, 48],
    [3, 5, 31, 64],
    [2, 9, 17, 96],
    [1, 4, 33, 128],
    [1, 4, 300, 34],
];

const OFFSET: usize = 11;

/// A leaf in an order, and what it holds as `[B, H, T, D]`.
fn input(
    shape: [usize; 4],
    order: Order,
    dtype: DType,
    seed: u64,
    device: &Device,
) -> (Tensor<4>, Vec<f64>) {
    let laid = order.shape(shape);
    let (x, _) = tensor(&numbers(laid.iter().product(), seed, 0.2), laid, dtype, device);
    let held = values(&order.view(x.clone()));
    (x.autodiff().require_grad(), held)
}

fn table(shape: [usize; 4], options: RopeOptions, device: &Device) -> RopeTable {
    RopeTable::new(OFFSET + shape[2] + 3, shape[3], options, device).unwrap()
}

struct Case {
    x: Vec<f64>,
    dy: Vec<f64>,
    y: Vec<f64>,
    dx: Vec<f64>,
}

/// Forward and backward of a fresh case.
fn run(
    shape: [usize; 4],
    options: RopeOptions,
    order: Order,
    dtype: DType,
    seed: u64,
    device: &Device,
) -> Case {
    let (leaf, x) = input(shape, order, dtype, seed, device);
    let n = shape.iter().product();
    let (dy, dy_held) = tensor(&numbers(n, seed + 1, 0.1), shape, dtype, device);
    let y = rope(order.view(leaf.clone()), &table(shape, options, device), OFFSET).unwrap();
    let grads = pull(y.clone(), &dy.autodiff()).backward();
    let dx = order.view(leaf.grad(&grads).unwrap());
    Case { x, dy: dy_held, y: values(&y), dx: values(&dx) }
}

fn check(case: &Case, shape: [usize; 4], options: RopeOptions, dtype: DType, what: &str) {
    let size = [shape[2], shape[3]];
    let y = oracle::forward(&case.x, size, &options, OFFSET);
    let dx = oracle::backward(&case.dy, size, &options, OFFSET);
    assert_near(&case.y, &y, dtype, 1, &format!("y of {what}"));
    assert_near(&case.dx, &dx, dtype, 1, &format!("dx of {what}"));
}

fn every_option(width: usize) -> Vec<RopeOptions> {
    let half = RopeOptions::default();
    let interleaved = RopeOptions { layout: RopeLayout::Interleaved, base: 500.0, ..half };
    let mut options = vec![half, interleaved];
    if width.is_multiple_of(4) {
        options.push(RopeOptions { truncated: true, ..half });
    }
    options
}

#[test]
fn matches_float64() {
    for device in devices() {
        for dtype in dtypes(&device) {
            for (i, shape) in SHAPES.iter().enumerate() {
                for options in every_option(shape[3]) {
                    for order in ORDERS {
                        poison(shape.iter().product(), dtype, &device);
                        let case = run(*shape, options, order, dtype, 10 * i as u64, &device);
                        let what = format!("{shape:?}, {options:?}, {order:?}, {device:?}");
                        check(&case, *shape, options, dtype, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn kernel_and_reference_agree_in_both_orders() {
    let (shape, options) = ([2, 3, 19, 64], RopeOptions::default());
    for device in kernel_devices() {
        for (first, second) in [
            (Implementation::Fused, Implementation::Reference),
            (Implementation::Reference, Implementation::Fused),
        ] {
            for (seed, implementation) in [(1, first), (2, second), (3, first)] {
                let case = policy::force(implementation, || {
                    run(shape, options, Order::Positions, DType::F32, seed, &device)
                });
                let what = format!("{implementation} of order {first}, {second}");
                check(&case, shape, options, DType::F32, &what);
            }
        }
    }
}

#[test]
fn repeats_bit_for_bit() {
    let (shape, options) = ([2, 5, 67, 128], RopeOptions::default());
    for device in kernel_devices() {
        let once = run(shape, options, Order::Heads, DType::F32, 5, &device);
        let again = run(shape, options, Order::Heads, DType::F32, 5, &device);
        assert!(once.y == again.y && once.dx == again.dx, "{device:?}");
    }
}

/// Queries and keys in one launch are what two launches make of them, bit for bit, whichever of
/// them is used afterwards.
#[test]
fn queries_and_keys_together() {
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            for (q_shape, k_heads) in
                [([2, 5, 17, 64], 2), ([1, 2, 33, 80], 7), ([2, 4, 9, 128], 4)]
            {
                let [b, _, t, d] = q_shape;
                let k_shape = [b, k_heads, t, d];
                let options = RopeOptions::default();
                let table = table(q_shape, options, &device);
                let (q, _) = input(q_shape, Order::Positions, dtype, 1, &device);
                let (k, _) = input(k_shape, Order::Cut, dtype, 2, &device);
                let n = |shape: [usize; 4]| shape.iter().product();
                let dq = tensor(&numbers(n(q_shape), 3, 0.1), q_shape, dtype, &device).0;
                let dk = tensor(&numbers(n(k_shape), 4, 0.1), k_shape, dtype, &device).0;
                let (dq, dk) = (dq.autodiff(), dk.autodiff());
                let view = || (Order::Positions.view(q.clone()), Order::Cut.view(k.clone()));
                let (q_in, k_in) = view();
                let alone =
                    (rope(q_in, &table, OFFSET).unwrap(), rope(k_in, &table, OFFSET).unwrap());
                for used in [[true, true], [true, false], [false, true]] {
                    let (q_in, k_in) = view();
                    let (q_out, k_out) = rope_qk(q_in, k_in, &table, OFFSET).unwrap();
                    assert_eq!(values(&q_out), values(&alone.0));
                    assert_eq!(values(&k_out), values(&alone.1));
                    let pulls = [(used[0], q_out, &dq), (used[1], k_out, &dk)];
                    let pulls = pulls.into_iter().filter(|(used, ..)| *used);
                    let loss = pulls.map(|(_, y, dy)| pull(y, dy)).reduce(|a, b| a + b).unwrap();
                    let grads = loss.backward();
                    let near = |leaf: &Tensor<4>, order: Order, dy: &Tensor<4>, used, what| {
                        let found = leaf.grad(&grads).map(|dx| values(&order.view(dx)));
                        let size = [t, d];
                        let dx = oracle::backward(&values(dy), size, &options, OFFSET);
                        if used {
                            assert_near(&found.unwrap(), &dx, dtype, 1, what);
                        } else {
                            assert!(found.is_none_or(|dx| dx.iter().all(|dx| *dx == 0.0)));
                        }
                    };
                    near(&q, Order::Positions, &dq, used[0], "dq");
                    near(&k, Order::Cut, &dk, used[1], "dk");
                }
            }
        }
    }
}

/// One gradient, none, no elements, gradient checkpointing, surroundings that Burn fuses.
#[test]
fn autodiff_in_every_setting() {
    let (shape, options) = ([2, 3, 5, 16], RopeOptions::default());
    for device in devices() {
        let table = table(shape, options, &device);
        let (leaf, x) = input(shape, Order::Heads, DType::F32, 1, &device);
        let (dy, d) = tensor(&numbers(480, 3, 0.0), shape, DType::F32, &device);
        let y = oracle::forward(&x, [5, 16], &options, OFFSET);
        let dx = oracle::backward(&d, [5, 16], &options, OFFSET);
        let plain = leaf.clone().inner();

        let out = rope(plain.clone().autodiff(), &table, OFFSET).unwrap();
        assert!(!out.is_tracked());
        assert_near(&values(&out), &y, DType::F32, 1, "tracked by nobody");

        for (q, k) in [(leaf.clone(), plain.clone().autodiff()), (plain.clone().autodiff(), leaf)] {
            let (q_out, k_out) = rope_qk(q.clone(), k.clone(), &table, OFFSET).unwrap();
            let dy = dy.clone().autodiff();
            let grads = (pull(q_out, &dy) + pull(k_out, &dy)).backward();
            let found = q.grad(&grads).or_else(|| k.grad(&grads)).unwrap();
            assert_near(&values(&found), &dx, DType::F32, 1, "one of q and k");
        }

        let none = Tensor::<4>::zeros([2, 0, 5, 16], &device).autodiff().require_grad();
        assert_eq!(rope(none.clone(), &table, OFFSET).unwrap().dims(), [2, 0, 5, 16]);
        let (q, k) = rope_qk(plain.clone().autodiff(), none, &table, OFFSET).unwrap();
        assert_near(&values(&q), &y, DType::F32, 1, "no keys");
        assert_eq!(k.dims(), [2, 0, 5, 16]);

        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        let leaf = Tensor::<4>::from_data(plain.to_data(), &checkpointing).require_grad();
        let dy = Tensor::<4>::from_data(dy.to_data(), &checkpointing);
        let doubled = leaf.clone().mul_scalar(2.0).exp().log().mul_scalar(0.5);
        let out = rope(doubled.clone(), &table, OFFSET).unwrap().mul_scalar(1.0);
        let (q, k) = rope_qk(doubled.clone(), doubled, &table, OFFSET).unwrap();
        let grads = (pull(out, &dy) + pull(q, &dy) + pull(k, &dy)).backward();
        let found = values(&leaf.grad(&grads).unwrap());
        let three: Vec<f64> = dx.iter().map(|dx| 3.0 * dx).collect();
        let error = kiln_ops::oracle::distance(&found, &three).relative;
        assert!(error < 1e-4, "checkpointing between fused elementwise operations: {error}");
    }
}

/// On CUDA the result may take the memory of its input: only if nobody can see it there.
#[test]
fn an_input_that_somebody_holds_is_left_alone() {
    let (shape, options) = ([2, 5, 7, 16], RopeOptions::default());
    for device in devices() {
        let table = table(shape, options, &device);
        for dtype in dtypes(&device) {
            let (x, held) = input(shape, Order::Heads, dtype, 1, &device);
            let x = x.inner();
            let y = values(&rope(x.clone(), &table, OFFSET).unwrap());
            assert_eq!(values(&x), held);
            let (q, k) = rope_qk(x.clone(), x.clone(), &table, OFFSET).unwrap();
            assert_eq!((values(&q), values(&k)), (y.clone(), y.clone()));
            assert_eq!(values(&x), held);
            let last = rope(x, &table, OFFSET).unwrap();
            assert_eq!(values(&last), y);
        }
    }
}

#[test]
fn wrong_calls_are_named() {
    let device = devices().remove(0);
    let table = RopeTable::new(10, 8, RopeOptions::default(), &device).unwrap();
    let x = |shape: [usize; 4]| Tensor::<4>::ones(shape, &device);
    let message = |r: Result<Tensor<4>, OpError>| r.unwrap_err().to_string();
    assert_eq!(
        message(rope(x([1, 2, 3, 6]), &table, 0)),
        "rope: `x` has shape [1, 2, 3, 6], expected [B, H, T, 8] as the table"
    );
    assert_eq!(
        message(rope(x([1, 2, 3, 8]), &table, 8)),
        "rope: offset = 8, expected at most 7 for T = 3 and 10 positions"
    );
    assert_eq!(
        message(rope(x([1, 2, 11, 8]), &table, 0)),
        "rope: offset = 0, expected a table of at least T = 11 positions, not of 10"
    );
    let two = |q, k| rope_qk(q, k, &table, 0).map(|(q, _)| q);
    assert_eq!(
        message(two(x([1, 2, 3, 8]), x([1, 2, 4, 8]))),
        "rope: `k` has shape [1, 2, 4, 8], expected [1, Hkv, 3, 8] as `q`"
    );
    assert_eq!(
        message(two(x([1, 2, 3, 8]), x([1, 1, 3, 8]).cast(DType::F16))),
        "rope: `k` is F16, expected F32"
    );
    let wrong =
        |head_dim, options| RopeTable::new(4, head_dim, options, &device).unwrap_err().to_string();
    let half = RopeOptions::default();
    assert_eq!(wrong(7, half), "rope: head_dim = 7, expected an even number above 0");
    let truncated = RopeOptions { truncated: true, ..half };
    assert_eq!(
        wrong(6, truncated),
        "rope: head_dim = 6, expected a multiple of 4 (truncated frequencies)"
    );
    if !device::is_cube(&device) {
        let refused = policy::force(Implementation::Fused, || rope(x([1, 2, 3, 8]), &table, 0));
        assert!(message(refused).starts_with("rope: the fused kernel cannot run on cpu"));
    }
}

/// Queries and keys of a packed tensor are turned as they are by themselves, the values are not.
#[test]
fn a_packed_tensor_is_turned_in_one_piece() {
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            for ([batch, length, width], [heads, kv_heads]) in
                [([2, 19, 64], [4, 2]), ([1, 1, 128], [3, 1]), ([3, 5, 6], [2, 2])]
            {
                for options in every_option(width) {
                    let total = heads + 2 * kv_heads;
                    let shape = [batch, length, total * width];
                    let n = shape.iter().product();
                    let (x, _) = tensor(&numbers(n, 3, 0.1), shape, dtype, &device);
                    let (dy, _) = tensor(&numbers(n, 4, 0.1), shape, dtype, &device);
                    let table = RopeTable::new(OFFSET + length, width, options, &device).unwrap();
                    let leaf = x.autodiff().require_grad();
                    poison(n, dtype, &device);
                    // One that others hold, and one that nobody does.
                    for alone in [false, true] {
                        let of = if alone { leaf.clone().mul_scalar(1.0) } else { leaf.clone() };
                        let y = rope_qkv(of, heads, kv_heads, &table, OFFSET).unwrap();
                        let grads = pull(y.clone(), &dy.clone().autodiff()).backward();
                        let found = [values(&y), values(&leaf.grad(&grads).unwrap())];
                        let parts = |x: Tensor<3>, back: bool| {
                            let x = x.reshape([batch, length, total, width]).swap_dims(1, 2);
                            let turned = heads + kv_heads;
                            let (first, rest) =
                                (x.clone().narrow(1, 0, turned), x.narrow(1, turned, kv_heads));
                            let first = first.cast(DType::F32);
                            let first = match back {
                                false => kiln_ops::rope::reference::rope(first, &table, OFFSET),
                                true => {
                                    let leaf = first.zeros_like().autodiff().require_grad();
                                    let y = kiln_ops::rope::reference::rope(
                                        leaf.clone(),
                                        &table,
                                        OFFSET,
                                    );
                                    let grads = pull(y, &first.autodiff()).backward();
                                    leaf.grad(&grads).unwrap()
                                }
                            };
                            let all = Tensor::cat(vec![first, rest.cast(DType::F32)], 1);
                            values(&all.swap_dims(1, 2).reshape(shape))
                        };
                        let expected =
                            [parts(leaf.clone().inner(), false), parts(dy.clone(), true)];
                        for (found, expected) in found.iter().zip(&expected) {
                            let what = format!("{shape:?}, {options:?}, alone {alone}");
                            assert_near(found, expected, dtype, 2, &what);
                        }
                    }
                }
            }
        }
        let table = RopeTable::new(4, 8, RopeOptions::default(), &device).unwrap();
        let call = |width, offset| {
            let qkv = Tensor::<3>::ones([1, 2, width], &device);
            rope_qkv(qkv, 2, 1, &table, offset).unwrap_err().to_string()
        };
        assert_eq!(
            call(30, 0),
            "rope: `qkv` has shape [1, 2, 30], expected [B, T, 32] for 2 + 2·1 heads as the table"
        );
        assert_eq!(call(32, 3), "rope: offset = 3, expected at most 2 for T = 2 and 4 positions");
    }
}
