//! More elements than 32 bits can number: rows before and behind 2³¹ and 2³², and the last ones, are what the same rows
//! alone are. On a CUDA device with room for them; elsewhere the same with few rows. By itself, since it takes the memory.

use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use kiln_ops::prelude::*;

#[path = "../common/mod.rs"]
#[allow(dead_code)] // of what the tests share
mod common;

mod matrices;
mod parameters;
mod tables;

use common::{assert_near, kernel_devices, values};
use std::sync::{Mutex, PoisonError};

/// Bytes that a call takes at most, with what Burn's operations around it take.
const MEMORY: u64 = 110 << 30;
/// Rows that are looked at in each place.
const ROWS: usize = 8;

/// Whether the device has so much memory.
fn has_room(device: &Device) -> bool {
    kiln_ops::device::is_cuda(device)
        && kiln_ops::device::memory(device).is_some_and(|memory| memory >= MEMORY)
}

/// Rows of `width` elements that are over 2³² in all, where the device has room for them.
fn rows(device: &Device, width: usize) -> usize {
    if has_room(device) { (1usize << 32) / width + 24 } else { 64 }
}

/// Every device with kernels, one test at a time; says so where there is no such room.
fn on_each(run: impl Fn(&Device)) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for device in kernel_devices() {
        if rows(&device, 4096) == 64 {
            kiln_test::skip("large", format!("{device:?} has no {MEMORY} bytes of memory"));
        }
        run(&device);
        free(&device);
    }
}

/// Gives back the memory that nothing is in, which streams do not share.
fn free(device: &Device) {
    device.sync().unwrap();
    device.memory_cleanup();
}

/// The first of the rows that are looked at.
fn places(rows: usize, width: usize) -> Vec<usize> {
    let around = |element: usize| (element / width).saturating_sub(ROWS / 2);
    let places = [0, around(1 << 31), around(1 << 32), rows - ROWS];
    places.into_iter().filter(|first| first + ROWS <= rows).collect()
}

fn random(rows: usize, width: usize, device: &Device) -> Tensor<2> {
    Tensor::random([rows, width], Distribution::Normal(0.0, 1.0), (device, dtype(device)))
}

/// wgpu has no bf16.
fn dtype(device: &Device) -> DType {
    if device.supports_dtype(DType::BF16) { DType::BF16 } else { DType::F32 }
}

fn cut(x: &Tensor<2>, first: usize) -> Tensor<2> {
    x.clone().narrow(0, first, ROWS)
}

/// The rows from `first` on, which are others than those where 32 bits of their place lead.
fn distinct(x: &Tensor<2>, first: usize) -> Tensor<2> {
    let width = x.dims()[1];
    for bits in [31, 32] {
        if let Some(wrapped) = first.checked_sub((1usize << bits) / width) {
            assert!(values(&cut(x, first)) != values(&cut(x, wrapped)), "rows from {first} on");
        }
    }
    cut(x, first)
}

/// A cotangent that is zero but for the rows of these places.
fn cotangent(rows: usize, width: usize, places: &[usize], device: &Device) -> Tensor<2> {
    let mut wanted = vec![0.0f32; rows];
    places.iter().for_each(|first| wanted[*first..first + ROWS].fill(1.0));
    let wanted = Tensor::<1>::from_data(wanted.as_slice(), device).cast(dtype(device));
    random(rows, width, device) * wanted.unsqueeze_dim(1)
}

