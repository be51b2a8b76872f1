//! The resolvent's diagonal and its gradients in float64: the continued fractions, one site after the other.
//!
//! Bounds are running ones, of complex numbers as a whole: a `Ball` is a value and how far an implementation in
//! f32 may be from it. To first order what the pivots' recursion makes of a rounding at site k is what (T − z)⁻¹
//! makes of one of a_k, which no implementation can avoid.

use super::{BkMode, BkOptions};
use crate::oracle::{Number, Path};

/// Which inputs all rows share, and their sizes.
#[derive(Debug, Clone, Copy)]
pub struct Dims {
    /// Rows of `a`.
    pub rows: usize,
    /// Sites of a row.
    pub length: usize,
    /// Rows of `b`, `c` and `z`, each 1 or `rows`.
    pub shared: [usize; 3],
}

/// A complex number, and how far from it a result may be.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Ball {
    re: f64,
    im: f64,
    radius: f64,
}

/// Cosines and pivots are taken for no smaller, 2⁻⁴⁰.
const SMALLEST: f64 = 1.0 / (1u64 << 40) as f64;
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

impl Ball {
    fn exact(re: f64, im: f64) -> Self {
        Self { re, im, radius: 0.0 }
    }

    fn size(self) -> f64 {
        self.re.hypot(self.im)
    }

    /// With the rounding of an operation that has this result.
    fn rounded(self, roundings: f64) -> Self {
        Self { radius: self.radius + roundings * UNIT * self.size(), ..self }
    }

    fn plus(self, other: Self) -> Self {
        let radius = self.radius + other.radius;
        Self { re: self.re + other.re, im: self.im + other.im, radius }.rounded(1.0)
    }

    fn minus(self, other: Self) -> Self {
        self.plus(other.by(-1.0))
    }

    /// Times a constant without an error.
    fn by(self, factor: f64) -> Self {
        Self { re: self.re * factor, im: self.im * factor, radius: self.radius * factor.abs() }
    }

    fn times(self, other: Self) -> Self {
        let radius =
            self.size() * other.radius + other.size() * self.radius + self.radius * other.radius;
        let re = self.re * other.re - self.im * other.im;
        let im = self.re * other.im + self.im * other.re;
        Self { re, im, radius }.rounded(3.0)
    }

    fn inverse(self) -> Self {
        // Scaled: squares leave float64 too.
        let scale = self.re.abs().max(self.im.abs()).max(f64::MIN_POSITIVE);
        let (re, im) = (self.re / scale, self.im / scale);
        let square = (re * re + im * im).max(f64::MIN_POSITIVE) * scale;
        let size = self.size();
        let apart = if self.radius < size { size * (size - self.radius) } else { 0.0 };
        let radius = if self.radius == 0.0 { 0.0 } else { self.radius / apart };
        Self { re: re / square, im: -im / square, radius }.rounded(6.0)
    }

    fn over(self, other: Self) -> Self {
        self.times(other.inverse())
    }
}

/// A row: a, b and c as they are, and z.
struct Row<'a, N> {
    a: &'a [N],
    b: &'a [N],
    c: &'a [N],
    z: Ball,
    mode: BkMode,
}

/// What both passes need of it.
struct Pivots {
    beta: Vec<Ball>,
    left: Vec<Ball>,
    right: Vec<Ball>,
    g: Vec<Ball>,
}

fn row<N: Number>(inputs: [&[N]; 4], d: Dims, options: BkOptions, row: usize) -> Row<'_, N> {
    let [a, b, c, z] = inputs;
    let of = |rows: usize, width: usize| {
        let row = if rows == 1 { 0 } else { row };
        row * width..(row + 1) * width
    };
    let couplings = d.length - 1;
    let z = &z[of(d.shared[2], 2)];
    Row {
        a: &a[row * d.length..(row + 1) * d.length],
        b: &b[of(d.shared[0], couplings)],
        c: &c[of(d.shared[1], couplings)],
        z: Ball::exact(z[0].value(), z[1].value()),
        mode: options.mode,
    }
}

