//! Rotary position embedding: pairs of channels rotated by an angle that grows with the position.
//!
//! Source: Su et al., RoFormer, 2021 (arXiv 2104.09864). For position t and pair k the angle is
//! (t + offset) · base^(−2k/D), and
//!
//! * y1 = x1·cos + x2·sin
//! * y2 = −x1·sin + x2·cos
//!
//! where (x1, x2) are the two halves of D ([`RopeLayout::Half`]) or the channels (2k, 2k+1)
//! ([`RopeLayout::Interleaved`]). Backward rotates the other way: dx1 = dy1·cos − dy2·sin,
//! dx2 = dy1·sin + dy2·cos.
//!
//! Bytes that must move, for n elements of s bytes: 2·n·s forward and as many backward.

#[cfg(feature = "cube")]
pub mod backend;
#[cfg(feature = "cube")]
mod heads;
#[cfg(feature = "cube")]
pub(crate) mod kernel;
#[cfg(feature = "oracle")]
pub mod oracle;
pub mod reference;

use crate::OpError;
use crate::check::Check;
use crate::policy::{self, Choice};
use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

const OP: &str = "rope";

/// Which channels form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RopeLayout {
    /// Channel k with channel k + D/2.
    #[default]
    Half,
    /// Channel 2k with channel 2k + 1.
    Interleaved,
}

/// Frequencies and layout.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RopeOptions {
    /// Base of the frequencies.
    pub base: f64,
    /// Which channels form a pair.
    pub layout: RopeLayout,
    /// Frequencies (1/base)^linspace(0, 1, D/4) for the first D/4 pairs and 0 for the rest.
    /// [`RopeLayout::Half`] only, D a multiple of 4.
    pub truncated: bool,
}

impl Default for RopeOptions {
    fn default() -> Self {
        Self { base: 10_000.0, layout: RopeLayout::Half, truncated: false }
    }
}

impl RopeOptions {
    /// The D/2 frequencies of heads of width `head_dim`.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let pairs = head_dim / 2;
        if !self.truncated {
            return (0..pairs).map(|k| self.base.powf(-2.0 * k as f64 / head_dim as f64)).collect();
        }
        let rotating = head_dim / 4;
        let last = rotating.saturating_sub(1).max(1) as f64;
        (0..pairs)
            .map(|k| if k < rotating { self.base.powf(-(k as f64) / last) } else { 0.0 })
            .collect()
    }

    fn check(&self, head_dim: usize) -> Result<(), OpError> {
        let check = Check(OP);
        check.number("base", self.base, self.base > 0.0, "a number above 0")?;
        let found = head_dim as f64;
        check.number(
            "head_dim",
            found,
            head_dim > 0 && head_dim.is_multiple_of(2),
            "an even number above 0",
        )?;
        if self.truncated {
            let ok = head_dim.is_multiple_of(4);
            check.number("head_dim", found, ok, "a multiple of 4 (truncated frequencies)")?;
            if self.layout != RopeLayout::Half {
                return Err(OpError::Attribute {
                    op: OP,
                    attribute: "layout",
                    found: format!("{:?}", self.layout).to_lowercase(),
                    expected: "half (truncated frequencies)".into(),
                });
            }
        }
        Ok(())
    }
}

/// cos and sin of every position and pair in f32, made once for a model.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// `[positions, D/2]`.
    pub(crate) cos: Tensor<2>,
    /// `[positions, D/2]`.
    pub(crate) sin: Tensor<2>,
    layout: RopeLayout,
}

impl RopeTable {
    /// The table of positions 0 to `positions` − 1 for heads of width `head_dim`; angles in f64.
    ///
    /// # Errors
    ///
    /// [`OpError`] if `head_dim` is not even, the base not above 0, or `truncated` does not fit.
    pub fn new(
        positions: usize,
        head_dim: usize,
        options: RopeOptions,
        device: &Device,
    ) -> Result<Self, OpError> {
        Self::window(0, positions, head_dim, options, device)
    }

    /// A table of `length` positions from `first` on: its row 0 is position `first`.
    ///
    /// # Errors
    ///
    /// As [`RopeTable::new`].
    pub fn window(
        first: usize,
        length: usize,
        head_dim: usize,
        options: RopeOptions,
        device: &Device,
    ) -> Result<Self, OpError> {
        options.check(head_dim)?;
        let frequencies = options.frequencies(head_dim);
        let positions = (0..length).map(|t| (first + t) as f64);
        let angles = positions.flat_map(|t| frequencies.iter().map(move |f| t * f));
        let (sin, cos): (Vec<f32>, Vec<f32>) =
            angles.map(|a| (a.sin() as f32, a.cos() as f32)).unzip();
        let shape = [length, head_dim / 2];
        let device = device.clone().inner();
        let table = |values| Tensor::from_data(TensorData::new(values, shape), &device);
        Ok(Self { cos: table(cos), sin: table(sin), layout: options.layout })
    }

