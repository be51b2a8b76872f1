//! The language model: a decoder-only transformer with pre-norm RMSNorm. A block is a mixer and an MLP
//! between residuals, each chosen in the configuration: causal self-attention with RoPE and grouped KV
//! heads or the resolvent of chains, block by block; SwiGLU; plain addition or hyper-connections. All layers go through
//! `kiln-ops`.
//!
//! ```text
//! tokens ─ embedding ─ dropout ─┬───────────(+)──┬─────────(+)─ … ─ norm ─ head ─ logits
//!                               └─ norm ─ mixer ─┘─ norm ─ MLP ─┘
//! ```

mod block;
mod initial;
mod mixer;
mod mlp;
mod residual;

pub use block::Block;
pub use mixer::{Mixer, MixerCache};
pub use mlp::{KasminaMlp, Mlp};

use crate::config::{ModelConfig, Precision, ResidualKind};
use crate::earlier;
use crate::names::names;
use crate::tensors::{self, TensorsError};
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_nn::prelude::*;
use kiln_ops::device;
use kiln_ops::embedding::{EmbeddingOptions, embedding, tied_embedding};
use kiln_optim::Names;
use residual::Stream;
use std::collections::BTreeMap;

/// The language model.
#[derive(Module, Debug)]
pub struct Transformer {
    /// A vector for each token; the output projection too if it is tied.
    pub embedding: Embedding,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// From the streams to one, if there are several.
    pub stream_head: Option<HyperHead>,
    /// Before the output projection.
    pub norm: RmsNorm,
    /// To the logits, unless the embedding is.
    pub head: Option<Linear>,
    dropout: Dropout,
    context: usize,
    #[module(skip)]
    dtype: DType,
}

/// What the trainer needs of a model.
pub trait LanguageModel: Module {
    /// Mean cross-entropy of `targets` after `tokens`, both `[B, T]`: `[1]` in f32.
    fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1>;

    /// Whether the parameter of this name and rank is read in the element type of the activations alone, so that it
    /// may be held in it. The optimizer has its value then, and overwrites what [`after_step`](Self::after_step) makes of it.
    fn in_activations(name: &str, rank: usize) -> bool {
        let _ = (name, rank);
        false
    }

    /// Whether the parameter of this name learns beside the model, so that its gradient is no part of the global norm.
    fn beside(name: &str) -> bool {
        let _ = name;
        false
    }

    /// The model after optimizer step number `step`, counted from 1. Layers with a life of their own, or
    /// with statistics that lag behind, bring them up to date here; what they keep is part of the
    /// [record](tensors::record). It must not read from the device, which would wait for it, and what it
    /// makes of parameters must leave the graph (`Tensor::inner`, not `detach`, which goes on tracking).
    fn after_step(self, step: u64) -> Self {
        let _ = step;
        self
    }
}

impl LanguageModel for Transformer {
    fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        Transformer::loss(self, tokens, targets)
    }

    fn in_activations(name: &str, rank: usize) -> bool {
        // Norms take their scales in f32, hyper-connections all they have, and seeds what is no MLP.
        let of_seeds = name.contains(".seeds.") && !name.ends_with(".mlps");
        rank >= 2 && !name.ends_with(".phi") && !of_seeds
    }

    fn beside(name: &str) -> bool {
        // Clipping must not tell the model of seeds that nobody is to see.
        name.contains(".seeds.")
    }

    fn after_step(self, step: u64) -> Self {
        let blocks = self.blocks.into_iter().map(|block| block.after_step(step)).collect();
        Self { blocks, ..self }
    }
}

impl ModelConfig {
    /// A model for `vocab_size` tokens whose first values follow from `seed` alone, whatever the
    /// device: normal with standard deviation 0.02, divided by √(2·layers) for the projections
    /// back to the residual stream; norms 1.
    ///
    /// The configuration is one that [`Config::validate`](crate::config::Config::validate) accepts.
    pub fn init(&self, vocab_size: usize, seed: u64, device: &Device) -> Transformer {
        initial::initialize(self.skeleton(vocab_size, device), self, seed)
    }

    /// A model with everything that was saved of it, as [`tensors::record`] names it or did in an earlier version;
    /// `what` names the file in errors.
    ///
    /// # Errors
    ///
    /// [`TensorsError`] if they do not fit the configuration.
    pub fn restore(
        &self,
        vocab_size: usize,
        what: &'static str,
        record: BTreeMap<String, TensorData>,
        device: &Device,
    ) -> Result<Transformer, TensorsError> {
        tensors::with_record(what, self.skeleton(vocab_size, device), earlier::renamed(record))
    }

