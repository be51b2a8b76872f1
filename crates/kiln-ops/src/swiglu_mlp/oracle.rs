//! The SwiGLU MLP in float64.

use crate::oracle::{Number, Path, product};
use crate::swiglu::oracle as swiglu;

/// y for `rows` rows of width `width` and inner width `inner`.
pub fn forward<N: Number>(
    x: &[N],
    w_gate: &[N],
    w_up: &[N],
    w_down: &[N],
    [rows, width, inner]: [usize; 3],
) -> Vec<N> {
    let [gate, up] = products(x, [w_gate, w_up], [rows, width, inner]);
    let hidden = swiglu::forward(&gate, &up);
    stored(product(&hidden, w_down, rows, inner, width, false, false))
}

/// dx, dw_gate, dw_up, dw_down from the cotangent `dy`.
pub fn backward<N: Number>(
    x: &[N],
    w_gate: &[N],
    w_up: &[N],
    w_down: &[N],
    sizes: [usize; 3],
    dy: &[N],
) -> [Vec<N>; 4] {
    let units = units(x, w_gate, w_up, w_down, sizes, dy);
    let dx = of_input(w_gate, w_up, &units, sizes);
    let [dw_gate, dw_up, dw_down] = of_weights(x, dy, &units, sizes);
    [dx, dw_gate, dw_up, dw_down]
}

/// What a backward makes of the inner units, a row for each of the input.
pub struct Units<N> {
    /// The gated product.
    pub hidden: Vec<N>,
    /// The gradient of x·w_gate.
    pub dgate: Vec<N>,
    /// The gradient of x·w_up.
    pub dup: Vec<N>,
}

/// The inner units of these weights.
pub fn units<N: Number>(
    x: &[N],
    w_gate: &[N],
    w_up: &[N],
    w_down: &[N],
    [rows, width, inner]: [usize; 3],
    dy: &[N],
) -> Units<N> {
    let [gate, up] = products(x, [w_gate, w_up], [rows, width, inner]);
    let hidden = swiglu::forward(&gate, &up);
    let dhidden = stored(product(dy, w_down, rows, width, inner, false, true));
    let (dgate, dup) = swiglu::backward(&gate, &up, &dhidden);
    Units { hidden, dgate, dup }
}

/// dx from all inner units.
pub fn of_input<N: Number>(
    w_gate: &[N],
    w_up: &[N],
    units: &Units<N>,
    [rows, width, inner]: [usize; 3],
) -> Vec<N> {
    // A kernel adds both products up in f32.
    let one = product(&units.dgate, w_gate, rows, inner, width, false, true);
    let other = product(&units.dup, w_up, rows, inner, width, false, true);
    let rounded = |part: &N| part.stored_by(Path::Reference);
    one.iter().zip(&other).map(|(a, b)| (rounded(a) + rounded(b)).stored()).collect()
}

/// dw_gate, dw_up and dw_down of these inner units, and of these columns of x and dy.
pub fn of_weights<N: Number>(
    x: &[N],
    dy: &[N],
    units: &Units<N>,
    [rows, width, inner]: [usize; 3],
) -> [Vec<N>; 3] {
    [
        stored(product(x, &units.dgate, width, rows, inner, true, false)),
        stored(product(x, &units.dup, width, rows, inner, true, false)),
        stored(product(&units.hidden, dy, inner, rows, width, true, false)),
    ]
}

/// x·w_gate and x·w_up as they are stored. A kernel that gates them in f32 is nearer.
fn products<N: Number>(
    x: &[N],
    weights: [&[N]; 2],
    [rows, width, inner]: [usize; 3],
) -> [Vec<N>; 2] {
    weights.map(|weight| stored(product(x, weight, rows, width, inner, false, false)))
}

fn stored<N: Number>(numbers: Vec<N>) -> Vec<N> {
    numbers.into_iter().map(N::stored).collect()
}
