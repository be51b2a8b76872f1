//! attention on every device: layouts, packed inputs, documents, autodiff, numbers that are none, errors.

use crate::common::orders::{ORDERS, Order};
use crate::common::*;
use burn::tensor::{DType, Device, Tensor};
use kiln_ops::attention::{backend, oracle};
use kiln_ops::device;
use kiln_ops::launch::audit::Audit;
use kiln_ops::policy::{self, Implementation};
use kiln_ops::prelude::*;

/// B, H, Hkv, T, S, D.
type Sizes = [usize; 6];

fn dims([batch, heads, kv_heads, queries, keys, width]: Sizes) -> oracle::Dims {
    oracle::Dims { batch, heads, kv_heads, queries, keys, width }
}

/// y, dq, dk, dv in float64.
fn expected(of: &[Vec<f64>; 4], sizes: Sizes, rule: &oracle::Rule) -> [Vec<f64>; 4] {
    let ([q, k, v, dy], d) = (of, dims(sizes));
    let y = oracle::forward(q, k, v, d, rule);
    let (dq, dk, dv) = oracle::backward(q, k, v, d, rule, dy);
    [y, dq, dk, dv]
}

/// Shapes of q, k, v and dy.
fn shapes([b, h, kv, t, s, d]: Sizes) -> [[usize; 4]; 4] {
    [[b, h, t, d], [b, kv, s, d], [b, kv, s, d], [b, h, t, d]]
}

/// What is laid out in an order, and what it holds as `[B, H, T, D]`.
fn laid(
    shape: [usize; 4],
    order: Order,
    dtype: DType,
    seed: u64,
    device: &Device,
) -> (Tensor<4>, Vec<f64>) {
    let laid = order.shape(shape);
    let (x, _) = tensor(&numbers(laid.iter().product(), seed, 0.1), laid, dtype, device);
    let held = values(&order.view(x.clone()));
    (x, held)
}

/// q, k, v and dy, each with what it holds; their seeds follow `seed`.
fn made(
    sizes: Sizes,
    orders: [Order; 4],
    dtype: DType,
    seed: u64,
    device: &Device,
) -> [(Tensor<4>, Vec<f64>); 4] {
    let shapes = shapes(sizes);
    std::array::from_fn(|i| laid(shapes[i], orders[i], dtype, seed + 1 + i as u64, device))
}

/// Roundings that the results of a bf16 or f16 call have gone through, scores and their gradients included.
const ROUNDINGS: u32 = 6;

fn near(found: &[Vec<f64>; 4], expected: &[Vec<f64>; 4], dtype: DType, what: &str) {
    for (i, name) in ["y", "dq", "dk", "dv"].into_iter().enumerate() {
        assert_near(&found[i], &expected[i], dtype, ROUNDINGS, &format!("{name} of {what}"));
    }
}

#[test]
fn reads_every_layout_where_it_is() {
    let _others = crate::beside_others();
    let sizes = [2, 4, 2, 19, 37, 64];
    let options = AttentionOptions { window: Some(11), ..Default::default() };
    let rule = oracle::Rule::new(options, sizes[5]);
    for device in devices() {
        for dtype in dtypes(&device) {
            for (i, order) in ORDERS.into_iter().enumerate() {
                let orders = [order, ORDERS[(i + 1) % 4], ORDERS[(i + 2) % 4], Order::Heads];
                let made = made(sizes, orders, dtype, 10 * i as u64, &device);
                let [q, k, v, dy] = made.each_ref().map(|(x, _)| x.clone());
                let leaves = [q, k, v].map(|x| x.autodiff().require_grad());
                let [q, k, v] = std::array::from_fn(|i| orders[i].view(leaves[i].clone()));
                poison(dy.dims().iter().product(), dtype, &device);
                let y = attention(q, k, v, options).unwrap();
                let grads = pull(y.clone(), &dy.autodiff()).backward();
                let grad = |i: usize| values(&orders[i].view(leaves[i].grad(&grads).unwrap()));
                let found = [values(&y), grad(0), grad(1), grad(2)];
                let what = format!("{orders:?}, {device:?}");
                near(&found, &expected(&made.map(|(_, x)| x), sizes, &rule), dtype, &what);
            }
        }
    }
}

