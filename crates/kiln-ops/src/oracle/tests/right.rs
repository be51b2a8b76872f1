//! What is right passes, whatever the seed and the order.

use super::machine::{Machine, ORDERS, Order, f32s, f64s};
use super::{Random, operators, right};
use crate::add_rms_norm::oracle as add_rms_norm;
use crate::attention::AttentionOptions;
use crate::attention::oracle::{self as attention, Dims};
use crate::cross_entropy::{CrossEntropyOptions, oracle as cross_entropy};
use crate::linear_cross_entropy::oracle as linear_cross_entropy;
use crate::matmul::oracle as matmul;
use crate::mhc_pre::{MhcPreOptions, oracle as mhc_pre};
use crate::oracle::{Bounded, Format, Path, Products, Rounding, compare};
use crate::rms_norm::oracle as rms_norm;
use crate::swiglu_mlp::oracle as swiglu_mlp;

const FORMATS: [Format; 3] = [Format::F32, Format::Bf16, Format::F16];

/// The largest ratios of elements and of lines, of many runs.
#[derive(Default)]
struct Ratios([f64; 2]);

impl Ratios {
    #[track_caller]
    fn take(&mut self, out: &[f32], reference: &[Bounded], columns: usize, what: &str) {
        let found = right(&f64s(out), reference, columns, what);
        self.0 = [0, 1].map(|i| self.0[i].max(found[i]));
    }

    /// The bounds are no further off than this.
    #[track_caller]
    fn at_least(&self, least: [f64; 2], what: &str) {
        println!("{what}: {:.3} of an element's bound, {:.3} of a line's", self.0[0], self.0[1]);
        let near = self.0.iter().zip(least).all(|(ratio, least)| *ratio >= least);
        assert!(near, "{what}: the bounds are generous: {:?}", self.0);
    }
}

#[test]
fn sums_of_a_row() {
    for format in FORMATS {
        let mut ratios = Ratios::default();
        let shapes = [[5, 1], [3, 2], [4, 64], [33, 31], [2, 1000], [7, 4099], [60, 768]];
        for seed in 0..24 {
            let ([rows, width], order) = (shapes[seed % 7], ORDERS[seed / 7 % 4]);
            let mut random = Random::new(seed as u64);
            let x = random.normal(rows * width, 0.3, 1.0, format);
            let weight = random.normal(width, 1.0, 1.0, format);
            let dy = random.normal(rows * width, 0.1, 1.0, format);
            let machine = Machine::new(format, order);
            let found =
                operators::rms_norm(&machine, &f32s(&x), &f32s(&weight), 1e-5, &f32s(&dy), None);
            let of = |x: &[f64]| Rounding::fused(format).numbers(x);
            let (x, weight, dy) = (of(&x), of(&weight), of(&dy));
            let (dx, dw) = rms_norm::backward(&x, &weight, 1e-5, &dy);
            let expected = [rms_norm::forward(&x, &weight, 1e-5), dx, dw];
            for (found, expected) in found.iter().zip(&expected) {
                let what = format!("{format:?}, {rows}×{width}, seed {seed}, {order:?}");
                ratios.take(found, expected, width, &what);
            }
        }
        let least = if format == Format::F32 { [0.04, 0.02] } else { [0.9, 0.3] };
        ratios.at_least(least, &format!("rms_norm in {format:?}"));
    }
}

