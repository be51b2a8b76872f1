//! Keys and values of the tokens that one attention layer has seen, for generation.

use burn::tensor::Tensor;

/// Keys and values of one layer, `[B, Hkv, S, D]`, already turned by RoPE.
#[derive(Debug, Clone, Default)]
pub struct KvCache {
    stored: Option<(Tensor<4>, Tensor<4>)>,
}

impl KvCache {
    /// A cache that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of positions seen.
    pub fn len(&self) -> usize {
        self.stored.as_ref().map_or(0, |(k, _)| k.dims()[2])
    }

    /// Whether nothing was seen.
    pub fn is_empty(&self) -> bool {
        self.stored.is_none()
    }

    /// Appends keys and values and returns all of them.
    pub(crate) fn append(&mut self, k: Tensor<4>, v: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let all = match self.stored.take() {
            Some((old_k, old_v)) => {
                (Tensor::cat(vec![old_k, k], 2), Tensor::cat(vec![old_v, v], 2))
            }
            None => (k, v),
        };
        self.stored = Some(all.clone());
        all
    }
}
