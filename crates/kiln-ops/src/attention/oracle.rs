//! Attention in float64.

use super::AttentionOptions;
use crate::oracle::{Number, Path};
use std::ops::Range;

/// Which keys a query sees, and what becomes of a score.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Query t sees the keys up to t + S − T.
    pub causal: bool,
    /// Only so many of the last of them.
    pub window: Option<usize>,
    /// Factor on the scores.
    pub scale: f64,
    /// c·tanh(s/c) in place of the scaled score s.
    pub softcap: Option<f64>,
    /// Cumulative lengths of packed documents.
    pub documents: Option<Vec<usize>>,
}

impl Rule {
    /// Of a call with these options on heads of this width.
    pub fn new(options: AttentionOptions, width: usize) -> Self {
        let AttentionOptions { causal, scale, window, softcap } = options;
        let scale = scale.unwrap_or((width as f64).sqrt().recip());
        Self { causal, window, scale, softcap, documents: None }
    }

    /// The keys that query `t` sees.
    fn seen(&self, t: usize, d: Dims) -> Range<usize> {
        let mut end = if self.causal { (t + d.keys + 1).saturating_sub(d.queries) } else { d.keys };
        let mut start = self.window.map_or(0, |window| end.saturating_sub(window));
        if let Some(ends) = &self.documents {
            let next = ends.partition_point(|end| *end <= t);
            start = start.max(ends[next - 1]);
            end = end.min(ends[next]);
        }
        start..end
    }
}

/// Sizes of an attention call.
#[derive(Debug, Clone, Copy)]
pub struct Dims {
    /// B.
    pub batch: usize,
    /// H, heads of the queries.
    pub heads: usize,
    /// Hkv, heads of keys and values.
    pub kv_heads: usize,
    /// T.
    pub queries: usize,
    /// S.
    pub keys: usize,
    /// D.
    pub width: usize,
}

/// y of shape `[B, H, T, D]`.
pub fn forward<N: Number>(q: &[N], k: &[N], v: &[N], d: Dims, rule: &Rule) -> Vec<N> {
    let mut y = Vec::with_capacity(q.len());
    for (group, q) in q.chunks_exact((d.rows() * d.width).max(1)).enumerate() {
        let [k, v] = [k, v].map(|of| d.keys_of(of, group));
        for row in 0..d.rows() {
            y.extend(Query::new(q, k, row, d, rule).output(v));
        }
    }
    y
}

/// dq, dk, dv from the cotangent `dy`.
pub fn backward<N: Number>(
    q: &[N],
    k: &[N],
    v: &[N],
    d: Dims,
    rule: &Rule,
    dy: &[N],
) -> (Vec<N>, Vec<N>, Vec<N>) {
    let size = d.rows() * d.width;
    let (mut dq, mut dk, mut dv) = (vec![], vec![], vec![]);
    // Of no queries there still are keys.
    for group in 0..d.batch * d.kv_heads {
        let [q, dy] = [q, dy].map(|of| &of[group * size..(group + 1) * size]);
        let [k, v] = [k, v].map(|of| d.keys_of(of, group));
        // Probabilities and gradients of the scores, a row for each query of the group.
        let (mut p, mut ds) = (vec![], vec![]);
        for row in 0..d.rows() {
            let query = Query::new(q, k, row, d, rule);
            let scores = query.scores(v, d.row(dy, row));
            dq.extend(query.gradient(k, &scores));
            p.extend(query.probabilities());
            ds.extend(query.stored(scores));
        }
        dk.extend(of_keys(&ds, q, d.keys, d));
        dv.extend(of_keys(&p, dy, d.keys, d));
    }
    (dq, dk, dv)
}

/// dk of `keys` keys of a group from the gradients of their scores, a row for each query of `q`; or dv from
/// their probabilities and dy.
pub fn of_keys<N: Number>(scores: &[N], q: &[N], keys: usize, d: Dims) -> Vec<N> {
    let product = N::product(scores, q, [keys, d.rows(), d.width], [true, false]);
    product.into_iter().map(N::stored).collect()
}

impl Dims {
    /// Queries that read the same keys: those of the heads of a group stand below each other.
    fn rows(&self) -> usize {
        self.heads / self.kv_heads * self.queries
    }

    /// What a group reads.
    fn keys_of<'a, N>(&self, of: &'a [N], group: usize) -> &'a [N] {
        &of[group * self.keys * self.width..][..self.keys * self.width]
    }

    fn column<'a, N: Number>(&self, of: &'a [N], i: usize) -> impl Iterator<Item = N> + 'a {
        of.iter().skip(i).step_by(self.width).copied()
    }

    fn row<'a, N>(&self, of: &'a [N], row: usize) -> &'a [N] {
        &of[row * self.width..][..self.width]
    }
}

/// A query and the probabilities of the keys that it sees: e^(s − largest) / Σ.
///
/// 1/Σ is common to all of them, and its error does not average out in sums over the keys: it is multiplied
/// in afterwards.
pub struct Query<N> {
    d: Dims,
    scale: f64,
    seen: Range<usize>,
    exponentials: Vec<N>,
    /// 1 − tanh² of their scores under a soft-cap.
    slopes: Option<Vec<N>>,
    inverse: N,
}

/// The gradients of the scaled scores of a query, p·(dp − Σ p·dp), and what they are made of.
pub struct Scores<N> {
    gradients: Vec<N>,
    pulled: Vec<N>,
    delta: N,
}

