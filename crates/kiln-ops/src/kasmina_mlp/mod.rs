//! The Kasmina layer with blueprints that are small MLPs, beside those that are rows.
//!
//! As [`kasmina`], and a seed whose blend is [`Blend::Mlp`](crate::kasmina::Blend::Mlp) makes
//! y = (1 − alpha)·x + alpha·f(x) of its chunk of s features, f(x) = W₂·relu(W₁·x + b₁) + b₂ with 2s hidden units.
//!
//! The weights of all MLPs are one tensor, `[Q, 4S + 3, S]` for chunks of up to S features: of each MLP 2S rows of W₁, a
//! hidden unit each; 2S rows of W₂ᵀ, what each hidden unit adds to the outputs; b₁ in two rows; b₂. A chunk with one feature
//! less takes the leading s numbers of rows, the leading 2s hidden units and the leading 2s numbers of b₁.
//!
//! Backward, with the hidden units h, u = W₂ᵀ·dy and d = u where h > 0, else 0: dx = (1 − alpha)·dy + alpha·W₁ᵀ·d; in the
//! states that train dW₁ = alpha·Σ d·xᵀ, db₁ = alpha·Σ d, dW₂ = alpha·Σ dy·hᵀ, db₂ = alpha·Σ dy over rows, and over the
//! seeds that share the MLP; dalpha = Σ dy·(f(x) − x).
//!
//! Source: the chunk MLPs of `kasmina` of tachyon-beep/esper, which launched a few small kernels for each seed.
//!
//! Bytes that must move, for M rows: those of `kasmina`. Operations: 8·M·s² a chunk of s features forward, 20·M·s² backward (five products, since
//! hidden units are made again).

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
pub(crate) mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::kasmina::{self, BlueprintCounts, KasminaOptions, Seeds, Telemetry};
use crate::policy::{self, Choice};
use burn::tensor::Tensor;

const OP: &str = "kasmina_mlp";

/// Features of a chunk up to which there are kernels.
pub const MOST_FEATURES: usize = 64;

/// Rows of the weights of an MLP of chunks of up to `features` features.
pub fn mlp_rows(features: usize) -> usize {
    4 * features + 3
}

/// Blends the blueprints of contributing seeds into their chunks, rows and MLPs.
///
/// * `x`: `[..., H]`, f32, bf16 or f16, any strides; rows may be none, H at least 1.
/// * `blueprints`: `[P, H]`, the element type of `x` or f32, P at least 1.
/// * `mlps`: `[Q, 4S + 3, S]`, the element type of `x`, Q at least 1, S = ⌈H / C⌉, as [the module](self) lays them out.
/// * `seeds`: C of them, 1 ≤ C ≤ H; `blueprint_id` is a row of what the seed's blend takes.
///
/// Returns y, `[..., H]` in the element type of `x`, and the telemetry of `x`; sums are f32. Gradients flow to `x`,
/// `blueprints`, `mlps` and `seeds.alpha`; two runs agree bit for bit. The MLPs of all seeds are one launch.
///
/// Kernels take chunks of up to [`MOST_FEATURES`]; wider ones go through the reference, in batched products of which those
/// of other seeds are made too.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use kiln_ops::prelude::*;
///
/// let device = Device::flex();
/// let x = Tensor::<2>::full([3, 4], 2.0, &device);
/// let rows = Tensor::ones([1, 4], &device);
/// let mlps = Tensor::ones([1, 11, 2], &device); // relu(2 + 2 + 1), four times, + 1
/// let grafting = Seed { state: SeedState::Grafting, blueprint: Some(0), blend: Blend::Mlp, alpha: 0.5 };
/// let seeds = Seeds::new(&[Seed::default(), grafting], &device)?;
/// let (y, _) = kasmina_mlp(x, rows, mlps, &seeds, KasminaOptions::default())?;
/// assert_eq!(y.into_data().to_vec::<f32>().unwrap()[..4], [2.0, 2.0, 11.5, 11.5]);
/// # }
/// # Ok::<(), kiln_ops::OpError>(())
/// ```
///
/// # Errors
///
/// [`OpError`] on a shape, element type, device or seed that does not fit, and where the fused kernel was asked for on a
/// device that has none or for wider chunks.
pub fn kasmina_mlp<const D: usize>(
    x: Tensor<D>,
    blueprints: Tensor<2>,
    mlps: Tensor<3>,
    seeds: &Seeds,
    options: KasminaOptions,
) -> Result<(Tensor<D>, Telemetry), OpError> {
    kasmina::check(OP, &x, &blueprints, seeds)?;
    let widest = x.dims()[D - 1].div_ceil(seeds.count());
    let (check, dims) = (Check(OP), mlps.dims());
    let fits = dims[0] > 0 && dims[1..] == [mlp_rows(widest), widest];
    let expected = format!("[Q, {}, {widest}] with Q at least 1", mlp_rows(widest));
    check.shape("mlps", &dims, fits, expected)?;
    check.dtype("mlps", &mlps, &[x.dtype()])?;
    check.device("mlps", &mlps.device(), &x.device())?;
    if options.check_seeds {
        seeds.check(BlueprintCounts { rows: blueprints.dims()[0], mlps: dims[0] })?;
    }
    let fits = match widest <= MOST_FEATURES {
        true => Ok(()),
        false => Err(format!("chunks have {widest} features, kernels take {MOST_FEATURES}")),
    };
    Ok(match policy::choose_if(OP, x.shape().num_elements(), &x, fits)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(x, blueprints, mlps, seeds),
        Choice::Reference => reference::kasmina_mlp(x, blueprints, mlps, seeds),
    })
}
