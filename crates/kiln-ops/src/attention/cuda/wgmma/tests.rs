//! What no public function reaches: every width and layout through the entry points, against plain loops in
//! float64. Times are ignored.

mod backward;

use super::{forward, takes};
use crate::attention::problem::{HeadsView, Mask, Problem, Sizes};
use crate::device::Hardware;
use burn::tensor::{DType, Shape, bf16, f16};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use std::ops::RangeInclusive;

/// The device of `KILN_DEVICE`, if it has wgmma.
fn device() -> Option<(cubecl::Device, Client)> {
    let opened = crate::device::open(&std::env::var("KILN_DEVICE").ok()?).expect("KILN_DEVICE");
    let cube = match opened.device.as_dispatch() {
        burn::backend::DispatchDevice::Cube(cube) => cube.clone(),
        _ => return None,
    };
    let client = cube.client();
    Hardware::of(&client).wgmma.then_some((cube, client))
}

/// How heads lie in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// `[B, H, T, D]`
    Heads,
    /// `[B, T, H, D]`
    Rows,
    /// `[B, T, (H + 2·Hkv)·D]` of queries, keys and values.
    Packed,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: DType,
    sizes: Sizes,
    layout: Layout,
    causal: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    /// Documents of about so many rows.
    documents: Option<usize>,
    scale: f32,
}

impl Case {
    fn new(dtype: DType, [batches, heads, kv_heads, queries, keys, width]: [usize; 6]) -> Self {
        Self {
            dtype,
            sizes: Sizes { batches, heads, kv_heads, queries, keys, width },
            layout: Layout::Heads,
            causal: true,
            window: None,
            softcap: None,
            documents: None,
            scale: 1.0 / (width as f32).sqrt(),
        }
    }
}

/// Normal numbers that the element type holds.
fn normal(count: usize, seed: u64, dtype: DType) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f64 + 0.5) / (1u64 << 24) as f64
    };
    let mut next = || {
        let (radius, angle) = ((-2.0 * uniform().ln()).sqrt(), std::f64::consts::TAU * uniform());
        stored((radius * angle.cos()) as f32, dtype)
    };
    (0..count).map(|_| next()).collect()
}

fn stored(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        _ => f16::from_f32(x).to_f32(),
    }
}

fn bytes(numbers: &[f32], dtype: DType) -> Vec<u8> {
    let bits = |x: &f32| match dtype {
        DType::BF16 => bf16::from_f32(*x).to_bits(),
        _ => f16::from_f32(*x).to_bits(),
    };
    numbers.iter().flat_map(|x| bits(x).to_ne_bytes()).collect()
}

fn numbers(tensor: &CubeTensor) -> Vec<f32> {
    let read = tensor.client.read_one(tensor.handle.clone()).expect("readable");
    let half = |b: &[u8]| u16::from_ne_bytes([b[0], b[1]]);
    match tensor.dtype {
        DType::BF16 => read.chunks_exact(2).map(|b| bf16::from_bits(half(b)).to_f32()).collect(),
        DType::F16 => read.chunks_exact(2).map(|b| f16::from_bits(half(b)).to_f32()).collect(),
        _ => read.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

struct Bench {
    device: cubecl::Device,
    client: Client,
}

impl Bench {
    fn tensor(&self, bytes: &[u8], shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
        let handle = self.client.create_from_slice(bytes);
        let (client, device) = (self.client.clone(), self.device.clone());
        CubeTensor::new_contiguous(client, device, shape.into(), handle, dtype)
    }

    /// Heads of so many rows as the layout has them, all elements NaN or of these numbers in the order of memory;
    /// of the packed one those of all three.
    fn heads(&self, case: &Case, which: usize, seed: Option<u64>) -> (HeadsView, Vec<f32>) {
        let s = &case.sizes;
        let (heads, rows) = if which == 0 { (s.heads, s.queries) } else { (s.kv_heads, s.keys) };
        let packed = case.layout == Layout::Packed && seed.is_some();
        let all = if packed { s.heads + 2 * s.kv_heads } else { heads };
        let count = s.batches * all * rows * s.width;
        let held = match seed {
            // The packed tensors are three with the same numbers.
            Some(seed) => normal(count, if packed { 77 } else { seed + which as u64 }, case.dtype),
            None => vec![f32::NAN; count],
        };
        let tensor = self.tensor(&bytes(&held, case.dtype), [count], case.dtype);
        let first = if packed { [0, s.heads, s.heads + s.kv_heads][which] } else { 0 };
        let (head_stride, row_stride) = match case.layout {
            Layout::Heads => (rows * s.width, s.width),
            _ => (s.width, all * s.width),
        };
        let batch_stride = all * rows * s.width;
        (HeadsView { tensor, first, batch_stride, head_stride, row_stride }, held)
    }
}

/// First key of the document of each row, and one past its last.
fn document_limits(rows: usize, length: usize) -> [Vec<u32>; 2] {
    let mut limits = [vec![], vec![]];
    let mut start = 0;
    while start < rows {
        let end = (start + length + start % 7).min(rows);
        limits[0].extend((start..end).map(|_| start as u32));
        limits[1].extend((start..end).map(|_| end as u32));
        start = end;
    }
    limits
}

/// The rows of one head.
struct Head<'a> {
    held: &'a [f32],
    view: &'a HeadsView,
    batch: usize,
    head: usize,
}

impl Head<'_> {
    fn row(&self, row: usize, width: usize) -> &[f32] {
        let v = self.view;
        let at = self.batch * v.batch_stride
            + (v.first + self.head) * v.head_stride
            + row * v.row_stride;
        &self.held[at..at + width]
    }
}

