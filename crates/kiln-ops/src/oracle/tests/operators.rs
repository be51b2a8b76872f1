//! Operators on an emulated device, in the operations of the kernels and of the references.

use super::machine::{Machine, Order};
use crate::attention::oracle::Dims;

/// y, dx and dw of rms_norm; rounded where kernels do. `dsum` is added to dx.
pub(super) fn rms_norm(
    at: &Machine,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dy: &[f32],
    dsum: Option<&[f32]>,
) -> [Vec<f32>; 3] {
    let width = weight.len();
    let (mut y, mut dx, mut scales) = (vec![], vec![], vec![]);
    for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact(width)) {
        let squares: Vec<f32> = x.iter().map(|x| x * x).collect();
        let r = at.rsqrt(at.sum(&squares) / width as f32 + eps);
        let dots: Vec<f32> = (0..width).map(|i| x[i] * dy[i] * weight[i]).collect();
        let back = r * r * r * at.sum(&dots) / width as f32;
        y.extend((0..width).map(|i| at.stored(x[i] * r * weight[i])));
        let first = dx.len();
        dx.extend((0..width).map(|i| {
            let (direct, back) = (r * weight[i] * dy[i], back * x[i]);
            let Some(dsum) = dsum else { return at.stored(direct - back) };
            at.stored(match at.order {
                _ if at.stores_all => at.stored(direct - back) + dsum[first + i],
                Order::Sequential => direct - back + dsum[first + i],
                _ => direct + (dsum[first + i] - back),
            })
        }));
        scales.push(r);
    }
    let column = |i: usize| {
        let terms =
            scales.iter().enumerate().map(|(m, r)| r * x[m * width + i] * dy[m * width + i]);
        at.stored(at.sum(&terms.collect::<Vec<f32>>()))
    };
    [y, dx, (0..width).map(column).collect()]
}

/// The largest logit of a row and the logarithm of the sum relative to it, as a kernel that reads it once.
fn log_sum_exp(at: &Machine, row: &[f32]) -> (f32, f32) {
    let (mut largest, mut terms) = (f32::MIN, Vec::with_capacity(row.len()));
    for group in row.chunks(64) {
        let peak = group.iter().fold(f32::MIN, |a, b| a.max(*b));
        if peak > largest {
            let factor = at.exp(largest - peak);
            terms.iter_mut().for_each(|t| *t *= factor);
            largest = peak;
        }
        terms.push(at.sum(&group.iter().map(|x| at.exp(x - largest)).collect::<Vec<f32>>()));
    }
    (largest, at.sum(&terms).ln())
}

/// The gradient of the logits of cross_entropy for a cotangent of `factor` times the targets, before it is
/// stored.
pub(super) fn cross_entropy_gradient(
    at: &Machine,
    logits: &[f32],
    targets: &[i64],
    classes: usize,
    factor: f32,
) -> Vec<f32> {
    let mut gradient = vec![];
    for (row, target) in logits.chunks_exact(classes).zip(targets) {
        let (largest, log) = log_sum_exp(at, row);
        let lse = largest + log;
        gradient.extend(row.iter().enumerate().map(|(class, x)| {
            let p = at.exp(x - lse) * factor;
            if class as i64 == *target { p - factor } else { p }
        }));
    }
    gradient
}

/// The mean loss of cross_entropy.
pub(super) fn cross_entropy(at: &Machine, logits: &[f32], targets: &[i64], classes: usize) -> f32 {
    let rows = logits.chunks_exact(classes).zip(targets);
    let losses = rows.map(|(row, target)| {
        let (largest, log) = log_sum_exp(at, row);
        log - (row[*target as usize] - largest)
    });
    at.sum(&losses.collect::<Vec<f32>>()) / targets.len() as f32
}