impl<N: Number> Row<'_, N> {
    /// `products`: how many of a scan's make directions off, see `joined`.
    fn pivots(&self, products: f64) -> Pivots {
        let length = self.a.len();
        let alpha: Vec<Ball> =
            self.a.iter().map(|a| Ball::exact(a.value(), 0.0).minus(self.z)).collect();
        let beta: Vec<Ball> = self
            .b
            .iter()
            .zip(self.c)
            .map(|(b, c)| Ball::exact(b.value() * c.value(), 0.0).rounded(1.0))
            .collect();
        let mut left = alpha.clone();
        for j in 1..length {
            left[j] = alpha[j].minus(beta[j - 1].over(left[j - 1]));
        }
        let mut right = alpha.clone();
        for j in (0..length - 1).rev() {
            right[j] = alpha[j].minus(beta[j].over(right[j + 1]));
        }
        Self::joined(&beta, &mut left, &mut right, products);
        let g = (0..length).map(|j| match self.mode {
            BkMode::Causal => left[j].inverse(),
            BkMode::Full => {
                let behind = match j + 1 < length {
                    true => beta[j].over(right[j + 1]),
                    false => Ball::default(),
                };
                left[j].minus(behind).inverse()
            }
        });
        let g = g.collect();
        Pivots { beta, left, right, g }
    }

    /// What directions are off by: an error of a product L·R is one of |L|·|R|, however small L·R·v is. So where sites
    /// join at which the vectors from the left and from the right are nearly orthogonal it is the larger by that, and
    /// products of a scan are off by it far from there too. u over the smallest cosine of a row for each of `products`,
    /// which makes β_{j−1}/δ_{j−1} = l off by (1 + |l|²) of it, and β_j/ε_{j+1} by β_j·(1 + 1/|ε_{j+1}|²) of it.
    fn joined(beta: &[Ball], left: &mut [Ball], right: &mut [Ball], products: f64) {
        let cosine = |j: usize| {
            let (delta, epsilon, beta) = (left[j], right[j + 1], beta[j]);
            let determinant = delta.times(epsilon).minus(beta).size();
            determinant / (delta.size().hypot(beta.size()) * epsilon.size().hypot(1.0))
        };
        let smallest = (0..beta.len()).map(cosine).fold(1.0, f64::min);
        let off = products * UNIT / smallest.max(SMALLEST);
        for j in 0..beta.len() {
            let before = beta[j].size() / left[j].size().max(SMALLEST);
            let behind = 1.0 / right[j + 1].size().max(SMALLEST);
            left[j + 1].radius += off * (1.0 + before * before);
            right[j].radius += off * beta[j].size() * (1.0 + behind * behind);
        }
    }
}

/// min(1, m / |G|).
fn factor(g: Ball, most: f64) -> f64 {
    (most / g.size()).min(1.0)
}

/// What an implementation may be off, over what the recursion alone may be.
fn allowance<N: Number>(like: N) -> f64 {
    match like.path() {
        Path::Fused => FUSED,
        Path::Reference => REFERENCE,
    }
}

const FUSED: f64 = 8.0;
const REFERENCE: f64 = 16.0;

/// G, `[B, N, 2]`.
pub fn forward<N: Number>(inputs: [&[N]; 4], d: Dims, options: BkOptions) -> Vec<N> {
    let mut out = vec![];
    let products = match inputs[0][0].path() {
        // Its units go on by the recursion from where the scan left them.
        Path::Fused => 1.0,
        // Every site is what log₂ N products make it, which round independently of each other.
        Path::Reference => (d.length as f64).log2().max(1.0).sqrt(),
    };
    for r in 0..d.rows {
        for g in row(inputs, d, options, r).pivots(products).g {
            let g = match options.max_abs {
                // Its direction is as far off as it was, and its length less.
                Some(most) => g.by(factor(g, most)).rounded(8.0),
                None => g,
            };
            let bound = g.radius * allowance(inputs[0][0]);
            out.extend([g.re, g.im].map(|value| inputs[0][0].known(value, bound)));
        }
    }
    out
}

