//! How exact products of f32 operands are.

/// How f32 operands are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum F32Precision {
    /// In f32.
    #[default]
    Highest,
    /// Where there are tensor cores, as sums of two bf16 each, hi + lo: hi·hi + hi·lo + lo·hi, added up in
    /// f32, with an error of at most 3·2⁻¹⁸ of each term. Elements must be below 3.38e38 in size, the end
    /// of bf16. In f32 elsewhere.
    High,
}