#[test]
fn sums_that_are_stored_before_they_are_normalised() {
    for format in FORMATS {
        for path in [Path::Fused, Path::Reference] {
            let mut ratios = Ratios::default();
            for seed in 0..60 {
                let [rows, width] = [[9, 1], [5, 2], [33, 31], [7, 400]][seed % 4];
                let mut random = Random::new(700 + seed as u64);
                let x = random.normal(rows * width, 0.3, 1.0, format);
                let residual = random.normal(rows * width, -0.1, 1.0, format);
                let weight = random.normal(width, 1.0, 1.0, format);
                let dsum = random.normal(rows * width, 0.1, 1.0, format);
                let dy = random.normal(rows * width, 0.1, 1.0, format);
                let stores_all = path == Path::Reference;
                let machine = Machine { stores_all, ..Machine::new(format, ORDERS[seed % 3]) };
                let (a, b) = (f32s(&x), f32s(&residual));
                let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| machine.stored(a + b)).collect();
                let [w, dy_, dsum_] = [&weight, &dy, &dsum].map(|x| f32s(x));
                let [y, dx, dw] = operators::rms_norm(&machine, &sum, &w, 1e-5, &dy_, Some(&dsum_));
                let rounding = Rounding { path, ..Rounding::fused(format) };
                let of = |x: &[f64]| rounding.numbers(x);
                let (x, residual, weight) = (of(&x), of(&residual), of(&weight));
                let (expected_sum, expected_y) =
                    add_rms_norm::forward(&x, &residual, &weight, 1e-5);
                let (expected_dx, expected_dw) =
                    add_rms_norm::backward(&x, &residual, &weight, 1e-5, &of(&dsum), &of(&dy));
                let what = format!("{format:?}, {path:?}, {rows}×{width}, seed {seed}");
                for (found, expected, name) in [
                    (sum, expected_sum, "sum"),
                    (y, expected_y, "y"),
                    (dx, expected_dx, "dx"),
                    (dw, expected_dw, "dw"),
                ] {
                    ratios.take(&found, &expected, width, &format!("{name}, {what}"));
                }
            }
            let least = if format == Format::F32 { [0.1, 0.1] } else { [0.9, 0.3] };
            ratios.at_least(least, &format!("add_rms_norm in {format:?} by {path:?}"));
        }
    }
}

#[test]
fn products_in_any_order() {
    for format in FORMATS {
        let mut ratios = Ratios::default();
        let sizes = [[1, 1, 1], [7, 5, 3], [16, 2056, 24], [40, 96, 33], [30, 17, 65]];
        for seed in 0..40 {
            let [m, k, n] = sizes[seed % 5];
            let order = ORDERS[seed / 5 % 4];
            let mut random = Random::new(100 + seed as u64);
            let a = random.normal(m * k, 0.1, 1.0, format);
            let b = random.normal(k * n, 0.1, 1.0, format);
            let found = Machine::new(format, order).stored_product(
                &f32s(&a),
                &f32s(&b),
                [m, k, n],
                [false; 2],
            );
            let of = |x: &[f64]| Rounding::fused(format).numbers(x);
            let expected = matmul::forward(&of(&a), &of(&b), [1, m, k, n], 1.0);
            ratios.take(&found, &expected, n, &format!("{format:?}, {m}×{k}×{n}, {order:?}"));
        }
        let least = if format == Format::F32 { [0.1, 0.04] } else { [0.9, 0.3] };
        ratios.at_least(least, &format!("products in {format:?}"));
    }
}

/// f32 results, so that nothing hides what tensor cores cut off.
#[test]
fn products_on_tensor_cores() {
    for tensor_cores in [(16, 2), (8, 1)] {
        let mut ratios = Ratios::default();
        for seed in 0..12 {
            let [m, k, n] = [[24, 64, 40], [24, 2056, 24], [8, 8192, 8], [24, 520, 40]][seed % 4];
            let mut random = Random::new(200 + seed as u64);
            let mean = if seed < 8 { 0.1 } else { 1.0 };
            let a = random.normal(m * k, mean, 1.0, Format::Bf16);
            let b = random.normal(k * n, mean, 1.0, Format::Bf16);
            let machine = Machine {
                tensor_cores: Some(tensor_cores),
                ..Machine::new(Format::F32, Order::Sequential)
            };
            let found = machine.product(&f32s(&a), &f32s(&b), [m, k, n], [false; 2]);
            let rounding =
                Rounding { products: Products::TensorCores, ..Rounding::fused(Format::F32) };
            let of = |x: &[f64]| rounding.numbers(x);
            let expected = matmul::forward(&of(&a), &of(&b), [1, m, k, n], 1.0);
            ratios.take(
                &found,
                &expected,
                n,
                &format!("{tensor_cores:?}, {m}×{k}×{n}, mean {mean}"),
            );
        }
        ratios.at_least([0.02, 0.02], &format!("tensor cores {tensor_cores:?}"));
    }
}

