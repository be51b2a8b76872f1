//! Arithmetic of devices, emulated.

use super::super::Format;

/// How a sum is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Order {
    /// One term after the other.
    Sequential,
    /// Halves, and halves of those.
    Pairwise,
    /// So many units take every so many terms each, then they are added in a tree.
    Units(usize),
}

pub(super) const ORDERS: [Order; 4] =
    [Order::Sequential, Order::Pairwise, Order::Units(8), Order::Units(256)];

/// A device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) order: Order,
    /// What results are stored in.
    pub(super) format: Format,
    /// Products on tensor cores: products of a block and bits more than f32 has.
    pub(super) tensor_cores: Option<(usize, i32)>,
    /// Results that are tensors of their own are stored, as plain operations do.
    pub(super) stores_all: bool,
    /// Units in the last place by which exponentials and roots are too large.
    pub(super) off: i32,
}

impl Machine {
    pub(super) fn new(format: Format, order: Order) -> Self {
        Self { order, format, tensor_cores: None, stores_all: false, off: 2 }
    }

    pub(super) fn stored(&self, x: f32) -> f32 {
        self.format.round(f64::from(x)) as f32
    }

    /// Stored if plain operations would.
    pub(super) fn between(&self, x: f32) -> f32 {
        if self.stores_all { self.stored(x) } else { x }
    }

    fn off(&self, x: f32) -> f32 {
        x + self.off as f32 * f32::EPSILON * 0.5 * x
    }

    pub(super) fn exp(&self, x: f32) -> f32 {
        self.off(x.exp())
    }

    pub(super) fn rsqrt(&self, x: f32) -> f32 {
        self.off(1.0 / x.sqrt())
    }

    pub(super) fn sigmoid(&self, x: f32) -> f32 {
        1.0 / (1.0 + self.exp(-x))
    }

    pub(super) fn sum(&self, terms: &[f32]) -> f32 {
        match self.order {
            Order::Sequential => terms.iter().fold(0.0, |sum, t| sum + t),
            Order::Pairwise => pairwise(terms),
            Order::Units(units) => {
                let of =
                    |unit: usize| terms.iter().skip(unit).step_by(units).fold(0.0, |s, t| s + t);
                pairwise(&(0..units).map(of).collect::<Vec<f32>>())
            }
        }
    }

    /// Σ left · right.
    pub(super) fn dot(&self, pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
        if let Some((block, bits)) = self.tensor_cores {
            return tensor_core(&pairs.collect::<Vec<_>>(), block, bits);
        }
        match self.order {
            Order::Sequential => pairs.fold(0.0, |sum, (a, b)| a.mul_add(b, sum)),
            _ => self.sum(&pairs.map(|(a, b)| a * b).collect::<Vec<f32>>()),
        }
    }

    /// op(A) · op(B), before anything is stored.
    pub(super) fn product(
        &self,
        a: &[f32],
        b: &[f32],
        [m, k, n]: [usize; 3],
        [ta, tb]: [bool; 2],
    ) -> Vec<f32> {
        let left = |i: usize, x: usize| if ta { a[x * m + i] } else { a[i * k + x] };
        let right = |x: usize, j: usize| if tb { b[j * k + x] } else { b[x * n + j] };
        let at = |i: usize| self.dot((0..k).map(|x| (left(i / n, x), right(x, i % n))));
        (0..m * n).map(at).collect()
    }

    /// The same, stored.
    pub(super) fn stored_product(
        &self,
        a: &[f32],
        b: &[f32],
        sizes: [usize; 3],
        transposed: [bool; 2],
    ) -> Vec<f32> {
        self.product(a, b, sizes, transposed).into_iter().map(|x| self.stored(x)).collect()
    }
}

fn pairwise(terms: &[f32]) -> f32 {
    match terms {
        [] => 0.0,
        [one] => *one,
        _ => {
            let (low, high) = terms.split_at(terms.len().div_ceil(2));
            pairwise(low) + pairwise(high)
        }
    }
}

/// Products of a block and the sum so far, cut off some bits below the f32 digits of the largest of them,
/// and the result cut off to f32.
fn tensor_core(pairs: &[(f32, f32)], block: usize, bits: i32) -> f32 {
    let cut = |x: f64, unit: f64| (x / unit).trunc() * unit;
    let exponent = |x: f64| if x == 0.0 { -200 } else { x.abs().log2().floor() as i32 };
    let mut sum = 0.0f64;
    for pairs in pairs.chunks(block) {
        let terms = pairs.iter().map(|(a, b)| f64::from(*a) * f64::from(*b));
        let terms: Vec<f64> = terms.chain([sum]).collect();
        let largest = terms.iter().map(|t| exponent(*t)).max().unwrap_or(0);
        let unit = 2f64.powi(largest - 23 - bits);
        let exact: f64 = terms.iter().map(|t| cut(*t, unit)).sum();
        sum = cut(exact, 2f64.powi(exponent(exact) - 23));
    }
    sum as f32
}

pub(super) fn f32s(x: &[f64]) -> Vec<f32> {
    x.iter().map(|x| *x as f32).collect()
}

pub(super) fn f64s(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}
