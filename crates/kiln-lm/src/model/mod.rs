//! The language model: a decoder-only transformer with pre-norm RMSNorm, RoPE, grouped KV heads and
//! SwiGLU, all layers through `kiln-ops`.
//!
//! ```text
//! tokens ─ embedding ─ dropout ─┬───────────────(+)──┬─────────(+)─ … ─ norm ─ head ─ logits
//!                               └─ norm ─ attention ─┘─ norm ─ MLP ─┘
//! ```

mod block;
mod initial;

pub use block::Block;

use crate::config::{ModelConfig, Precision};
use crate::tensors::{self, TensorsError};
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_nn::prelude::*;
use std::collections::BTreeMap;

/// Prefix of the parameters of the token embedding, which weight decay spares.
pub const EMBEDDING: &str = "embedding";

/// The language model.
#[derive(Module, Debug)]
pub struct Transformer {
    /// A vector for each token; the output projection too if it is tied.
    pub embedding: Embedding,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// Before the output projection.
    pub norm: RmsNorm,
    /// To the logits, unless the embedding is.
    pub head: Option<Linear>,
    dropout: Dropout,
    context: usize,
    #[module(skip)]
    dtype: DType,
}

impl ModelConfig {
    /// A model for `vocab_size` tokens whose first values follow from `seed` alone, whatever the
    /// device: normal with standard deviation 0.02, divided by √(2·layers) for the projections
    /// back to the residual stream; norms 1.
    ///
    /// The configuration is one that [`Config::validate`](crate::config::Config::validate) accepts.
    pub fn init(&self, vocab_size: usize, seed: u64, device: &Device) -> Transformer {
        initial::initialize(self.skeleton(vocab_size, device), self.layers, seed)
    }

    /// A model with saved parameters, as [`tensors::parameters`] names them; `what` names their
    /// file in errors.
    ///
    /// # Errors
    ///
    /// [`TensorsError`] if they do not fit the configuration.
    pub fn restore(
        &self,
        vocab_size: usize,
        what: &'static str,
        parameters: BTreeMap<String, TensorData>,
        device: &Device,
    ) -> Result<Transformer, TensorsError> {
        tensors::with_parameters(what, self.skeleton(vocab_size, device), parameters)
    }

    /// The layers, with parameters that have no value yet.
    fn skeleton(&self, vocab_size: usize, device: &Device) -> Transformer {
        let zeros = Initializer::Zeros;
        let head = LinearConfig::new(self.width, vocab_size).with_initializer(zeros.clone());
        let embedding = EmbeddingConfig::new(vocab_size, self.width).with_initializer(zeros);
        Transformer {
            embedding: embedding.init(device),
            blocks: (0..self.layers).map(|_| Block::new(self, device)).collect(),
            norm: RmsNormConfig::new(self.width).with_eps(self.norm_eps).init(device),
            head: (!self.tied_embeddings).then(|| head.init(device)),
            dropout: DropoutConfig::new(self.dropout).init(),
            context: self.context,
            dtype: DType::F32,
        }
    }
}

impl Precision {
    /// The element type of activations on this device.
    pub fn dtype(self, device: &Device) -> DType {
        let cuda = kiln_ops::policy::device_name(device).starts_with("cuda");
        match self {
            Precision::Bf16 => DType::BF16,
            Precision::Auto if cuda => DType::BF16,
            Precision::Auto | Precision::F32 => DType::F32,
        }
    }
}

impl Transformer {
    /// The same model with activations and inputs of matrix products in `dtype`; parameters,
    /// logits and loss stay f32.
    pub fn with_activations(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// Number of tokens the model sees at once.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Number of tokens it knows.
    pub fn vocab_size(&self) -> usize {
        self.embedding.weight.dims()[0]
    }

    /// Logits of the token after each of `tokens`: `[B, T]` to `[B, T, V]` in f32.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, length] = tokens.dims();
        let logits = self.logits(self.hidden(tokens, None));
        let vocab_size = logits.dims()[1];
        logits.reshape([batch, length, vocab_size])
    }

    /// Mean cross-entropy of `targets` after `tokens`, both `[B, T]`: `[1]` in f32. Targets are
    /// known to be tokens of the vocabulary.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let [batch, length] = targets.dims();
        let options = CrossEntropyOptions { check_targets: false, ..Default::default() };
        let targets = targets.reshape([batch * length]);
        let loss = linear_cross_entropy(self.hidden(tokens, None), self.head(), targets, options);
        loss.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Logits after the last of `tokens`, which follow those in `cache`: `[B, T]` to `[B, V]`.
    ///
    /// `cache` has one entry a layer, as [`empty_cache`](Self::empty_cache) makes them.
    pub fn forward_cached(&self, tokens: Tensor<2, Int>, cache: &mut [KvCache]) -> Tensor<2> {
        let [batch, length] = tokens.dims();
        let y = self.hidden(tokens, Some(cache));
        let width = y.dims()[1];
        let last = y.reshape([batch, length, width]).narrow(1, length - 1, 1);
        self.logits(last.reshape([batch, width]))
    }

    /// A cache for [`forward_cached`](Self::forward_cached) that has seen nothing.
    pub fn empty_cache(&self) -> Vec<KvCache> {
        vec![KvCache::new(); self.blocks.len()]
    }

    /// What goes into the output projection: `[B·T, width]`.
    fn hidden(&self, tokens: Tensor<2, Int>, mut cache: Option<&mut [KvCache]>) -> Tensor<2> {
        let [batch, length] = tokens.dims();
        let x = self.embedding.forward(tokens).cast(self.dtype);
        let mut x = self.dropout.forward(x);
        let mut y = self.blocks[0].attention_norm.forward(x.clone());
        for (i, block) in self.blocks.iter().enumerate() {
            let cache = cache.as_mut().map(|cache| &mut cache[i]);
            let (residual, delta) = block.forward(x, y, cache);
            let norm = self.blocks.get(i + 1).map_or(&self.norm, |next| &next.attention_norm);
            (x, y) = norm.forward_add(delta, residual);
        }
        let width = y.dims()[2];
        y.reshape([batch * length, width])
    }

    /// The output projection, `[width, V]`, in the element type of the activations.
    fn head(&self) -> Tensor<2> {
        let weight = match &self.head {
            Some(head) => head.weight.val(),
            None => self.embedding.weight.val().transpose(),
        };
        weight.cast(self.dtype)
    }

    fn logits(&self, y: Tensor<2>) -> Tensor<2> {
        y.matmul(self.head()).cast(DType::F32)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
