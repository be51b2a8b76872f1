//! Which implementation a bound is for: where it rounds, and what multiplies its matrices.

use super::bounded::Bounded;
use super::format::Format;

/// An implementation, by where it rounds to the element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// A kernel: f32 from the inputs to the outputs.
    Fused,
    /// Plain Burn operations: between two tensors every result is in its element type.
    Reference,
}

/// What adds up the products of matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Products {
    /// f32, rounded to nearest after every term.
    F32,
    /// Tensor cores on operands of 16 bits, whose products are exact.
    TensorCores,
    /// Tensor cores on f32 operands of which 10 bits of fraction are taken.
    Tf32,
}

/// Whose results are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rounding {
    /// Element type of the operation.
    pub format: Format,
    /// Where it rounds.
    pub path: Path,
    /// What adds up its products of matrices.
    pub products: Products,
}

impl Rounding {
    /// A kernel on plain units.
    pub fn fused(format: Format) -> Self {
        Self { format, path: Path::Fused, products: Products::F32 }
    }

    /// Plain Burn operations.
    pub fn reference(format: Format) -> Self {
        Self { path: Path::Reference, ..Self::fused(format) }
    }

    /// An input: it is what the element type holds, so it has no error.
    pub fn number(self, value: f64) -> Bounded {
        Bounded::input(value, self)
    }

    /// The inputs of an oracle.
    pub fn numbers(self, values: &[f64]) -> Vec<Bounded> {
        values.iter().map(|value| self.number(*value)).collect()
    }
}