/// da, db, dc and dz, of the shapes of the inputs.
pub fn backward<N: Number>(
    inputs: [&[N]; 4],
    d: Dims,
    options: BkOptions,
    dg: &[N],
) -> [Vec<N>; 4] {
    let couplings = d.length - 1;
    let widths = [d.length, couplings, couplings, 2];
    let rows = [d.rows, d.shared[0], d.shared[1], d.shared[2]];
    let mut sums: [Vec<Ball>; 4] =
        std::array::from_fn(|i| vec![Ball::default(); rows[i] * widths[i]]);
    let mut add = |input: usize, r: usize, i: usize, value: Ball| {
        let r = if rows[input] == 1 { 0 } else { r };
        let sum = &mut sums[input][r * widths[input] + i];
        *sum = sum.plus(Ball { im: 0.0, ..value });
    };
    for r in 0..d.rows {
        let row = row(inputs, d, options, r);
        let products = match inputs[0][0].path() {
            // Its units begin with the directions that the scan left them, which both go into Q where units meet: each
            // of its log₂ N products counts. On wgpu the gate's seed 17 needs it, whose z is next to the real axis.
            Path::Fused => (d.length as f64).log2(),
            // What it may be off is that of the whole row anyway.
            Path::Reference => 0.0,
        };
        let Pivots { beta, left, right, g } = row.pivots(products);
        let w: Vec<Ball> = (0..d.length)
            .map(|i| {
                let at = 2 * (r * d.length + i);
                let w = Ball::exact(dg[at].value(), -dg[at + 1].value());
                match options.max_abs {
                    Some(most) if g[i].size() > most => uncapped(w, g[i], most),
                    _ => w,
                }
            })
            .collect();
        let own: Vec<Ball> = w.iter().zip(&g).map(|(w, g)| w.times(*g).times(*g)).collect();
        let mut v = own.clone();
        for j in (0..couplings).rev() {
            let ratio = beta[j].over(left[j]).over(left[j]);
            v[j] = own[j].plus(ratio.times(v[j + 1]));
        }
        let mut u = vec![Ball::default(); d.length];
        if options.mode == BkMode::Full {
            u = own.clone();
            for j in 0..couplings {
                let ratio = beta[j].over(right[j + 1]).over(right[j + 1]);
                u[j + 1] = own[j + 1].plus(ratio.times(u[j]));
            }
        }
        for j in 0..d.length {
            let s = match options.mode {
                BkMode::Full => u[j].plus(v[j]).minus(own[j]),
                BkMode::Causal => v[j],
            };
            add(0, r, j, s.by(-1.0));
            add(3, r, 0, s);
            add(3, r, 1, Ball { re: -s.im, ..s });
            if j < couplings {
                let mut q = v[j + 1].over(left[j]);
                if options.mode == BkMode::Full {
                    q = q.plus(u[j].over(right[j + 1]));
                }
                add(1, r, j, q.by(row.c[j].value()).rounded(1.0));
                add(2, r, j, q.by(row.b[j].value()).rounded(1.0));
            }
        }
    }
    let like = inputs[0][0];
    let mut widths = widths.into_iter();
    sums.map(|of| {
        let width = widths.next().expect("there are four").max(1);
        let bounded = |row: &[Ball]| -> Vec<N> {
            // Autodiff goes through all products, whose derivatives cancel to those of G: an error anywhere in a row
            // is one of the whole row.
            let largest = row.iter().map(|x| x.radius).fold(0.0, f64::max);
            let radius = |x: &Ball| match like.path() {
                Path::Fused => x.radius,
                Path::Reference => largest,
            };
            row.iter().map(|x| like.known(x.re, radius(x) * allowance(like))).collect()
        };
        of.chunks(width).flat_map(bounded).collect()
    })
}

/// The cotangent of G before its cap.
fn uncapped(w: Ball, g: Ball, most: f64) -> Ball {
    let size = g.size();
    let factor = most / size;
    let direction = g.by(1.0 / size);
    let along = w.times(direction).re;
    let re = factor * (w.re - along * direction.re);
    let im = factor * (w.im + along * direction.im);
    // To first order in what the direction is off.
    let radius = factor * w.size() * 3.0 * (g.radius / size + 4.0 * UNIT);
    Ball { re, im, radius }
}
