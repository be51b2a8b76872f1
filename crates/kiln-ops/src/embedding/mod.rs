//! Rows of a table by their numbers, and the gradient of the table.
//!
//! y\[b, t\] = weight\[tokens\[b, t\]\], and dweight\[v\] = Σ dy\[b, t\] over the b, t with tokens\[b, t\] = v, in their order
//! and in f32, whatever stands how often: tokens are sorted on the device, rows that many tokens name are added up in
//! pieces, and every row of the gradient is written once.
//!
//! Bytes that must move, for T tokens, V rows of D numbers of s bytes: forward 2·T·D·s (less where rows repeat),
//! backward T·D·s for dy and V·D·s for dweight.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Int, Tensor};

const OP: &str = "embedding";

/// What comes out, and what is looked at before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbeddingOptions {
    /// Element type of the result: f32, bf16 or f16; none is that of `weight`.
    pub dtype: Option<DType>,
    /// Read the tokens back and refuse those that are no row of `weight`. The read waits for the device, so a trainer
    /// whose data is known to be in range turns it off; then such a token gives a row of NaN and has no gradient.
    pub check_tokens: bool,
}

impl Default for EmbeddingOptions {
    fn default() -> Self {
        Self { dtype: None, check_tokens: true }
    }
}

/// weight\[tokens\].
///
/// * `weight`: `[V, D]`, f32, bf16 or f16, rows at any distance, V and D at least 1.
/// * `tokens`: `[B, T]`, 0 to V − 1; there may be none, and then nothing hangs on `weight`.
///
/// Returns `[B, T, D]`. The gradient flows to `weight`, in its element type, from sums in f32. Two runs agree bit for bit.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use kiln_ops::prelude::*;
///
/// let device = Device::flex();
/// let weight = Tensor::from_floats([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &device);
/// let tokens = Tensor::from_ints([[2, 0, 2]], &device);
/// let y = embedding(weight, tokens, EmbeddingOptions::default())?;
/// assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [5.0, 6.0, 1.0, 2.0, 5.0, 6.0]);
/// # }
/// # Ok::<(), kiln_ops::OpError>(())
/// ```
///
/// # Errors
///
/// [`OpError`] on a shape, element type, device or token that does not fit, and where the fused kernel was asked for on a
/// device that has none.
pub fn embedding(
    weight: Tensor<2>,
    tokens: Tensor<2, Int>,
    options: EmbeddingOptions,
) -> Result<Tensor<3>, OpError> {
    let Asked { dtype, shape } = Asked::new(&weight, &tokens, options)?;
    if shape.contains(&0) {
        return Ok(nothing(&weight, shape, dtype));
    }
    let tokens = tokens.reshape([shape[0] * shape[1]]);
    let y = match policy::choose(OP, shape.iter().product(), &weight)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(weight, tokens, dtype),
        Choice::Reference => reference::embedding(weight, tokens, dtype),
    };
    Ok(y.reshape(shape))
}

/// The same for a table that is read again, as one that is the output projection too: with the rows comes `weight` for
/// its next reader.
///
/// What that reader's gradient is of `weight` arrives before those of the rows, and they are added to it where it stands,
/// each sum to what is there, rounded once. Rows that no token names are not touched.
///
/// # Errors
///
/// As [`embedding`](fn@embedding).
pub fn tied_embedding(
    weight: Tensor<2>,
    tokens: Tensor<2, Int>,
    options: EmbeddingOptions,
) -> Result<(Tensor<3>, Tensor<2>), OpError> {
    let Asked { dtype, shape } = Asked::new(&weight, &tokens, options)?;
    if shape.contains(&0) {
        return Ok((nothing(&weight, shape, dtype), weight));
    }
    let tokens = tokens.reshape([shape[0] * shape[1]]);
    let (y, weight) = match policy::choose(OP, shape.iter().product(), &weight)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::tied(weight, tokens, dtype),
        Choice::Reference => (reference::embedding(weight.clone(), tokens, dtype), weight),
    };
    Ok((y.reshape(shape), weight))
}

/// What is asked for, checked.
struct Asked {
    dtype: DType,
    /// Of the result.
    shape: [usize; 3],
}

impl Asked {
    fn new(
        weight: &Tensor<2>,
        tokens: &Tensor<2, Int>,
        options: EmbeddingOptions,
    ) -> Result<Self, OpError> {
        let check = Check(OP);
        check.float("weight", weight)?;
        let ([rows, width], [batch, length]) = (weight.dims(), tokens.dims());
        let fits = rows > 0 && width > 0;
        check.shape("weight", &weight.dims(), fits, "[V, D] with V, D at least 1")?;
        let dtype = options.dtype.unwrap_or(weight.dtype());
        check.float_on("y", dtype, &weight.device())?;
        check.device("tokens", &tokens.device(), &weight.device())?;
        if options.check_tokens {
            check_tokens(tokens, rows)?;
        }
        Ok(Self { dtype, shape: [batch, length, width] })
    }
}

/// The rows of no token.
fn nothing(weight: &Tensor<2>, shape: [usize; 3], dtype: DType) -> Tensor<3> {
    let none = Tensor::empty(shape, (&weight.device(), dtype));
    if weight.is_autodiff() && !none.is_autodiff() { none.autodiff() } else { none }
}

/// Refuses a token that is no row.
fn check_tokens(tokens: &Tensor<2, Int>, rows: usize) -> Result<(), OpError> {
    let data = tokens.to_data();
    for (position, found) in data.iter::<i64>().enumerate() {
        if !(0..rows as i64).contains(&found) {
            return Err(OpError::Token { op: OP, found, position, last: rows - 1 });
        }
    }
    Ok(())
}
