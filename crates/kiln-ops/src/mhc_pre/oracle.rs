//! What precedes a layer, in float64.

use super::MhcPreOptions;
use crate::oracle::{Number, Path, Step};
use std::borrow::Cow;

/// What goes into a call, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, N> {
    /// `[T, n, D]`.
    pub x: &'a [N],
    /// `[n² + 2n, n·D]`.
    pub phi: &'a [N],
    /// `[3]`.
    pub alpha: &'a [N],
    /// `[n² + 2n]`.
    pub bias: &'a [N],
    /// `[n, D]`, or nothing: 1.
    pub gamma: &'a [N],
}

/// h_in, h_post and h_res of all tokens, or their cotangents.
pub type Outputs<N> = [Vec<N>; 3];

/// h_in, h_post and h_res.
pub fn forward<N: Number>(of: Inputs<'_, N>, n: usize, options: MhcPreOptions) -> Outputs<N> {
    let phi = beside_halves(&scaled(&of));
    let [mut h_in, mut h_post, mut h_res] = [const { vec![] }; 3];
    for x in of.x.chunks_exact(phi.len() / of.bias.len()) {
        let token = Token::new(x, &phi, &of, n, options);
        let d = x.len() / n;
        let pre: Vec<N> = token.pre.iter().map(|s| (*s + options.hc_eps).of_row()).collect();
        let alike = rounds_alike(&pre);
        h_in.extend((0..d).map(|at| {
            let sum = N::sum((0..n).map(|i| pre[i] * x[i * d + at])).stored();
            if alike { sum.of_row() } else { sum }
        }));
        h_post.extend(token.post.iter().map(|s| *s * 2.0));
        h_res.extend(match options.sinkhorn {
            0 => token.res,
            repeats => N::through(&token.res, |logits, step| {
                Sinkhorn::new(logits, n, repeats, options.hc_eps, step).result
            }),
        });
    }
    [h_in, h_post, h_res]
}

/// A weight that is so much smaller than another is as good as none, and so near to a number it is as good as that.
const CLOSE: f64 = 1.0 / 256.0;

/// Whether results that are sums with these weights are rounded alike: where there is one weight, it may take numbers of few
/// bits next to others, all on the same side: 1 − 2⁻¹³ does. So may several that are all close to numbers of two bits, as
/// those of saturated sigmoids are: without what they lack the sums would be halfway between numbers as often as not.
fn rounds_alike<N: Number>(weights: &[N]) -> bool {
    let sizes: Vec<f64> = weights.iter().map(|weight| weight.value().abs()).collect();
    let largest = sizes.iter().copied().fold(0.0, f64::max);
    let count: Vec<f64> = sizes.into_iter().filter(|size| *size >= CLOSE * largest).collect();
    let close = |size: &f64| {
        let whole = 2.0 * size / size.log2().floor().exp2();
        (whole - whole.round()).abs() <= CLOSE * whole
    };
    count.len() < 2 || count.iter().all(close)
}

/// dx, dφ, dα, dbias and dγ from the cotangents.
pub fn backward<N: Number>(
    of: Inputs<'_, N>,
    n: usize,
    options: MhcPreOptions,
    cotangents: [&[N]; 3],
) -> [Vec<N>; 5] {
    let back = tokens_backward(of, n, options, cotangents);
    let dx = of_x(of, n, &back, cotangents[0]);
    let [dphi, dalpha, dbias, dgamma] = over_tokens(of, n, &back);
    [dx, dphi, dalpha, dbias, dgamma]
}

/// What the cotangents of tokens give, token after token: what their gradients are made of.
#[derive(Debug, Clone)]
pub struct Tokens<N> {
    /// The gradient of φ·X, `[T, n² + 2n]`.
    pub dm: Vec<N>,
    /// Those of what the sigmoids and Sinkhorn are given, `[T, n² + 2n]`.
    pub given: Vec<N>,
    /// The same times y.
    pub times_y: Vec<N>,
    /// The gradient of y, `[T, n² + 2n]`.
    dy: Vec<N>,
    /// The inverse root mean squares, `[T]`.
    r: Vec<N>,
    /// What is taken from X, `[T]`.
    shrunk: Vec<N>,
    /// h_pre, `[T, n]`.
    weights: Vec<N>,
}

