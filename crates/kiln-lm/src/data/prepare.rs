//! Preparing a data set on first use: read, split, tokenize, write; reuse while nothing changes.

use super::dataset::{Dataset, META, Meta, TOKENIZER, TRAIN, VALIDATION, VERSION};
use super::error::DataError;
use super::hugging_face::check_vocab_size;
use super::shard::ShardWriter;
use super::sources::{Corpus, expand};
use super::split::Split;
use super::tokenizer::Tokenizer;
use crate::config::{DataConfig, TokenizerConfig};
use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::Path;

/// Text that is encoded and written at a time.
const PIECE: usize = 4 << 20;

/// How far [`prepare`] has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub stage: Stage,
    /// How much of it is done: files when reading, else bytes of text.
    pub done: usize,
    /// How much there is to do.
    pub total: usize,
}

/// A part of [`prepare`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Reading the sources.
    Read,
    /// Training the tokenizer.
    Train,
    /// Encoding and writing the tokens.
    Encode,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "reading",
            Self::Train => "training the tokenizer",
            Self::Encode => "encoding",
        })
    }
}

/// Tokenizes the sources of `config`, or opens what an earlier call made of the same text.
///
/// Relative paths (sources, tokenizer file, cache) start at `base`. The files are sorted by path
/// and put one after the other: with the end-of-document token after each if the tokenizer has one,
/// else with a newline between two. Of many files whole ones of each kind are kept for validation, of
/// few the end of the text. A damaged cache is reported as a warning and made anew.
///
/// # Errors
///
/// Every [`DataError`] but those about windows and damage.
pub fn prepare(
    config: &DataConfig,
    base: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<Dataset, DataError> {
    let share = config.validation;
    if !(share > 0.0 && share < 1.0) {
        return Err(DataError::BadValidation { share });
    }
    let files = expand(&config.sources, base)?;
    let plan = Plan::of(&config.tokenizer, base)?;
    let total = files.len();
    let corpus = Corpus::read(&files, plan.separator(), |done| {
        let stage = Stage::Read;
        progress(Progress { stage, done, total });
    })?;

    let cache = base.join(&config.cache);
    let split = Split::of(&corpus, share);
    let dir = cache.join(key(&plan, &split, &corpus));
    if dir.exists() {
        match Dataset::open(&dir) {
            Ok(dataset) => return Ok(dataset),
            Err(error) => tracing::warn!("prepared data cannot be reused, made anew: {error}"),
        }
    }

    fs::create_dir_all(&cache).map_err(DataError::cache(&cache))?;
    let temporary = temporary_folder(".preparing-", &cache)?;
    let tokenizer = plan.tokenizer(&corpus, &split, progress)?;
    write(&corpus, &split, files.len(), &tokenizer, temporary.path(), progress)?;
    publish(temporary, &dir, &cache)?;
    let dataset = Dataset::open(&dir)?;
    Ok(Dataset { reused: false, ..dataset })
}

/// The tokenizer as far as it is known before the text is.
enum Plan {
    /// With the file that it is read from.
    Ready {
        tokenizer: Tokenizer,
        json: Vec<u8>,
    },
    Characters,
    Bpe(usize),
}

impl Plan {
    fn of(config: &TokenizerConfig, base: &Path) -> Result<Self, DataError> {
        match config {
            TokenizerConfig::Byte => {
                let tokenizer = Tokenizer::byte();
                let json = tokenizer.to_json()?.into();
                Ok(Self::Ready { tokenizer, json })
            }
            TokenizerConfig::Char => Ok(Self::Characters),
            TokenizerConfig::Bpe(vocab_size) => {
                check_vocab_size(*vocab_size)?;
                Ok(Self::Bpe(*vocab_size))
            }
            TokenizerConfig::File(path) => {
                let path = base.join(path);
                let tokenizer = Tokenizer::load(&path)?;
                let json = fs::read(&path).map_err(DataError::io(&path))?;
                Ok(Self::Ready { tokenizer, json })
            }
        }
    }

    /// What goes between two documents.
    fn separator(&self) -> &'static str {
        match self {
            Self::Ready { tokenizer, .. } if tokenizer.eos().is_some() => "",
            Self::Bpe(_) => "",
            _ => "\n",
        }
    }

    fn tokenizer(
        &self,
        corpus: &Corpus,
        split: &Split,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Tokenizer, DataError> {
        match self {
            Self::Ready { tokenizer, .. } => Ok(tokenizer.clone()),
            Self::Characters => Ok(Tokenizer::characters(&corpus.text)),
            Self::Bpe(vocab_size) => {
                let total = split.train.iter().map(|range| range.len()).sum();
                let mut report = |done| {
                    let stage = Stage::Train;
                    progress(Progress { stage, done, total });
                };
                report(0);
                let ranges = split.train.iter();
                let documents = ranges.flat_map(|range| corpus.documents(range.start, range.end));
                let documents = documents.map(|(document, _)| document);
                let tokenizer = Tokenizer::train_bpe(documents, *vocab_size);
                report(total);
                tokenizer
            }
        }
    }
}

/// Names the folder: a hash of all that decides what is in it.
fn key(plan: &Plan, split: &Split, corpus: &Corpus) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&VERSION.to_le_bytes());
    match plan {
        Plan::Ready { json, .. } => hasher.update(b"json").update(json),
        Plan::Characters => hasher.update(b"char"),
        Plan::Bpe(size) => hasher.update(b"bpe ").update(&(*size as u64).to_le_bytes()),
    };
    for ranges in [&split.train, &split.validation] {
        hasher.update(&(ranges.len() as u64).to_le_bytes());
        for place in ranges.iter().flat_map(|range| [range.start, range.end]) {
            hasher.update(&(place as u64).to_le_bytes());
        }
    }
    for end in &corpus.ends {
        hasher.update(&(*end as u64).to_le_bytes());
    }
    hasher.update(corpus.text.as_bytes());
    hasher.finalize().to_hex()[..32].to_owned()
}

