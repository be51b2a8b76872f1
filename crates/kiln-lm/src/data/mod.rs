//! From text files to batches of tokens: sources, tokenizers, memory-mapped shards, sampling.
//!
//! [`prepare`] tokenizes once and caches; [`BatchSampler`] and [`ValidationBatches`] cut the shards
//! of the [`Dataset`] into windows.

mod batches;
mod dataset;
mod error;
mod hugging_face;
mod id;
mod prepare;
mod rank;
mod shard;
mod sources;
mod split;
mod stream;
mod tokenizer;

pub use batches::{Batch, BatchSampler, SamplerState, ValidationBatches};
pub use dataset::{Dataset, Meta, unigram_loss};
pub use error::DataError;
pub use id::DataId;
pub use prepare::{Progress, Stage, prepare};
pub use rank::Rank;
pub use shard::TokenShard;
pub use stream::StreamDecoder;
pub use tokenizer::Tokenizer;

/// A shard of these tokens, for tests.
#[cfg(test)]
pub(crate) fn shard_of(path: &std::path::Path, tokens: &[u32], vocab_size: usize) -> TokenShard {
    let mut writer = shard::ShardWriter::create(path, vocab_size).unwrap();
    writer.write(tokens).unwrap();
    writer.finish().unwrap();
    TokenShard::open(path, vocab_size).unwrap()
}
