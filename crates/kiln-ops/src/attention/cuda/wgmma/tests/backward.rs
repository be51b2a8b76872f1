//! The backward, beside plain loops in float64. Times are ignored.

use super::super::{backward, forward, takes_backward};
use super::{Bench, Case, Head, Layout, burst, cases, device, document_limits, numbers};
use crate::attention::problem::{Backward, HeadsView, Mask, Problem, Sizes};
use burn::tensor::DType;
use std::ops::RangeInclusive;

/// Numbers of a head, row by row.
type Rows = Vec<f64>;

/// The keys that query `t` sees.
fn seen(case: &Case, limits: &[Vec<u32>; 2], t: usize) -> std::ops::Range<usize> {
    let s = &case.sizes;
    let reach = (t + s.keys) as i64 - s.queries as i64 + 1;
    let mut high = if case.causal { reach.clamp(0, s.keys as i64) } else { s.keys as i64 };
    let mut low = case.window.map_or(0, |w| (reach - w as i64).max(0));
    if case.documents.is_some() {
        low = low.max(i64::from(limits[0][t]));
        high = high.min(i64::from(limits[1][t]));
    }
    low as usize..high.max(low) as usize
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn sizes(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) * f64::from(*b)).abs()).sum()
}

/// A gradient of a head, and the sums of the sizes of what it is made of.
#[derive(Clone)]
struct Expected {
    sums: Rows,
    sizes: Rows,
}

impl Expected {
    fn new(elements: usize) -> Self {
        Self { sums: vec![0.0; elements], sizes: vec![0.0; elements] }
    }

    /// Adds `factor` of the size `size` times a row from element `at` on.
    fn add(&mut self, at: usize, [factor, size]: [f64; 2], row: &[f32]) {
        for (c, x) in row.iter().enumerate() {
            self.sums[at + c] += factor * f64::from(*x);
            self.sizes[at + c] += size * f64::from(x.abs());
        }
    }

    /// The largest difference of an element, by its size.
    fn error(&self, found: &Head, width: usize) -> f64 {
        let apart = |i: usize| {
            let apart = (f64::from(found.row(i / width, width)[i % width]) - self.sums[i]).abs();
            // What is tiny is off by the rounding of its scores.
            let off = apart / self.sizes[i].max(1e-3);
            if off.is_nan() { f64::INFINITY } else { off }
        };
        (0..self.sums.len()).map(apart).fold(0.0, f64::max)
    }
}