/// What row `t` is to be: the result, Σ p·|v| of each element, and the log-sum-exp to base 2.
fn expected(
    case: &Case,
    limits: &[Vec<u32>; 2],
    [q, k, v]: [&Head; 3],
    t: usize,
) -> (Vec<f64>, Vec<f64>, f64) {
    let s = &case.sizes;
    let reach = (t + s.keys) as i64 - s.queries as i64 + 1;
    let mut high = if case.causal { reach.clamp(0, s.keys as i64) } else { s.keys as i64 };
    let mut low = case.window.map_or(0, |w| (reach - w as i64).max(0));
    if case.documents.is_some() {
        low = low.max(i64::from(limits[0][t]));
        high = high.min(i64::from(limits[1][t]));
    }
    let (mut out, mut size) = (vec![0.0; s.width], vec![0.0; s.width]);
    let keys: Vec<usize> = (low..high.max(low)).map(|key| key as usize).collect();
    let score = |key: &usize| {
        let terms = q.row(t, s.width).iter().zip(k.row(*key, s.width));
        let sum: f64 = terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let score = sum * f64::from(case.scale);
        case.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    };
    let scores: Vec<f64> = keys.iter().map(score).collect();
    let largest = scores.iter().copied().fold(f64::MIN, f64::max);
    let total: f64 = scores.iter().map(|x| (x - largest).exp()).sum();
    for (key, score) in keys.iter().zip(&scores) {
        let weight = (score - largest).exp() / total;
        for (i, x) in v.row(*key, s.width).iter().enumerate() {
            out[i] += weight * f64::from(*x);
            size[i] += weight * f64::from(x.abs());
        }
    }
    let lse = if keys.is_empty() { f64::INFINITY } else { (largest + total.ln()) / 2f64.ln() };
    (out, size, lse)
}

