//! What the zeros of `[model]` and keys that are not given stand for, and what follows from it: the head dimension and
//! the number of parameters.

use super::{MixerKind, MlpKind, ModelConfig, ResidualKind};
use kiln_nn::KasminaLayerConfig;

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

    /// Streams of an `mhc` residual, 4 if they are not given.
    pub fn resolved_streams(&self) -> usize {
        self.streams.unwrap_or(4)
    }

    /// Seeds of a `kasmina` MLP, one for each 64 numbers of `width` if they are not given.
    pub fn resolved_seeds(&self) -> usize {
        self.seeds.unwrap_or(self.width.div_ceil(64))
    }

    /// MLPs that they choose from, as many as seeds if they are not given.
    pub fn resolved_seed_mlps(&self) -> usize {
        self.seed_mlps.unwrap_or(self.resolved_seeds())
    }

    /// The seeds of a `kasmina` MLP.
    pub(crate) fn kasmina(&self) -> KasminaLayerConfig {
        KasminaLayerConfig::new(self.width, self.resolved_seeds())
            .with_mlps(self.resolved_seed_mlps())
    }

    /// Streams between layers.
    pub(crate) fn residual_streams(&self) -> usize {
        match self.residual {
            ResidualKind::Plain => 1,
            ResidualKind::Mhc => self.resolved_streams(),
        }
    }

    /// Width of one head; 0 where `heads` is 0, which [`Config::validate`](super::Config::validate)
    /// refuses.
    pub fn head_dim(&self) -> usize {
        self.width.checked_div(self.heads).unwrap_or(0)
    }

    /// Number of parameters for so many tokens, without making any; a float, which no size overflows.
    pub fn parameters(&self, vocab_size: usize) -> f64 {
        let width = self.width as f64;
        let swiglu = 3.0 * width * self.resolved_mlp_width() as f64;
        let mlp = match self.mlp {
            MlpKind::SwiGlu => swiglu,
            MlpKind::Kasmina => {
                let seeds = self.kasmina();
                swiglu + if seeds.seeds == 0 { 0.0 } else { seeds.parameters() }
            }
        };
        let by_turns = self.mixer.by_turns();
        let mixers = by_turns.iter().enumerate().map(|(turn, kind)| {
            // Not block by block: there may be more than anyone waits for.
            let (rounds, rest) = (self.layers / by_turns.len(), self.layers % by_turns.len());
            (rounds + usize::from(turn < rest)) as f64 * self.mixer_parameters(*kind)
        });
        let (connection, stream_head) = match self.residual {
            ResidualKind::Plain => (0.0, 0.0),
            ResidualKind::Mhc => {
                let n = self.resolved_streams() as f64;
                let rows = n * n + 2.0 * n;
                (rows * n * width + 3.0 + rows, n * n * width + 1.0 + n)
            }
        };
        let block = 2.0 * (width + connection) + mlp;
        let blocks = self.layers as f64 * block + mixers.sum::<f64>() + stream_head;
        let tables = if self.tied_embeddings { 1.0 } else { 2.0 };
        blocks + width + tables * vocab_size as f64 * width
    }

    fn mixer_parameters(&self, kind: MixerKind) -> f64 {
        let width = self.width as f64;
        match kind {
            MixerKind::Attention => {
                let head_dim = self.head_dim() as f64;
                let heads = 2.0 * self.heads as f64 + 2.0 * self.resolved_kv_heads() as f64;
                let norms = if self.qk_norm { 2.0 * head_dim } else { 0.0 };
                heads * head_dim * width + norms
            }
            MixerKind::Bk => 3.0 * self.resolved_bk_channels() as f64 * width,
        }
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
