//! What is wrong is convicted: in bf16, where bounds are widest, and by which of the two tests.

use super::machine::{Machine, Order, f32s, f64s};
use super::{Random, convicted, operators, right};
use crate::attention::AttentionOptions;
use crate::attention::oracle::{self as attention, Dims};
use crate::cross_entropy::{CrossEntropyOptions, oracle as cross_entropy};
use crate::linear_cross_entropy::oracle as linear_cross_entropy;
use crate::matmul::oracle as matmul;
use crate::oracle::{Bounded, Format, Place, Products, Rounding};
use crate::rms_norm::oracle as rms_norm;
use crate::swiglu_mlp::oracle as swiglu_mlp;

const BF16: Format = Format::Bf16;

/// All elements by 2 % too large, and stored.
fn too_large(out: &[f64], format: Format) -> Vec<f64> {
    out.iter().map(|x| format.round(1.02 * x)).collect()
}

/// Right as it is, convicted when it is 2 % too large or too small.
#[track_caller]
fn two_percent(out: &[f32], reference: &[Bounded], columns: usize, format: Format, what: &str) {
    let out = f64s(out);
    right(&out, reference, columns, what);
    convicted(&too_large(&out, format), reference, columns, &format!("{what} 2 % too large"));
    let small: Vec<f64> = out.iter().map(|x| format.round(0.98 * x)).collect();
    convicted(&small, reference, columns, &format!("{what} 2 % too small"));
}

#[test]
fn a_softmax_gradient_that_lost_a_term_a_half_or_two_percent() {
    let classes = 50_257;
    for format in [Format::F32, BF16, Format::F16] {
        let mut random = Random::new(1);
        let logits = random.normal(2 * classes, 0.5, 1.0, format);
        let targets = [7i64, 40_000];
        let machine = Machine::new(format, Order::Units(256));
        // As losses are scaled for f16.
        let factor = 64.0;
        let gradient =
            operators::cross_entropy_gradient(&machine, &f32s(&logits), &targets, classes, factor);
        let found: Vec<f32> = gradient.into_iter().map(|g| machine.stored(g)).collect();
        let rounding = Rounding::fused(format);
        let options = CrossEntropyOptions::default();
        let dloss = rounding.number(f64::from(factor) * 2.0);
        let expected =
            cross_entropy::backward(&rounding.numbers(&logits), &targets, classes, &options, dloss);
        let what = format!("softmax in {format:?}");
        two_percent(&found, &expected, classes, format, &what);

        let mut lost = f64s(&found);
        lost[classes + 3] = 0.0;
        let verdict = convicted(&lost, &expected, classes, &format!("{what}, a term lost"));
        let worst = verdict.elements.expect("there are elements");
        assert_eq!((worst.place, verdict.wrong), (Place::Element(1, 3), 1));

        let mut half = f64s(&found);
        half[..classes].iter_mut().for_each(|g| *g *= 0.5);
        let verdict = convicted(&half, &expected, classes, &format!("{what}, half of it"));
        assert!(verdict.wrong > classes / 2, "{what}: {} wrong", verdict.wrong);
    }
}

/// The sum of exponentials without one of 257 terms.
#[test]
fn a_log_sum_exp_that_lost_a_term() {
    let (rows, classes) = (4, 257);
    for (format, least) in [(Format::F32, 1), (BF16, 0)] {
        let mut random = Random::new(2);
        let logits = random.normal(rows * classes, 0.5, 1.0, format);
        let rounding = Rounding::fused(format);
        let options = CrossEntropyOptions::default();
        let (numbers, targets) = (rounding.numbers(&logits), [0, 1, 2, 3]);
        let expected =
            cross_entropy::backward(&numbers, &targets, classes, &options, rounding.number(4.0));
        let rows = logits.chunks(classes).zip(targets);
        let wrong: Vec<f64> = rows
            .flat_map(|(row, target)| {
                let sum: f64 = row[..classes - 1].iter().map(|x| x.exp()).sum();
                let onehot = move |class| f64::from(u8::from(class as i64 == target));
                let gradient = row.iter().enumerate().map(move |(i, x)| x.exp() / sum - onehot(i));
                gradient.map(move |g| format.round(g))
            })
            .collect();
        let verdict = convicted(&wrong, &expected, classes, "a sum without its last term");
        assert!(verdict.wrong >= least, "{format:?}: {} wrong", verdict.wrong);
    }
}