/// The part of the backward in which every token stands for itself, but for dx.
pub fn tokens_backward<N: Number>(
    of: Inputs<'_, N>,
    n: usize,
    options: MhcPreOptions,
    [dh_in, dh_post, dh_res]: [&[N]; 3],
) -> Tokens<N> {
    let phi = beside_halves(&scaled(&of));
    let width = phi.len() / of.bias.len();
    let (tokens, d) = (of.x.len() / width, width / n);
    let undone = match of.bias[0].path() {
        Path::Fused => UNDONE,
        Path::Reference => 0.0,
    };
    let [mut dm, mut given, mut times_y, mut all_dy] = [const { vec![] }; 4];
    let [mut all_r, mut all_shrunk, mut weights] = [const { vec![] }; 3];
    for token in 0..tokens {
        let x = &of.x[token * width..][..width];
        let dh_in = &dh_in[token * d..][..d];
        let Token { r, y, pre, post, res } = Token::new(x, &phi, &of, n, options);
        let slope = |s: N| s * (N::exact(1.0) - s);
        let mut g: Vec<N> = (0..n)
            .map(|i| N::sum((0..d).map(|at| dh_in[at] * x[i * d + at])) * slope(pre[i]))
            .collect();
        g.extend((0..n).map(|i| dh_post[token * n + i] * slope(post[i]) * 2.0));
        let dres = &dh_res[token * n * n..][..n * n];
        match options.sinkhorn {
            0 => g.extend(dres),
            repeats => g.extend(N::through(&[&res, dres].concat(), |both, step| {
                let (logits, cotangent) = both.split_at(n * n);
                let forward = Sinkhorn::new(logits, n, repeats, options.hc_eps, step);
                forward.backward(cotangent, undone, step)
            })),
        }
        let dy: Vec<N> = g.iter().enumerate().map(|(j, g)| *g * of.alpha[part(j, n)]).collect();
        let along = N::sum(dy.iter().zip(&y).map(|(dy, y)| *dy * *y));
        all_shrunk.push((along * r * r / width as f64).of_row());
        let r = r.of_row();
        all_r.push(r);
        weights.extend(pre.iter().map(|s| (*s + options.hc_eps).of_row()));
        dm.extend(dy.iter().map(|dy| (*dy * r).of_row()));
        all_dy.extend(dy.iter().map(|dy| dy.of_row()));
        times_y.extend(g.iter().zip(&y).map(|(g, y)| *g * *y));
        given.extend(g);
    }
    Tokens { dm, given, times_y, dy: all_dy, r: all_r, shrunk: all_shrunk, weights }
}

/// dx.
pub fn of_x<N: Number>(of: Inputs<'_, N>, n: usize, back: &Tokens<N>, dh_in: &[N]) -> Vec<N> {
    all_of_x(of, n, back, dh_in).into_iter().map(N::stored).collect()
}

/// The same before it is rounded.
pub(crate) fn all_of_x<N: Number>(
    of: Inputs<'_, N>,
    n: usize,
    back: &Tokens<N>,
    dh_in: &[N],
) -> Vec<N> {
    let phi = beside_halves(&scaled(&of));
    let dy: Vec<N> = back.dy.iter().map(|dy| dy.beside_halves().of_row()).collect();
    let (rows, width) = (of.bias.len(), phi.len() / of.bias.len());
    let d = width / n;
    let element = |place: usize| {
        let (token, at) = (place / width, place % width);
        let terms = (0..rows).map(|j| (phi[j * width + at], dy[token * rows + j]));
        let through = N::dot(terms) * back.r[token];
        let direct = back.weights[token * n + at / d] * dh_in[token * d + at % d];
        through - back.shrunk[token] * of.x[place] + direct
    };
    (0..of.x.len()).map(element).collect()
}

/// dφ, dα, dbias and dγ: sums over all tokens. Of x, φ and γ there may be some columns only.
pub fn over_tokens<N: Number>(of: Inputs<'_, N>, n: usize, back: &Tokens<N>) -> [Vec<N>; 4] {
    let rows = of.bias.len();
    let (tokens, width) = (back.dm.len() / rows, of.phi.len() / rows);
    let over_tokens =
        |of: &[N], j: usize| N::sum((0..tokens).map(|token| of[token * rows + j])).of_row();
    let dbias = (0..rows).map(|j| over_tokens(&back.given, j)).collect();
    let dalpha = (0..3).map(|which| {
        let terms = (0..tokens * rows).filter(|at| part(at % rows, n) == which);
        N::sum(terms.map(|at| back.times_y[at]))
    });
    let dm = beside_halves(&back.dm);
    let dphi = N::product(&dm, of.x, [rows, tokens, width], [true, false]);
    let (dphi, dgamma) = match of.gamma {
        [] => (dphi, vec![]),
        gamma => {
            let column = |at: usize| (0..rows).map(move |j| j * width + at);
            let dgamma = (0..width).map(|at| N::sum(column(at).map(|i| dphi[i] * of.phi[i])));
            let dgamma = dgamma.collect();
            let scaled = dphi.iter().enumerate().map(|(i, dphi)| *dphi * gamma[i % width]);
            (scaled.collect(), dgamma)
        }
    };
    [dphi, dalpha.collect(), dbias, dgamma]
}

/// φ times γ.
fn scaled<'a, N: Number>(of: &Inputs<'a, N>) -> Cow<'a, [N]> {
    match of.gamma {
        [] => of.phi.into(),
        gamma => {
            of.phi.iter().zip(gamma.iter().cycle()).map(|(phi, gamma)| *phi * *gamma).collect()
        }
    }
}

/// As they are multiplied with numbers of 16 bits.
fn beside_halves<N: Number>(of: &[N]) -> Vec<N> {
    of.iter().map(|x| x.beside_halves()).collect()
}

