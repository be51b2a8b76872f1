//! The Newton-Schulz iteration, which takes the singular values of a matrix towards 1:
//!
//! X₀ = G / (s·‖G‖_F + 1e-7), then A = X·Xᵀ, X = a·X + (b·A + c·A²)·X for each step.
//!
//! Of a matrix with more rows than columns it is the iteration of the transpose. It is not differentiated.
//!
//! Source: Jordan et al., Muon, 2024, whose coefficients do not converge: of singular values of at least 0.01 of the
//! norm five steps make values from 0.68 to 1.14, and more steps do not come nearer. Polar Express: Amsel et al.,
//! 2025 (arXiv 2505.16932).
//!
//! With M ≤ N each step takes 2·M²·N + 2·M³/2 + M²·N operations: both products that are symmetric are half computed.

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
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

const OP: &str = "newton_schulz";

/// The factors a, b and c of the steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Coefficients {
    /// Those of Muon, (3.4445, −4.7750, 2.0315) in every step.
    #[default]
    Muon,
    /// Those of Polar Express, others in each of the first five steps.
    PolarExpress,
}

/// The steps of Polar Express; further ones repeat the last.
const POLAR_EXPRESS: [[f64; 3]; 5] = [
    [8.156554524902461, -22.48329292557795, 15.878769915207462],
    [4.042929935166739, -2.808917465908714, 0.5000178451051316],
    [3.8916678022926607, -2.772484153217685, 0.5060648178503393],
    [3.285753657755655, -2.3681294933425376, 0.46449024233003106],
    [2.3465413258596377, -1.7097828382687081, 0.42323551169305323],
];

impl Coefficients {
    /// a, b and c of a step, counted from 0.
    pub fn of(self, step: usize) -> [f64; 3] {
        match self {
            Self::Muon => [3.4445, -4.7750, 2.0315],
            Self::PolarExpress => POLAR_EXPRESS[step.min(POLAR_EXPRESS.len() - 1)],
        }
    }

    /// What the norm is multiplied with before it divides: s.
    pub fn norm_scale(self) -> f64 {
        match self {
            Self::Muon => 1.0,
            Self::PolarExpress => 1.02,
        }
    }
}

/// How [`newton_schulz`] iterates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewtonSchulzOptions {
    /// Steps, of which none only normalises.
    pub steps: usize,
    /// Their factors.
    pub coefficients: Coefficients,
}

impl Default for NewtonSchulzOptions {
    fn default() -> Self {
        Self { steps: 5, coefficients: Coefficients::default() }
    }
}

/// The matrices of `g` with their singular values taken towards 1.
///
/// * `g`: `[..., M, N]` of rank 2 or more, f32, bf16 or f16, any strides; every size may be 0.
///
/// Returns `[..., M, N]` in the element type of `g`, in which what each product makes is stored; sums are f32. The result
/// is a constant: no gradient flows to `g`. A matrix of zeros stays one; one whose squares leave f32 is not scaled
/// right.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use kiln_ops::newton_schulz::{NewtonSchulzOptions, newton_schulz};
///
/// let g = Tensor::<2>::random([4, 16], Distribution::Normal(0.0, 3.0), &Device::flex());
/// let y = newton_schulz(g, NewtonSchulzOptions::default()).unwrap();
/// // The sum of its squared singular values.
/// let squares: f32 = y.square().sum().into_scalar();
/// assert!((1.6..5.2).contains(&squares));
/// # }
/// ```
///
/// # Errors
///
/// [`OpError`] on a wrong shape or element type, and where the fused kernel was asked for on a device that has none.
pub fn newton_schulz<const D: usize>(
    g: Tensor<D>,
    options: NewtonSchulzOptions,
) -> Result<Tensor<D>, OpError> {
    let check = Check(OP);
    check.float("g", &g)?;
    check.shape("g", &g.dims(), D >= 2, "[..., M, N] of rank 2 or more")?;
    let tracked = g.is_autodiff();
    let g = g.inner();
    let y = match g.shape().num_elements() {
        0 => g,
        elements => match policy::choose(OP, elements, &g)? {
            #[cfg(feature = "cube")]
            Choice::Fused => backend::fused(g, options),
            Choice::Reference => reference::newton_schulz(g, options),
        },
    };
    Ok(if tracked { y.autodiff() } else { y })
}
