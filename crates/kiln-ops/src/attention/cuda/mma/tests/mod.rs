//! Forward and backward beside plain sums in float64; `timing`, which is ignored, says how long they take.

mod timing;

use super::{backward, forward, takes};
use crate::attention::problem::{Backward, HeadsView, Mask, Problem, Sizes};
use crate::tile::tests::like;
use burn::tensor::{DType, Shape, bf16, f16};
use burn_cubecl::tensor::CubeTensor;

/// What is different from case to case.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    dtype: DType,
    sizes: Sizes,
    causal: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    scale: f32,
    documents: &'static [u32],
    /// Of the random queries and keys.
    spread: f32,
    /// All in one tensor of rows.
    packed: bool,
}

impl Case {
    fn new(
        name: &'static str,
        [batches, heads, kv_heads, queries, keys, width]: [usize; 6],
    ) -> Self {
        Self {
            name,
            dtype: DType::BF16,
            sizes: Sizes { batches, heads, kv_heads, queries, keys, width },
            causal: true,
            window: None,
            softcap: None,
            scale: 1.0 / (width as f32).sqrt(),
            documents: &[],
            spread: 1.0,
            packed: false,
        }
    }

    /// Keys from and to that a query sees.
    fn seen(&self, query: usize) -> (usize, usize) {
        let Sizes { queries, keys, .. } = self.sizes;
        let diagonal = (query + keys + 1).saturating_sub(queries);
        let (mut from, mut to) = (0, keys);
        if self.causal {
            to = to.min(diagonal);
        }
        if let Some(window) = self.window {
            from = diagonal.saturating_sub(window);
        }
        for ends in self.documents.windows(2) {
            let (start, end) = (ends[0] as usize, ends[1] as usize);
            if (start..end).contains(&query) {
                (from, to) = (from.max(start), to.min(end));
            }
        }
        (from, to)
    }
}

fn stored(dtype: DType, numbers: &[f32]) -> Vec<u8> {
    match dtype {
        DType::BF16 => numbers.iter().flat_map(|x| bf16::from_f32(*x).to_ne_bytes()).collect(),
        DType::F16 => numbers.iter().flat_map(|x| f16::from_f32(*x).to_ne_bytes()).collect(),
        _ => numbers.iter().flat_map(|x| x.to_ne_bytes()).collect(),
    }
}

fn loaded(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let halves = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        DType::BF16 => halves().map(|b| bf16::from_ne_bytes(b).to_f64()).collect(),
        DType::F16 => halves().map(|b| f16::from_ne_bytes(b).to_f64()).collect(),
        _ => bytes
            .chunks_exact(4)
            .map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]).into())
            .collect(),
    }
}

fn tensor(like: &CubeTensor, shape: &[usize], dtype: DType, bytes: &[u8]) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    let handle = client.create_from_slice(bytes);
    CubeTensor::new_contiguous(client, device, Shape::from(shape.to_vec()), handle, dtype)
}

fn read(tensor: &CubeTensor) -> Vec<u8> {
    tensor.client.read_one(tensor.handle.clone()).expect("readable").to_vec()
}

/// About normal numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        let mut sum = 0.0;
        for _ in 0..4 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            sum += (self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        }
        sum * 1.7
    }
}

/// Heads of a tensor of bytes, and where they are in it.
struct Held {
    view: HeadsView,
    /// Behind each other: [batch, head, row, element].
    sizes: [usize; 4],
}

impl Held {
    /// Heads `first ..` of rows of `wide` heads and 8 elements more, or one head behind the other.
    fn view(tensor: CubeTensor, sizes: [usize; 4], wide: Option<(usize, usize)>) -> Self {
        let [_, heads, rows, width] = sizes;
        let view = match wide {
            Some((first, wide)) => {
                let row_stride = wide * width + 8;
                HeadsView {
                    tensor,
                    first,
                    batch_stride: rows * row_stride,
                    head_stride: width,
                    row_stride,
                }
            }
            None => {
                let batch_stride = heads * rows * width;
                HeadsView {
                    tensor,
                    first: 0,
                    batch_stride,
                    head_stride: rows * width,
                    row_stride: width,
                }
            }
        };
        Self { view, sizes }
    }

    fn at(&self, batch: usize, head: usize, row: usize, element: usize) -> usize {
        let v = &self.view;
        batch * v.batch_stride + (v.first + head) * v.head_stride + row * v.row_stride + element
    }