/// y, dq, dk, dv of attention with one head of keys for each of queries, in plain operations: scores,
/// probabilities and their gradients are stored.
pub(super) fn attention(
    at: &Machine,
    [q, k, v, dy]: [&[f32]; 4],
    d: Dims,
    causal: bool,
    scale: f32,
) -> [Vec<f32>; 4] {
    let (t, s, w) = (d.queries, d.keys, d.width);
    let mut out = [const { vec![] }; 4];
    for head in 0..d.batch * d.heads {
        let of = |x: &[f32], rows: usize| x[head * rows * w..(head + 1) * rows * w].to_vec();
        let (q, k, v, dy) = (of(q, t), of(k, s), of(v, s), of(dy, t));
        let scores = at.product(&q, &k, [t, w, s], [false, true]);
        let scores: Vec<f32> = scores.into_iter().map(|x| at.between(x) * scale).collect();
        let dp = at.product(&dy, &v, [t, w, s], [false, true]);
        let (mut p, mut ds) = (vec![0.0; t * s], vec![0.0; t * s]);
        for row in 0..t {
            let seen = if causal { (row + s + 1).saturating_sub(t) } else { s };
            let scores = &scores[row * s..][..seen];
            let largest = scores.iter().fold(f32::MIN, |a, b| a.max(*b));
            let e: Vec<f32> = scores.iter().map(|x| at.exp(x - largest)).collect();
            let sum = at.sum(&e);
            let e: Vec<f32> = e.iter().map(|e| e / sum).collect();
            let dp: Vec<f32> = dp[row * s..][..seen].iter().map(|x| at.between(*x)).collect();
            let pulled: Vec<f32> = e.iter().zip(&dp).map(|(e, dp)| e * dp).collect();
            let delta = at.sum(&pulled);
            for (i, (e, dp)) in e.iter().zip(&dp).enumerate() {
                p[row * s + i] = at.stored(*e);
                ds[row * s + i] = at.stored(e * (dp - delta) * scale);
            }
        }
        out[0].extend(at.stored_product(&p, &v, [t, s, w], [false; 2]));
        out[1].extend(at.stored_product(&ds, &k, [t, s, w], [false; 2]));
        out[2].extend(at.stored_product(&ds, &q, [s, t, w], [true, false]));
        out[3].extend(at.stored_product(&p, &dy, [s, t, w], [true, false]));
    }
    out
}

/// y, dx, dw_gate, dw_up and dw_down of swiglu_mlp.
pub(super) fn swiglu_mlp(
    at: &Machine,
    [x, gate, up, down, dy]: [&[f32]; 5],
    [m, d, f]: [usize; 3],
) -> [Vec<f32>; 5] {
    let of = |w| at.stored_product(x, w, [m, d, f], [false; 2]);
    let (g, u) = (of(gate), of(up));
    let s: Vec<f32> = g.iter().map(|g| at.sigmoid(*g)).collect();
    let each =
        |of: &dyn Fn(usize) -> f32| -> Vec<f32> { (0..m * f).map(|i| at.stored(of(i))).collect() };
    let hidden = each(&|i| g[i] * s[i] * u[i]);
    let dh = at.stored_product(dy, down, [m, d, f], [false, true]);
    let dg = each(&|i| dh[i] * u[i] * s[i] * (1.0 + g[i] * (1.0 - s[i])));
    let du = each(&|i| dh[i] * g[i] * s[i]);
    let one = at.product(&dg, gate, [m, f, d], [false, true]);
    let other = at.product(&du, up, [m, f, d], [false, true]);
    let both = one.iter().zip(&other).map(|(a, b)| at.stored(at.between(*a) + at.between(*b)));
    [
        at.stored_product(&hidden, down, [m, f, d], [false; 2]),
        both.collect(),
        at.stored_product(x, &dg, [d, m, f], [true, false]),
        at.stored_product(x, &du, [d, m, f], [true, false]),
        at.stored_product(&hidden, dy, [f, m, d], [true, false]),
    ]
}

/// dx and dweight of linear_cross_entropy, for a cotangent of 1, in chunks of rows.
pub(super) fn linear_cross_entropy(
    at: &Machine,
    x: &[f32],
    weight: &[f32],
    targets: &[i64],
    [m, d, v]: [usize; 3],
    dloss: f32,
    chunk: usize,
) -> [Vec<f32>; 2] {
    let (mut dx, mut dw) = (vec![], vec![0.0f32; d * v]);
    for from in (0..m).step_by(chunk) {
        let rows = chunk.min(m - from);
        let x = &x[from * d..(from + rows) * d];
        let logits = at.stored_product(x, weight, [rows, d, v], [false; 2]);
        let factor = if at.stores_all { dloss / m as f32 } else { 1.0 / m as f32 };
        let grad = cross_entropy_gradient(at, &logits, &targets[from..from + rows], v, factor);
        let grad: Vec<f32> = grad.into_iter().map(|g| at.stored(g)).collect();
        dx.extend(at.stored_product(&grad, weight, [rows, v, d], [false, true]));
        let more = at.product(x, &grad, [d, rows, v], [true, false]);
        let add = |(sum, more): (&mut f32, f32)| *sum = at.between(*sum + at.between(more));
        dw.iter_mut().zip(more).for_each(add);
    }
    let last = |x: f32| if at.stores_all { x } else { at.stored(x * dloss) };
    [dx, dw].map(|gradient| gradient.into_iter().map(|x| last(at.stored(x))).collect())
}