#[test]
fn a_softmax_of_50257_classes() {
    let classes = 50_257;
    for format in FORMATS {
        let mut ratios = Ratios::default();
        for (seed, order) in ORDERS.into_iter().enumerate() {
            let mut random = Random::new(300 + seed as u64);
            let logits = random.normal(2 * classes, 0.5, 1.0 + seed as f64, format);
            let targets = [random.below(classes) as i64, random.below(classes) as i64];
            let machine = Machine::new(format, order);
            let gradient =
                operators::cross_entropy_gradient(&machine, &f32s(&logits), &targets, classes, 1.0);
            let found: Vec<f32> = gradient.into_iter().map(|g| machine.stored(g)).collect();
            let rounding = Rounding::fused(format);
            let options = CrossEntropyOptions::default();
            let (logits, dloss) = (rounding.numbers(&logits), rounding.number(2.0));
            let expected = cross_entropy::backward(&logits, &targets, classes, &options, dloss);
            ratios.take(&found, &expected, classes, &format!("{format:?}, {order:?}"));
        }
        let least = if format == Format::F32 { [0.02, 0.0] } else { [0.9, 0.05] };
        ratios.at_least(least, &format!("softmax in {format:?}"));
    }
}

#[test]
fn losses_of_one_class_and_of_many() {
    for format in FORMATS {
        let mut ratios = Ratios::default();
        for seed in 0..60 {
            let [rows, classes] = [[4, 1], [1, 2], [13, 7], [33, 257], [2, 20_000]][seed % 5];
            let mut random = Random::new(800 + seed as u64);
            // Far from zero too: the largest logit is subtracted.
            let mean = if seed % 2 == 0 { 0.5 } else { 90.0 };
            let logits = random.normal(rows * classes, mean, 1.0, format);
            let targets: Vec<i64> = (0..rows).map(|_| random.below(classes) as i64).collect();
            let machine = Machine::new(format, ORDERS[seed % 4]);
            let loss = operators::cross_entropy(&machine, &f32s(&logits), &targets, classes);
            let options = CrossEntropyOptions::default();
            let logits = Rounding::fused(format).numbers(&logits);
            let expected = cross_entropy::forward(&logits, &targets, classes, &options);
            let what = format!("{format:?}, {rows}×{classes}, seed {seed}");
            ratios.take(&[loss], &[expected], 1, &what);
        }
        ratios.at_least([0.02, 0.02], &format!("losses in {format:?}"));
    }
}

#[test]
fn attention_in_plain_operations() {
    for format in FORMATS {
        let mut ratios = Ratios::default();
        for seed in 0..200 {
            let [heads, t, s, w] = [
                [1, 1, 1, 1],
                [2, 9, 9, 8],
                [3, 31, 31, 48],
                [2, 5, 17, 16],
                [1, 11, 4, 16],
                [1, 97, 97, 16],
            ][seed % 6];
            if seed > 60 && t > 20 {
                continue;
            }
            let d = Dims { batch: 1, heads, kv_heads: heads, queries: t, keys: s, width: w };
            let mut random = Random::new(400 + seed as u64);
            let q = random.normal(heads * t * w, 0.1, 1.0, format);
            let k = random.normal(heads * s * w, -0.1, 1.0, format);
            let v = random.normal(heads * s * w, 0.3, 1.0, format);
            let dy = random.normal(heads * t * w, 0.1, 1.0, format);
            let scale = 1.0 / (w as f64).sqrt();
            let order = ORDERS[seed % 4];
            let machine = Machine { stores_all: true, ..Machine::new(format, order) };
            let numbers = [&q, &k, &v, &dy].map(|x| f32s(x));
            let inputs = numbers.each_ref().map(Vec::as_slice);
            let found = operators::attention(&machine, inputs, d, seed % 3 > 0, scale as f32);
            let of = |x: &[f64]| Rounding::reference(format).numbers(x);
            let (q, k, v, dy) = (of(&q), of(&k), of(&v), of(&dy));
            let options = AttentionOptions { causal: seed % 3 > 0, ..Default::default() };
            let rule = attention::Rule::new(options, w);
            let y = attention::forward(&q, &k, &v, d, &rule);
            let (dq, dk, dv) = attention::backward(&q, &k, &v, d, &rule, &dy);
            for (i, expected) in [y, dq, dk, dv].iter().enumerate() {
                let what = format!("{format:?}, {heads}×{t}×{s}×{w}, seed {seed}, result {i}");
                ratios.take(&found[i], expected, w, &what);
            }
        }
        let least = if format == Format::F32 { [0.02, 0.01] } else { [0.3, 0.1] };
        ratios.at_least(least, &format!("attention in {format:?}"));
    }
}

