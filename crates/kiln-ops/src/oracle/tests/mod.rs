//! The bounds hold what right arithmetic gives, are not far above it, and convict what is wrong.
//!
//! Right arithmetic is emulated: f32 as the machine has it, in several orders, with approximations that are
//! off by some units in the last place, tensor cores that cut off, and results rounded where kernels or plain
//! Burn operations round them.

mod machine;
mod operators;
mod right;
mod wrong;

use super::{Bounded, Comparison, Format, Number, Place, compare};

/// Numbers that repeat, normal around a mean.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5851_F42D_4C95_7F2D)
    }

    /// Between 0 and 1.
    fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.uniform() * end as f64) as usize
    }

    /// `n` numbers as a format holds them.
    pub(super) fn normal(&mut self, n: usize, mean: f64, scale: f64, format: Format) -> Vec<f64> {
        let mut one = || {
            let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
            format.round(scale * (mean + radius * (std::f64::consts::TAU * self.uniform()).cos()))
        };
        (0..n).map(|_| one()).collect()
    }
}

/// Fails unless the result is right; how near it comes to its bounds, of elements and of lines.
#[track_caller]
pub(super) fn right(out: &[f64], reference: &[Bounded], columns: usize, what: &str) -> [f64; 2] {
    let found = compare(out, reference, columns);
    assert!(found.passes(), "{what}: {}", show(&found));
    [found.elements, found.lines].map(|worst| worst.map_or(0.0, |worst| worst.ratio))
}

/// Fails unless the result is convicted.
#[track_caller]
pub(super) fn convicted(
    out: &[f64],
    reference: &[Bounded],
    columns: usize,
    what: &str,
) -> Comparison {
    let found = compare(out, reference, columns);
    assert!(!found.passes(), "{what} got through: {}", show(&found));
    found
}

fn show(found: &Comparison) -> String {
    let one = |worst: Option<super::Worst>| worst.map_or_else(String::new, |w| w.to_string());
    format!("{}; lines: {}; {} wrong", one(found.elements), one(found.lines), found.wrong)
}

#[test]
fn arithmetic_of_errors() {
    let rounding = super::Rounding::fused(Format::Bf16);
    let unit = Format::F32.unit();
    let (x, y) = (rounding.number(3.0), rounding.number(0.5));
    assert_eq!((x.bound(), (x + y).value(), (x * y).value()), (0.0, 3.5, 1.5));
    let one = |z: Bounded, units: f64| {
        let size = units * unit * z.value().abs();
        assert!((z.bound() - size).abs() < 1e-6 * size, "{z:?}, {size:e}");
    };
    one(x + y, 1.0);
    one(x * y, 1.0);
    one((x + y) * y, 2.0);
    one((x + y) * (x + y), 3.0);
    one(x / y, 6.0);
    one(x - 0.1, 1.0 + 0.1 / 2.9 * 0.5 / 0.8);
    // What cancels keeps the errors of what it is made of.
    let none = (x + y) - rounding.number(3.5);
    assert!(none.value() == 0.0 && none.bound() >= 3.5 * unit);
    // Half the distance of the neighbours of 3.5 in bf16, and the sum's own.
    assert!((((x + y).stored()).bound() - (2f64.powi(-7) + 3.5 * unit)).abs() < 1e-9);
    assert_eq!(rounding.number(0.0) * y, rounding.number(0.0));
}

/// A number that is there a thousand times is rounded the same way a thousand times.
#[test]
fn what_is_alike_is_rounded_alike() {
    let one = super::Rounding::fused(Format::Bf16).number(1.3).stored();
    let (out, alike) = (vec![Format::Bf16.round(1.3); 1000], vec![one; 1000]);
    right(&out, &alike, 1000, "a row of one number");
}

#[test]
fn an_element_may_be_off_by_what_a_line_may_not() {
    let many: Vec<f64> = (0..1000).map(|i| 1.0 + f64::from(i) / 1001.0).collect();
    let numbers = super::Rounding::fused(Format::Bf16).numbers(&many);
    let stored: Vec<Bounded> = numbers.into_iter().map(Bounded::stored).collect();
    let nearest: Vec<f64> = many.iter().map(|x| Format::Bf16.round(*x)).collect();
    right(&nearest, &stored, 40, "rounded to nearest");
    let nearly = |x: &f64| x + 0.9 * Format::Bf16.half_gap(*x);
    let up: Vec<f64> = many.iter().map(nearly).collect();
    let found = convicted(&up, &stored, 40, "too large by nearly half a step each");
    assert_eq!((found.wrong, found.lines.map(|worst| worst.place)), (0, Some(Place::All)));
    // As much in one row only.
    let row: Vec<f64> = [&up[..200], &nearest[200..]].concat();
    let found = convicted(&row, &stored, 200, "too large in a row");
    assert_eq!((found.wrong, found.lines.map(|worst| worst.place)), (0, Some(Place::Row(0))));
    let of_column = |i: usize| if i % 4 == 2 { up[i] } else { nearest[i] };
    let column: Vec<f64> = (0..1000).map(of_column).collect();
    let found = convicted(&column, &stored, 4, "too large in a column");
    assert_eq!((found.wrong, found.lines.map(|worst| worst.place)), (0, Some(Place::Column(2))));
}

#[test]
fn what_is_infinite_has_to_be_infinite() {
    let rounding = super::Rounding::fused(Format::F16);
    let large = (rounding.number(300.0) * rounding.number(300.0)).stored();
    let near = (rounding.number(256.0) * rounding.number(255.9375)).stored();
    let inf = f64::INFINITY;
    assert!(compare(&[inf], &[large], 1).passes());
    assert!(!compare(&[65_504.0], &[large], 1).passes());
    assert!(!compare(&[f64::NAN], &[large], 1).passes());
    // 65520 exactly, the tie above the largest number.
    assert!(compare(&[inf], &[near], 1).passes() && !compare(&[f64::NAN], &[near], 1).passes());
    let zero = [rounding.number(0.0)];
    assert!(compare(&[0.0], &zero, 1).passes() && !compare(&[1e-30], &zero, 1).passes());
    let masked = (rounding.number(-inf) - rounding.number(2.0)).exp();
    assert_eq!((masked.value(), masked.bound()), (0.0, 0.0));
}