#[test]
fn a_product_that_lost_a_step_a_tile_or_a_term() {
    let [m, k, n] = [128, 2056, 64];
    let mut random = Random::new(3);
    let (a, b) = (random.normal(m * k, 0.1, 1.0, BF16), random.normal(k * n, 0.1, 1.0, BF16));
    let rounding = Rounding { products: Products::TensorCores, ..Rounding::fused(BF16) };
    let expected = matmul::forward(&rounding.numbers(&a), &rounding.numbers(&b), [1, m, k, n], 1.0);
    let machine = Machine { tensor_cores: Some((16, 2)), ..Machine::new(BF16, Order::Sequential) };
    let sums = machine.product(&f32s(&a), &f32s(&b), [m, k, n], [false; 2]);
    let stored =
        |sums: &[f32]| -> Vec<f64> { sums.iter().map(|x| f64::from(machine.stored(*x))).collect() };
    right(&stored(&sums), &expected, n, "a product");

    // One step of 16 of K, in one tile of 8 by 8.
    let mut lost = sums.clone();
    for (i, j) in (64..72).flat_map(|i| (8..16).map(move |j| (i, j))) {
        let step = (512..528).map(|x| a[i * k + x] * b[x * n + j]).sum::<f64>();
        lost[i * n + j] -= step as f32;
    }
    let verdict = convicted(&stored(&lost), &expected, n, "a step of K lost in a tile");
    assert!(verdict.wrong > 32, "{} of 64 wrong", verdict.wrong);

    // A tile that holds what the one beside it does.
    let mut stale = sums.clone();
    for i in 0..8 {
        stale.copy_within(i * n..i * n + 8, i * n + 8);
    }
    assert!(convicted(&stored(&stale), &expected, n, "a tile lost").wrong > 60);

    // One term of each sum, in f32.
    let rounding = Rounding::fused(Format::F32);
    let expected = matmul::forward(&rounding.numbers(&a), &rounding.numbers(&b), [1, m, k, n], 1.0);
    let lost: Vec<f64> = (0..m * n)
        .map(|i| (0..k - 1).map(|x| a[i / n * k + x] * b[x * n + i % n]).sum::<f64>() as f32)
        .map(f64::from)
        .collect();
    let verdict = convicted(&lost, &expected, n, "the last term of each sum lost");
    assert!(verdict.wrong > m * n / 2, "{} wrong", verdict.wrong);
}

#[test]
fn a_weight_gradient_that_lost_a_row() {
    let (rows, width) = (301, 768);
    let mut random = Random::new(4);
    let x = random.normal(rows * width, 0.3, 1.0, BF16);
    let weight = random.normal(width, 1.0, 1.0, BF16);
    let dy = random.normal(rows * width, 0.1, 1.0, BF16);
    let machine = Machine::new(BF16, Order::Units(8));
    let [y, dx, dw] =
        operators::rms_norm(&machine, &f32s(&x), &f32s(&weight), 1e-5, &f32s(&dy), None);
    let of = |x: &[f64]| Rounding::fused(BF16).numbers(x);
    let (x_, w_, dy_) = (of(&x), of(&weight), of(&dy));
    let (expected_dx, expected_dw) = rms_norm::backward(&x_, &w_, 1e-5, &dy_);
    two_percent(&y, &rms_norm::forward(&x_, &w_, 1e-5), width, BF16, "y of rms_norm");
    two_percent(&dx, &expected_dx, width, BF16, "dx of rms_norm");
    two_percent(&dw, &expected_dw, width, BF16, "dw of rms_norm");
    let less = (rows - 1) * width;
    let (x, dy) = (f32s(&x[..less]), f32s(&dy[..less]));
    let [_, _, lost] = operators::rms_norm(&machine, &x, &f32s(&weight), 1e-5, &dy, None);
    let verdict = convicted(&f64s(&lost), &expected_dw, width, "dw without its last row");
    assert!(verdict.wrong > width / 2, "{} of {width} wrong", verdict.wrong);
}