    /// The layers, with parameters that have no value yet.
    pub(crate) fn skeleton(&self, vocab_size: usize, device: &Device) -> Transformer {
        let zeros = Initializer::Zeros;
        let head = LinearConfig::new(self.width, vocab_size).with_initializer(zeros.clone());
        let embedding = EmbeddingConfig::new(vocab_size, self.width).with_initializer(zeros);
        Transformer {
            embedding: embedding.init(device),
            blocks: self.mixers().map(|mixer| Block::new(mixer, self, device)).collect(),
            stream_head: match self.residual {
                ResidualKind::Plain => None,
                ResidualKind::Mhc => {
                    let head = HyperHeadConfig::new(self.width);
                    Some(head.with_streams(self.resolved_streams()).init(device))
                }
            },
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
        match self {
            Precision::Bf16 => DType::BF16,
            Precision::Auto if device::is_cuda(device) => DType::BF16,
            Precision::Auto | Precision::F32 => DType::F32,
        }
    }
}

impl Transformer {
    /// The same model with activations and inputs of matrix products in `dtype`; logits and loss stay f32. Parameters
    /// in another element type than they are used in are cast at every call.
    pub fn with_activations(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// The same model for inference alone: without autodiff, its matrices in the element type of the activations, to
    /// which the layers would cast them at every call.
    pub fn for_inference(&self) -> Self {
        struct Cast(DType, Names);
        impl ModuleMapper for Cast {
            fn enter_module(&mut self, name: &str, _container_type: &str) {
                self.1.enter(name);
            }

            fn exit_module(&mut self, _name: &str, _container_type: &str) {
                self.1.exit();
            }

            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                match Transformer::in_activations(&self.1.name(), D) {
                    true => param.map(|matrix| matrix.cast(self.0)),
                    false => param,
                }
            }
        }
        self.valid().map(&mut Cast(self.dtype, names()))
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
        let (y, head) = self.hidden(tokens, None);
        let logits = logits(y, head);
        let vocab_size = logits.dims()[1];
        logits.reshape([batch, length, vocab_size])
    }

    /// Mean cross-entropy of `targets` after `tokens`, both `[B, T]`: `[1]` in f32. Targets are
    /// known to be tokens of the vocabulary.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let [batch, length] = targets.dims();
        let options = CrossEntropyOptions { check_targets: false, ..Default::default() };
        let targets = targets.reshape([batch * length]);
        let loss = match self.hidden(tokens, None) {
            (y, Head::Weight(weight)) => linear_cross_entropy(y, weight, targets, options),
            (y, Head::Table(table)) => linear_cross_entropy_of_table(y, table, targets, options),
        };
        let loss = loss.unwrap_or_else(|error| panic!("{error}"));
        // Its gradient without its value: seeds in training learn beside the model.
        let beside = self.seeded().filter_map(|(_, mlp)| mlp.take_loss());
        beside.fold(loss, |loss, beside| loss + (beside.clone() - beside.detach()))
    }

    /// The blocks whose MLPs have seeds, by number.
    pub fn seeded(&self) -> impl Iterator<Item = (usize, &KasminaMlp)> {
        let blocks = self.blocks.iter().enumerate();
        blocks.filter_map(|(number, block)| Some((number, block.mlp.kasmina()?)))
    }

    /// Logits after the last of `tokens`, which follow those in `cache`: `[B, T]` to `[B, V]`.
    ///
    /// `cache` has one entry a layer, as [`empty_cache`](Self::empty_cache) makes them.
    pub fn forward_cached(&self, tokens: Tensor<2, Int>, cache: &mut [MixerCache]) -> Tensor<2> {
        let [batch, length] = tokens.dims();
        let (y, head) = self.hidden(tokens, Some(cache));
        let width = y.dims()[1];
        let last = y.reshape([batch, length, width]).narrow(1, length - 1, 1);
        logits(last.reshape([batch, width]), head)
    }

    /// A cache for [`forward_cached`](Self::forward_cached) that has seen nothing.
    pub fn empty_cache(&self) -> Vec<MixerCache> {
        self.blocks.iter().map(|block| block.mixer.empty_cache()).collect()
    }

    /// What goes into the output projection, `[B·T, width]`, and that, in the element type of the activations.
    fn hidden(
        &self,
        tokens: Tensor<2, Int>,
        mut cache: Option<&mut [MixerCache]>,
    ) -> (Tensor<2>, Head) {
        let [batch, length] = tokens.dims();
        // Tokens are those of the tokenizer, whose vocabulary the table has.
        let options = EmbeddingOptions { dtype: Some(self.dtype), check_tokens: false };
        let table = self.embedding.weight.val();
        let embedded = match &self.head {
            Some(head) => {
                let weight = Head::Weight(head.weight.val().cast(self.dtype));
                embedding(table, tokens, options).map(|x| (x, weight))
            }
            None => {
                let tied = tied_embedding(table, tokens, options);
                tied.map(|(x, table)| (x, Head::Table(table.cast(self.dtype))))
            }
        };
        let (x, head) = embedded.unwrap_or_else(|error| panic!("{error}"));
        let stream_head = self.stream_head.as_ref();
        let mut stream = Stream::new(self.dropout.forward(x), stream_head);
        for (i, block) in self.blocks.iter().enumerate() {
            stream = block.forward(stream, cache.as_mut().map(|cache| &mut cache[i]));
        }
        let y = stream.end(stream_head, &self.norm);
        let width = y.dims()[2];
        (y.reshape([batch * length, width]), head)
    }
}

/// The output projection.
enum Head {
    /// `[width, V]`.
    Weight(Tensor<2>),
    /// The embedding, `[V, width]`.
    Table(Tensor<2>),
}

fn logits(y: Tensor<2>, head: Head) -> Tensor<2> {
    let weight = match head {
        Head::Weight(weight) => weight,
        Head::Table(table) => table.transpose(),
    };
    let logits = matmul(y, weight, MatmulOptions::default());
    logits.unwrap_or_else(|error| panic!("{error}")).cast(DType::F32)
}

#[cfg(all(test, feature = "flex"))]
mod tests;
