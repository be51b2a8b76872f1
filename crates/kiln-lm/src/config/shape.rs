//! What the zeros of `[model]` and keys that are not given stand for, and the head dimension that follows from it.

use super::ModelConfig;

impl ModelConfig {
    /// Key and value heads, with 0 resolved to `heads`.
    pub fn resolved_kv_heads(&self) -> usize {
        if self.kv_heads == 0 { self.heads } else { self.kv_heads }
    }

    /// Width inside the MLP, with 0 resolved to 8/3 of `width`, rounded up to a multiple of 64.
    pub fn resolved_mlp_width(&self) -> usize {
        match self.mlp_width {
            0 => (8 * self.width).div_ceil(3).next_multiple_of(64),
            width => width,
        }
    }

    /// Chains of a `bk` mixer, a quarter of `width` if they are not given.
    pub fn resolved_bk_channels(&self) -> usize {
        self.bk_channels.unwrap_or((self.width / 4).max(1))
    }

    /// Width of one head; 0 where `heads` is 0, which [`Config::validate`](super::Config::validate)
    /// refuses.
    pub fn head_dim(&self) -> usize {
        self.width.checked_div(self.heads).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_resolved_and_other_values_stay() {
        let model = ModelConfig { width: 384, heads: 6, ..ModelConfig::default() };
        assert_eq!(model.head_dim(), 64);
        assert_eq!(model.resolved_kv_heads(), 6);
        assert_eq!(model.resolved_mlp_width(), 1024);
        assert_eq!(model.resolved_bk_channels(), 96);
        let narrow = ModelConfig { width: 3, ..model.clone() };
        assert_eq!(narrow.resolved_bk_channels(), 1);
        let few = ModelConfig { bk_channels: Some(5), ..model.clone() };
        assert_eq!(few.resolved_bk_channels(), 5);
        // 8/3 of 128 is 341.3.
        assert_eq!(ModelConfig { width: 128, ..model.clone() }.resolved_mlp_width(), 384);
        let model = ModelConfig { kv_heads: 2, mlp_width: 100, ..model };
        assert_eq!((model.resolved_kv_heads(), model.resolved_mlp_width()), (2, 100));
    }
}
