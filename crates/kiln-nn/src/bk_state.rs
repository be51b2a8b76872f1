//! What a causal [`BkCore`](crate::BkCore) has to know of the tokens it has seen, for generation: G of the last one.

use burn::tensor::{Device, Tensor};

/// G of the last position of one layer: memory that does not grow.
#[derive(Debug, Clone, Default)]
pub struct BkState {
    /// Re and Im, `[B, channels]` each, in f32.
    last: Option<[Tensor<2>; 2]>,
    len: usize,
}

impl BkState {
    /// A state that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of positions seen.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was seen.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets what it has seen.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// G of the last position, if there was one.
    ///
    /// # Panics
    ///
    /// If it is of other sequences or chains, or on another device.
    #[track_caller]
    pub(crate) fn of(
        &self,
        batch: usize,
        channels: usize,
        device: &Device,
    ) -> Option<[Tensor<2>; 2]> {
        let last = self.last.clone()?;
        let (found, expected) = ([batch, channels], last[0].dims());
        assert!(
            found == expected,
            "bk_core: [B, channels] = {found:?}, expected {expected:?}, those of the state"
        );
        let (found, expected) = (device, last[0].device());
        assert!(*found == expected, "bk_core: `x` is on {found:?}, the state on {expected:?}");
        Some(last)
    }

    /// Goes on by so many positions, after which G is this.
    pub(crate) fn put(&mut self, last: [Tensor<2>; 2], length: usize) {
        self.last = Some(last);
        self.len += length;
    }
}
