//! The Kasmina layer with MLPs in float64.

use crate::kasmina::oracle::{self as rows, Outputs, either_way};
use crate::kasmina::{Blend, SeedState, chunk};
use crate::oracle::{Number, Path};
use std::ops::Range;

/// A call, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a, N> {
    /// What a call without MLPs has.
    pub rows: rows::Call<'a, N>,
    /// `[Q, 4S + 3, S]`.
    pub mlps: &'a [N],
    /// S.
    pub widest: usize,
}

/// The MLP of a chunk of s features with some hidden units, 2s of them or those that somebody looks at.
#[derive(Debug, Clone)]
pub struct Mlp<N> {
    /// A hidden unit each: what it is made of, its bias, and what it adds to the outputs.
    units: Vec<Unit<N>>,
    /// The outputs' bias, `[s]`.
    bias: Vec<N>,
}

#[derive(Debug, Clone)]
struct Unit<N> {
    first: Vec<N>,
    bias: N,
    second: Vec<N>,
}

/// A hidden unit of a row: itself, and its cotangents after and before the ReLU.
#[derive(Debug, Clone, Copy)]
pub struct Hidden<N> {
    h: N,
    u: N,
    d: N,
}

impl<N: Number> Mlp<N> {
    /// From the weights of one MLP, for `size` features.
    pub fn new(weights: &[N], widest: usize, size: usize) -> Self {
        let at = |row: usize| weights[row * widest..][..size].to_vec();
        let unit = |j: usize| Unit {
            first: at(j),
            bias: weights[4 * widest * widest + j],
            second: at(2 * widest + j),
        };
        Self { units: (0..2 * size).map(unit).collect(), bias: at(4 * widest + 2) }
    }

    /// With these hidden units alone, to look at their gradients.
    pub fn cut(&self, units: &[usize]) -> Self {
        let units = units.iter().map(|unit| self.units[*unit].clone()).collect();
        Self { units, bias: self.bias.clone() }
    }

    /// The hidden units of a row for a cotangent of f(x).
    pub fn hidden(&self, x: &[N], dy: &[N]) -> Vec<Hidden<N>> {
        let of = |unit: &Unit<N>| {
            let before = dot(x, &unit.first) + unit.bias;
            let u = N::dot(dy.iter().map(given).zip(unit.second.iter().copied()));
            // Which way the ReLU goes may be open. Tensor cores take both on in 16 bits, or in those of TF32.
            // What is no number stays that.
            let on = before.value() > 0.0 || before.value().is_nan();
            let (h, d) = match (before.may_be_zero(), on) {
                (true, on) => {
                    let value = u.value() * f64::from(on);
                    let h = if on { before } else { before - before.value() };
                    (h, u.known(value, u.value().abs()))
                }
                (false, true) => (before, u),
                (false, false) => (N::exact(0.0), N::exact(0.0)),
            };
            Hidden { h: h.stored(), u, d: d.stored() }
        };
        self.units.iter().map(of).collect()
    }

    /// f of a row.
    pub fn forward(&self, x: &[N]) -> Vec<N> {
        let zeros = vec![N::exact(0.0); x.len()];
        self.outputs(&self.hidden(x, &zeros))
    }

    /// f of the hidden units of a row.
    fn outputs(&self, hidden: &[Hidden<N>]) -> Vec<N> {
        let out = |(i, bias): (usize, &N)| {
            N::dot(hidden.iter().zip(&self.units).map(|(of, unit)| (of.h, unit.second[i]))) + *bias
        };
        self.bias.iter().enumerate().map(out).collect()
    }

    /// What of a row's cotangent goes back through f to its x.
    pub fn back(&self, hidden: &[Hidden<N>]) -> Vec<N> {
        let of = |i: usize| {
            N::dot(hidden.iter().zip(&self.units).map(|(of, unit)| (of.d, unit.first[i])))
        };
        (0..self.bias.len()).map(of).collect()
    }

    /// Σ over the features of a row of dy·(f(x) − x), of its hidden units.
    pub fn of_alpha(&self, x: &[N], dy: &[N], hidden: &[Hidden<N>]) -> N {
        let through = hidden.iter().map(|of| (of.h, of.u));
        let biases = || self.bias.iter().zip(dy).map(|(bias, dy)| (*bias, *dy));
        let inputs = || x.iter().zip(dy).map(|(x, dy)| (-*x, *dy));
        let by_units = N::dot(through.chain(biases()).chain(inputs()));
        let outputs = self.outputs(hidden).into_iter().zip(dy.iter().copied());
        either_way(by_units, N::dot(outputs.chain(inputs())))
    }
}

/// Of each hidden unit the gradients of its first weights, its bias and its second weights, all without alpha.
pub fn of_units<N: Number>(
    x: &[Vec<N>],
    dy: &[Vec<N>],
    hidden: &[Vec<Hidden<N>>],
) -> Vec<(Vec<N>, N, Vec<N>)> {
    let size = x.first().map_or(0, Vec::len);
    let units = hidden.first().map_or(0, Vec::len);
    let of = |j: usize| {
        let first = (0..size).map(|i| N::dot(hidden.iter().zip(x).map(|(h, x)| (h[j].d, x[i]))));
        let terms = |i: usize| hidden.iter().zip(dy).map(move |(h, d)| (h[j].h, given(&d[i])));
        let second = (0..size).map(|i| N::dot(terms(i)));
        (first.collect(), N::sum(hidden.iter().map(|row| row[j].d)), second.collect())
    };
    (0..units).map(of).collect()
}