    /// Number of positions.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// Width of the heads it is for.
    pub fn head_dim(&self) -> usize {
        2 * self.cos.dims()[1]
    }

    /// Which channels form a pair.
    pub fn layout(&self) -> RopeLayout {
        self.layout
    }
}

/// Rotates the heads in `x` by their positions, the first of which is `offset`.
///
/// * `x`: `[B, H, T, D]`, f32, bf16 or f16, D even; any strides, so a swapped `[B, T, H, D]` is read
///   where it is. B, H and T may be 0.
/// * `table`: for heads of width D, with at least `offset` + T positions.
///
/// Returns `[B, H, T, D]` in the element type of `x`; arithmetic is f32. The gradient flows to `x`.
///
/// # Errors
///
/// [`OpError`] on a shape, element type or device that does not fit, and where the fused kernel was
/// asked for on a device that has none.
pub fn rope(x: Tensor<4>, table: &RopeTable, offset: usize) -> Result<Tensor<4>, OpError> {
    check("x", &x, table, offset)?;
    Ok(match policy::choose(OP, x.shape().num_elements(), &x)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(x, table, offset),
        Choice::Reference => reference::rope(x, table, offset),
    })
}

/// [`rope`] of queries and keys, in one launch.
///
/// * `q`: `[B, H, T, D]`, as the `x` of [`rope`].
/// * `k`: `[B, Hkv, T, D]`, the element type of `q`; any number of heads.
///
/// Returns both rotated.
///
/// # Errors
///
/// As [`rope`].
pub fn rope_qk(
    q: Tensor<4>,
    k: Tensor<4>,
    table: &RopeTable,
    offset: usize,
) -> Result<(Tensor<4>, Tensor<4>), OpError> {
    let dtype = check("q", &q, table, offset)?;
    let ([batch, _, length, width], [_, heads, ..]) = (q.dims(), k.dims());
    let expected = format!("[{batch}, Hkv, {length}, {width}] as `q`");
    let ok = k.dims() == [batch, heads, length, width];
    Check(OP).shape("k", &k.dims(), ok, expected)?;
    Check(OP).dtype("k", &k, &[dtype])?;
    Check(OP).device("k", &k.device(), &q.device())?;
    Ok(match policy::choose(OP, q.shape().num_elements().max(k.shape().num_elements()), &q)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused_qk(q, k, table, offset),
        Choice::Reference => (reference::rope(q, table, offset), reference::rope(k, table, offset)),
    })
}

/// [`rope`] of the queries and keys that one product has left in one tensor with the values.
///
/// * `qkv`: `[B, T, (H + 2·Hkv)·D]`: the H = `heads` heads of the queries, the `kv_heads` of the keys, those of
///   the values; f32, bf16 or f16.
///
/// Returns the same with queries and keys rotated: on CUDA where they are, if nobody else holds `qkv`, so that the
/// values are not touched.
///
/// # Errors
///
/// As [`rope`].
pub fn rope_qkv(
    qkv: Tensor<3>,
    heads: usize,
    kv_heads: usize,
    table: &RopeTable,
    offset: usize,
) -> Result<Tensor<3>, OpError> {
    let check = Check(OP);
    check.float("qkv", &qkv)?;
    let [batch, length, all] = qkv.dims();
    let expected = (heads + 2 * kv_heads) * table.head_dim();
    check.number("heads", heads as f64, heads > 0, "at least 1")?;
    check.number("kv_heads", kv_heads as f64, kv_heads > 0, "at least 1")?;
    let text = format!("[B, T, {expected}] for {heads} + 2·{kv_heads} heads as the table");
    check.shape("qkv", &[batch, length, all], all == expected, text)?;
    check_positions(length, table, offset)?;
    check.device("table", &table.cos.device(), &qkv.device())?;
    let rotated = heads + kv_heads;
    Ok(match policy::choose(OP, qkv.shape().num_elements(), &qkv)? {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused_packed(qkv, rotated, table, offset),
        Choice::Reference => reference::rope_packed(qkv, rotated, table, offset),
    })
}

fn check_positions(length: usize, table: &RopeTable, offset: usize) -> Result<(), OpError> {
    let fits = offset.checked_add(length).is_some_and(|end| end <= table.positions());
    let positions = table.positions();
    let expected = match positions.checked_sub(length) {
        Some(last) => format!("at most {last} for T = {length} and {positions} positions"),
        None => format!("a table of at least T = {length} positions, not of {positions}"),
    };
    Check(OP).number("offset", offset as f64, fits, &expected)
}

fn check(
    name: &'static str,
    x: &Tensor<4>,
    table: &RopeTable,
    offset: usize,
) -> Result<DType, OpError> {
    let check = Check(OP);
    let dtype = check.float(name, x)?;
    let [_, _, length, width] = x.dims();
    let ok = width == table.head_dim();
    check.shape(name, &x.dims(), ok, format!("[B, H, T, {}] as the table", table.head_dim()))?;
    check_positions(length, table, offset)?;
    check.device("table", &table.cos.device(), &x.device())?;
    Ok(dtype)
}