/// `of` of all rows of its inputs, of `width` elements, and their gradients, against `of` of some rows. Those of the result
/// have `width_of_y`.
fn agree<const N: usize>(
    name: &str,
    [width, width_of_y]: [usize; 2],
    device: &Device,
    of: impl Fn([Tensor<2>; N]) -> Tensor<2>,
) {
    free(device);
    let widest = width.max(width_of_y);
    let rows = rows(device, widest);
    let dtype = dtype(device);
    let run = |inputs: [Tensor<2>; N], dy: Tensor<2>| -> (Tensor<2>, [Tensor<2>; N]) {
        let leaves = inputs.map(|x| x.autodiff().require_grad());
        let y = of(leaves.clone());
        let held = y.clone().inner();
        let grads = (y * dy.autodiff()).sum().backward();
        (held, leaves.map(|x| x.grad(&grads).expect("every input has a gradient")))
    };
    let inputs: [Tensor<2>; N] = std::array::from_fn(|_| random(rows, width, device));
    let dy = random(rows, width_of_y, device);
    let (y, gradients) = run(inputs.clone(), dy.clone());
    assert_eq!(y.dims(), [rows, width_of_y], "{name}");
    for first in places(rows, widest) {
        let some = inputs.clone().map(|x| distinct(&x, first));
        let (expected, of_some) = run(some, distinct(&dy, first));
        let what = format!("{name}, {ROWS} of {rows} rows from {first} on, {device:?}");
        assert_near(&values(&cut(&y, first)), &values(&expected), dtype, 2, &what);
        for (i, (all, some)) in gradients.iter().zip(&of_some).enumerate() {
            let what = format!("gradient {i} of {what}");
            assert_near(&values(&cut(all, first)), &values(some), dtype, 2, &what);
        }
    }
}

/// The gradient of the losses of rows, whose targets are the first classes in turn, against that of some rows.
fn agree_on_losses(
    x: Tensor<2>,
    classes: i64,
    loss: impl Fn(Tensor<2>, Tensor<1, Int>) -> Tensor<1>,
) {
    let device = &x.device();
    let [rows, width] = x.dims();
    let targets = Tensor::<1, Int>::arange(0..rows as i64, device).remainder_scalar(classes);
    let gradient = |x: Tensor<2>, targets: Tensor<1, Int>| {
        let rows = x.dims()[0] as f64;
        let leaf = x.autodiff().require_grad();
        // Of the sum over rows, not of their mean.
        leaf.grad(&(loss(leaf.clone(), targets.autodiff()) * rows).backward()).unwrap()
    };
    let all = gradient(x.clone(), targets.clone());
    for first in places(rows, width) {
        let some = gradient(distinct(&x, first), targets.clone().narrow(0, first, ROWS));
        let what = format!("{ROWS} of {rows} rows from {first} on, {device:?}");
        assert_near(&values(&cut(&all, first)), &values(&some), dtype(device), 2, &what);
    }
}

/// The gradient of a weight, which is a sum over all rows, against that of some rows alone, where all others have no cotangent.
fn adds_up<const D: usize>(
    name: &str,
    [width, width_of_y]: [usize; 2],
    weight: Tensor<D>,
    of: impl Fn(Tensor<2>, Tensor<D>) -> Tensor<2>,
) {
    let device = &weight.device();
    free(device);
    let widest = width.max(width_of_y);
    let rows = rows(device, widest);
    let places = places(rows, widest);
    let dy = cotangent(rows, width_of_y, &places, device);
    let x = random(rows, width, device);
    let some =
        |of: &Tensor<2>| Tensor::cat(places.iter().map(|first| distinct(of, *first)).collect(), 0);
    let gradient = |x: Tensor<2>, dy: Tensor<2>| {
        let leaf = weight.clone().autodiff().require_grad();
        let y = of(x.autodiff(), leaf.clone());
        let grads = (y * dy.autodiff()).sum().backward();
        values(&leaf.grad(&grads).expect("the weight has a gradient"))
    };
    let what = format!("gradient of a weight of {name}, of {rows} rows, {device:?}");
    let expected = gradient(some(&x), some(&dy));
    assert_near(&gradient(x, dy), &expected, dtype(device), 2, &what);
}

const STREAMS: usize = 4;

/// What mHC's streams are made with.
struct Streams {
    phi: Tensor<2>,
    alpha: Tensor<1>,
    bias: Tensor<1>,
}

impl Streams {
    fn new(width: usize, device: &Device) -> Self {
        let all = STREAMS * (STREAMS + 2);
        let distribution = Distribution::Normal(0.0, 0.02);
        Self {
            phi: Tensor::random([all, width], distribution, device),
            alpha: Tensor::ones([3], device),
            bias: Tensor::zeros([all], device),
        }
    }

    /// Rows as positions of several streams.
    fn of(&self, x: Tensor<2>) -> Tensor<4> {
        let [rows, width] = x.dims();
        x.reshape([1, rows, STREAMS, width / STREAMS])
    }