/// The cotangent of y in a product: the reference multiplies it with alpha before, kernels afterwards.
fn given<N: Number>(dy: &N) -> N {
    dy.stored_by(Path::Reference)
}

fn dot<N: Number>(left: &[N], right: &[N]) -> N {
    N::dot(left.iter().copied().zip(right.iter().copied()))
}

/// The chunk of a seed that blends an MLP.
struct Blended<N> {
    chunk: Range<usize>,
    alpha: N,
    /// Where its weights begin.
    from: usize,
    mlp: Mlp<N>,
    trains: bool,
}

impl<N: Number> Call<'_, N> {
    fn of(&self, seed: usize) -> Option<Blended<N>> {
        let (call, widest) = (&self.rows, self.widest);
        let state = SeedState::ALL[call.lifecycle[seed] as usize];
        let blended = state.contributes() && call.blend[seed] == Blend::Mlp.code();
        let chunk = chunk(seed, call.features, call.alpha.len());
        let elements = (4 * widest + 3) * widest;
        blended.then(|| {
            let from = call.blueprint_id[seed] as usize * elements;
            let mlp = Mlp::new(&self.mlps[from..from + elements], widest, chunk.len());
            Blended { chunk, alpha: call.alpha[seed], from, mlp, trains: state.trains() }
        })
    }
}

/// (1 − alpha)·x + alpha·out.
fn blend<N: Number>(alpha: N, x: N, out: N) -> N {
    ((-alpha + 1.0) * x + alpha * out).stored()
}

/// The outputs.
pub fn forward<N: Number>(call: &Call<'_, N>) -> Outputs<N> {
    let mut outputs = rows::forward(&call.rows);
    let features = call.rows.features;
    for Blended { chunk, alpha, mlp, .. } in
        (0..call.rows.alpha.len()).filter_map(|seed| call.of(seed))
    {
        for (x, y) in call.rows.x.chunks_exact(features).zip(outputs.y.chunks_exact_mut(features)) {
            let x = &x[chunk.clone()];
            let out = mlp.forward(x);
            for ((y, x), out) in y[chunk.clone()].iter_mut().zip(x).zip(out) {
                *y = blend(alpha, *x, out);
            }
        }
    }
    outputs
}

/// The gradients of x, alpha, the rows and the MLPs for a cotangent of y.
pub fn backward<N: Number>(call: &Call<'_, N>, dy: &[N]) -> [Vec<N>; 4] {
    let [mut dx, mut dalpha, drows] = rows::backward(&call.rows, dy);
    let (features, widest) = (call.rows.features, call.widest);
    // What each seed adds to its MLP.
    let mut added: Vec<Vec<N>> = vec![vec![]; call.mlps.len()];
    for (seed, dalpha) in dalpha.iter_mut().enumerate() {
        let Some(Blended { chunk, alpha, from, mlp, trains }) = call.of(seed) else { continue };
        let cut = |of: &[N]| -> Vec<Vec<N>> {
            of.chunks_exact(features).map(|row| row[chunk.clone()].to_vec()).collect()
        };
        let (x, dy) = (cut(call.rows.x), cut(dy));
        let both = || x.iter().zip(&dy);
        let hidden: Vec<Vec<Hidden<N>>> = both().map(|(x, dy)| mlp.hidden(x, dy)).collect();
        for ((dx, dy), hidden) in dx.chunks_exact_mut(features).zip(&dy).zip(&hidden) {
            let back = mlp.back(hidden);
            for ((dx, dy), back) in dx[chunk.clone()].iter_mut().zip(dy).zip(back) {
                *dx = blend(alpha, *dy, back);
            }
        }
        let terms = both().zip(&hidden).map(|((x, dy), hidden)| mlp.of_alpha(x, dy, hidden));
        *dalpha = N::sum(terms).stored();
        if !trains {
            continue;
        }
        let mut add = |row: usize, column: usize, sum: N| {
            added[from + row * widest + column].push(alpha * sum);
        };
        for (j, (first, bias, second)) in of_units(&x, &dy, &hidden).into_iter().enumerate() {
            first.into_iter().enumerate().for_each(|(i, sum)| add(j, i, sum));
            second.into_iter().enumerate().for_each(|(i, sum)| add(2 * widest + j, i, sum));
            add(4 * widest, j, bias);
        }
        for i in 0..chunk.len() {
            add(4 * widest + 2, i, N::sum(dy.iter().map(|row| row[i])));
        }
    }
    let dmlps = added.into_iter().map(|parts| match parts.is_empty() {
        true => N::exact(0.0),
        false => N::sum(parts).stored(),
    });
    [dx, dalpha, drows, dmlps.collect()]
}