impl<N: Number> Query<N> {
    /// That of a row of `q`; `q` and `k` are those of a group.
    pub fn new(q: &[N], k: &[N], row: usize, d: Dims, rule: &Rule) -> Self {
        let (seen, scale) = (rule.seen(row % d.queries, d), rule.scale);
        let q = d.row(q, row);
        let score = |s: usize| {
            let pairs = q.iter().copied().zip(d.row(k, s).iter().copied());
            N::dot(pairs).stored_by(Path::Reference) * scale
        };
        let mut scores: Vec<N> = seen.clone().map(score).collect();
        let mut slopes = None;
        if let Some(cap) = rule.softcap {
            let tanh: Vec<N> = scores.iter().map(|s| (*s / cap).tanh()).collect();
            scores = tanh.iter().map(|t| *t * cap).collect();
            slopes = Some(tanh.into_iter().map(|t| N::exact(1.0) - t * t).collect());
        }
        // Any number will do to be relative to, so it has no error.
        let largest = scores.iter().fold(f64::NEG_INFINITY, |most, s| most.max(s.value()));
        let relative = |s: N| (s - N::exact(largest)).exp();
        let exponentials: Vec<N> = scores.into_iter().map(relative).collect();
        let sum = N::sum(exponentials.iter().copied());
        let one = N::exact(1.0);
        let inverse = if seen.is_empty() { one } else { (one / sum).of_row() };
        Self { d, scale, seen, exponentials, slopes, inverse }
    }

    /// Its row of y.
    pub fn output(&self, v: &[N]) -> Vec<N> {
        let (d, e) = (self.d, &self.exponentials);
        let column = |i: usize| {
            let with = |of: Vec<N>| N::dot(of.into_iter().zip(self.column(v, i)));
            let stored = e.iter().map(|e| self.probability(*e).storing()).collect();
            (with(e.clone()) * self.inverse + with(stored)).of_row().stored()
        };
        (0..d.width).map(column).collect()
    }

    /// Element `i` of the keys that it sees.
    fn column<'a>(&'a self, of: &'a [N], i: usize) -> impl Iterator<Item = N> + 'a {
        self.d.column(of, i).skip(self.seen.start)
    }

    fn probability(&self, exponential: N) -> N {
        exponential * self.inverse
    }

    /// As they are stored; 0 of keys that are not seen.
    pub fn probabilities(&self) -> Vec<N> {
        let seen = self.exponentials.iter().map(|e| self.probability(*e).stored());
        self.among_all(seen)
    }

    /// With the zeros of the keys that are not seen.
    fn among_all(&self, seen: impl Iterator<Item = N>) -> Vec<N> {
        let mut all = vec![N::exact(0.0); self.d.keys];
        all.iter_mut().skip(self.seen.start).zip(seen).for_each(|(all, seen)| *all = seen);
        all
    }

    /// What its row of dy makes of the scores.
    pub fn scores(&self, v: &[N], dy: &[N]) -> Scores<N> {
        let (d, e) = (self.d, &self.exponentials);
        let dp = |s: usize| {
            let pairs = dy.iter().copied().zip(d.row(v, s).iter().copied());
            N::dot(pairs).stored_by(Path::Reference)
        };
        let dp: Vec<N> = self.seen.clone().map(dp).collect();
        let pulled: Vec<N> = e.iter().zip(&dp).map(|(e, dp)| *e * *dp).collect();
        let mut delta = N::sum(pulled.iter().copied()) * self.inverse;
        if delta.path() == Path::Fused {
            // Kernels have it as dy·y, of the y that is stored.
            let y = (0..d.width).map(|i| N::dot(e.iter().copied().zip(self.column(v, i))));
            let stored = y.map(|y| (y * self.inverse).storing());
            delta = delta + N::dot(dy.iter().copied().zip(stored));
        }
        let delta = delta.of_row();
        // Burn's way is four operations longer.
        let ds = |(e, dp): (&N, &N)| (self.probability(*e) * (*dp - delta)).off_by(8.0);
        let gradients = self.sloped(e.iter().zip(&dp).map(ds).collect());
        Scores { gradients, pulled, delta }
    }

    /// Times the slope of the soft-cap.
    fn sloped(&self, of: Vec<N>) -> Vec<N> {
        match &self.slopes {
            Some(slopes) => of.into_iter().zip(slopes).map(|(x, slope)| x * *slope).collect(),
            None => of,
        }
    }

    /// Its row of dq.
    pub fn gradient(&self, k: &[N], scores: &Scores<N>) -> Vec<N> {
        let (d, Scores { gradients, pulled, delta }) = (self.d, scores);
        let (pulled, e) = (self.sloped(pulled.clone()), self.sloped(self.exponentials.clone()));
        let storing: Vec<N> = gradients.iter().map(|ds| self.storing(*ds)).collect();
        let column = |i: usize| {
            let with = |of: &[N]| N::dot(of.iter().copied().zip(self.column(k, i)));
            let sums = (with(&pulled) - *delta * with(&e)) * self.inverse * self.scale;
            (sums + with(&storing)).of_row().stored()
        };
        (0..d.width).map(column).collect()
    }

    /// Its scale times the gradients of the scores as they are stored; 0 of keys that are not seen.
    pub fn stored(&self, scores: Scores<N>) -> Vec<N> {
        let stored = |ds: N| (ds.stored_by(Path::Fused) * self.scale).stored_by(Path::Reference);
        self.among_all(scores.gradients.into_iter().map(stored))
    }

    /// What storing the gradient of a score is off by. Kernels multiply sums of what is stored by the scale.
    fn storing(&self, ds: N) -> N {
        match ds.path() {
            Path::Fused => ds.storing() * self.scale,
            Path::Reference => (ds * self.scale).storing(),
        }
    }
}