/// The largest error of an element over what is allowed, and of a log-sum-exp.
fn check_forward(bench: &Bench, case: &Case, again_without: bool) -> (f64, f64) {
    let s = case.sizes;
    let (q, q_held) = bench.heads(case, 0, Some(1));
    let (k, k_held) = bench.heads(case, 1, Some(1));
    let (v, v_held) = bench.heads(case, 2, Some(1));
    let (o, _) = bench.heads(case, 0, None);
    let limits = document_limits(s.queries, case.documents.unwrap_or(1));
    let of_limits: Vec<u8> =
        limits.iter().flatten().flat_map(|limit| limit.to_ne_bytes()).collect();
    let rows = s.batches * s.heads * s.queries;
    let lse = bench.tensor(&f32::NAN.to_ne_bytes().repeat(rows), [rows], DType::F32);
    let problem = Problem {
        q: q.clone(),
        k: k.clone(),
        v: v.clone(),
        sizes: s,
        mask: Mask {
            causal: case.causal,
            window: case.window,
            documents: case.documents.is_some(),
        },
        scale: case.scale,
        softcap: case.softcap,
        documents: case.documents.map(|_| bench.tensor(&of_limits, [2, s.queries], DType::U32)),
    };
    assert!(takes(&problem), "{case:?}");
    forward(&problem, &o, Some(&lse));
    let (found, found_lse) = (numbers(&o.tensor), numbers(&lse));
    // The result is the same once more, and so it is without a log-sum-exp, which is another kernel.
    let (again, _) = bench.heads(case, 0, None);
    forward(&problem, &again, (!again_without).then_some(&lse));
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&found) == bits(&numbers(&again.tensor)), "other bits: {case:?}");

    // Of many heads some.
    let all = (0..s.batches).flat_map(|batch| (0..s.heads).map(move |head| (batch, head)));
    let some: Vec<_> = all.step_by((s.batches * s.heads / 12).max(1)).collect();
    let check = |(batch, head): (usize, usize)| {
        let kv_head = head / (s.heads / s.kv_heads);
        let head_of = |held, view, head| Head { held, view, batch, head };
        let heads = [
            &head_of(&q_held, &q, head),
            &head_of(&k_held, &k, kv_head),
            &head_of(&v_held, &v, kv_head),
        ];
        let result = head_of(&found, &o, head);
        let lse = &found_lse[(batch * s.heads + head) * s.queries..][..s.queries];
        head_errors(case, &limits, heads, &result, lse)
    };
    let errors: Vec<_> = std::thread::scope(|scope| {
        let checks: Vec<_> = some.iter().map(|at| scope.spawn(|| check(*at))).collect();
        checks.into_iter().map(|check| check.join().unwrap()).collect()
    });
    errors.into_iter().fold((0.0, 0.0), |(a, b), (c, d)| (f64::max(a, c), f64::max(b, d)))
}

/// The largest errors of a head over what is allowed.
fn head_errors(
    case: &Case,
    limits: &[Vec<u32>; 2],
    heads: [&Head; 3],
    result: &Head,
    lse: &[f32],
) -> (f64, f64) {
    let s = &case.sizes;
    // Weights and the result are rounded, by half the distance of two neighbours at most.
    let unit = if case.dtype == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
    let most = |a: f64, b: f64| if b.is_nan() { f64::INFINITY } else { f64::max(a, b) };
    let (mut worst, mut worst_lse) = (0.0, 0.0);
    for (t, found) in lse.iter().enumerate() {
        let (out, size, row_lse) = expected(case, limits, heads, t);
        for (i, x) in result.row(t, s.width).iter().enumerate() {
            let allowed = unit * (size[i] + out[i].abs()) + 1e-6;
            worst = most(worst, (f64::from(*x) - out[i]).abs() / allowed);
        }
        let found = f64::from(*found);
        let error = if row_lse.is_infinite() {
            if found == row_lse { 0.0 } else { f64::INFINITY }
        } else {
            (found - row_lse).abs() / (1e-5 * (1.0 + row_lse.abs()))
        };
        worst_lse = most(worst_lse, error);
    }
    (worst, worst_lse)
}

fn cases() -> Vec<Case> {
    let (bf16, f16) = (DType::BF16, DType::F16);
    let mut cases = vec![];
    // Of each kind of tiles some: every width has kernels of its own, which take seconds to compile.
    for width in [16, 40, 64, 72, 96, 128, 136, 192, 256] {
        cases.push(Case::new(bf16, [1, 2, 1, 256, 256, width]));
        // Ragged, more queries than keys and the other way round.
        for [queries, keys] in [[333, 333], [200, 77], [77, 300], [1, 129]] {
            let case =
                Case::new(if queries == 77 { f16 } else { bf16 }, [2, 2, 2, queries, keys, width]);
            cases.push(case);
            cases.push(Case { causal: false, layout: Layout::Rows, ..case });
        }
    }
    for width in [64, 128, 256] {
        let case = Case::new(bf16, [2, 6, 2, 390, 390, width]);
        cases.push(Case { layout: Layout::Packed, ..case });
        cases.push(Case { softcap: Some(2.0), ..case });
        for window in [1, 50, 130, 1000] {
            cases.push(Case { window: Some(window), ..case });
            cases.push(Case {
                window: Some(window),
                softcap: Some(5.0),
                dtype: f16,
                sizes: Sizes { queries: 391, keys: 250, ..case.sizes },
                ..case
            });
        }
        for documents in [3, 100, 260] {
            let one = Case {
                documents: Some(documents),
                sizes: Sizes { batches: 1, ..case.sizes },
                ..case
            };
            cases.push(Case { layout: Layout::Packed, ..one });
            cases.push(Case { causal: false, ..one });
            cases.push(Case { window: Some(70), layout: Layout::Packed, ..one });
        }
        cases.push(Case { scale: 2.0, ..case });
        // More tiles than multiprocessors.
        cases.push(Case::new(bf16, [5, 16, 16, 700, 700, width]));
    }
    cases
}

