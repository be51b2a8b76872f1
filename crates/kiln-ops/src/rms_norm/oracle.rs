//! RMSNorm in float64.

use crate::oracle::{Number, Path};

/// y for rows of `weight.len()` elements.
pub fn forward<N: Number>(x: &[N], weight: &[N], eps: f64) -> Vec<N> {
    let width = weight.len();
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(width) {
        let r = scale(row, eps);
        y.extend(row.iter().zip(weight).map(|(x, w)| (*x * r * *w).stored()));
    }
    y
}

/// dx and dw from the cotangent `dy`.
pub fn backward<N: Number>(x: &[N], weight: &[N], eps: f64, dy: &[N]) -> (Vec<N>, Vec<N>) {
    let (dx, dw) = gradients(x, weight, eps, dy, None);
    let stored = |gradient: Vec<N>| gradient.into_iter().map(N::stored).collect();
    (stored(dx), stored(dw))
}

/// Units of f32 roundoff that Burn's backward of √ is off: a power, which WGSL makes of a logarithm
/// (3 ULP) and an exponential (3 + 2|x| ULP).
const POWER: f64 = 128.0;

/// dx and dw before they are stored; with `dsum`, the cotangent of x itself, in dx.
pub(crate) fn gradients<N: Number>(
    x: &[N],
    weight: &[N],
    eps: f64,
    dy: &[N],
    dsum: Option<&[N]>,
) -> (Vec<N>, Vec<N>) {
    let width = weight.len();
    let mut dx = Vec::with_capacity(x.len());
    let mut scales = vec![];
    for (row, dy) in x.chunks_exact(width).zip(dy.chunks_exact(width)) {
        let r = scale(row, eps);
        let terms = (0..width).map(|i| row[i] * weight[i] * dy[i]);
        let power = if r.path() == Path::Reference { POWER } else { 0.0 };
        let back = (r * r * r * N::sum(terms) / width as f64).off_by(power).of_row();
        let first = dx.len();
        dx.extend((0..width).map(|i| {
            let (direct, back) = (r * weight[i] * dy[i], back * row[i]);
            let Some(dsum) = dsum else { return direct - back };
            let stored = match r.path() {
                Path::Reference => (direct - back).storing(),
                Path::Fused => N::exact(0.0),
            };
            // WGSL lets a device add the three in any order (section Reassociation and Fusion), as Mesa does.
            N::sum([direct, -back, dsum[first + i]]) + stored
        }));
        scales.push(r);
    }
    (dx, of_weight(x, &scales, dy, width))
}

/// dw of `width` columns before it is stored, from the [`scale`] of every row.
pub fn of_weight<N: Number>(x: &[N], scales: &[N], dy: &[N], width: usize) -> Vec<N> {
    let term =
        |i: usize| move |(row, r): (usize, &N)| *r * x[row * width + i] * dy[row * width + i];
    (0..width).map(|i| N::sum(scales.iter().enumerate().map(term(i)))).collect()
}

/// What a row is multiplied by.
pub fn scale<N: Number>(row: &[N], eps: f64) -> N {
    let mean = N::sum(row.iter().map(|x| *x * *x)) / row.len() as f64;
    (mean + eps).rsqrt().of_row()
}
