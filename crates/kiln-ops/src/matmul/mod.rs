//! The matrix product Y = alpha · A·B + beta · C, of one pair of matrices or of stacks of them.
//!
//! Backward: dA = alpha · dY·Bᵀ, dB = alpha · Aᵀ·dY, dC = beta · dY, summed over the dimensions that
//! an input was broadcast along.
//!
//! Operands are read as they lie in memory: a transposed view (`b.transpose()`), rows cut out of a
//! wider tensor and broadcast matrices cost no copy. f32 operands are multiplied in f32, exactly:
//! never in TF32, as Burn's own product does on CUDA without saying so, and on tensor cores as sums of
//! bf16 only where [`F32Precision::High`] asks for it. bf16 and f16 operands are
//! multiplied on tensor cores where the device has them, and always added up in f32.
//!
//! 2·M·N·K operations for each pair of matrices, twice that backward; (M·K + K·N + M·N) elements
//! must move.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
mod gradient;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

pub use crate::precision::F32Precision;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Tensor};

const OP: &str = "matmul";

/// What [`matmul`] does beside multiplying.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatmulOptions {
    /// Factor of the product.
    pub alpha: f64,
    /// Factor of what is added.
    pub beta: f64,
    /// Element type of the result, that of the operands if none.
    pub dtype: Option<DType>,
    /// How f32 operands are multiplied, in the backward too.
    pub precision: F32Precision,
    /// The product is known to be symmetric, as A·Aᵀ is, and so is C: half of it may be computed. If they
    /// are not, which half of the result is right is not said.
    pub symmetric: bool,
}

impl Default for MatmulOptions {
    fn default() -> Self {
        Self {
            alpha: 1.0,
            beta: 1.0,
            dtype: None,
            precision: F32Precision::Highest,
            symmetric: false,
        }
    }
}

/// alpha · `a` · `b`.
///
/// * `a`: `[..., M, K]`, f32, bf16 or f16, of rank 2 or more, any strides; K at least 1, the others may be 0.
/// * `b`: `[..., K, N]` in the element type of `a`. Leading dimensions broadcast.
///
/// Returns `[..., M, N]` in the element type of `a` or in that of the options. The gradients are
/// rounded to the element type of the operands, dY too before it is multiplied.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use kiln_ops::matmul::{MatmulOptions, matmul};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::ones([4, 8], &device);
/// let weight = Tensor::<2>::ones([16, 8], &device);
/// let y = matmul(x, weight.transpose(), MatmulOptions::default()).unwrap();
/// assert_eq!(y.dims(), [4, 16]);
/// # }
/// ```
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type, device or factor, and where the fused kernel was
/// asked for on a device that has none.
pub fn matmul<const D: usize>(
    a: Tensor<D>,
    b: Tensor<D>,
    options: MatmulOptions,
) -> Result<Tensor<D>, OpError> {
    check(&a, &b, options)?;
    run(a, b, None, options)
}

/// alpha · `a` · `b` + beta · `c`, where `c` broadcasts to the shape of the result: a bias is
/// `[1, N]`, a residual or a gradient to add to `[M, N]`.
///
/// `c` is f32, bf16 or f16, of any strides. On CUDA the result takes its memory if it has the result's
/// shape and element type and nobody else holds it.
///
/// # Errors
///
/// As [`matmul`].
pub fn matmul_add<const D: usize>(
    a: Tensor<D>,
    b: Tensor<D>,
    c: Tensor<D>,
    options: MatmulOptions,
) -> Result<Tensor<D>, OpError> {
    let shape = check(&a, &b, options)?;
    let check = Check(OP);
    check.float("c", &c)?;
    let fits = c.dims().iter().zip(&shape).all(|(c, y)| c == y || *c == 1);
    check.shape("c", &c.dims(), fits, format!("{shape:?} or 1 in place of any of them"))?;
    let square = !options.symmetric || c.dims()[D - 2] == c.dims()[D - 1];
    check.shape(
        "c",
        &c.dims(),
        square,
        "[..., M, M] or [..., 1, 1], as a symmetric result needs",
    )?;
    check.device("c", &c.device(), &a.device())?;
    run(a, b, Some(c), options)
}

/// The shape of the result.
fn check<const D: usize>(
    a: &Tensor<D>,
    b: &Tensor<D>,
    options: MatmulOptions,
) -> Result<[usize; D], OpError> {
    let check = Check(OP);
    let dtype = check.float("a", a)?;
    let (left, right) = (a.dims(), b.dims());
    let ok = D >= 2 && left[D - 1] >= 1;
    check.shape("a", &left, ok, "[..., M, K] of rank 2 or more, K at least 1")?;
    let mut shape = left;
    shape[D - 1] = right[D - 1];
    let mut expected = left;
    expected[D - 2] = left[D - 1];
    let mut fits = right[D - 2] == left[D - 1];
    for i in 0..D - 2 {
        fits &= left[i] == right[i] || left[i] == 1 || right[i] == 1;
        shape[i] = if left[i] == 1 { right[i] } else { left[i] };
    }
    let leading: String = expected[..D - 2].iter().map(|d| format!("{d} or 1, ")).collect();
    check.shape("b", &right, fits, format!("[{leading}{}, N]", expected[D - 2]))?;
    check.dtype("b", b, &[dtype])?;
    check.device("b", &b.device(), &a.device())?;
    let square = !options.symmetric || shape[D - 2] == shape[D - 1];
    check.shape("y", &shape, square, "[..., M, M], as a symmetric product has")?;
    check.number("alpha", options.alpha, true, "a number")?;
    check.number("beta", options.beta, true, "a number")?;
    match options.dtype {
        None | Some(DType::F32 | DType::BF16 | DType::F16) => Ok(shape),
        Some(found) => {
            Err(OpError::DType { op: OP, tensor: "y", found, expected: "F32, BF16 or F16".into() })
        }
    }
}

fn run<const D: usize>(
    a: Tensor<D>,
    b: Tensor<D>,
    c: Option<Tensor<D>>,
    options: MatmulOptions,
) -> Result<Tensor<D>, OpError> {
    Ok(match policy::choose(OP, a.shape().num_elements().max(b.shape().num_elements()), &a)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(a, b, c, options),
        Choice::Reference => reference::matmul(a, b, c, options),
    })
}
