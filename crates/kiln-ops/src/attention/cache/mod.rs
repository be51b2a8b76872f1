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
    /// There but for the time of a call.
    held: Option<[Tensor<4>; 2]>,
    shape: [usize; 4],
    len: usize,
}

impl KvCache {
    /// Memory for `[B, Hkv, capacity, D]`, nothing of it filled.
    pub fn new(shape: [usize; 4], dtype: DType, device: &Device) -> Self {
        let device = device.clone().inner();
        let zeros = || Tensor::zeros(shape, (&device, dtype));
        Self { held: Some([zeros(), zeros()]), shape, len: 0 }
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
        let keys = &self.both()[0];
        self.shape == shape && keys.dtype() == dtype && keys.device() == device.clone().inner()
    }

    /// Forgets all positions and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// The keys and the values that are filled, `[B, Hkv, len, D]`, if any are.
    pub fn filled(&self) -> Option<[Tensor<4>; 2]> {
        (self.len > 0).then(|| self.both().clone().map(|all| all.narrow(2, 0, self.len)))
    }

    fn both(&self) -> &[Tensor<4>; 2] {
        self.held.as_ref().expect("a call that did not end took the cache with it")
    }
}

/// [`attention_qkv`](super::attention_qkv) of positions that follow those in `cache`, to which their keys and
/// values are added.
///
/// * `qkv`: `[B, T, (H + 2·Hkv)·D]`: the H = `heads` heads of the queries, the Hkv of the keys, those of the values;
///   B, Hkv, D and the element type are those of the cache.
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
    check.number("heads", heads as f64, groups, "a multiple of the cache's, both at least 1")?;
    let [_, length, _] = qkv.dims();
    let all = (heads + 2 * kv_heads) * width;
    let ok = qkv.dims() == [batch, length, all] && length > 0;
    let expected = format!("[{batch}, T, {all}] for {heads} heads and the cache, T at least 1");
    check.shape("qkv", &qkv.dims(), ok, expected)?;
    check.number("head_dim", width as f64, width > 0, "at least 1")?;
    check.dtype("qkv", &qkv, &[cache.both()[0].dtype()])?;
    let tracked = qkv.is_autodiff();
    let qkv = qkv.inner();
    check.device("cache", &cache.both()[0].device(), &qkv.device())?;
    options.check(width)?;
    let end = cache.len + length;
    let expected = format!("at most {capacity}, the capacity of the cache");
    check.number("positions", end as f64, end <= capacity, &expected)?;
    // Alike for a prompt and for what follows.
    let choice = choose(&cache.both()[0], width)?;
    let held = cache.held.take().expect("it was there");
    let (y, held) = match choice {
        #[cfg(feature = "cube")]
        Choice::Fused => backend::fused(qkv, heads, held, cache.len, options),
        Choice::Reference => reference::attention_cached(qkv, heads, held, cache.len, options),
    };
    (cache.held, cache.len) = (Some(held), end);
    Ok(if tracked { y.autodiff() } else { y })
}
