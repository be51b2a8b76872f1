//! Keys and values of the tokens that one attention layer has seen, for generation.

use burn::tensor::Tensor;
use kiln_ops::attention;

/// Keys and values of one layer, already rotated by RoPE: memory for all positions, allocated once and filled in
/// place.
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
