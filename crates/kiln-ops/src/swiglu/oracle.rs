//! SwiGLU in float64.

/// silu(gate) · up.
pub fn forward(gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(g, u)| g * sigmoid(*g) * u).collect()
}

/// dgate and dup from the cotangent `dy`.
pub fn backward(gate: &[f64], up: &[f64], dy: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let mut dgate = Vec::with_capacity(gate.len());
    let mut dup = Vec::with_capacity(gate.len());
    for ((g, u), dy) in gate.iter().zip(up).zip(dy) {
        let s = sigmoid(*g);
        dgate.push(dy * u * s * (1.0 + g * (1.0 - s)));
        dup.push(dy * g * s);
    }
    (dgate, dup)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