    fn numbers(&self) -> Vec<f64> {
        let all = loaded(self.view.tensor.dtype, &read(&self.view.tensor));
        let [batches, heads, rows, width] = self.sizes;
        let mut numbers = vec![];
        for (b, h, r) in indices([batches, heads, rows]) {
            let first = self.at(b, h, r, 0);
            numbers.extend_from_slice(&all[first..first + width]);
        }
        numbers
    }
}

fn indices([a, b, c]: [usize; 3]) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..a * b * c).map(move |i| (i / (b * c), i / c % b, i % c))
}

/// q, k, v and dy, or o, dq, dk and dv: in tensors of their own, or the three of one size in one.
fn four(like: &CubeTensor, case: &Case, mut fill: impl FnMut(usize) -> Vec<u8>) -> [Held; 4] {
    let Sizes { batches, heads, kv_heads, queries, keys, width } = case.sizes;
    let of = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)];
    let sizes = of.map(|(heads, rows)| [batches, heads, rows, width]);
    if case.packed {
        let wide = heads + 2 * kv_heads;
        let count = batches * queries * (wide * width + 8);
        let one = tensor(like, &[count], case.dtype, &fill(count));
        let count = batches * queries * (heads * width + 8);
        let other = tensor(like, &[count], case.dtype, &fill(count));
        let part = |i: usize, first| Held::view(one.clone(), sizes[i], Some((first, wide)));
        let last = Held::view(other, sizes[3], Some((0, heads)));
        [part(0, 0), part(1, heads), part(2, heads + kv_heads), last]
    } else {
        sizes.map(|sizes| {
            let count = sizes.iter().product();
            Held::view(tensor(like, &[count], case.dtype, &fill(count)), sizes, None)
        })
    }
}

/// o, lse, dq, dk, dv and delta.
type Expected = [Vec<f64>; 6];

/// All of them in float64.
fn expected(case: &Case, [q, k, v, dy]: [&[f64]; 4]) -> Expected {
    let Sizes { batches, heads, kv_heads, queries, keys, width } = case.sizes;
    let (group, scale) = (heads / kv_heads, f64::from(case.scale));
    let mut o = vec![0.0; q.len()];
    let mut dq = vec![0.0; q.len()];
    let (mut dk, mut dv) = (vec![0.0; k.len()], vec![0.0; k.len()]);
    let (mut lse, mut delta) = (vec![], vec![]);
    for (b, h, t) in indices([batches, heads, queries]) {
        let row = ((b * heads + h) * queries + t) * width;
        let kv = (b * kv_heads + h / group) * keys;
        let dot = |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| x * y).sum() };
        let (q, dy) = (&q[row..row + width], &dy[row..row + width]);
        let (from, to) = case.seen(t);
        if from >= to {
            lse.push(f64::INFINITY);
            delta.push(0.0);
            continue;
        }
        let at = |s: usize| (kv + s) * width;
        let raw: Vec<f64> = (from..to).map(|s| scale * dot(q, &k[at(s)..at(s) + width])).collect();
        let capped = |s: f64| case.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh());
        let largest = raw.iter().map(|s| capped(*s)).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = raw.iter().map(|s| (capped(*s) - largest).exp()).sum();
        lse.push((largest + sum.ln()) * std::f64::consts::LOG2_E);
        let weights: Vec<f64> = raw.iter().map(|s| (capped(*s) - largest).exp() / sum).collect();
        for (s, p) in (from..to).zip(&weights) {
            for i in 0..width {
                o[row + i] += p * v[at(s) + i];
            }
        }
        let taken = dot(dy, &o[row..row + width]);
        delta.push(taken);
        for ((s, p), raw) in (from..to).zip(&weights).zip(&raw) {
            let slope = case.softcap.map_or(1.0, |c| 1.0 - (raw / f64::from(c)).tanh().powi(2));
            let ds = p * (dot(dy, &v[at(s)..at(s) + width]) - taken) * slope * scale;
            for i in 0..width {
                dv[at(s) + i] += p * dy[i];
                dk[at(s) + i] += ds * q[i];
                dq[row + i] += ds * k[at(s) + i];
            }
        }
    }
    [o, lse, dq, dk, dv, delta]
}