/// Adds what row `t` gives to dq, dk and dv.
fn expected_row(
    case: &Case,
    limits: &[Vec<u32>; 2],
    [q, k, v, dy]: [&Head; 4],
    t: usize,
    [dq, dk, dv]: [&mut Expected; 3],
) {
    let width = case.sizes.width;
    let (scale, cap) = (f64::from(case.scale), case.softcap.map(f64::from));
    let (q, dy) = (q.row(t, width), dy.row(t, width));
    let keys = seen(case, limits, t);
    let scores: Vec<f64> = keys.clone().map(|key| dot(q, k.row(key, width)) * scale).collect();
    let capped = |x: f64| cap.map_or(x, |cap| cap * (x / cap).tanh());
    let largest = scores.iter().map(|x| capped(*x)).fold(f64::MIN, f64::max);
    let mut weights: Vec<f64> = scores.iter().map(|x| (capped(*x) - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|weight| *weight /= total);
    let of_weights: Vec<f64> = keys.clone().map(|key| dot(dy, v.row(key, width))).collect();
    let of_sizes: Vec<f64> = keys.clone().map(|key| sizes(dy, v.row(key, width))).collect();
    let [delta, size] =
        [&of_weights, &of_sizes].map(|of| weights.iter().zip(of).map(|(p, x)| p * x).sum::<f64>());
    for (i, key) in keys.enumerate() {
        let slope = cap.map_or(1.0, |cap| 1.0 - (scores[i] / cap).tanh().powi(2));
        let of = |slope_of_weight: f64| weights[i] * slope_of_weight * slope * scale;
        let ds = [of(of_weights[i] - delta), of(of_sizes[i] + size)];
        dq.add(t * width, ds, k.row(key, width));
        dk.add(key * width, ds, q);
        dv.add(key * width, [weights[i]; 2], dy);
    }
}

/// dq, dk and dv: in tensors of their own, or parts of one.
fn outputs(bench: &Bench, case: &Case) -> [HeadsView; 3] {
    if case.layout != Layout::Packed {
        return [0, 1, 2].map(|which| bench.heads(case, which, None).0);
    }
    let views = [0, 1, 2].map(|which| bench.heads(case, which, Some(5)).0);
    let tensor = views[0].tensor.clone();
    views.map(|view| HeadsView { tensor: tensor.clone(), ..view })
}

/// The largest errors of dq, dk and dv.
fn check(bench: &Bench, case: &Case) -> [f64; 3] {
    let s = case.sizes;
    let inputs = [0, 1, 2].map(|which| bench.heads(case, which, Some(1)));
    let [(q, q_held), (k, k_held), (v, v_held)] = inputs;
    let layout = if case.layout == Layout::Heads { Layout::Heads } else { Layout::Rows };
    let (dy, dy_held) = bench.heads(&Case { layout, ..*case }, 0, Some(9));
    let (o, _) = bench.heads(&Case { layout, ..*case }, 0, None);
    let limits = document_limits(s.queries, case.documents.unwrap_or(1));
    let of_limits: Vec<u8> = limits.iter().flatten().flat_map(|x| x.to_ne_bytes()).collect();
    let rows = s.batches * s.heads * s.queries;
    let lse = bench.tensor(&f32::NAN.to_ne_bytes().repeat(rows), [rows], DType::F32);
    let mask =
        Mask { causal: case.causal, window: case.window, documents: case.documents.is_some() };
    let documents = case.documents.map(|_| bench.tensor(&of_limits, [2, s.queries], DType::U32));
    let (scale, softcap) = (case.scale, case.softcap);
    let of = [&q, &k, &v].map(Clone::clone);
    let problem = {
        let [q, k, v] = of;
        Problem { q, k, v, sizes: s, mask, scale, softcap, documents }
    };
    forward(&problem, &o, Some(&lse));
    let o_held = numbers(&o.tensor);
    let mut delta = vec![];
    for at in 0..rows {
        let (batch, head, row) =
            (at / s.queries / s.heads, at / s.queries % s.heads, at % s.queries);
        let row_of = |held, view| Head { held, view, batch, head }.row(row, s.width).to_vec();
        delta.push(dot(&row_of(&dy_held, &dy), &row_of(&o_held, &o)) as f32);
    }
    let delta: Vec<u8> = delta.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let delta = bench.tensor(&delta, [rows], DType::F32);
    let run = || {
        let outputs = outputs(bench, case);
        let [dq, dk, dv] = &outputs;
        let with = Backward { dy: &dy, lse: &lse, delta: &delta, dq, dk, dv, wanted: [true; 3] };
        assert!(takes_backward(&problem, &with), "{case:?}");
        backward(&problem, &with);
        let held = outputs.each_ref().map(|view| numbers(&view.tensor));
        (outputs, held)
    };
    let (views, found) = run();
    let bits = |x: &[Vec<f32>; 3]| x.concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for _ in 0..3 {
        assert!(bits(&found) == bits(&run().1), "other bits: {case:?}");
    }

    // Of many KV heads some.
    let group = s.heads / s.kv_heads;
    let all = (0..s.batches).flat_map(|batch| (0..s.kv_heads).map(move |head| (batch, head)));
    let some: Vec<_> = all.step_by((s.batches * s.kv_heads / 6).max(1)).collect();
    let check = |(batch, kv_head): (usize, usize)| {
        let head_of = |held, view, head| Head { held, view, batch, head };
        let [mut dk, mut dv] = [0, 1].map(|_| Expected::new(s.keys * s.width));
        let mut worst = [0.0f64; 3];
        for head in kv_head * group..(kv_head + 1) * group {
            let mut dq = Expected::new(s.queries * s.width);
            let heads = [
                &head_of(&q_held, &q, head),
                &head_of(&k_held, &k, kv_head),
                &head_of(&v_held, &v, kv_head),
                &head_of(&dy_held, &dy, head),
            ];
            for t in 0..s.queries {
                expected_row(case, &limits, heads, t, [&mut dq, &mut dk, &mut dv]);
            }
            let found = head_of(&found[0], &views[0], head);
            worst[0] = worst[0].max(dq.error(&found, s.width));
        }
        worst[1] = dk.error(&head_of(&found[1], &views[1], kv_head), s.width);
        worst[2] = dv.error(&head_of(&found[2], &views[2], kv_head), s.width);
        worst
    };
    let errors: Vec<_> = std::thread::scope(|scope| {
        let checks: Vec<_> = some.iter().map(|at| scope.spawn(|| check(*at))).collect();
        checks.into_iter().map(|check| check.join().unwrap()).collect()
    });
    errors.into_iter().fold([0.0; 3], |a, b| [0, 1, 2].map(|i| f64::max(a[i], b[i])))
}

/// Those of the forward that fit, and some where cubes wait for each other more.
fn all_cases() -> Vec<Case> {
    let mut all: Vec<_> = cases().into_iter().filter(|case| case.sizes.width <= 128).collect();
    for width in [64, 80, 128] {
        let case = Case::new(DType::BF16, [2, 8, 2, 1024, 1024, width]);
        all.push(case);
        all.push(Case { causal: false, ..case });
        all.push(Case { window: Some(200), layout: Layout::Packed, ..case });
        all.push(Case::new(DType::F16, [1, 2, 1, 1500, 3000, width]));
        let one_head = Case::new(DType::BF16, [1, 1, 1, 3000, 3000, width]);
        all.push(Case { causal: false, ..one_head });
        // Many heads, more than are kept at a time: of one tile, and of several.
        all.push(Case::new(DType::BF16, [40, 16, 16, 70, 70, width]));
        all.push(Case::new(DType::BF16, [10, 16, 4, 700, 700, width]));
        let case = Case::new(DType::BF16, [20, 16, 16, 300, 300, width]);
        all.push(Case { causal: false, ..case });
    }
    all
}

fn check_widths(widths: RangeInclusive<usize>) {
    let Some((device, client)) = device() else {
        return kiln_test::skip("wgmma", "KILN_DEVICE names no device that has it");
    };
    let bench = Bench { device, client };
    let mut wrong = vec![];
    for case in all_cases().into_iter().filter(|case| widths.contains(&case.sizes.width)) {
        let [dq, dk, dv] = check(&bench, &case);
        // Roundings of o, of dS or the weights, of the result, and one for what is small beside them.
        let bound = 4.0 * if case.dtype == DType::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) };
        let word = if [dq, dk, dv].iter().all(|x| *x < bound) { "ok" } else { "WRONG" };
        eprintln!("{word} dq {dq:.1e} dk {dk:.1e} dv {dv:.1e}: {case:?}");
        if word != "ok" {
            wrong.push(case);
        }
    }
    assert!(wrong.is_empty(), "{} cases are wrong", wrong.len());
}

