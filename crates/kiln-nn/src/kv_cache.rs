//! Keys and values of the tokens that one attention layer has seen, for generation.

use burn::tensor::Tensor;
use kiln_ops::attention;

/// Keys and values of one [`CausalSelfAttention`](crate::CausalSelfAttention), already rotated by RoPE: memory for all
/// positions, allocated once and filled in place.
///
/// It makes the [`attention::KvCache`] that the operator takes at the first call, which says what is to be held.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use kiln_nn::prelude::*;
///
/// let device = Device::flex();
/// let attention = CausalSelfAttentionConfig::new(64, 4, 16).init(&device);
/// let mut cache = KvCache::new(16);
///
/// let prompt = Tensor::<3>::ones([1, 5, 64], &device);
/// let y = attention.forward_cached(prompt, &mut cache);
/// assert_eq!((y.dims(), cache.len()), ([1, 5, 64], 5));
///
/// let next = Tensor::<3>::ones([1, 1, 64], &device);
/// let y = attention.forward_cached(next, &mut cache);
/// assert_eq!((y.dims(), cache.len()), ([1, 1, 64], 6));
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct KvCache {
    capacity: usize,
    /// Made by the first call, which says for how many sequences, and in which element type.
    held: Option<attention::KvCache>,
}

impl KvCache {
    /// A cache with room for so many positions that has seen nothing.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, held: None }
    }

    /// Number of positions seen.
    pub fn len(&self) -> usize {
        self.held.as_ref().map_or(0, attention::KvCache::len)
    }

    /// Whether nothing was seen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of positions there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets what it has seen and keeps the memory.
    pub fn clear(&mut self) {
        if let Some(held) = &mut self.held {
            held.clear();
        }
    }

    /// The cache for what is in `qkv`; while nothing was seen it may be of other sequences than before.
    #[track_caller]
    pub(crate) fn of(
        &mut self,
        qkv: &Tensor<3>,
        heads: usize,
        kv_heads: usize,
    ) -> &mut attention::KvCache {
        let [batch, _, all] = qkv.dims();
        let shape = [batch, kv_heads, self.capacity, all / (heads + 2 * kv_heads)];
        let device = qkv.device().inner();
        let fits =
            |held: &attention::KvCache| !held.is_empty() || held.fits(shape, qkv.dtype(), &device);
        if !self.held.as_ref().is_some_and(fits) {
            let new = attention::KvCache::new(shape, qkv.dtype(), &device);
            match new {
                Ok(new) => self.held = Some(new),
                Err(error) => panic!("{error}"),
            }
        }
        self.held.as_mut().expect("it is there")
    }
}