/// Gradients that come cut out of wider tensors or transposed.
#[test]
fn reads_cotangents_where_they_are() {
    let _others = crate::beside_others();
    let sizes = [2, 2, 1, 21, 21, 64];
    let options = AttentionOptions::default();
    let rule = oracle::Rule::new(options, sizes[5]);
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            for order in ORDERS {
                let orders = [Order::Heads, Order::Heads, Order::Heads, order];
                let made = made(sizes, orders, dtype, 50, &device);
                let [q, k, v, dy] = made.each_ref().map(|(x, _)| x.clone());
                let inputs = [q, k, v];
                let (y, lse) = backend::forward(inputs.clone(), None, options);
                let kept = (y.clone(), lse);
                let grads = backend::backward(order.view(dy), inputs, kept, None, options);
                let [dq, dk, dv] = grads.map(|grad| values(&grad));
                let what = format!("dy as {order:?}");
                let found = [values(&y), dq, dk, dv];
                near(&found, &expected(&made.map(|(_, x)| x), sizes, &rule), dtype, &what);
            }
        }
    }
}

/// A packed tensor gives what its parts give, in value and gradient.
#[test]
fn packed_inputs_are_read_in_one_piece() {
    let _others = crate::beside_others();
    for device in devices() {
        for dtype in dtypes(&device) {
            for (heads, kv_heads, length, width, lengths) in [
                (4, 2, 33, 64, None),
                (3, 1, 70, 20, None),
                (2, 2, 40, 48, Some([7, 0, 30, 3])),
                (1, 1, 1, 1, None),
            ] {
                let batch = if lengths.is_some() { 1 } else { 2 };
                let documents =
                    lengths.map(|lengths: [usize; 4]| Documents::new(&lengths, &device).unwrap());
                let documents = documents.as_ref();
                let options = AttentionOptions { softcap: Some(3.0), ..Default::default() };
                let shape = [batch, length, (heads + 2 * kv_heads) * width];
                let qkv = numbers(shape.iter().product(), 7, 0.1);
                let leaf = tensor(&qkv, shape, dtype, &device).0.autodiff().require_grad();
                let n = batch * length * heads * width;
                let dy =
                    tensor(&numbers(n, 8, 0.1), [batch, length, heads * width], dtype, &device);
                let part = |first: usize, heads: usize| {
                    let part = leaf.clone().narrow(2, first * width, heads * width);
                    part.reshape([batch, length, heads, width]).swap_dims(1, 2)
                };
                let of_parts = || {
                    let [q, k, v] = [(0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)]
                        .map(|(first, heads)| part(first, heads));
                    let y = match documents {
                        Some(documents) => attention_documents(q, k, v, documents, options),
                        None => attention(q, k, v, options),
                    };
                    y.unwrap().swap_dims(1, 2).reshape([batch, length, heads * width])
                };
                let results = |y: Tensor<3>| {
                    let grads = pull(y.clone(), &dy.0.clone().autodiff()).backward();
                    [values(&y), values(&leaf.grad(&grads).unwrap())]
                };
                let found = attention_qkv(leaf.clone(), heads, kv_heads, documents, options);
                let found = results(found.unwrap());
                let expected = policy::force(Implementation::Reference, || results(of_parts()));
                for (found, expected) in found.iter().zip(&expected) {
                    let what = format!("{shape:?}, {device:?}");
                    assert_near(found, expected, dtype, 2 * ROUNDINGS, &what);
                }
            }
        }
    }
}

#[test]
fn documents_see_themselves_alone() {
    let _others = crate::beside_others();
    let lengths = [5, 0, 40, 1, 33];
    let total: usize = lengths.iter().sum();
    let ends = [0, 5, 5, 45, 46, 79];
    let sizes = [1, 2, 1, total, total, 32];
    for device in devices() {
        let documents = Documents::new(&lengths, &device).unwrap();
        assert_eq!(documents.total(), total);
        let same = Documents::from_cu_seqlens(&ends, &device).unwrap();
        for options in [
            AttentionOptions::default(),
            AttentionOptions { causal: false, ..Default::default() },
            AttentionOptions { window: Some(7), softcap: Some(2.0), ..Default::default() },
        ] {
            let rule = oracle::Rule::new(options, sizes[5]);
            let rule = oracle::Rule { documents: Some(ends.to_vec()), ..rule };
            let made = made(sizes, [Order::Heads; 4], DType::F32, 70, &device);
            let [q, k, v, dy] = made.each_ref().map(|(x, _)| x.clone());
            let leaves = [q, k, v].map(|x| x.autodiff().require_grad());
            let [q, k, v] = leaves.clone();
            let y = attention_documents(q, k, v, &documents, options).unwrap();
            let grads = pull(y.clone(), &dy.autodiff()).backward();
            let grad = |i: usize| values(&leaves[i].grad(&grads).unwrap());
            let found = [values(&y), grad(0), grad(1), grad(2)];
            let what = format!("{options:?}, {device:?}");
            near(&found, &expected(&made.map(|(_, x)| x), sizes, &rule), DType::F32, &what);
            let [q, k, v] = leaves;
            let again = attention_documents(q, k, v, &same, options).unwrap();
            assert_eq!(values(&again), values(&y));
        }
    }
}