#[test]
fn products_of_products() {
    for format in FORMATS {
        for path in [Path::Fused, Path::Reference] {
            let mut ratios = Ratios::default();
            for seed in 0..30 {
                let [m, d, f] =
                    [[1, 1, 1], [7, 5, 3], [33, 16, 48], [17, 31, 80], [4, 40, 300]][seed % 5];
                let mut random = Random::new(500 + seed as u64);
                let x = random.normal(m * d, 0.1, 1.0, format);
                let root = |n: usize| 1.0 / (n as f64).sqrt();
                let gate = random.normal(d * f, 0.0, root(d), format);
                let up = random.normal(d * f, 0.0, root(d), format);
                let down = random.normal(f * d, 0.0, root(f), format);
                let dy = random.normal(m * d, 0.1, 1.0, format);
                let stores_all = path == Path::Reference;
                let machine = Machine { stores_all, ..Machine::new(format, ORDERS[seed % 4]) };
                let numbers = [&x, &gate, &up, &down, &dy].map(|x| f32s(x));
                let inputs = numbers.each_ref().map(Vec::as_slice);
                let found = operators::swiglu_mlp(&machine, inputs, [m, d, f]);
                let rounding = Rounding { path, ..Rounding::fused(format) };
                let of = |x: &[f64]| rounding.numbers(x);
                let [x, gate, up, down, dy] = [&x, &gate, &up, &down, &dy].map(|x| of(x));
                let y = swiglu_mlp::forward(&x, &gate, &up, &down, [m, d, f]);
                let [dx, dg, du, dd] = swiglu_mlp::backward(&x, &gate, &up, &down, [m, d, f], &dy);
                for (i, (expected, columns)) in
                    [(y, d), (dx, d), (dg, f), (du, f), (dd, d)].iter().enumerate()
                {
                    let what =
                        format!("{format:?}, {path:?}, {m}×{d}×{f}, seed {seed}, result {i}");
                    ratios.take(&found[i], expected, *columns, &what);
                }
            }
            let least = if format == Format::F32 { [0.04, 0.02] } else { [0.3, 0.1] };
            ratios.at_least(least, &format!("swiglu_mlp in {format:?} by {path:?}"));
        }
    }
}

#[test]
fn gradients_through_chunks_of_logits() {
    for format in FORMATS {
        for path in [Path::Fused, Path::Reference] {
            let mut ratios = Ratios::default();
            for seed in 0..24 {
                // Of many classes a target's part of dx stands in the sum while all others are added.
                let shapes = [[1, 1, 2], [13, 7, 5], [33, 48, 257], [1100, 8, 31], [5, 16, 30011]];
                let [m, d, v] = shapes[seed % 5];
                if seed > 8 && m > 1000 {
                    continue;
                }
                let mut random = Random::new(600 + seed as u64);
                let x = random.normal(m * d, 0.1, 1.0, format);
                let weight = random.normal(d * v, 0.0, 1.0 / (d as f64).sqrt(), format);
                let targets: Vec<i64> = (0..m).map(|_| random.below(v) as i64).collect();
                let dloss = 0.7 * m as f64;
                let (stores_all, chunk) =
                    (path == Path::Reference, if path == Path::Reference { 1024 } else { 128 });
                let machine = Machine { stores_all, ..Machine::new(format, ORDERS[seed % 4]) };
                let found = operators::linear_cross_entropy(
                    &machine,
                    &f32s(&x),
                    &f32s(&weight),
                    &targets,
                    [m, d, v],
                    dloss as f32,
                    chunk,
                );
                let rounding = Rounding { path, ..Rounding::fused(format) };
                let (x, weight) = (rounding.numbers(&x), rounding.numbers(&weight));
                let dloss = rounding.number(f64::from(dloss as f32));
                let options = CrossEntropyOptions::default();
                let (dx, dw) = linear_cross_entropy::backward(
                    &x,
                    &weight,
                    &targets,
                    [m, d, v],
                    &options,
                    dloss,
                );
                let what = format!("{format:?}, {path:?}, {m}×{d}×{v}, seed {seed}");
                ratios.take(&found[0], &dx, d, &format!("dx, {what}"));
                ratios.take(&found[1], &dw, v, &format!("dw, {what}"));
            }
            let least = if format == Format::F32 { [0.02, 0.01] } else { [0.3, 0.1] };
            ratios.at_least(least, &format!("linear_cross_entropy in {format:?} by {path:?}"));
        }
    }
}

