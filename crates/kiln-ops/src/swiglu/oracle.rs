//! SwiGLU in float64.

use crate::oracle::Number;

/// silu(gate) · up.
pub fn forward<N: Number>(gate: &[N], up: &[N]) -> Vec<N> {
    gate.iter().zip(up).map(|(g, u)| (*g * g.sigmoid() * *u).stored()).collect()
}

/// dgate and dup from the cotangent `dy`.
pub fn backward<N: Number>(gate: &[N], up: &[N], dy: &[N]) -> (Vec<N>, Vec<N>) {
    let mut dgate = Vec::with_capacity(gate.len());
    let mut dup = Vec::with_capacity(gate.len());
    for ((g, u), dy) in gate.iter().zip(up).zip(dy) {
        let s = g.sigmoid();
        dgate.push((*dy * *u * s * (*g * (-s + 1.0) + 1.0)).stored());
        dup.push((*dy * *g * s).stored());
    }
    (dgate, dup)
}