/// Which α belongs to row j.
fn part(j: usize, n: usize) -> usize {
    (j / n).min(2)
}

/// A token on its way: both kinds of sigmoids, and what Sinkhorn is given.
struct Token<N> {
    r: N,
    y: Vec<N>,
    pre: Vec<N>,
    post: Vec<N>,
    res: Vec<N>,
}

impl<N: Number> Token<N> {
    fn new(x: &[N], phi: &[N], of: &Inputs<'_, N>, n: usize, options: MhcPreOptions) -> Self {
        let width = x.len();
        let squares = N::sum(x.iter().map(|x| *x * *x)) / width as f64;
        let r = (squares + options.norm_eps).rsqrt();
        let row = |row: &[N]| N::dot(row.iter().copied().zip(x.iter().copied())) * r;
        let y: Vec<N> = phi.chunks_exact(width).map(row).collect();
        let given = |j: usize| y[j] * of.alpha[part(j, n)] + of.bias[j];
        Self {
            pre: (0..n).map(|j| given(j).sigmoid()).collect(),
            post: (n..2 * n).map(|j| given(j).sigmoid()).collect(),
            res: (2 * n..2 * n + n * n).map(given).collect(),
            r,
            y,
        }
    }
}

/// Units that an exponential of −x may be off, and its argument.
fn exp_units(x: f64) -> f64 {
    6.0 + 5.0 * x.abs()
}

/// Units of a division, or a reciprocal and a product.
const DIVISION: f64 = 7.0;
/// Units of a division that is undone by a product: a kernel makes again what it divided.
const UNDONE: f64 = 6.0;

/// Matrices are divided by the sums of their rows or of their columns.
#[derive(Clone, Copy, PartialEq)]
enum Along {
    Rows,
    Columns,
}

/// What was divided, and by what.
struct Stage {
    along: Along,
    y: Vec<f64>,
    sums: Vec<f64>,
}

impl Stage {
    /// Which sum an element belongs to.
    fn line(along: Along, at: usize, n: usize) -> usize {
        if along == Along::Rows { at / n } else { at % n }
    }
}

/// Sinkhorn's iteration over one matrix of logits, and what its backward needs.
struct Sinkhorn {
    n: usize,
    softmax: Vec<f64>,
    stages: Vec<Stage>,
    result: Vec<f64>,
}

impl Sinkhorn {
    fn new(logits: &[f64], n: usize, repeats: usize, eps: f64, step: Step<'_>) -> Self {
        let mut softmax = vec![];
        for row in logits.chunks_exact(n) {
            let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exp = |x: &f64| step((x - largest).exp(), exp_units(x - largest));
            let exps: Vec<f64> = row.iter().map(exp).collect();
            let sum = step(exps.iter().sum(), n as f64);
            softmax.extend(exps.iter().map(|x| step(x / sum, DIVISION)));
        }
        let mut y: Vec<f64> = softmax.iter().map(|p| step(p + eps, 0.0)).collect();
        let mut stages = vec![];
        for stage in 1..2 * repeats {
            let along = if stage % 2 == 1 { Along::Columns } else { Along::Rows };
            let mut sums = vec![eps; n];
            y.iter().enumerate().for_each(|(at, y)| sums[Stage::line(along, at, n)] += y);
            sums.iter_mut().for_each(|sum| *sum = step(*sum, n as f64));
            let divided = y.iter().enumerate();
            let divided =
                divided.map(|(at, y)| step(y / sums[Stage::line(along, at, n)], DIVISION));
            let divided = divided.collect();
            stages.push(Stage { along, y: std::mem::replace(&mut y, divided), sums });
        }
        Self { n, softmax, stages, result: y }
    }

    /// The gradient of the logits, where a division that is undone costs so many units.
    fn backward(&self, cotangent: &[f64], undone: f64, step: Step<'_>) -> Vec<f64> {
        let n = self.n;
        let mut g = cotangent.to_vec();
        for (later, Stage { along, y, sums }) in self.stages.iter().rev().enumerate() {
            // G/s, and what the sum takes away from it, term by term.
            let mut taken = vec![0.0; n];
            let units = n as f64 + 2.0 * DIVISION + undone * later as f64;
            for (at, (g, y)) in g.iter().zip(y).enumerate() {
                let line = Stage::line(*along, at, n);
                taken[line] += step(g * y / (sums[line] * sums[line]), units);
            }
            for (at, g) in g.iter_mut().enumerate() {
                let line = Stage::line(*along, at, n);
                let kept = step(*g / sums[line], DIVISION);
                *g = step(kept - taken[line], 0.0);
            }
        }
        let mut logits = vec![];
        for (g, p) in g.chunks_exact(n).zip(self.softmax.chunks_exact(n)) {
            for i in 0..n {
                let terms: f64 = (0..n).map(|j| step(p[i] * g[j] * p[j], n as f64 + 2.0)).sum();
                let kept = step(p[i] * g[i], 1.0);
                logits.push(step(kept - terms, 0.0));
            }
        }
        logits
    }
}