/// Cases of heads of these widths. Kernels are compiled for each: a test for each part of them.
fn check_widths(widths: RangeInclusive<usize>) {
    let Some((device, client)) = device() else {
        return kiln_test::skip("wgmma", "KILN_DEVICE names no device that has it");
    };
    let bench = Bench { device, client };
    let mut wrong = vec![];
    let these = cases().into_iter().filter(|case| widths.contains(&case.sizes.width));
    for (number, case) in these.enumerate() {
        let (out, lse) = check_forward(&bench, &case, number % 8 == 0);
        let word = if out <= 1.0 && lse <= 1.0 { "ok" } else { "WRONG" };
        eprintln!("{word} out {out:.3} lse {lse:.3} of what is allowed: {case:?}");
        if word != "ok" {
            wrong.push(case);
        }
    }
    assert!(wrong.is_empty(), "{} cases are wrong", wrong.len());
}

#[test]
fn every_width_up_to_64_and_layout() {
    check_widths(1..=64);
}

#[test]
fn every_width_up_to_128_and_layout() {
    check_widths(65..=128);
}

#[test]
fn every_width_up_to_256_and_layout() {
    check_widths(129..=256);
}

/// Half of the products of a causal mask count.
#[test]
#[ignore = "a time and no test"]
fn times() {
    let Some((device, client)) = device() else {
        return kiln_test::skip("wgmma", "KILN_DEVICE names no device that has it");
    };
    let bench = Bench { device, client };
    for [batches, heads, length, width] in [
        [4, 16, 4096, 128],
        [4, 16, 4096, 64],
        [2, 16, 8192, 128],
        [1, 16, 16384, 128],
        [8, 16, 2048, 128],
        [2, 32, 8192, 64],
        [8, 32, 2048, 64],
        [32, 12, 1024, 64],
        [32, 16, 512, 128],
        [4, 16, 4096, 96],
        [4, 16, 4096, 192],
        [4, 8, 4096, 256],
    ] {
        for causal in [true, false] {
            let sizes = [batches, heads, heads, length, length, width];
            let case = Case { causal, ..Case::new(DType::BF16, sizes) };
            let [q, k, v] = [0, 1, 2].map(|which| bench.heads(&case, which, Some(1)).0);
            let o = bench.heads(&case, 0, None).0;
            let rows = batches * heads * length;
            let lse = bench.tensor(&vec![0; 4 * rows], [rows], DType::F32);
            let mask = Mask { causal, window: None, documents: false };
            let (sizes, scale) = (case.sizes, case.scale);
            let problem = Problem { q, k, v, sizes, mask, scale, softcap: None, documents: None };
            let operations = 4.0 * (rows * length * width) as f64 * if causal { 0.5 } else { 1.0 };
            let seconds = burst(&lse, || forward(&problem, &o, Some(&lse)));
            eprintln!(
                "forward b{batches} h{heads} s{length} d{width} causal {causal}: {:.1} µs, {:.0} TFLOP/s",
                seconds * 1e6,
                operations / seconds / 1e12
            );
        }
    }
}

/// Seconds of a launch: the median over bursts of about 4 ms, with pauses, of which the last launch is waited for by
/// reading what it wrote.
fn burst(written: &CubeTensor, launch: impl Fn()) -> f64 {
    let wait = || {
        let mut handle = written.handle.clone();
        handle.offset_end = Some(handle.size() - 4);
        drop(written.client.read_one(handle).expect("readable"));
    };
    let run = |count: usize| {
        wait();
        let start = std::time::Instant::now();
        (0..count).for_each(|_| launch());
        wait();
        start.elapsed().as_secs_f64()
    };
    run(3);
    let count = ((4e-3 / (run(10) / 10.0)) as usize).clamp(5, 200);
    let mut times: Vec<f64> = (0..15)
        .map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            run(count) / count as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