/// Each of them alone and with others, right, and no output of kernels that nobody wants.
#[test]
fn gradients_of_frozen_inputs_are_not_made() {
    let _alone = crate::alone();
    let sizes = [2, 2, 1, 11, 15, 32];
    let options = AttentionOptions::default();
    let rule = oracle::Rule::new(options, sizes[5]);
    for device in devices() {
        for dtype in dtypes(&device) {
            let made = made(sizes, [Order::Heads; 4], dtype, 80, &device);
            let [q, k, v, dy] = made.each_ref().map(|(x, _)| x.clone());
            let plain = [q, k, v];
            let expected = expected(&made.map(|(_, x)| x), sizes, &rule);
            let roundings = if dtype == DType::F32 { 1 } else { ROUNDINGS };
            for set in 1..8 {
                let wanted: [bool; 3] = std::array::from_fn(|i| set & (1 << i) != 0);
                let what = format!("{wanted:?}, {dtype:?}, {device:?}");
                let inputs: [_; 3] = std::array::from_fn(|i| {
                    let x = plain[i].clone().autodiff();
                    if wanted[i] { x.require_grad() } else { x }
                });
                let audit = Audit::begin();
                let [q, k, v] = inputs.clone();
                let y = attention(q, k, v, options).unwrap();
                let grads = pull(y, &dy.clone().autodiff()).backward();
                let found = inputs.map(|x| x.grad(&grads).map(|grad| values(&grad)));
                for finding in audit.finish() {
                    assert!(finding.clean(), "{finding}, {what}");
                }
                for i in 0..3 {
                    assert_eq!(found[i].is_some(), wanted[i], "{what}");
                    if let Some(found) = &found[i] {
                        assert_near(found, &expected[1 + i], dtype, roundings, &what);
                    }
                }
            }
        }
    }
}

/// None wanted, no queries, gradient checkpointing, surroundings that Burn fuses.
#[test]
fn autodiff_in_every_setting() {
    let _others = crate::beside_others();
    let sizes = [2, 2, 1, 9, 13, 16];
    let options = AttentionOptions::default();
    let rule = oracle::Rule::new(options, sizes[5]);
    for device in devices() {
        let made = made(sizes, [Order::Heads; 4], DType::F32, 90, &device);
        let [q, k, v, dy] = made.each_ref().map(|(x, _)| x.clone());
        let expected = expected(&made.map(|(_, x)| x), sizes, &rule);
        let plain = [q, k, v];

        let [q, k, v] = plain.clone().map(Tensor::autodiff);
        let y = attention(q, k, v, options).unwrap();
        assert!(!y.is_tracked());
        assert_near(&values(&y), &expected[0], DType::F32, 1, "tracked by nobody");

        let none = Tensor::<4>::zeros([2, 2, 0, 16], &device).autodiff().require_grad();
        let [_, k, v] = plain.clone().map(|x| x.autodiff().require_grad());
        let y = attention(none, k.clone(), v, options).unwrap();
        assert_eq!(y.dims(), [2, 2, 0, 16]);
        let grads = (y.sum() + k.clone().mul_scalar(2.0).sum()).backward();
        assert!(values(&k.grad(&grads).unwrap()).iter().all(|dk| *dk == 2.0), "no queries");

        let checkpointing = device.clone().autodiff().gradient_checkpointing();
        let load = |x: &Tensor<4>| Tensor::<4>::from_data(x.to_data(), &checkpointing);
        let leaves = plain.each_ref().map(|x| load(x).require_grad());
        // Elementwise operations on either side.
        let [q, k, v] = leaves.clone().map(|x| x.exp().log());
        let y = attention(q, k, v, options).unwrap().mul_scalar(1.0);
        let grads = pull(y, &load(&dy)).backward();
        for (leaf, expected) in leaves.iter().zip(&expected[1..]) {
            let found = values(&leaf.grad(&grads).unwrap());
            let error = kiln_ops::oracle::distance(&found, expected).relative;
            assert!(error < 1e-4, "checkpointing between elementwise operations: {error}");
        }
    }
}