    fn pre(&self, x: Tensor<4>, phi: Tensor<2>) -> MhcPre {
        let [alpha, bias] = [&self.alpha, &self.bias].map(|of| of.clone().autodiff());
        mhc_pre(x, phi, alpha, bias, None, MhcPreOptions::default()).unwrap()
    }
}

#[test]
fn rows_beyond_two_to_the_32() {
    on_each(|device| {
        let width = 4096;
        let weight = Tensor::<1>::ones([width], (device, dtype(device))).mul_scalar(0.75);
        let (plain, of) = (weight.clone(), |weight: &Tensor<1>| weight.clone().autodiff());
        agree("rms_norm", [width; 2], device, |[x]| rms_norm(x, of(&plain), 1e-5).unwrap());
        agree("add_rms_norm", [width; 2], device, |[x, residual]| {
            let (sum, y) = add_rms_norm(x, residual, of(&plain), 1e-5).unwrap();
            sum * 0.5 + y
        });
        agree("swiglu", [width; 2], device, |[gate, up]| swiglu(gate, up).unwrap());
        let grafting =
            Seed { state: SeedState::Grafting, blueprint: Some(1), alpha: 0.3, ..Seed::default() };
        let mlp = Seed { blend: Blend::Mlp, ..grafting };
        let blueprints = random(2, width, device);
        let mlps = random(2 * mlp_rows(32), 32, device).reshape([2, mlp_rows(32), 32]) * 0.1;
        agree("kasmina and kasmina_mlp", [width; 2], device, |[x]| {
            let rows = Seeds::new(&[grafting; 128], device).unwrap();
            let options = KasminaOptions::default();
            let (y, _) = kasmina(x, blueprints.clone().autodiff(), &rows, options).unwrap();
            let seeds = Seeds::new(&[mlp; 128], device).unwrap();
            let (table, mlps) = (blueprints.clone().autodiff(), mlps.clone().autodiff());
            kasmina_mlp(y, table, mlps, &seeds, options).unwrap().0
        });
        let b = random(64, width, device);
        agree("matmul", [64, width], device, |[a]| {
            matmul(a, b.clone().autodiff(), MatmulOptions::default()).unwrap()
        });
        let b = random(64, width, device) * 0.125;
        agree("matmul_add", [width; 2], device, |[c]| {
            let (a, b) = (c.clone().narrow(1, 0, 64), b.clone().autodiff());
            matmul_add(a, b, c, MatmulOptions::default()).unwrap()
        });
        let table = RopeTable::new(64, 64, RopeOptions::default(), device).unwrap();
        agree("rope", [64 * 64; 2], device, |[x]| {
            let [rows, width] = x.dims();
            rope(x.reshape([rows, 1, 64, 64]), &table, 0).unwrap().reshape([rows, width])
        });
        agree("attention", [128 * 64; 2], device, |[q, k, v]| {
            let [rows, width] = q.dims();
            let heads = |x: Tensor<2>| x.reshape([rows, 1, 128, 64]);
            let y = attention(heads(q), heads(k), heads(v), AttentionOptions::default()).unwrap();
            y.reshape([rows, width])
        });
        let streams = Streams::new(width, device);
        agree("mhc_pre and mhc_post", [width; 2], device, |[x]| {
            let rows = x.dims()[0];
            let x = streams.of(x);
            let MhcPre { x, h_in, h_post, h_res } = streams.pre(x, streams.phi.clone().autodiff());
            mhc_post(x, h_in, h_post, h_res).unwrap().reshape([rows, width])
        });
    });
}

