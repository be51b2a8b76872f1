//! What tells one text in tokens from another.

use super::Dataset;
use serde::{Deserialize, Serialize};

/// Tells one prepared data set from another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `tokenizer_hash` and others")]
pub struct DataId {
    pub(crate) tokenizer_hash: String,
    pub(crate) train_tokens: u64,
    pub(crate) validation_tokens: u64,
    pub(crate) vocab_size: usize,
    /// BLAKE3 of the hashes of both splits; checkpoints of Kiln before 2026-11-25 have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tokens_hash: Option<String>,
}

impl DataId {
    /// That of a data set.
    pub fn of(dataset: &Dataset) -> Self {
        let meta = &dataset.meta;
        let hashes = [dataset.train.hash(), dataset.validation.hash()].concat();
        Self {
            tokenizer_hash: meta.tokenizer_hash.clone(),
            train_tokens: meta.train_tokens,
            validation_tokens: meta.validation_tokens,
            vocab_size: meta.vocab_size,
            tokens_hash: Some(blake3::hash(&hashes).to_hex().to_string()),
        }
    }

    /// Eight hexadecimal digits to show: but for chance others where a token of a split, or the tokenizer, is another.
    pub fn short(&self) -> String {
        let Self { tokenizer_hash, train_tokens, validation_tokens, vocab_size, tokens_hash } =
            self;
        let tokens = tokens_hash.as_deref().unwrap_or_default();
        let all =
            format!("{tokenizer_hash} {train_tokens} {validation_tokens} {vocab_size} {tokens}");
        blake3::hash(all.as_bytes()).to_hex()[..8].to_string()
    }
}
