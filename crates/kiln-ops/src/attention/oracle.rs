//! Attention in float64.

use crate::oracle::{Number, Path};

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
pub fn forward<N: Number>(q: &[N], k: &[N], v: &[N], d: Dims, causal: bool, scale: f64) -> Vec<N> {
    let mut y = Vec::with_capacity(q.len());
    for (group, q) in q.chunks_exact((d.rows() * d.width).max(1)).enumerate() {
        let [k, v] = [k, v].map(|of| d.keys_of(of, group));
        for row in 0..d.rows() {
            let softmax = Softmax::new(q, k, row, d, causal, scale);
            let e = &softmax.exponentials;
            y.extend((0..d.width).map(|i| {
                let with = |of: Vec<N>| N::dot(of.into_iter().zip(d.column(v, i)));
                let stored = e.iter().map(|e| softmax.probability(*e).storing()).collect();
                (with(e.clone()) * softmax.inverse + with(stored)).of_row().stored()
            }));
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
    causal: bool,
    scale: f64,
    dy: &[N],
) -> (Vec<N>, Vec<N>, Vec<N>) {
    let size = (d.rows() * d.width).max(1);
    let (mut dq, mut dk, mut dv) = (vec![], vec![], vec![]);
    for (group, (q, dy)) in q.chunks_exact(size).zip(dy.chunks_exact(size)).enumerate() {
        let [k, v] = [k, v].map(|of| d.keys_of(of, group));
        // Probabilities and gradients of the scores, a row for each query of the group.
        let (mut p, mut ds) = (vec![], vec![]);
        for row in 0..d.rows() {
            let softmax = Softmax::new(q, k, row, d, causal, scale);
            let dy = &dy[row * d.width..][..d.width];
            p.extend(softmax.probabilities(d.keys));
            ds.extend(softmax.backward(k, v, dy, d, scale, &mut dq));
        }
        let sizes = [d.keys, d.rows(), d.width];
        dk.extend(N::product(&ds, q, sizes, [true, false]).into_iter().map(N::stored));
        dv.extend(N::product(&p, dy, sizes, [true, false]).into_iter().map(N::stored));
    }
    (dq, dk, dv)
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

/// The probabilities of the keys that a query sees: e^(s − largest) / Σ.
///
/// 1/Σ is common to all of them, and its error does not average out in sums over the keys: it is multiplied
/// in afterwards.
struct Softmax<N> {
    exponentials: Vec<N>,
    inverse: N,
}

impl<N: Number> Softmax<N> {
    fn new(q: &[N], k: &[N], row: usize, d: Dims, causal: bool, scale: f64) -> Self {
        let t = row % d.queries;
        let seen = if causal { (t + d.keys + 1).saturating_sub(d.queries) } else { d.keys };
        let q = d.row(q, row);
        let score = |s: usize| {
            let pairs = q.iter().copied().zip(d.row(k, s).iter().copied());
            N::dot(pairs).stored_by(Path::Reference) * scale
        };
        let scores: Vec<N> = (0..seen).map(score).collect();
        // Any number will do to be relative to, so it has no error.
        let largest = scores.iter().fold(f64::NEG_INFINITY, |most, s| most.max(s.value()));
        let relative = |s: N| (s - N::exact(largest)).exp();
        let exponentials: Vec<N> = scores.into_iter().map(relative).collect();
        let sum = N::sum(exponentials.iter().copied());
        let one = N::exact(1.0);
        let inverse = if seen == 0 { one } else { (one / sum).of_row() };
        Self { exponentials, inverse }
    }

    fn probability(&self, exponential: N) -> N {
        exponential * self.inverse
    }

    /// As they are stored; 0 of keys that are not seen.
    fn probabilities(&self, keys: usize) -> Vec<N> {
        let seen = self.exponentials.iter().map(|e| self.probability(*e).stored());
        let unseen = keys - self.exponentials.len();
        seen.chain(std::iter::repeat_n(N::exact(0.0), unseen)).collect()
    }

    /// The gradients of the scores, p·(dp − Σ p·dp)·scale, as they are stored; adds a row to dq.
    fn backward(&self, k: &[N], v: &[N], dy: &[N], d: Dims, scale: f64, dq: &mut Vec<N>) -> Vec<N> {
        let e = &self.exponentials;
        let dp = |s: usize| {
            let pairs = dy.iter().copied().zip(d.row(v, s).iter().copied());
            N::dot(pairs).stored_by(Path::Reference)
        };
        let dp: Vec<N> = (0..e.len()).map(dp).collect();
        let pulled: Vec<N> = e.iter().zip(&dp).map(|(e, dp)| *e * *dp).collect();
        let delta = (N::sum(pulled.iter().copied()) * self.inverse).of_row();
        // Burn's way is four operations longer.
        let ds = |(e, dp): (&N, &N)| (self.probability(*e) * (*dp - delta) * scale).off_by(8.0);
        let ds: Vec<N> = e.iter().zip(&dp).map(ds).collect();
        dq.extend((0..d.width).map(|i| {
            let with = |of: &[N]| N::dot(of.iter().copied().zip(d.column(k, i)));
            let storing: Vec<N> = ds.iter().map(|ds| ds.storing()).collect();
            let sums = (with(&pulled) - delta * with(e)) * self.inverse * scale;
            (sums + with(&storing)).of_row().stored()
        }));
        let unseen = d.keys - ds.len();
        let stored = ds.into_iter().map(N::stored);
        stored.chain(std::iter::repeat_n(N::exact(0.0), unseen)).collect()
    }
}