fn write(
    corpus: &Corpus,
    split: &Split,
    files: usize,
    tokenizer: &Tokenizer,
    dir: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), DataError> {
    let total = corpus.text.len();
    let mut done = 0;
    let mut shard = |name: &str, ranges: &[Range<usize>]| {
        let mut writer = ShardWriter::create(&dir.join(name), tokenizer.vocab_size())?;
        let mut text = |text: &str, writer: &mut ShardWriter| {
            for piece in tokenizer.pieces(text, PIECE) {
                writer.write(&tokenizer.encode(piece)?)?;
                done += piece.len();
                let stage = Stage::Encode;
                progress(Progress { stage, done, total });
            }
            Ok(())
        };
        for range in ranges {
            let Some(eos) = tokenizer.eos() else {
                text(&corpus.text[range.clone()], &mut writer)?;
                continue;
            };
            for (document, ends) in corpus.documents(range.start, range.end) {
                text(document, &mut writer)?;
                if ends {
                    writer.write(&[eos])?;
                }
            }
        }
        writer.finish()
    };
    let train_tokens = shard(TRAIN, &split.train)?;
    let validation_tokens = shard(VALIDATION, &split.validation)?;

    let json = tokenizer.to_json()?;
    write_synced(&dir.join(TOKENIZER), json.as_bytes())?;
    let meta = Meta {
        version: VERSION,
        files,
        bytes: total,
        vocab_size: tokenizer.vocab_size(),
        train_tokens,
        validation_tokens,
        tokenizer_hash: blake3::hash(json.as_bytes()).to_hex().to_string(),
    };
    let path = dir.join(META);
    let json =
        serde_json::to_vec_pretty(&meta).map_err(|error| DataError::io(&path)(error.into()))?;
    write_synced(&path, &json)
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    let mut file = File::create(path).map_err(DataError::io(path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(DataError::io(path))
}

fn temporary_folder(prefix: &str, cache: &Path) -> Result<tempfile::TempDir, DataError> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(prefix);
    // By default only the owner may read it, also after it has been renamed.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    builder.tempdir_in(cache).map_err(DataError::cache(cache))
}

/// Renames a complete folder to its place.
fn publish(temporary: tempfile::TempDir, dir: &Path, cache: &Path) -> Result<(), DataError> {
    sync_dir(temporary.path())?;
    if dir.exists() {
        if Dataset::open(dir).is_ok() {
            return Ok(()); // Another process was faster.
        }
        let discarded = temporary_folder(".discarded-", cache)?;
        fs::rename(dir, discarded.path().join("data")).map_err(DataError::io(dir))?;
    }
    match fs::rename(temporary.path(), dir) {
        Ok(()) => {
            let _ = temporary.keep(); // It has moved: nothing is left to remove.
            sync_dir(cache)
        }
        Err(_) if Dataset::open(dir).is_ok() => Ok(()),
        Err(error) => Err(DataError::io(dir)(error)),
    }
}

/// Makes the names in a folder durable, where the system has a way to.
fn sync_dir(dir: &Path) -> Result<(), DataError> {
    if cfg!(unix) {
        let folder = File::open(dir).and_then(|folder| folder.sync_all());
        folder.map_err(DataError::io(dir))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