/// The largest error, by the largest number.
fn error(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest =
        expected.iter().filter(|x| x.is_finite()).fold(0.0f64, |most, x| most.max(x.abs()));
    let apart = |(x, y): (&f64, &f64)| match x == y {
        true => 0.0,
        false if x.is_nan() || !y.is_finite() => f64::INFINITY,
        false => (x - y).abs(),
    };
    let worst = found.iter().zip(expected).map(apart).fold(0.0, f64::max);
    // Small sums of large terms: what is left is rounding.
    worst / largest.max(1e-2)
}

fn check(like: &CubeTensor, case: &Case) -> bool {
    let mut random = Random(7 + case.sizes.width as u64);
    let mut calls = 0;
    let inputs = four(like, case, |count| {
        // Of queries and keys, or of all that is packed.
        let spread = if calls < 2 { case.spread } else { 1.0 };
        calls += 1;
        stored(case.dtype, &(0..count).map(|_| random.next() * spread).collect::<Vec<_>>())
    });
    let poison = |count: usize| vec![0xff; count * 2];
    let outputs = four(like, case, poison);
    let results = four(like, case, poison);
    let Sizes { batches, heads, queries, keys, .. } = case.sizes;
    let held = inputs.each_ref().map(Held::numbers);
    let [o, lse, dq, dk, dv, delta] = expected(case, held.each_ref().map(Vec::as_slice));

    let documents = (!case.documents.is_empty()).then(|| {
        let of = |t: u32| case.documents.windows(2).find(|d| (d[0]..d[1]).contains(&t)).unwrap();
        let rows = (0..2).flat_map(|i| (0..queries as u32).map(move |t| of(t)[i]));
        let bytes: Vec<u8> = rows.flat_map(u32::to_ne_bytes).collect();
        tensor(like, &[2, queries], DType::U32, &bytes)
    });
    let [q, k, v, dy] = inputs.each_ref().map(|held| held.view.clone());
    let mask = Mask { causal: case.causal, window: case.window, documents: documents.is_some() };
    let (sizes, scale, softcap) = (case.sizes, case.scale, case.softcap);
    let problem = Problem { q, k, v, sizes, mask, scale, softcap, documents };
    assert!(takes(&problem), "{}", case.name);
    let rows = [batches, heads, queries];
    let found_lse = tensor(like, &rows, DType::F32, &vec![0xff; batches * heads * queries * 4]);
    forward(&problem, &outputs[3].view, Some(&found_lse));
    let floats: Vec<f32> = delta.iter().map(|x| *x as f32).collect();
    let delta = tensor(like, &rows, DType::F32, &stored(DType::F32, &floats));
    let run = |to: &[Held; 4]| {
        let with = Backward {
            dy: &dy,
            lse: &found_lse,
            delta: &delta,
            dq: &to[0].view,
            dk: &to[1].view,
            dv: &to[2].view,
            wanted: [true; 3],
        };
        backward(&problem, &with);
    };
    run(&outputs);
    run(&results);
    let (again, first) =
        (results.each_ref().map(Held::numbers), outputs.each_ref().map(Held::numbers));
    let repeat = (0..3).all(|i| again[i] == first[i]);
    let [found_dq, found_dk, found_dv, found_o] = first;
    let found_lse = loaded(DType::F32, &read(&found_lse));
    let errors = [
        error(&found_o, &o),
        error(&found_lse, &lse),
        error(&found_dq, &dq),
        error(&found_dk, &dk),
        error(&found_dv, &dv),
    ];
    // What is beside the heads stays as it is.
    let poisoned = |held: &Held, used: usize| {
        let v = &held.view;
        let bytes = read(&v.tensor);
        !case.packed
            || (0..batches * keys).all(|row| {
                let at = (row * v.row_stride + used) * 2;
                bytes[at..at + 16].iter().all(|b| *b == 0xff)
            })
    };
    let whole = (case.sizes.heads + 2 * case.sizes.kv_heads) * case.sizes.width;
    let kept = poisoned(&outputs[0], whole) && poisoned(&outputs[3], heads * case.sizes.width);
    let bound = if case.dtype == DType::F16 { 4e-3 } else { 2e-2 };
    let ok = repeat && kept && errors.iter().all(|e| *e < bound) && errors[1] < 1e-4;
    let [b, hq, hkv] = [batches, heads, case.sizes.kv_heads];
    eprintln!(
        "{} {:?} {} b{b} h{hq}/{hkv} t{queries} s{keys} d{}: o {:.1e} lse {:.1e} dq {:.1e} dk {:.1e} dv {:.1e}{}{}",
        if ok { "ok  " } else { "BAD " },
        case.dtype,
        case.name,
        case.sizes.width,
        errors[0],
        errors[1],
        errors[2],
        errors[3],
        errors[4],
        if repeat { "" } else { ", bits differ" },
        if kept { "" } else { ", written beside" },
    );
    ok
}