/// Gradients that have gone through roundings of the probabilities and of the gradient of the scores.
#[test]
fn gradients_of_attention_two_percent_off() {
    for (seed, [heads, t, w]) in [[4, 31, 48], [2, 97, 32], [8, 9, 8]].into_iter().enumerate() {
        let d = Dims { batch: 1, heads, kv_heads: heads, queries: t, keys: t, width: w };
        let mut random = Random::new(5 + seed as u64);
        let n = heads * t * w;
        let inputs = [0.1, -0.1, 0.3, 0.1].map(|mean| random.normal(n, mean, 1.0, BF16));
        let scale = 1.0 / (w as f64).sqrt();
        let machine = Machine { stores_all: true, ..Machine::new(BF16, Order::Units(8)) };
        let numbers = inputs.each_ref().map(|x| f32s(x));
        let numbers = numbers.each_ref().map(Vec::as_slice);
        let found = operators::attention(&machine, numbers, d, true, scale as f32);
        let [q, k, v, dy] = inputs.map(|x| Rounding::reference(BF16).numbers(&x));
        let rule = attention::Rule::new(AttentionOptions::default(), d.width);
        let y = attention::forward(&q, &k, &v, d, &rule);
        let (dq, dk, dv) = attention::backward(&q, &k, &v, d, &rule, &dy);
        for (name, (found, expected)) in
            ["y", "dq", "dk", "dv"].iter().zip(found.iter().zip([y, dq, dk, dv]))
        {
            two_percent(found, &expected, w, BF16, &format!("{name} of {heads} heads, T = {t}"));
        }
    }
}

#[test]
fn gradients_of_the_mlp_two_percent_off() {
    let [m, d, f] = [33, 16, 48];
    let mut random = Random::new(8);
    let root = |n: usize| 1.0 / (n as f64).sqrt();
    let inputs = [
        random.normal(m * d, 0.1, 1.0, BF16),
        random.normal(d * f, 0.0, root(d), BF16),
        random.normal(d * f, 0.0, root(d), BF16),
        random.normal(f * d, 0.0, root(f), BF16),
        random.normal(m * d, 0.1, 1.0, BF16),
    ];
    let numbers = inputs.each_ref().map(|x| f32s(x));
    let numbers = numbers.each_ref().map(Vec::as_slice);
    let machine = Machine::new(BF16, Order::Sequential);
    let found = operators::swiglu_mlp(&machine, numbers, [m, d, f]);
    let [x, gate, up, down, dy] = inputs.map(|x| Rounding::fused(BF16).numbers(&x));
    let y = swiglu_mlp::forward(&x, &gate, &up, &down, [m, d, f]);
    let [dx, dg, du, dd] = swiglu_mlp::backward(&x, &gate, &up, &down, [m, d, f], &dy);
    let expected = [(y, d), (dx, d), (dg, f), (du, f), (dd, d)];
    for (i, (found, (expected, columns))) in found.iter().zip(expected).enumerate() {
        two_percent(found, &expected, columns, BF16, &format!("result {i} of the MLP"));
    }
}

#[test]
fn gradients_through_logits_that_lost_a_chunk() {
    let [m, d, v] = [1100, 8, 31];
    let mut random = Random::new(9);
    let x = random.normal(m * d, 0.1, 1.0, BF16);
    let weight = random.normal(d * v, 0.0, 1.0 / (d as f64).sqrt(), BF16);
    let targets: Vec<i64> = (0..m).map(|_| random.below(v) as i64).collect();
    let dloss = 640.0;
    let machine = Machine::new(BF16, Order::Sequential);
    let (inputs, sizes) = ((f32s(&x), f32s(&weight)), [m, d, v]);
    let [dx, dw] = operators::linear_cross_entropy(
        &machine, &inputs.0, &inputs.1, &targets, sizes, dloss, 128,
    );
    let rounding = Rounding::fused(BF16);
    let (x, weight) = (rounding.numbers(&x), rounding.numbers(&weight));
    let (options, dloss) = (CrossEntropyOptions::default(), rounding.number(f64::from(dloss)));
    let (expected_dx, expected_dw) =
        linear_cross_entropy::backward(&x, &weight, &targets, sizes, &options, dloss);
    two_percent(&dx, &expected_dx, d, BF16, "dx of linear_cross_entropy");
    two_percent(&dw, &expected_dw, v, BF16, "dw of linear_cross_entropy");
    // The gradient of the weight without rows 128 to 255.
    let lost = targets.iter().enumerate().filter(|(row, _)| !(128..256).contains(row));
    let rows: Vec<usize> = lost.map(|(row, _)| row).collect();
    let x: Vec<f32> =
        rows.iter().flat_map(|row| inputs.0[row * d..(row + 1) * d].to_vec()).collect();
    let targets: Vec<i64> = rows.iter().map(|row| targets[*row]).collect();
    let sizes = [rows.len(), d, v];
    let share = rows.len() as f32 / m as f32;
    let [_, lost] = operators::linear_cross_entropy(
        &machine,
        &x,
        &inputs.1,
        &targets,
        sizes,
        640.0 * share,
        128,
    );
    let verdict = convicted(&f64s(&lost), &expected_dw, v, "dw without a chunk");
    assert!(verdict.wrong > 0, "no element of it");
}