#[test]
fn gradients_of_every_width_up_to_64_and_layout() {
    check_widths(1..=64);
}

#[test]
fn gradients_of_every_width_up_to_128_and_layout() {
    check_widths(65..=128);
}

/// Half of the products of a causal mask count.
#[test]
#[ignore = "a time and no test"]
fn times_of_the_backward() {
    let Some((device, client)) = device() else {
        return kiln_test::skip("wgmma", "KILN_DEVICE names no device that has it");
    };
    let bench = Bench { device, client };
    for [batches, heads, kv_heads, length, width] in [
        [4, 16, 16, 4096, 128],
        [4, 16, 16, 4096, 64],
        [2, 16, 16, 8192, 128],
        [1, 16, 16, 16384, 128],
        [8, 16, 16, 2048, 128],
        [2, 32, 32, 8192, 64],
        [8, 32, 32, 2048, 64],
        [32, 12, 12, 1024, 64],
        [32, 16, 16, 512, 128],
        [4, 16, 16, 4096, 96],
        [4, 16, 16, 4096, 80],
        [4, 16, 4, 4096, 128],
    ] {
        for causal in [true, false] {
            let sizes = Sizes { batches, heads, kv_heads, queries: length, keys: length, width };
            let case = Case::new(DType::BF16, [batches, heads, kv_heads, length, length, width]);
            let [q, k, v] = [0, 1, 2].map(|which| bench.heads(&case, which, Some(1)).0);
            let dy = bench.heads(&case, 0, Some(9)).0;
            let [dq, dk, dv] = [0, 1, 2].map(|which| bench.heads(&case, which, None).0);
            let o = bench.heads(&case, 0, None).0;
            let rows = batches * heads * length;
            let [lse, delta] = [0, 1].map(|_| bench.tensor(&vec![0; 4 * rows], [rows], DType::F32));
            let mask = Mask { causal, window: None, documents: false };
            let scale = case.scale;
            let problem = Problem { q, k, v, sizes, mask, scale, softcap: None, documents: None };
            forward(&problem, &o, Some(&lse));
            let with = Backward {
                dy: &dy,
                lse: &lse,
                delta: &delta,
                dq: &dq,
                dk: &dk,
                dv: &dv,
                wanted: [true; 3],
            };
            let operations = 10.0 * (rows * length * width) as f64 * if causal { 0.5 } else { 1.0 };
            let seconds = burst(&dq.tensor, || backward(&problem, &with));
            eprintln!(
                "backward b{batches} h{heads}/{kv_heads} s{length} d{width} causal {causal}: {:.1} µs, {:.0} TFLOP/s",
                seconds * 1e6,
                operations / seconds / 1e12
            );
        }
    }
}
