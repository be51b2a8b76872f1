//! The Kasmina layer in float64.

use super::{Blend, SeedState, chunk};
use crate::oracle::Number;

/// A call, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a, N> {
    /// `[M, H]`.
    pub x: &'a [N],
    /// `[P, H]`.
    pub blueprints: &'a [N],
    /// `[C]`.
    pub alpha: &'a [N],
    /// `[C]`, codes.
    pub lifecycle: &'a [i64],
    /// `[C]`, rows; any where the seed does not contribute.
    pub blueprint_id: &'a [i64],
    /// `[C]`, codes.
    pub blend: &'a [i64],
    /// H.
    pub features: usize,
}

/// What comes out.
#[derive(Debug, Clone)]
pub struct Outputs<N> {
    /// `[M, H]`.
    pub y: Vec<N>,
    /// `[C]`.
    pub mean: Vec<N>,
    /// `[C]`.
    pub variance: Vec<N>,
}

/// A seed that contributes, and whose blueprint is a row.
struct Blended<N> {
    blend: Blend,
    alpha: N,
    row: usize,
    trains: bool,
}

impl<N: Number> Call<'_, N> {
    fn rows(&self) -> usize {
        self.x.len() / self.features
    }

    fn blended(&self, seed: usize) -> Option<Blended<N>> {
        let state = SeedState::ALL[self.lifecycle[seed] as usize];
        let blend = Blend::ALL[self.blend[seed] as usize];
        (state.contributes() && blend != Blend::Mlp).then(|| Blended {
            blend,
            alpha: self.alpha[seed],
            row: self.blueprint_id[seed] as usize,
            trains: state.trains(),
        })
    }

    fn w(&self, row: usize, feature: usize) -> N {
        self.blueprints[row * self.features + feature]
    }

    fn chunks(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
        let (features, seeds) = (self.features, self.alpha.len());
        (0..seeds).map(move |seed| (seed, chunk(seed, features, seeds)))
    }
}

/// 1 + alpha·(w − 1), which a driver may take for (1 − alpha)·1 + alpha·w.
fn interpolated<N: Number>(alpha: N, w: N) -> N {
    either_way((w - 1.0) * alpha + 1.0, (-alpha + 1.0) + alpha * w)
}

/// The same number made in two ways, of which an implementation takes one.
pub(crate) fn either_way<N: Number>(one: N, other: N) -> N {
    match other.value().is_finite() {
        true => one + (other - N::exact(other.value())),
        false => one,
    }
}

/// The outputs.
pub fn forward<N: Number>(call: &Call<'_, N>) -> Outputs<N> {
    let (rows, features) = (call.rows(), call.features);
    let mut y = call.x.to_vec();
    let (mut means, mut variances) = (vec![], vec![]);
    for (seed, chunk) in call.chunks() {
        let places =
            || (0..rows).flat_map(|row| chunk.clone().map(move |feature| row * features + feature));
        if let Some(Blended { blend, alpha, row, .. }) = call.blended(seed) {
            for at in places() {
                let (x, w) = (call.x[at], call.w(row, at % features));
                y[at] = match blend {
                    Blend::Lerp => x * interpolated(alpha, w),
                    Blend::Scale => w * x,
                    Blend::Add => x + alpha * w,
                    Blend::Mixed | Blend::Mlp => (-alpha + 1.0) * x + alpha * w,
                }
                .stored()
                .of_column();
            }
        }
        let count = (rows * chunk.len()) as f64;
        if count == 0.0 {
            means.push(N::exact(0.0));
            variances.push(N::exact(0.0));
            continue;
        }
        let mean = N::sum(places().map(|at| call.x[at])) / count;
        // What the mean is off is common to the terms, and cancels but for its square. Where moments are brought together, each
        // is about a mean of its own, which is rounded.
        let rounded = N::exact(mean.value()) * N::exact(1.0);
        let squares = N::sum(places().map(|at| {
            let centred = call.x[at] - rounded;
            centred * centred
        }));
        let off = mean - mean.value();
        means.push(mean);
        variances.push(squares / count + off * off);
    }
    Outputs { y, mean: means, variance: variances }
}

/// The gradients of x, alpha and the blueprints for a cotangent of y.
pub fn backward<N: Number>(call: &Call<'_, N>, dy: &[N]) -> [Vec<N>; 3] {
    let (rows, features) = (call.rows(), call.features);
    let mut dx = dy.to_vec();
    let mut dalpha = vec![N::exact(0.0); call.alpha.len()];
    let mut dblueprints = vec![N::exact(0.0); call.blueprints.len()];
    for (seed, chunk) in call.chunks() {
        let Some(Blended { blend, alpha, row, trains }) = call.blended(seed) else { continue };
        let mut of_alpha = vec![];
        for feature in chunk {
            let w = call.w(row, feature);
            let places = || (0..rows).map(|row| row * features + feature);
            let factor = match blend {
                Blend::Lerp => interpolated(alpha, w),
                Blend::Scale => w,
                Blend::Add => N::exact(1.0),
                Blend::Mixed | Blend::Mlp => -alpha + 1.0,
            };
            for at in places() {
                dx[at] = (factor * dy[at]).stored().of_column();
            }
            let products = || N::dot(places().map(|at| (call.x[at], dy[at])));
            let cotangents = || N::sum(places().map(|at| dy[at]));
            of_alpha.push(match blend {
                Blend::Lerp => (w - 1.0) * products(),
                Blend::Scale => N::exact(0.0),
                Blend::Add => w * cotangents(),
                Blend::Mixed | Blend::Mlp => w * cotangents() - products(),
            });
            if trains {
                dblueprints[row * features + feature] = match blend {
                    Blend::Lerp => alpha * products(),
                    Blend::Scale => products(),
                    Blend::Add | Blend::Mixed | Blend::Mlp => alpha * cotangents(),
                }
                .stored();
            }
        }
        dalpha[seed] = N::sum(of_alpha).stored();
    }
    [dx, dalpha, dblueprints]
}
