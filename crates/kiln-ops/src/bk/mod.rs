//! The BK resolvent scan: the diagonal of (T − zI)⁻¹ of a complex tridiagonal matrix.
//!
//! T has a_i on its diagonal, b_i above (T[i, i+1]) and c_i below (T[i+1, i]), all real; z is complex. With
//! α_i = a_i − z, β_i = b_i·c_i and the pivots
//!
//! * from the left δ_0 = α_0, δ_j = α_j − β_{j−1}/δ_{j−1},
//! * from the right ε_{N−1} = α_{N−1}, ε_j = α_j − β_j/ε_{j+1},
//!
//! the result is G_j = 1/(δ_j + ε_j − α_j), or in a causal model, where site j must not know what comes after it,
//! G_j = 1/δ_j.
//!
//! Backward, with w_i = ∂L/∂Re G_i − i·∂L/∂Im G_i and S_j = Σ_i w_i G_ij G_ji:
//!
//! * da_j = −Re S_j, db_j = Re(c_j Q_j), dc_j = Re(b_j Q_j), dz = (Re Σ S_j, −Im Σ S_j),
//! * Q_j = U_j/ε_{j+1} + V_{j+1}/δ_j with the first-order recurrences U_j = w_j G_j² + β_{j−1}/ε_j² · U_{j−1} and
//!   V_j = w_j G_j² + β_j/δ_j² · V_{j+1}, and S_j = U_j + V_j − w_j G_j²; causal is V alone.
//!
//! Everything is a scan, in parallel over the sequence. Source: P. Dirac's resolvent of a chain as in the
//! continued fractions of R. Haydock, V. Heine and M. Kelly, 1972; the parallel form of linear recurrences is that
//! of G. Blelloch, Prefix Sums and Their Applications, 1990.
//!
//! Bytes that must move, for n = B·N sites: forward 20·n (a, b, c in, G out), backward 32·n and 4·n of what the forward keeps
//! for it.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
pub(crate) mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Tensor};

const OP: &str = "bk";

/// Which neighbours a site's resolvent knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum BkMode {
    /// All sites: G_j = 1/(δ_j + ε_j − α_j).
    #[default]
    Full,
    /// Those up to j alone, as a model of language must: G_j = 1/δ_j.
    Causal,
}

/// What [`bk`] computes beside its inputs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BkOptions {
    /// Which neighbours count.
    pub mode: BkMode,
    /// A limit m on |G|: G · min(1, m/|G|), with the gradient of that.
    pub max_abs: Option<f64>,
}

/// The diagonal of (T − zI)⁻¹ for each row of a batch, as (re, im).
///
/// * `a`: `[B, N]`, the diagonal, f32, B and N at least 1.
/// * `b`, `c`: `[B, N − 1]` or `[1, N − 1]` for all rows, above and below it, f32.
/// * `z`: `[B, 2]` or `[1, 2]` for all rows, (re, im), f32.
///
/// Returns `[B, N, 2]` in f32. Gradients flow to all four; two runs agree bit for bit.
///
/// Finite input gives finite results; only gradients of the reference that leave f32 are infinite or NaN. Where T − zI is
/// singular to f32, a denominator is taken for no smaller than 2⁻⁴⁰ of what it would be without cancellation, so that
/// |G| stops near 10¹² over the size of T's elements, which count as no smaller than 2⁻⁸⁰ there; numbers beyond 2¹²⁰ are
/// limited to that, and cotangents to 2⁸⁰. Behind sites that are exactly singular by themselves and coupled to the rest
/// by an exact 0, results are finite and no more: with Im z ≠ 0 there are none.
///
/// # Errors
///
/// [`OpError`] on a wrong shape, element type, device or `max_abs`, and where the fused kernel was asked for on a
/// device that has none.
pub fn bk(
    a: Tensor<2>,
    b: Tensor<2>,
    c: Tensor<2>,
    z: Tensor<2>,
    options: BkOptions,
) -> Result<Tensor<3>, OpError> {
    let check = Check(OP);
    let [rows, length] = a.dims();
    check.shape("a", &[rows, length], rows * length > 0, "[B, N] with B and N at least 1")?;
    check.dtype("a", &a, &[DType::F32])?;
    for (name, tensor, width) in [("b", &b, length - 1), ("c", &c, length - 1), ("z", &z, 2)] {
        let [own, found] = tensor.dims();
        let fits = (own == rows || own == 1) && found == width;
        check.shape(name, &[own, found], fits, format!("[{rows}, {width}] or [1, {width}]"))?;
        check.dtype(name, tensor, &[DType::F32])?;
        check.device(name, &tensor.device(), &a.device())?;
    }
    if let Some(limit) = options.max_abs {
        let fits = limit > 0.0 && limit <= f64::from(f32::MAX);
        check.number("max_abs", limit, fits, "a number above 0, within f32")?;
    }
    Ok(match policy::choose(OP, a.shape().num_elements(), &a)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(a, b, c, z, options),
        Choice::Reference => reference::bk(a, b, c, z, options),
    })
}
