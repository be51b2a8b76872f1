//! A prepared data set: a folder with the tokenizer, two shards and what they were made from.

use super::error::DataError;
use super::shard::TokenShard;
use super::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

pub(super) const TRAIN: &str = "train.bin";
pub(super) const VALIDATION: &str = "validation.bin";
pub(super) const TOKENIZER: &str = "tokenizer.json";
pub(super) const META: &str = "meta.json";
/// Part of the cache key too: data prepared by another version is not looked at.
pub(super) const VERSION: u32 = 1;

/// What a data set was made from, as kept in `meta.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Version of the layout.
    pub version: u32,
    /// Files read.
    pub files: usize,
    /// Bytes of text.
    pub bytes: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Tokens of the training split.
    pub train_tokens: u64,
    /// Tokens of the validation split.
    pub validation_tokens: u64,
    /// BLAKE3 of `tokenizer.json`.
    pub tokenizer_hash: String,
}

/// Tokenized text, ready to train on.
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The tokenizer of both splits.
    pub tokenizer: Tokenizer,
    /// Tokens to train on.
    pub train: TokenShard,
    /// Tokens to evaluate on.
    pub validation: TokenShard,
    /// Folder of the files.
    pub dir: PathBuf,
    /// What it was made from.
    pub meta: Meta,
    /// Whether it was found in the cache.
    pub reused: bool,
}

impl Dataset {
    /// Opens a prepared folder and verifies every file in it.
    ///
    /// # Errors
    ///
    /// [`DataError::Io`] or [`DataError::Corrupt`], naming the file.
    pub fn open(dir: &Path) -> Result<Self, DataError> {
        let path = dir.join(META);
        let json = fs::read(&path).map_err(DataError::io(&path))?;
        let meta: Meta = serde_json::from_slice(&json)
            .map_err(|error| DataError::corrupt(&path, error.to_string()))?;
        if meta.version != VERSION {
            return Err(DataError::corrupt(&path, "its version is unknown"));
        }

        let path = dir.join(TOKENIZER);
        let json = fs::read(&path).map_err(DataError::io(&path))?;
        if blake3::hash(&json).to_hex().as_str() != meta.tokenizer_hash {
            return Err(DataError::corrupt(&path, "its checksum does not match"));
        }
        let tokenizer = Tokenizer::from_json(&json)
            .map_err(|error| DataError::corrupt(&path, error.to_string()))?;
        if tokenizer.vocab_size() != meta.vocab_size {
            return Err(DataError::corrupt(&path, "its vocabulary has another size"));
        }

        let shard = |name: &str, tokens: u64| {
            let path = dir.join(name);
            let shard = TokenShard::open(&path, meta.vocab_size)?;
            if shard.len() as u64 != tokens {
                return Err(DataError::corrupt(&path, "it has another number of tokens"));
            }
            Ok(shard)
        };
        Ok(Self {
            train: shard(TRAIN, meta.train_tokens)?,
            validation: shard(VALIDATION, meta.validation_tokens)?,
            tokenizer,
            dir: dir.to_owned(),
            meta,
            reused: true,
        })
    }

    /// Checks that both splits have a window of `context` tokens and the target of the last one.
    ///
    /// # Errors
    ///
    /// [`DataError::TooShort`] naming the split, [`DataError::EmptyContext`] for 0.
    pub fn check_window(&self, context: usize) -> Result<(), DataError> {
        check_window(&self.train, "training", context)?;
        check_window(&self.validation, "validation", context)
    }

    /// [`unigram_loss`] of this data set: what a model that ignores its context can reach.
    pub fn unigram_loss(&self) -> f64 {
        unigram_loss(&self.train, &self.validation, self.meta.vocab_size)
    }
}

/// Whether a folder holds a prepared data set.
pub(super) fn is_prepared(dir: &Path) -> bool {
    [META, TOKENIZER, TRAIN].iter().all(|name| dir.join(name).is_file())
}

pub(super) fn check_window(
    shard: &TokenShard,
    split: &'static str,
    context: usize,
) -> Result<(), DataError> {
    if context == 0 {
        return Err(DataError::EmptyContext);
    }
    let tokens = shard.len();
    if tokens <= context {
        let needed = context.saturating_add(1);
        return Err(DataError::TooShort { split, tokens, needed });
    }
    Ok(())
}

/// Cross-entropy in nats per token of `validation` under the frequencies of the tokens in `train`,
/// each count raised by one. NaN if `validation` is empty.
pub fn unigram_loss(train: &TokenShard, validation: &TokenShard, vocab_size: usize) -> f64 {
    let total = (train.len() + vocab_size) as f64;
    let counts = train.counts(vocab_size).into_iter().zip(validation.counts(vocab_size));
    let nats: f64 =
        counts.map(|(seen, times)| times as f64 * (total / (seen + 1) as f64).ln()).sum();
    nats / validation.len() as f64
}
