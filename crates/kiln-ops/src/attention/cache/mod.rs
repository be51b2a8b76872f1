//! Keys and values of the positions that a layer has seen: memory for all that there may be, filled in place.

#[cfg(feature = "cube")]
mod append;
#[cfg(feature = "cube")]
pub mod backend;

use super::{AttentionOptions, OP, choose, reference};
use crate::OpError;
use crate::check::Check;
use crate::policy::Choice;
use burn::tensor::{DType, Device, Tensor};

/// Keys and values of one layer, `[B, Hkv, capacity, D]` each, of which the first positions are filled.
///
/// [`attention_cached`] writes those that follow where they belong, without a copy of what is there. A clone shares
/// its memory until either of them goes on.
#[derive(Debug, Clone)]
pub struct KvCache {
    /// There but for the time of a call, and after one that panicked.
    held: Option<[Tensor<4>; 2]>,
    shape: [usize; 4],
    len: usize,
}

impl KvCache {
    /// Memory for `[B, Hkv, capacity, D]` of `dtype`, f32, bf16 or f16, nothing of it filled.
    ///
    /// # Errors
    ///
    /// [`OpError`] if a dimension is 0 or no memory could have that shape, and on an element type that is none of
    /// these or that the device does not have.
    pub fn new(shape: [usize; 4], dtype: DType, device: &Device) -> Result<Self, OpError> {
        let device = device.clone().inner();
        Check(OP).float_on("cache", dtype, &device)?;
        let some = !shape.contains(&0);
        Check(OP).shape("cache", &shape, some, "[B, Hkv, capacity, D], each at least 1")?;
        // Keys and values.
        let bytes = shape.iter().try_fold(2 * dtype.size(), |bytes, dim| bytes.checked_mul(*dim));
        let fits = bytes.is_some_and(|bytes| bytes <= isize::MAX as usize);
        Check(OP).shape("cache", &shape, fits, "[B, Hkv, capacity, D] that fits into memory")?;
        let zeros = || Tensor::zeros(shape, (&device, dtype));
        Ok(Self { held: Some([zeros(), zeros()]), shape, len: 0 })
    }

    /// Number of positions filled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is filled.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// `[B, Hkv, capacity, D]`.
    pub fn dims(&self) -> [usize; 4] {
        self.shape
    }

    /// Whether it is one of this shape, element type and device.
    pub fn fits(&self, shape: [usize; 4], dtype: DType, device: &Device) -> bool {
        self.held.as_ref().is_some_and(|[keys, _]| {
            self.shape == shape && keys.dtype() == dtype && keys.device() == device.clone().inner()
        })
    }

    /// Forgets all positions and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// The keys and the values that are filled, `[B, Hkv, len, D]`, if any are.
    pub fn filled(&self) -> Option<[Tensor<4>; 2]> {
        let held = self.held.clone().filter(|_| self.len > 0)?;
        Some(held.map(|all| all.narrow(2, 0, self.len)))
    }
}

/// [`attention_qkv`](super::attention_qkv) of positions that follow those in `cache`, to which their keys and
/// values are added.
///
/// * `qkv`: `[B, T, (H + 2·Hkv)·D]`: the H = `heads` heads of the queries, the Hkv of the keys, those of the values;
///   B, Hkv, D and the element type, f32, bf16 or f16, are those of the cache.
///
/// Returns `[B, T, H·D]`. It is for generation: the result is cut off from what made `qkv`, which gets no gradient.
///
/// No kernel depends on how much is in the cache. Of few queries, as in decoding, keys and values pass once
/// for some of them together.
///
/// # Errors
///
/// As [`attention`](super::attention), and if the cache has no room for T positions.
pub fn attention_cached(
    qkv: Tensor<3>,
    heads: usize,
    cache: &mut KvCache,
    options: AttentionOptions,
) -> Result<Tensor<3>, OpError> {
    let check = Check(OP);
    check.float("qkv", &qkv)?;
    let [batch, kv_heads, capacity, width] = cache.dims();
    let groups = kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads);
    let expected = format!("a multiple of the cache's {kv_heads} KV heads, both at least 1");
    check.number("heads", heads as f64, groups, &expected)?;
    let [_, length, _] = qkv.dims();
    let all = heads.saturating_add(2 * kv_heads).saturating_mul(width);
    let ok = qkv.dims() == [batch, length, all] && length > 0;
    let expected = format!("[{batch}, T, {all}] for {heads} heads and the cache, T at least 1");
    check.shape("qkv", &qkv.dims(), ok, expected)?;
    check.number("head_dim", width as f64, width > 0, "at least 1")?;
    let lost = || OpError::Attribute {
        op: OP,
        attribute: "cache",
        found: "lost by a call that failed".into(),
        expected: "one that is whole".into(),
    };
    let [keys, _] = cache.held.as_ref().ok_or_else(lost)?;
    check.dtype("qkv", &qkv, &[keys.dtype()])?;
    let tracked = qkv.is_autodiff();
    let qkv = qkv.inner();
    check.device("cache", &keys.device(), &qkv.device())?;
    options.check(width)?;
    let end = cache.len + length;
    let expected = format!("at most {capacity}, the capacity of the cache");
    check.number("positions", end as f64, end <= capacity, &expected)?;
    // Alike for a prompt and for what follows.
    let choice = choose(keys, width)?;
    let held = cache.held.take().ok_or_else(lost)?;
    let (y, held) = match choice {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(qkv, heads, held, cache.len, options),
        Choice::Reference => reference::attention_cached(qkv, heads, held, cache.len, options),
    };
    (cache.held, cache.len) = (Some(held), end);
    Ok(if tracked { y.autodiff() } else { y })
}