/// Operators that are made of others, or that read several things from one tensor.
#[test]
fn rows_of_several_things_beyond_two_to_the_32() {
    on_each(|device| {
        let width = 4096;
        let normal = |shape: [usize; 2], deviation: f64| {
            let distribution = Distribution::Normal(0.0, deviation);
            Tensor::<2>::random(shape, distribution, (device, dtype(device)))
        };
        // What gate and up make is as large as x.
        let hidden = if has_room(device) { width / 2 } else { 32 };
        let ups = [0; 2].map(|_| normal([width, hidden], 1.0 / 64.0));
        let down = normal([hidden, width], 1.0 / 64.0);
        agree("swiglu_mlp", [width; 2], device, |[x]| {
            let [gate, up] = ups.clone().map(Tensor::autodiff);
            swiglu_mlp(x, gate, up, down.clone().autodiff()).unwrap()
        });
        let table = RopeTable::new(64, 64, RopeOptions::default(), device).unwrap();
        agree("rope_qk", [width; 2], device, |[q, k]| {
            let [rows, width] = q.dims();
            let heads = |x: Tensor<2>| x.reshape([rows, 1, 64, 64]);
            let (q, k) = rope_qk(heads(q), heads(k), &table, 0).unwrap();
            (q + k * 0.5).reshape([rows, width])
        });
        // Two heads of queries and one of keys and of values, at 32 positions.
        agree("rope_qkv and attention_qkv", [32 * 256, 32 * 128], device, |[qkv]| {
            let rows = qkv.dims()[0];
            let qkv = rope_qkv(qkv.reshape([rows, 32, 256]), 2, 1, &table, 0).unwrap();
            let y = attention_qkv(qkv, 2, 1, None, AttentionOptions::default()).unwrap();
            y.reshape([rows, 32 * 128])
        });
        let neighbours = Tensor::<2>::ones([1, width - 1], device);
        let z = Tensor::<2>::from_floats([[0.25, 1.0]], device);
        agree("bk", [width, 2 * width], device, |[a]| {
            let [rows, width] = a.dims();
            let [b, c, z] = [&neighbours, &neighbours, &z].map(|of| of.clone().autodiff());
            let y = bk(a.cast(DType::F32), b, c, z, BkOptions::default()).unwrap();
            y.reshape([rows, 2 * width]).cast(dtype(device))
        });
        let streams = Streams::new(width, device);
        agree("mhc_post_pre", [width; 2], device, |[x]| {
            let rows = x.dims()[0];
            // Hopper's pass over all of it wants φ's gradient too.
            let (x, phi) = (streams.of(x), streams.phi.clone().autodiff().require_grad());
            let MhcPre { x, h_in, h_post, h_res } = streams.pre(x, phi.clone());
            let post = MhcPost { x, f: h_in, h_post, h_res };
            let [alpha, bias] = [&streams.alpha, &streams.bias].map(|of| of.clone().autodiff());
            let options = MhcPreOptions::default();
            let next = mhc_post_pre(post, phi, alpha, bias, None, options).unwrap();
            (next.x + next.h_in.unsqueeze_dim::<4>(2)).reshape([rows, width])
        });
    });
}

