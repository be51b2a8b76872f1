//! What a training run is made of, as one TOML file: `[data]`, `[model]`, `[optimizer]`,
//! `[schedule]`, `[seeds]`, `[train]`, `[sample]`.
//!
//! Every section but `[data]` has defaults, unknown keys are errors, and [`load`] names the line.

mod load;
mod mixers;
mod schedule;
mod seeds;
mod shape;
mod validate;

pub use load::{ConfigError, load, names_folder, parse, run_folder, to_toml};
pub use mixers::Mixers;
pub use seeds::SeedsConfig;
pub use validate::Violation;

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A whole training run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Text, tokenizer and split.
    pub data: DataConfig,
    /// Shape of the network.
    #[serde(default)]
    pub model: ModelConfig,
    /// How parameters move, and clipping.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// Learning rate over the steps.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// Lives of the seeds of a `kasmina` MLP.
    #[serde(default, skip_serializing_if = "SeedsConfig::is_default")]
    pub seeds: SeedsConfig,
    /// Steps, batches, evaluation and checkpoints.
    #[serde(default)]
    pub train: TrainConfig,
    /// Text generated now and then during training.
    #[serde(default)]
    pub sample: SampleConfig,
}

/// Text, tokenizer and split.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Files, folders (walked for text files) or glob patterns.
    pub sources: Vec<String>,
    /// How text becomes tokens.
    #[serde(default)]
    pub tokenizer: TokenizerConfig,
    /// Share of the text that is kept for validation: above 0, below 1.
    #[serde(default = "default_validation")]
    pub validation: f64,
    /// Folder of the prepared token shards.
    #[serde(default = "default_cache")]
    pub cache: PathBuf,
}

fn default_validation() -> f64 {
    0.1
}

fn default_cache() -> PathBuf {
    PathBuf::from("data")
}

/// How text becomes tokens: `"byte"`, `"char"`, `{ bpe = 4096 }` or `{ file = "tokenizer.json" }`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenizerConfig {
    /// 256 tokens, one a byte.
    #[default]
    Byte,
    /// One token for each character that occurs in the text.
    Char,
    /// Byte-level BPE of this vocabulary size, trained on the text.
    Bpe(usize),
    /// A `tokenizer.json` of Hugging Face's `tokenizers`.
    File(PathBuf),
}

/// Shape of the network: a pre-norm decoder whose blocks are a mixer and an MLP between residuals.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// Number of blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Query heads; `width` is a multiple.
    pub heads: usize,
    /// Key and value heads; `heads` is a multiple. 0 stands for `heads`.
    pub kv_heads: usize,
    /// Width inside the MLP. 0 stands for 8/3 of `width`, rounded up to a multiple of 64.
    pub mlp_width: usize,
    /// Tokens the model sees at once.
    pub context: usize,
    /// Dropout on the embeddings and on what mixer and MLP return.
    pub dropout: f64,
    /// Use the embedding as the output projection.
    pub tied_embeddings: bool,
    /// RMSNorm on queries and keys, head by head.
    pub qk_norm: bool,
    /// Base of the rotary frequencies.
    pub rope_base: f64,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f64,
    /// What mixes positions, in all blocks or by turns.
    pub mixer: Mixers,
    /// Chains of a `bk` mixer; a quarter of `width` if not given, and at least one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bk_channels: Option<usize>,
    /// What works on each position.
    pub mlp: MlpKind,
    /// Seeds of a `kasmina` MLP; one for each 64 numbers of `width` if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seeds: Option<usize>,
    /// MLPs of each block that these seeds take; as many as seeds if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed_mlps: Option<usize>,
    /// How the two join the residual stream.
    pub residual: ResidualKind,
    /// Streams of the `mhc` residual; 4 if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streams: Option<usize>,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            layers: 4,
            width: 128,
            heads: 4,
            kv_heads: 0,
            mlp_width: 0,
            context: 128,
            dropout: 0.0,
            tied_embeddings: true,
            qk_norm: false,
            rope_base: 10_000.0,
            norm_eps: 1e-5,
            mixer: MixerKind::Attention.into(),
            bk_channels: None,
            mlp: MlpKind::SwiGlu,
            seeds: None,
            seed_mlps: None,
            residual: ResidualKind::Plain,
            streams: None,
        }
    }
}

/// What mixes positions in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MixerKind {
    /// Causal self-attention with RoPE and grouped KV heads.
    Attention,
    /// The causal resolvent of chains.
    Bk,
}