/// Causal and not, of a width.
fn widths(widths: &[usize]) -> Vec<Case> {
    let of = |width: &usize| {
        let f16 = Case {
            dtype: DType::F16,
            causal: false,
            ..Case::new("full", [1, 2, 1, 131, 259, *width])
        };
        [Case::new("causal", [2, 2, 2, 200, 200, *width]), f16]
    };
    widths.iter().flat_map(of).collect()
}

/// All masks, attributes and forms of heads of a width.
fn settings(width: usize) -> Vec<Case> {
    let case = |name, sizes: [usize; 5]| {
        let [b, h, kv, t, s] = sizes;
        Case::new(name, [b, h, kv, t, s, width])
    };
    let full = |name, sizes| Case { causal: false, ..case(name, sizes) };
    vec![
        full("full", [1, 2, 2, 130, 77]),
        case("more keys", [1, 2, 2, 70, 333]),
        case("blind rows", [1, 2, 2, 333, 70]),
        full("one", [1, 1, 1, 1, 1]),
        case("one query", [2, 4, 2, 1, 500]),
        case("one key", [1, 2, 2, 150, 1]),
        case("groups", [2, 6, 2, 190, 250]),
        full("one KV head", [2, 5, 1, 190, 250]),
        Case { window: Some(33), ..case("window", [1, 2, 2, 300, 300]) },
        Case { window: Some(1), ..case("window of one", [1, 2, 1, 300, 310]) },
        Case { window: Some(100), ..case("window, more keys", [1, 4, 2, 200, 555]) },
        Case { window: Some(50), ..case("window, blind rows", [1, 4, 2, 300, 200]) },
        Case { window: Some(10_000), ..case("wide window", [1, 2, 2, 200, 200]) },
        Case { softcap: Some(2.0), ..case("softcap", [1, 2, 2, 200, 200]) },
        Case { softcap: Some(5.0), scale: 1.0, ..full("softcap", [1, 2, 1, 150, 200]) },
        Case { scale: -0.2, ..case("negative scale", [1, 2, 2, 150, 150]) },
        Case { scale: 0.0, ..full("no scale", [1, 2, 2, 150, 150]) },
        Case { spread: 4.0, scale: 1.0, ..case("large scores", [1, 2, 2, 150, 150]) },
        Case { documents: &[0, 37, 38, 130, 300], ..case("documents", [1, 2, 2, 300, 300]) },
        Case { documents: &[0, 128, 192, 300], ..full("documents", [1, 2, 1, 300, 300]) },
        Case {
            documents: &[0, 5, 200, 300],
            window: Some(40),
            softcap: Some(20.0),
            ..case("documents, window, softcap", [1, 4, 2, 300, 300])
        },
        Case { packed: true, ..case("packed", [2, 4, 2, 200, 200]) },
        Case { packed: true, dtype: DType::F16, ..full("packed", [2, 3, 1, 129, 129]) },
    ]
}

/// Whether there is a device with these kernels.
fn device() -> Option<CubeTensor> {
    let (_, like) = like()?;
    if crate::device::Hardware::of(&like.client).async_copies {
        return Some(like);
    }
    let name = like.client.name();
    kiln_test::skip("mma", format!("{name} has no tensor cores that these kernels know"));
    None
}

/// Forward and backward are those of plain sums. Kernels are compiled for each case: a test for each part of them.
fn check_all(cases: &[Case]) {
    let Some(like) = device() else { return };
    let wrong = cases.iter().filter(|case| !check(&like, case)).count();
    assert_eq!(wrong, 0, "cases are wrong");
}

#[test]
fn widths_up_to_64() {
    check_all(&widths(&[16, 24, 32, 40, 48, 64]));
}

#[test]
fn widths_up_to_136() {
    check_all(&widths(&[72, 80, 96, 128, 136]));
}

#[test]
fn widths_up_to_256() {
    check_all(&widths(&[144, 160, 192, 208, 256]));
}

#[test]
fn settings_of_width_64() {
    check_all(&settings(64));
}

#[test]
fn settings_of_width_128() {
    check_all(&settings(128));
}

#[test]
fn settings_of_width_192() {
    check_all(&settings(192));
}