#[test]
fn weights_of_rows_beyond_two_to_the_32() {
    on_each(|device| {
        let width = 4096;
        let normal = |shape: [usize; 2], deviation: f64| {
            let distribution = Distribution::Normal(0.0, deviation);
            Tensor::<2>::random(shape, distribution, (device, dtype(device)))
        };
        let ones = Tensor::<1>::ones([width], (device, dtype(device)));
        adds_up("rms_norm", [width; 2], ones.clone(), |x, weight| {
            rms_norm(x, weight, 1e-5).unwrap()
        });
        adds_up("add_rms_norm", [width; 2], ones, |x, weight| {
            let (sum, y) = add_rms_norm(x.clone(), x * 0.5, weight, 1e-5).unwrap();
            sum + y
        });
        adds_up("matmul", [width, 64], normal([width, 64], 1.0 / 64.0), |x, weight| {
            matmul(x, weight, MatmulOptions::default()).unwrap()
        });
        let [up, down] = [[width, 32], [32, width]].map(|shape| normal(shape, 1.0 / 64.0));
        adds_up("swiglu_mlp", [width; 2], normal([width, 32], 1.0 / 64.0), |x, gate| {
            swiglu_mlp(x, gate, up.clone().autodiff(), down.clone().autodiff()).unwrap()
        });
        adds_up("matmul_add", [width; 2], normal([64, width], 1.0 / 8.0), |x, b| {
            matmul_add(x.clone().narrow(1, 0, 64), b, x, MatmulOptions::default()).unwrap()
        });
        let seeds = |blend: Blend| {
            let (state, blueprint) = (SeedState::Grafting, Some(1));
            let seed = Seed { state, blueprint, alpha: 0.3, blend };
            Seeds::new(&[seed; 128], device).unwrap()
        };
        let options = KasminaOptions::default();
        let blueprints = random(2, width, device);
        adds_up("kasmina", [width; 2], blueprints.clone(), |x, table| {
            kasmina(x, table, &seeds(Seed::default().blend), options).unwrap().0
        });
        let mlps = normal([2 * mlp_rows(32), 32], 0.1).reshape([2, mlp_rows(32), 32]);
        adds_up("kasmina_mlp", [width; 2], mlps, |x, mlps| {
            let table = blueprints.clone().autodiff();
            kasmina_mlp(x, table, mlps, &seeds(Blend::Mlp), options).unwrap().0
        });
        let streams = Streams::new(width, device);
        adds_up("mhc_post_pre", [width; 2], streams.phi.clone(), |x, phi| {
            let rows = x.dims()[0];
            let x = streams.of(x);
            let MhcPre { x, h_in, h_post, h_res } = streams.pre(x, streams.phi.clone().autodiff());
            let post = MhcPost { x, f: h_in, h_post, h_res };
            let [alpha, bias] = [&streams.alpha, &streams.bias].map(|of| of.clone().autodiff());
            let options = MhcPreOptions::default();
            let next = mhc_post_pre(post, phi, alpha, bias, None, options).unwrap();
            (next.x + next.h_in.unsqueeze_dim::<4>(2)).reshape([rows, width])
        });
        adds_up("mhc_pre", [width, width / STREAMS], streams.phi.clone(), |x, phi| {
            let x = streams.of(x);
            let rows = x.dims()[1];
            streams.pre(x, phi).h_in.reshape([rows, width / STREAMS])
        });
    });
}

/// The rows of a product's left side, whose gradient is of a product of losses.
#[test]
fn losses_of_products_of_rows_beyond_two_to_the_32() {
    on_each(|device| {
        let (width, classes) = (4096, if has_room(device) { 512 } else { 64 });
        let x = random(rows(device, width), width, device);
        let distribution = Distribution::Normal(0.0, 1.0 / 64.0);
        let weight = Tensor::<2>::random([width, classes], distribution, (device, dtype(device)));
        let options = CrossEntropyOptions::default();
        agree_on_losses(x.clone(), 60, |x, targets| {
            linear_cross_entropy(x, weight.clone().autodiff(), targets, options).unwrap()
        });
        // The gradient of the weight: of some rows, where all others are ignored.
        let gradient = |x: Tensor<2>, targets: Tensor<1, Int>| {
            let leaf = weight.clone().autodiff().require_grad();
            let (x, targets) = (x.autodiff(), targets.autodiff());
            let loss = linear_cross_entropy(x, leaf.clone(), targets, options).unwrap();
            values(&(leaf.grad(&(loss * ROWS as f64).backward()).unwrap()))
        };
        let places = places(x.dims()[0], width);
        let mut targets = vec![options.ignore_index; x.dims()[0]];
        let mut of_some = vec![];
        for (row, first) in
            places.iter().flat_map(|first| (0..ROWS).map(move |i| (first + i, first)))
        {
            targets[row] = (row - first + first % 7) as i64 % 60;
            of_some.push(targets[row]);
        }
        let ints = |of: &[i64]| Tensor::<1, Int>::from_data(of, device);
        let some = Tensor::cat(places.iter().map(|first| distinct(&x, *first)).collect(), 0);
        let expected = gradient(some, ints(&of_some));
        let what = format!("gradient of the classes, of {} rows, {device:?}", targets.len());
        assert_near(&gradient(x, ints(&targets)), &expected, dtype(device), 2, &what);
    });
}

/// Classes of a row are many: a row of logits begins beyond what 32 bits number.
#[test]
fn losses_of_rows_beyond_two_to_the_32() {
    on_each(|device| {
        let width = 50_304;
        let logits = random(rows(device, width), width, device);
        agree_on_losses(logits, 50_000, |logits, targets| {
            cross_entropy(logits, targets, CrossEntropyOptions::default()).unwrap()
        });
    });
}