#[test]
fn sums_with_weights_of_almost_one_may_be_rounded_the_same_way() {
    let options = MhcPreOptions { hc_eps: 0.0, ..MhcPreOptions::default() };
    for (format, streams) in [(Format::Bf16, 4), (Format::Bf16, 2), (Format::F16, 3)] {
        // Σ x is halfway between two numbers as often as not, and a little less is rounded down then.
        let weight = |i: usize| 1.0 - format.unit() / (16.0 + i as f64);
        let width = 1 << 14;
        let x = Random::new(2).normal(streams * width, 0.2, 1.0, format);
        let rows = streams * streams + 2 * streams;
        let phi = vec![0.0; rows * x.len()];
        let mut bias: Vec<f64> =
            (0..streams).map(|i| (weight(i) / (1.0 - weight(i))).ln()).collect();
        bias.resize(rows, 0.0);
        let of = |x: &[f64]| Rounding::fused(format).numbers(x);
        let [x_, phi, alpha, bias] = [&x[..], &phi, &[1.0; 3], &bias].map(of);
        let inputs = mhc_pre::Inputs { x: &x_, phi: &phi, alpha: &alpha, bias: &bias, gamma: &[] };
        let [h_in, ..] = mhc_pre::forward(inputs, streams, options);
        let sum = |at: usize| (0..streams).map(|i| weight(i) * x[i * width + at]).sum::<f64>();
        let out: Vec<f64> = (0..width).map(|at| format.round(sum(at))).collect();
        right(&out, &h_in, width, &format!("{format:?}, {streams} streams"));
        let off: Vec<f64> = out.iter().map(|out| format.round(1.02 * out)).collect();
        let found = compare(&off, &h_in, width);
        assert!(found.lines.is_some_and(|lines| lines.ratio > 2.0), "{found:?}");
    }
}

#[test]
fn products_with_one_weight_may_all_be_rounded_the_same_way() {
    let options = MhcPreOptions { hc_eps: 0.0, ..MhcPreOptions::default() };
    for format in [Format::Bf16, Format::F16] {
        // A quarter of a gap below 1, and above 3/4: x times that is rounded up, or more often up than down.
        for weight in [1.0 - format.unit() / 4.0, 0.75 + format.unit() / 4.0] {
            let x = Random::new(1).normal(4099, 0.2, 1.0, format);
            let phi = vec![0.0; 3 * x.len()];
            let bias = [(weight / (1.0 - weight)).ln(), 0.0, 0.0];
            let of = |x: &[f64]| Rounding::fused(format).numbers(x);
            let [x_, phi, alpha, bias] = [&x[..], &phi, &[1.0; 3], &bias].map(of);
            let inputs =
                mhc_pre::Inputs { x: &x_, phi: &phi, alpha: &alpha, bias: &bias, gamma: &[] };
            let [h_in, ..] = mhc_pre::forward(inputs, 1, options);
            let out: Vec<f64> = x.iter().map(|x| format.round(weight * x)).collect();
            right(&out, &h_in, x.len(), &format!("{format:?}, {weight}"));
            let off: Vec<f64> = out.iter().map(|out| format.round(1.02 * out)).collect();
            let found = compare(&off, &h_in, x.len());
            assert!(found.lines.is_some_and(|lines| lines.ratio > 2.0), "{found:?}");
        }
    }
}
