//! Float formats: where their numbers are, and rounding to them.

/// A float format that results are stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// 24 binary digits, exponents from −126 on.
    F32,
    /// 8 digits, exponents as f32.
    Bf16,
    /// 11 digits, exponents from −14 to 15.
    F16,
}

impl Format {
    /// Binary digits of a normal number.
    pub fn digits(self) -> i32 {
        match self {
            Self::F32 => 24,
            Self::Bf16 => 8,
            Self::F16 => 11,
        }
    }

    /// Exponent of the smallest normal number: below it numbers are equally far apart.
    pub fn least_exponent(self) -> i32 {
        match self {
            Self::F32 | Self::Bf16 => -126,
            Self::F16 => -14,
        }
    }

    /// Exponent of the largest number.
    pub fn largest_exponent(self) -> i32 {
        match self {
            Self::F32 | Self::Bf16 => 127,
            Self::F16 => 15,
        }
    }

    /// The unit roundoff: the largest relative error of one rounding to nearest of a normal number.
    pub fn unit(self) -> f64 {
        power(-self.digits())
    }

    /// Half the distance of two neighbours at `x`: the largest error of one rounding to nearest there.
    pub fn half_gap(self, x: f64) -> f64 {
        power(exponent(x).max(self.least_exponent()) - self.digits())
    }

    /// From here on a rounding gives infinity.
    pub fn overflow(self) -> f64 {
        let top = power(self.largest_exponent());
        top * (2.0 - self.unit())
    }

    /// The nearest number, ties to even.
    pub fn round(self, x: f64) -> f64 {
        if !x.is_finite() {
            return x;
        }
        if x.abs() >= self.overflow() {
            return f64::INFINITY.copysign(x);
        }
        let gap = 2.0 * self.half_gap(x);
        (x / gap).round_ties_even() * gap
    }
}

/// 2^`exponent`, of any exponent that these formats have.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The exponent of `x`: 2^exponent ≤ |x| < 2^(exponent + 1); that of 0 is very small.
fn exponent(x: f64) -> i32 {
    (x.abs().to_bits() >> 52) as i32 - 1023
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_the_machine() {
        let mut bits = 1u64;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let x = f64::from_bits(bits);
            if x.is_nan() {
                continue;
            }
            let near = x * 2f64.powi(-(exponent(x)) + (bits >> 60) as i32 * 9 - 70);
            for x in [x, near] {
                assert_eq!(Format::F32.round(x), f64::from(x as f32), "{x:e}");
            }
        }
    }

    #[test]
    fn short_formats_have_few_numbers() {
        assert_eq!(Format::Bf16.round(1.0 + 2f64.powi(-8)), 1.0);
        assert_eq!(Format::Bf16.round(1.0 + 3.0 * 2f64.powi(-8)), 1.0 + 2f64.powi(-6));
        assert_eq!(Format::F16.round(65_519.9), 65_504.0);
        assert_eq!(Format::F16.round(-65_520.0), f64::NEG_INFINITY);
        // Subnormal: multiples of 2⁻²⁴.
        assert_eq!(Format::F16.round(2.6 * 2f64.powi(-24)), 3.0 * 2f64.powi(-24));
        assert_eq!(Format::F16.round(0.4 * 2f64.powi(-24)), 0.0);
        assert_eq!(Format::F16.half_gap(0.0), 2f64.powi(-25));
        assert_eq!(Format::Bf16.half_gap(1.99), 2f64.powi(-8));
        assert_eq!(Format::Bf16.half_gap(2.0), 2f64.powi(-7));
    }
}
