//! What can go wrong between a text file and a batch of tokens.

use std::io;
use std::path::{Path, PathBuf};

/// Why text could not be found, read, tokenized, cached or cut into windows.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// An entry of `sources` is neither a file, nor a folder, nor a glob pattern.
    #[error("source `{pattern}` not found: there is no {}", path.display())]
    SourceNotFound {
        /// The entry as configured.
        pattern: String,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// An entry of `sources` is a device, a pipe or the like.
    #[error(
        "source `{pattern}` is no regular file, expected a text file, a folder or a glob pattern"
    )]
    NotRegular {
        /// The entry as configured.
        pattern: String,
    },
    /// A glob pattern matched no file, or a folder holds no text file.
    #[error("source `{pattern}` matches no text file")]
    NoFiles {
        /// The entry as configured.
        pattern: String,
    },
    /// A glob pattern is malformed.
    #[error("source `{pattern}` is not a valid glob pattern: {source}")]
    BadPattern {
        /// The entry as configured.
        pattern: String,
        /// What is wrong with it, and where.
        source: glob::PatternError,
    },
    /// A file named by `sources` is not UTF-8.
    #[error("{} is not UTF-8: invalid byte at offset {offset}", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Offset of the first invalid byte.
        offset: usize,
    },
    /// The sources hold no text at all.
    #[error("the corpus is empty: no text in `sources` (files: {files})")]
    EmptyCorpus {
        /// Files found.
        files: usize,
    },
    /// A split is shorter than one window.
    #[error("the {split} split has {tokens} tokens, but one window needs {needed}")]
    TooShort {
        /// `training` or `validation`.
        split: &'static str,
        /// Tokens found.
        tokens: usize,
        /// Tokens of a window: the context and the target of its last position.
        needed: usize,
    },
    /// A window without tokens was asked for.
    #[error("the context must be at least one token")]
    EmptyContext,
    /// The share of the validation split is not between 0 and 1.
    #[error("validation share {share} is outside (0, 1)")]
    BadValidation {
        /// The share as configured.
        share: f64,
    },
    /// The BPE vocabulary has no room for all bytes and special tokens.
    #[error(
        "a BPE vocabulary of {asked} is too small: 256 bytes and the special token need {least}"
    )]
    VocabularyTooSmall {
        /// Size as configured.
        asked: usize,
        /// Smallest size possible.
        least: usize,
    },
    /// Text to encode has a character that the training text did not.
    #[error("character {character:?} (U+{:04X}) is not in the vocabulary", *character as u32)]
    UnknownCharacter {
        /// The character.
        character: char,
    },
    /// A shard has a token that the tokenizer does not know.
    #[error(
        "{}: token {token} at position {position} is outside the vocabulary of {vocab_size}",
        path.display()
    )]
    TokenOutOfRange {
        /// The shard.
        path: PathBuf,
        /// The token.
        token: u32,
        /// Its index in the shard.
        position: usize,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// A tokenizer could not be read, trained or applied.
    #[error("tokenizer: {message}")]
    Tokenizer {
        /// What went wrong.
        message: String,
    },
    /// A file that was named as a tokenizer cannot be read or holds none.
    #[error(
        "tokenizer {}: {reason}; expected a tokenizer.json of Hugging Face's tokenizers or of Kiln",
        path.display()
    )]
    TokenizerFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of a prepared data set is damaged.
    #[error("{} is damaged: {reason}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// The folder of prepared data cannot be made, or not written to.
    #[error("data.cache: cannot write to {}: {source}", path.display())]
    Cache {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file system failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder concerned.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl DataError {
    /// For `map_err`: attaches the path to an I/O error.
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    /// The same for the folder of prepared data.
    pub(super) fn cache(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Cache { path: path.to_owned(), source }
    }

    pub(super) fn corrupt(path: &Path, reason: impl Into<String>) -> Self {
        Self::Corrupt { path: path.to_owned(), reason: reason.into() }
    }

    pub(super) fn tokenizer(message: impl ToString) -> Self {
        Self::Tokenizer { message: message.to_string() }
    }
}
