//! The resolvent's diagonal in plain Burn operations: the products of all beginnings and of all ends by doubling,
//! in log2 N steps.

use super::{BkMode, BkOptions};
use burn::tensor::Tensor;

/// A complex tensor.
#[derive(Clone)]
struct Complex {
    re: Tensor<2>,
    im: Tensor<2>,
}

impl Complex {
    fn times(&self, other: &Self) -> Self {
        let (a, b) = (self.clone(), other.clone());
        Self {
            re: a.re.clone() * b.re.clone() - a.im.clone() * b.im.clone(),
            im: a.re * b.im + a.im * b.re,
        }
    }

    fn plus(self, other: Self) -> Self {
        Self { re: self.re + other.re, im: self.im + other.im }
    }

    fn map(&self, of: impl Fn(Tensor<2>) -> Tensor<2>) -> Self {
        Self { re: of(self.re.clone()), im: of(self.im.clone()) }
    }

    /// The larger of |re| and |im|, a constant.
    fn size(&self) -> Tensor<2> {
        self.re.clone().detach().abs().max_pair(self.im.clone().detach().abs())
    }

    /// 1/self, of which nothing is taken for smaller than 2⁻⁴⁰.
    fn inverse(&self) -> Self {
        let least = 1.0 / (1u64 << 40) as f32;
        let small = self.size().lower_elem(least);
        let re = self.re.clone().mask_fill(small.clone(), least);
        let im = self.im.clone().mask_fill(small, 0.0);
        // Scaled, because the gradient of a quotient has the square of the divisor.
        let of = Self { re, im };
        let unit = unit(&[&of]);
        let Self { re, im } = of.map(|part| part * unit.clone());
        let square = re.clone() * re.clone() + im.clone() * im.clone();
        Self { re: re / square.clone() * unit.clone(), im: -im / square * unit }
    }
}

/// 2×2 matrices, row by row, one for each site.
type Matrices = [Complex; 4];

/// The power of two that brings the largest number into [½, 1), a constant; 1 where all are 0, which no gradient is to
/// become infinite for.
fn unit(numbers: &[&Complex]) -> Tensor<2> {
    let sizes = numbers.iter().map(|number| number.size());
    let largest = sizes.reduce(Tensor::max_pair).expect("there are some");
    let largest = largest.clone().mask_fill(largest.equal_elem(0.0), 0.5);
    let exponent = largest.clamp(f32::MIN_POSITIVE, f32::MAX).log() / std::f32::consts::LN_2;
    (-(exponent.floor() + 1.0).clamp(-120.0, 120.0) * std::f32::consts::LN_2).exp()
}

/// later · earlier, scaled.
fn product(later: &Matrices, earlier: &Matrices) -> Matrices {
    let entry = |i: usize, j: usize| {
        later[2 * i].times(&earlier[j]).plus(later[2 * i + 1].times(&earlier[2 + j]))
    };
    let all = [entry(0, 0), entry(0, 1), entry(1, 0), entry(1, 1)];
    scaled(all)
}

fn scaled(all: Matrices) -> Matrices {
    let unit = unit(&all.each_ref());
    all.map(|entry| entry.map(|part| part * unit.clone()))
}

/// Sites `from..to`.
fn sites(of: &Matrices, from: usize, to: usize) -> Matrices {
    of.each_ref().map(|entry| entry.map(|part| part.narrow(1, from, to - from)))
}

fn joined(left: Matrices, right: Matrices) -> Matrices {
    let mut right = right.into_iter();
    left.map(|left| {
        let right = right.next().expect("there are four");
        Complex {
            re: beside([Some(left.re), Some(right.re)]),
            im: beside([Some(left.im), Some(right.im)]),
        }
    })
}

