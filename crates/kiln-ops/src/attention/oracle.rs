//! Attention in float64.

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
pub fn forward(q: &[f64], k: &[f64], v: &[f64], d: Dims, causal: bool, scale: f64) -> Vec<f64> {
    let mut y = vec![0.0; q.len()];
    each_query(q, k, d, causal, scale, |row, key_row, p| {
        for (s, p) in p.iter().enumerate() {
            for i in 0..d.width {
                y[row * d.width + i] += p * v[(key_row + s) * d.width + i];
            }
        }
    });
    y
}

/// dq, dk, dv from the cotangent `dy`.
pub fn backward(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    d: Dims,
    causal: bool,
    scale: f64,
    dy: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let w = d.width;
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    each_query(q, k, d, causal, scale, |row, key_row, p| {
        let dy = &dy[row * w..(row + 1) * w];
        let dp: Vec<f64> =
            (0..p.len()).map(|s| (0..w).map(|i| dy[i] * v[(key_row + s) * w + i]).sum()).collect();
        let delta: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for (s, p) in p.iter().enumerate() {
            let ds = p * (dp[s] - delta) * scale;
            for i in 0..w {
                dv[(key_row + s) * w + i] += p * dy[i];
                dq[row * w + i] += ds * k[(key_row + s) * w + i];
                dk[(key_row + s) * w + i] += ds * q[row * w + i];
            }
        }
    });
    (dq, dk, dv)
}

/// Calls `f(row of q, first row of its keys, probabilities of the keys it sees)`.
fn each_query(
    q: &[f64],
    k: &[f64],
    d: Dims,
    causal: bool,
    scale: f64,
    mut f: impl FnMut(usize, usize, &[f64]),
) {
    let w = d.width;
    for batch in 0..d.batch {
        for head in 0..d.heads {
            let kv = head / (d.heads / d.kv_heads);
            let key_row = (batch * d.kv_heads + kv) * d.keys;
            for t in 0..d.queries {
                let seen = if causal { (t + d.keys + 1).saturating_sub(d.queries) } else { d.keys };
                let row = (batch * d.heads + head) * d.queries + t;
                let mut p: Vec<f64> = (0..seen)
                    .map(|s| {
                        scale
                            * (0..w).map(|i| q[row * w + i] * k[(key_row + s) * w + i]).sum::<f64>()
                    })
                    .collect();
                let max = p.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
                p.iter_mut().for_each(|x| *x = (*x - max).exp());
                let sum: f64 = p.iter().sum();
                p.iter_mut().for_each(|x| *x /= sum);
                f(row, key_row, &p);
            }
        }
    }
}
