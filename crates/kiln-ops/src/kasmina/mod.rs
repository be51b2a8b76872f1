//! The Kasmina chunked layer: seeds that live in chunks of the features and blend blueprints into them.
//!
//! The H features of `x` are cut into C chunks, one for each seed ([`chunk`]): H div C features each, and one more for the
//! first H mod C. A seed in [a state](SeedState) that contributes blends a row `w` of `blueprints` into its chunk, by
//! [`Blend`]:
//!
//! * `lerp` y = x·(1 + alpha·(w − 1)), `scale` y = w·x, `add` y = x + alpha·w, `mixed` y = (1 − alpha)·x + alpha·w;
//! * in any other state the chunk passes through unchanged.
//!
//! In the same read the mean and the variance of each chunk of `x` over all rows are taken: telemetry, which has no
//! gradient.
//!
//! Backward: dx by the formula, always. The blueprint has a gradient in the states that train it, the sum over rows of
//! alpha·x·dy (`lerp`), x·dy (`scale`) or alpha·dy (`add`, `mixed`), added up over the seeds that share it; alpha has one
//! where its blend uses it, Σ (w − 1)·x·dy, Σ w·dy or Σ (w − x)·dy over the chunk.
//!
//! Source: `kasmina` of tachyon-beep/esper (morphogenetic layers), whose kernels had no backward and left features
//! unwritten; defined anew here.
//!
//! Bytes that must move, for M rows of s bytes an element: forward 2·M·H·s (x in, y out), backward 2·M·H·s (dy in, dx out)
//! and x in the chunks that have a gradient made of it. A handful of operations an element, so memory decides.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
pub(crate) mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;
mod seeds;

pub use reference::chunk_means;
pub use seeds::{Blend, BlueprintCounts, Seed, SeedChange, SeedState, Seeds, chunk};

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Tensor};

const OP: &str = "kasmina";

/// What is looked at before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KasminaOptions {
    /// Read the seeds back and refuse a code, a blueprint or an alpha that is none. The read waits for the device, so
    /// where they are known to be right, as after [`Seed::check`] of each, it is turned off; then an unknown state does not
    /// contribute, nor does one with a blend of MLPs that the call does not have; an unknown blend is `mixed`, and an unknown
    /// blueprint is the last.
    pub check_seeds: bool,
}

impl Default for KasminaOptions {
    fn default() -> Self {
        Self { check_seeds: true }
    }
}

/// What is known of the chunks of an input: f32, without gradients, on the device until somebody reads it.
#[derive(Debug, Clone)]
pub struct Telemetry {
    /// The mean of each chunk over all rows, `[C]`; 0 without rows, and not finite where the chunk is not.
    pub mean: Tensor<1>,
    /// Its variance, of the population, `[C]`; 0 without rows.
    pub variance: Tensor<1>,
}

/// Blends the blueprints of contributing seeds into their chunks.
///
/// * `x`: `[..., H]`, f32, bf16 or f16, any strides; rows may be none, H at least 1.
/// * `blueprints`: `[P, H]`, the element type of `x` or f32, P at least 1. Row w is read at the features of the chunk.
/// * `seeds`: C of them, 1 ≤ C ≤ H.
///
/// Returns y, `[..., H]` in the element type of `x`, and the telemetry of `x`; arithmetic is f32. Gradients flow to `x`,
/// `blueprints` and `seeds.alpha`; two runs agree bit for bit.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use kiln_ops::prelude::*;
///
/// let device = Device::flex();
/// let x = Tensor::<2>::full([3, 4], 2.0, &device);
/// let blueprints = Tensor::full([1, 4], 3.0, &device);
/// let grafting = Seed { state: SeedState::Grafting, blueprint: Some(0), alpha: 0.5, ..Seed::default() };
/// let seeds = Seeds::new(&[Seed::default(), grafting], &device)?;
/// let (y, telemetry) = kasmina(x, blueprints, &seeds, KasminaOptions::default())?;
/// assert_eq!(y.into_data().to_vec::<f32>().unwrap()[..4], [2.0, 2.0, 4.0, 4.0]);
/// assert_eq!(telemetry.mean.into_data().to_vec::<f32>().unwrap(), [2.0, 2.0]);
/// # }
/// # Ok::<(), kiln_ops::OpError>(())
/// ```
///
/// # Errors
///
/// [`OpError`] on a shape, element type, device or seed that does not fit, and where the fused kernel was asked for on a
/// device that has none.
pub fn kasmina<const D: usize>(
    x: Tensor<D>,
    blueprints: Tensor<2>,
    seeds: &Seeds,
    options: KasminaOptions,
) -> Result<(Tensor<D>, Telemetry), OpError> {
    check(OP, &x, &blueprints, seeds)?;
    if options.check_seeds {
        seeds.check(BlueprintCounts::rows(blueprints.dims()[0]))?;
    }
    Ok(match policy::choose(OP, x.shape().num_elements(), &x)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(x, blueprints, seeds),
        Choice::Reference => reference::kasmina(x, blueprints, seeds),
    })
}

pub(crate) fn check<const D: usize>(
    op: &'static str,
    x: &Tensor<D>,
    blueprints: &Tensor<2>,
    seeds: &Seeds,
) -> Result<(), OpError> {
    let check = Check(op);
    let (shape, device) = (x.dims(), x.device());
    let features = shape.last().copied().unwrap_or(0);
    check.shape("x", &shape, features > 0, "[..., H] with H at least 1")?;
    let dtype = check.float("x", x)?;
    let [rows, width] = blueprints.dims();
    let expected = format!("[P, {features}] with P at least 1");
    check.shape("blueprints", &[rows, width], rows > 0 && width == features, expected)?;
    check.dtype("blueprints", blueprints, &[dtype, DType::F32])?;
    check.device("blueprints", &blueprints.device(), &device)?;
    let Seeds { alpha, lifecycle, blueprint_id, blend } = seeds;
    let [count] = alpha.dims();
    let expected = format!("[C] with C from 1 to {features}, the features of `x`");
    check.shape("alpha", &[count], (1..=features).contains(&count), expected)?;
    check.dtype("alpha", alpha, &[dtype, DType::F32])?;
    check.device("alpha", &alpha.device(), &device)?;
    for (name, of) in [("lifecycle", lifecycle), ("blueprint_id", blueprint_id), ("blend", blend)] {
        check.shape(name, &of.dims(), of.dims() == [count], format!("[{count}]"))?;
        check.device(name, &of.device(), &device)?;
    }
    Ok(())
}