/// G as [`bk`](fn@super::bk) defines it.
pub fn bk(a: Tensor<2>, b: Tensor<2>, c: Tensor<2>, z: Tensor<2>, options: BkOptions) -> Tensor<3> {
    let [rows, length] = a.dims();
    let zeros = Tensor::zeros_like(&a);
    let alpha = Complex {
        re: limited(a - z.clone().narrow(1, 0, 1)),
        im: limited(zeros.clone() - z.narrow(1, 1, 1)),
    };
    let beta = match length {
        1 => zeros.clone(),
        _ => beside([
            Some(limited(b * c).expand([rows, length - 1])),
            Some(zeros.clone().narrow(1, 0, 1)),
        ]),
    };
    // As the kernel has them: M = [[α, −1], [β, 0]].
    let real = |re: Tensor<2>| Complex { im: Tensor::zeros_like(&re), re };
    let site = [alpha, real(zeros.clone() - 1.0), real(beta), real(zeros.clone())];
    let mut before = scaled(site.clone());
    let mut after = before.clone();
    let mut step = 1;
    while step < length {
        let met = product(&sites(&before, step, length), &sites(&before, 0, length - step));
        before = joined(sites(&before, 0, step), met);
        if options.mode == BkMode::Full {
            let met = product(&sites(&after, step, length), &sites(&after, 0, length - step));
            after = joined(met, sites(&after, length - step, length));
        }
        step *= 2;
    }
    // The vectors before each site from the left, (1, 0) before the first; that behind it, scaled; and those from
    // the right, (1, 0) behind the last.
    let one = |value: f32| Some(zeros.clone().narrow(1, 0, 1) + value);
    let shifted = |entry: &Complex, value: f32| Complex {
        re: beside([one(value), columns(&entry.re, 0, length - 1)]),
        im: beside([one(0.0), columns(&entry.im, 0, length - 1)]),
    };
    let ends = |entry: &Complex, value: f32| Complex {
        re: beside([columns(&entry.re, 1, length), one(value)]),
        im: beside([columns(&entry.im, 1, length), one(0.0)]),
    };
    let (x, y) = (shifted(&before[0], 1.0), shifted(&before[2], 0.0));
    let next_x = site[0].times(&x).plus(site[1].times(&y));
    let next_y = site[2].times(&x);
    let unit = unit(&[&next_x, &next_y]);
    let [next_x, next_y] = [next_x, next_y].map(|part| part.map(|part| part * unit.clone()));
    let g = match options.mode {
        BkMode::Causal => x.times(&next_x.inverse()),
        BkMode::Full => {
            let (phi, behind) = (ends(&after[0], 1.0), ends(&after[1], 0.0));
            let determinant = phi.times(&next_x).plus(behind.times(&next_y));
            x.times(&phi).times(&determinant.inverse())
        }
    };
    let g = g.map(|part| limited(part * unit.clone()));
    let g = match options.max_abs {
        None => g,
        Some(most) => {
            // Scaled, because squares leave f32 first.
            let size = g.size().clamp_min(f32::MIN_POSITIVE);
            let scaled = g.map(|part| part / size.clone());
            let square = scaled.re.clone() * scaled.re.clone() + scaled.im.clone() * scaled.im;
            let length = square.clamp_min(f32::MIN_POSITIVE).sqrt() * size;
            let beyond = length.clone().greater_elem(most);
            let factor = length.recip().mul_scalar(most);
            let factor = Tensor::ones_like(&factor).mask_where(beyond, factor);
            g.map(|part| part * factor.clone())
        }
    };
    Tensor::stack(vec![g.re, g.im], 2)
}

/// Within ±2¹²⁰.
fn limited(x: Tensor<2>) -> Tensor<2> {
    let most = (1u128 << 120) as f32;
    x.clamp(-most, most)
}

/// Columns, of which there may be none.
fn columns(of: &Tensor<2>, from: usize, to: usize) -> Option<Tensor<2>> {
    (from < to).then(|| of.clone().narrow(1, from, to - from))
}

/// One behind the other.
fn beside<const N: usize>(parts: [Option<Tensor<2>>; N]) -> Tensor<2> {
    Tensor::cat(parts.into_iter().flatten().collect(), 1)
}
