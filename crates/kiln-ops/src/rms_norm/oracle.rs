//! RMSNorm in float64.

/// y for rows of `weight.len()` elements.
pub fn forward(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let width = weight.len();
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(width) {
        let r = scale(row, eps);
        y.extend(row.iter().zip(weight).map(|(x, w)| x * r * w));
    }
    y
}

/// dx and dw from the cotangent `dy`.
pub fn backward(x: &[f64], weight: &[f64], eps: f64, dy: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let width = weight.len();
    let mut dx = Vec::with_capacity(x.len());
    let mut dw = vec![0.0; width];
    for (row, dy) in x.chunks_exact(width).zip(dy.chunks_exact(width)) {
        let r = scale(row, eps);
        let mut dot = 0.0;
        for i in 0..width {
            dot += row[i] * weight[i] * dy[i];
        }
        let mean = dot / width as f64;
        for i in 0..width {
            dx.push(r * weight[i] * dy[i] - r * r * r * row[i] * mean);
            dw[i] += r * row[i] * dy[i];
        }
    }
    (dx, dw)
}

fn scale(row: &[f64], eps: f64) -> f64 {
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    1.0 / (mean + eps).sqrt()
}
