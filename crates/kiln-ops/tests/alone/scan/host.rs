//! The operations in float64, with what rounding may do to them, and data for them.

use crate::common::numbers;
use kiln_ops::scan::ScanRequest;

/// An operation in float64, on items of up to 8 registers.
pub struct Host {
    pub name: &'static str,
    pub registers: usize,
    identity: [f64; 8],
    combine: fn(&[f64; 8], &[f64; 8]) -> [f64; 8],
    /// Roundings that a term of a combination can meet in one.
    roundings: usize,
}

pub const SUM: Host = Host {
    name: "sum",
    registers: 1,
    identity: [0.0; 8],
    combine: |a, b| [a[0] + b[0], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    roundings: 1,
};

pub const MATRICES: Host = Host {
    name: "matrices",
    registers: 4,
    identity: [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
    combine: |a, b| {
        let mut c = [0.0; 8];
        for (at, c) in c[..4].iter_mut().enumerate() {
            let (i, j) = (at / 2, at % 2);
            *c = a[2 * i] * b[j] + a[2 * i + 1] * b[2 + j];
        }
        c
    },
    roundings: 2,
};

/// Not scaled: powers of two are left to the comparison.
pub const MOEBIUS: Host = Host {
    name: "moebius",
    registers: 8,
    identity: [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
    combine: |earlier, later| {
        let mut c = [0.0; 8];
        for i in 0..2 {
            for j in 0..2 {
                for k in 0..2 {
                    let (a, b) = (&later[4 * i + 2 * k..], &earlier[4 * k + 2 * j..]);
                    c[4 * i + 2 * j] += a[0] * b[0] - a[1] * b[1];
                    c[4 * i + 2 * j + 1] += a[0] * b[1] + a[1] * b[0];
                }
            }
        }
        c
    },
    roundings: 0,
};

impl Host {
    pub fn item(&self, x: &[f64], i: usize) -> [f64; 8] {
        let mut item = [0.0; 8];
        item[..self.registers].copy_from_slice(&x[i * self.registers..(i + 1) * self.registers]);
        item
    }

    /// Element i with all before it, or only those.
    pub fn scan(&self, x: &[f64], request: &ScanRequest) -> Vec<f64> {
        let (length, registers) = (request.length, self.registers);
        let mut out = vec![0.0; x.len()];
        for sequence in 0..request.sequences {
            let mut prefix = self.identity;
            for step in 0..length {
                let at = if request.reverse { length - 1 - step } else { step };
                let at = sequence * length + at;
                let next = (self.combine)(&prefix, &self.item(x, at));
                let result = if request.exclusive { &prefix } else { &next };
                out[at * registers..(at + 1) * registers].copy_from_slice(&result[..registers]);
                prefix = next;
            }
        }
        out
    }

    /// Most that rounding can do to a result, in any order of the combinations: with n items behind it
    /// γ of n times the roundings of one, of what the moduli combine to.
    pub fn bounds(&self, x: &[f64], request: &ScanRequest) -> Vec<f64> {
        let moduli: Vec<f64> = x.iter().map(|x| x.abs()).collect();
        let mut bounds = self.scan(&moduli, request);
        for (at, bound) in bounds.iter_mut().enumerate() {
            let i = at / self.registers % request.length;
            let step = if request.reverse { request.length - 1 - i } else { i };
            *bound *= gamma((step + 1) * self.roundings);
        }
        bounds
    }

    /// All of them.
    pub fn all(&self, x: &[f64]) -> [f64; 8] {
        let items = x.len() / self.registers;
        (0..items).fold(self.identity, |all, i| (self.combine)(&all, &self.item(x, i)))
    }

    /// All of them from the last to the first.
    pub fn all_in_reverse(&self, x: &[f64]) -> [f64; 8] {
        let items = (0..x.len() / self.registers).rev();
        items.fold(self.identity, |all, i| (self.combine)(&all, &self.item(x, i)))
    }

    /// Items on which combinations are exact in f32, whatever their order: small integers, signed
    /// permutations, and those times powers of i.
    pub fn exact(&self, items: usize, seed: u64) -> Vec<f64> {
        let mut state = seed * 2 + 1;
        let mut next = |n: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let mut x = vec![0.0; items * self.registers];
        for item in x.chunks_mut(self.registers) {
            if self.registers == 1 {
                item[0] = next(7) as f64 - 3.0;
                continue;
            }
            let (crossed, half) = (next(2) as usize, self.registers / 2);
            for row in 0..2 {
                let column = row ^ crossed;
                let sign = [1.0, -1.0][next(2) as usize];
                let part = next((half / 2) as u64) as usize;
                item[row * half + column * (half / 2) + part] = sign;
            }
        }
        x
    }

    /// Items whose combinations stay of a size: numbers about 0.3, and rows of matrices that add up to
    /// one, some with a negative part.
    pub fn real(&self, items: usize, seed: u64) -> Vec<f64> {
        let x = numbers(items * self.registers, seed, 0.3);
        let mut x: Vec<f64> = x.iter().map(|x| f64::from(*x as f32)).collect();
        if self.registers == 4 {
            for row in x.chunks_mut(2) {
                let share = (row[0].abs() / (row[0].abs() + row[1].abs() + 0.1)) as f32;
                row[0] = f64::from(share);
                row[1] = f64::from(1.0 - share) * if row[1] < -1.2 { -1.0 } else { 1.0 };
            }
        }
        x
    }
}

/// n roundings, one after another.
fn gamma(n: usize) -> f64 {
    let nu = n as f64 * 2f64.powi(-24);
    assert!(nu < 0.5);
    nu / (1.0 - nu)
}