/// What works on each position in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MlpKind {
    /// The gated MLP of today's language models.
    SwiGlu,
    /// The same with seeds in its output, which germinate, learn and are grafted in while the model trains.
    Kasmina,
}

/// How mixer and MLP join the residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ResidualKind {
    /// What they return is added.
    Plain,
    /// Manifold-constrained hyper-connections: several streams, which each token mixes by weights of its own.
    Mhc,
}

/// How parameters move, and clipping. Matrices decay; norms, biases and embeddings do not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// The rule.
    pub kind: OptimizerKind,
    /// Highest learning rate.
    pub learning_rate: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay rate of Muon's momentum.
    pub momentum: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 turns clipping off.
    pub clip_norm: f64,
    /// Parameters that differ; of several groups that hold a parameter the last counts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupConfig>,
}

/// The rule by which parameters move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Muon for the matrices of the blocks, AdamW for the rest.
    Muon,
}

/// Parameters that do not move as the others do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupConfig {
    /// Their names, `*` standing for any characters: `embedding.*`, `blocks.*.mlp.*`.
    pub parameters: String,
    /// The rule; what it is without the group if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<OptimizerKind>,
    /// Their learning rate as a multiple of that of the others.
    #[serde(default = "default_scale")]
    pub learning_rate_scale: f64,
    /// Decoupled weight decay; what it is without the group if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

fn default_scale() -> f64 {
    1.0
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::AdamW,
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            momentum: 0.95,
            weight_decay: 0.1,
            clip_norm: 1.0,
            groups: Vec::new(),
        }
    }
}

/// Learning rate over the steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleConfig {
    /// Shape after the warm-up.
    pub kind: ScheduleKind,
    /// Steps of linear warm-up.
    pub warmup: usize,
    /// Last learning rate as a share of the highest.
    pub final_ratio: f64,
    /// `wsd` only: the last share of the steps, over which the rate falls linearly.
    pub decay_share: f64,
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self { kind: ScheduleKind::Cosine, warmup: 20, final_ratio: 0.1, decay_share: 0.2 }
    }
}

/// Shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// Stays at the highest rate.
    Constant,
    /// Half a cosine wave down to `final_ratio`.
    Cosine,
    /// Warm-up, stable, decay: stays, then falls linearly over the last `decay_share` of the steps.
    Wsd,
}

/// Steps, batches, evaluation and checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Optimizer steps.
    pub steps: usize,
    /// Windows in one forward pass.
    pub batch_size: usize,
    /// Forward passes added up in one optimizer step.
    pub accumulation: usize,
    /// Seed of weights, data order, dropout and samples.
    pub seed: u64,
    /// Storage of activations and matmul inputs: parameters stay f32.
    pub precision: Precision,
    /// Steps between lines of metrics.
    pub log_every: usize,
    /// Steps between evaluations; 0 evaluates only at the end.
    pub eval_every: usize,
    /// Batches of one evaluation; 0 takes the whole validation split.
    pub eval_batches: usize,
    /// Steps between samples of text; 0 prints one only at the end.
    pub sample_every: usize,
    /// Steps between checkpoints; 0 saves only at the end.
    pub checkpoint_every: usize,
    /// Checkpoints kept beside the best one.
    pub keep: usize,
    /// Folder of the run.
    pub out: PathBuf,
}

impl Config {
    /// Tokens of one optimizer step.
    pub fn tokens_per_step(&self) -> usize {
        let micro_batch = self.train.batch_size.saturating_mul(self.model.context);
        micro_batch.saturating_mul(self.train.accumulation)
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 500,
            batch_size: 16,
            accumulation: 1,
            seed: 1,
            precision: Precision::Auto,
            log_every: 10,
            eval_every: 100,
            eval_batches: 20,
            sample_every: 0,
            checkpoint_every: 250,
            keep: 2,
            out: PathBuf::from("runs/default"),
        }
    }
}

/// Storage of activations and matmul inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// bf16 on CUDA, f32 elsewhere.
    Auto,
    /// f32.
    F32,
    /// bf16.
    Bf16,
}

/// How text is sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SampleConfig {
    /// Text to continue.
    pub prompt: String,
    /// Tokens to generate.
    pub tokens: usize,
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f64,
    /// Keep only this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of tokens whose probability reaches this share.
    pub top_p: f64,
}

impl Default for SampleConfig {
    fn default() -> Self {
        Self { prompt: "\n".into(), tokens: 200, temperature: 0.8, top_k: 0, top_p: 0.95 }
    }
}