/// A query that is not a number spoils its own row, a key those of the queries that see it.
#[test]
fn what_is_not_a_number_stays_so() {
    let _others = crate::beside_others();
    for device in devices() {
        for dtype in dtypes(&device) {
            // Widths of every family of kernels, one tile of keys and several.
            for (length, width, at) in [(8, 8, 5), (200, 64, 150), (200, 128, 70)] {
                let made = |spoiled: bool| {
                    let mut x = numbers(length * width, 3, 0.1);
                    if spoiled {
                        x[at * width] = f64::NAN;
                    }
                    tensor(&x, [1, 1, length, width], dtype, &device).0
                };
                for (name, spoiled) in [("query", [true, false]), ("key", [false, true])] {
                    let [q, k] = spoiled.map(made);
                    let y = attention(q, k, made(false), AttentionOptions::default()).unwrap();
                    for (t, row) in values(&y).chunks(width).enumerate() {
                        let expected = if name == "query" { t == at } else { t >= at };
                        let found = row.iter().filter(|y| y.is_nan()).count();
                        let what = format!("{name} {at}, row {t} of {length}, {dtype:?}");
                        assert_eq!(found, if expected { width } else { 0 }, "{what}, {device:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn repeats_bit_for_bit() {
    let _others = crate::beside_others();
    let sizes = [1, 6, 2, 150, 150, 40];
    let options = AttentionOptions::default();
    for device in kernel_devices() {
        let made = shapes(sizes).map(|s| laid(s, Order::Heads, DType::F32, 5, &device).0);
        let run = || {
            let [q, k, v, dy] = made.clone();
            let inputs = [q, k, v];
            let kept = backend::forward(inputs.clone(), None, options);
            let y = values(&kept.0);
            let grads = backend::backward(dy, inputs, kept, None, options);
            (y, grads.map(|grad| values(&grad)))
        };
        assert!(run() == run(), "{device:?}");
    }
}

/// Keys and values that all heads and sequences share, which take the memory of one head.
#[test]
fn keys_shared_by_all_heads_and_sequences() {
    let _others = crate::beside_others();
    for device in kernel_devices() {
        for dtype in dtypes(&device) {
            let make = |shape, seed| laid(shape, Order::Heads, dtype, seed, &device).0;
            // As in training, and as in decoding.
            for queries in [70, 1] {
                let q = make([2, 4, queries, 64], 1);
                let [k, v] = [2, 3].map(|seed| make([1, 1, 70, 64], seed));
                let options = AttentionOptions::default();
                let call = |k, v| values(&attention(q.clone(), k, v, options).unwrap());
                let [k_all, v_all] = [&k, &v].map(|x| x.clone().repeat(&[2, 4, 1, 1]));
                let found = call(k.expand([2, 4, 70, 64]), v.expand([2, 4, 70, 64]));
                let what = format!("{queries} queries on {device:?}");
                assert_near(&found, &call(k_all, v_all), dtype, ROUNDINGS, &what);
            }
        }
    }
}

/// A soft-cap far above all scores changes nothing.
#[test]
fn a_large_softcap_is_none() {
    let _others = crate::beside_others();
    let sizes = [1, 4, 2, 24, 24, 32];
    for device in devices() {
        let made = shapes(sizes).map(|s| laid(s, Order::Heads, DType::F32, 7, &device).0);
        let run = |softcap| {
            let [q, k, v, dy] = made.clone();
            let [q, k, v] = [q, k, v].map(|x| x.autodiff().require_grad());
            let options = AttentionOptions { softcap, ..Default::default() };
            let y = attention(q.clone(), k.clone(), v.clone(), options).unwrap();
            let grads = pull(y.clone(), &dy.autodiff()).backward();
            let of = |x: Tensor<4>| values(&x.grad(&grads).unwrap());
            [values(&y), of(q), of(k), of(v)]
        };
        let without = run(None);
        for cap in [1e6, 1e9] {
            near(&run(Some(cap)), &without, DType::F32, &format!("{cap} on {device:?}"));
        }
    }
}

/// Sums of products of f16 may be more than f16 holds.
#[test]
fn large_scores_of_f16_are_right() {
    let _others = crate::beside_others();
    for device in those_with(DType::F16) {
        let full = |x: f64| Tensor::<4>::full([1, 1, 3, 128], x, (&device, DType::F16));
        let rows = Tensor::<1>::from_floats([1.0, 3.0, 5.0], &device).cast(DType::F16);
        let v = rows.reshape([1, 1, 3, 1]).expand([1, 1, 3, 128]);
        // ±73,728 for all: a mean of what is seen.
        for k in [-24.0, 24.0] {
            let y = attention(full(24.0), full(k), v.clone(), AttentionOptions::default()).unwrap();
            let firsts: Vec<f64> = values(&y).chunks(128).map(|row| row[0]).collect();
            assert_eq!(firsts, [1.0, 2.0, 3.0], "{device:?}, {k}");
        }
    }
}

/// Heads that no kernel takes are the reference's, and an error where the kernel is asked for.
#[test]
fn heads_wider_than_kernels_take() {
    let _others = crate::beside_others();
    for device in devices() {
        let x = || Tensor::<4>::ones([1, 1, 2, 257], &device);
        let call = || attention(x(), x(), x(), AttentionOptions::default());
        assert_eq!(values(&call().unwrap()), vec![1.0; 514]);
        let refused = policy::force(Implementation::Fused, call).unwrap_err().to_string();
        let reason = "kernels take heads of 1 to 256 elements, these have 257";
        assert!(refused.ends_with(reason), "{refused}");
    }
}

#[test]
fn wrong_calls_are_named() {
    let _others = crate::beside_others();
    let device = devices().remove(0);
    let x = |shape: [usize; 4]| Tensor::<4>::ones(shape, &device);
    let q = || x([1, 4, 3, 8]);
    let options = AttentionOptions::default();
    let with = |options| attention(q(), q(), q(), options).unwrap_err().to_string();
    let window = AttentionOptions { window: Some(0), ..options };
    assert_eq!(with(window), "attention: window = 0, expected at least 1");
    let window = AttentionOptions { window: Some(2), causal: false, ..options };
    assert_eq!(with(window), "attention: window = 2, expected none without `causal`");
    for (cap, shown) in [(0.0, "0"), (-1.0, "-1"), (f64::NAN, "NaN"), (1e-60, "1e-60")] {
        let found = with(AttentionOptions { softcap: Some(cap), ..options });
        let start = format!("attention: softcap = {shown}");
        assert!(found.starts_with(&start) && found.ends_with("a number above 0"), "{found}");
    }
    for cap in [3e38, 1e38, 1e-40] {
        let found = with(AttentionOptions { softcap: Some(cap), ..options });
        assert!(found.ends_with("expected one that f32 holds, and scale / softcap too"), "{found}");
    }
    for scale in [1e39, f64::INFINITY, f64::NAN] {
        let found = with(AttentionOptions { scale: Some(scale), ..options });
        assert!(found.ends_with("expected a finite number"), "{found}");
    }
    let message = |r: Result<Tensor<4>, OpError>| r.unwrap_err().to_string();
    assert_eq!(
        message(attention(q(), x([1, 3, 3, 8]), x([1, 3, 3, 8]), options)),
        "attention: `k` has shape [1, 3, 3, 8], expected [1, Hkv, S, 8] with 4 a multiple of Hkv, \
         S at least 1"
    );
    let documents = Documents::new(&[2, 2], &device).unwrap();
    assert_eq!(
        message(attention_documents(q(), q(), q(), &documents, options)),
        "attention: `q` has shape [1, 4, 3, 8], expected one sequence of T = S = 4, the rows of all \
         documents"
    );
    let ends = |ends: &[usize]| Documents::from_cu_seqlens(ends, &device).unwrap_err().to_string();
    assert_eq!(ends(&[]), "attention: cu_seqlens = none, expected 0 first");
    assert_eq!(ends(&[1, 2]), "attention: cu_seqlens = 1, expected 0 first");
    let decreasing = "attention: cu_seqlens = 2 after 3, expected ends that do not decrease";
    assert_eq!(ends(&[0, 3, 2]), decreasing);
    let nothing = "attention: cu_seqlens = 0, expected 1 to 2³¹ − 1 rows in all documents";
    assert_eq!(ends(&[0, 0]), nothing);
    let packed = |width, heads, kv_heads| {
        let qkv = Tensor::<3>::ones([1, 2, width], &device);
        attention_qkv(qkv, heads, kv_heads, None, options).unwrap_err().to_string()
    };
    assert_eq!(
        packed(24, 3, 2),
        "attention: heads = 3, expected a multiple of `kv_heads` = 2, both at least 1"
    );
    assert_eq!(
        packed(20, 4, 2),
        "attention: `qkv` has shape [1, 2, 20], expected [B, T, 8·D] with T, D at least 1"
    );
    if !device::is_cube(&device) {
        let refused = policy::force(Implementation::Fused, || attention(q(), q(), q(), options));
        assert!(message(refused).starts_with("attention: the fused kernel cannot run on cpu"));
    }
}
