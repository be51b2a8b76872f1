//! Token shards: a header of 64 bytes, then the tokens as little-endian u16 or u32, memory-mapped.

use super::error::DataError;
use memmap2::Mmap;
use std::fs::File;
use std::io::{BufWriter, Seek, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"KILNTOKS";
const VERSION: u32 = 1;
/// Magic, version (u32), bytes of a token (u32), count (u64), BLAKE3 of the tokens, zeros.
const HEADER: usize = 64;
/// Where a header has the hash of the tokens.
const HASH: Range<usize> = 24..56;

/// A memory-mapped sequence of tokens. Cheap to clone.
#[derive(Debug, Clone)]
pub struct TokenShard {
    map: Arc<Mmap>,
    width: Width,
    len: usize,
}

/// How a token is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Width {
    U16 = 2,
    U32 = 4,
}

impl Width {
    fn of(vocab_size: usize) -> Self {
        if vocab_size <= 1 << 16 { Self::U16 } else { Self::U32 }
    }
}

impl TokenShard {
    /// Maps a shard and checks its length, its checksum and that every token is below `vocab_size`.
    ///
    /// # Errors
    ///
    /// [`DataError::Corrupt`], [`DataError::TokenOutOfRange`] or [`DataError::Io`].
    pub fn open(path: &Path, vocab_size: usize) -> Result<Self, DataError> {
        let corrupt = |reason: &str| DataError::corrupt(path, reason);
        let file = File::open(path).map_err(DataError::io(path))?;
        // SAFETY: shards are never written in place: a new one is renamed over the old, whose
        // mapping stays as it was. A foreign program that truncates the file is not guarded
        // against, as with any mapped file.
        let map = unsafe { Mmap::map(&file) }.map_err(DataError::io(path))?;
        let header = map.get(..HEADER).ok_or_else(|| corrupt("the header is cut off"))?;
        if &header[..8] != MAGIC {
            return Err(corrupt("it is no token shard"));
        }
        let number = |at: usize| {
            let bytes = [header[at], header[at + 1], header[at + 2], header[at + 3]];
            u32::from_le_bytes(bytes)
        };
        if number(8) != VERSION {
            return Err(corrupt("its version is unknown"));
        }
        let width = match number(12) {
            2 => Width::U16,
            4 => Width::U32,
            _ => return Err(corrupt("its token width is unknown")),
        };
        let count = u64::from(number(16)) | u64::from(number(20)) << 32;
        let tokens = &map[HEADER..];
        if count.checked_mul(width as u64) != Some(tokens.len() as u64) {
            let reason = format!("{} bytes do not hold {count} tokens", tokens.len());
            return Err(DataError::corrupt(path, reason));
        }
        if blake3::hash(tokens).as_bytes()[..] != header[HASH] {
            return Err(corrupt("its checksum does not match"));
        }
        let len = tokens.len() / width as usize;
        let map = Arc::new(map);
        let shard = Self { map, width, len };
        let outside = (0..).zip(shard.iter()).find(|&(_, t)| t as usize >= vocab_size);
        match outside {
            None => Ok(shard),
            Some((position, token)) => Err(DataError::TokenOutOfRange {
                path: path.to_owned(),
                token,
                position,
                vocab_size,
            }),
        }
    }

    /// BLAKE3 of the tokens, as the file has them.
    pub fn hash(&self) -> &[u8] {
        &self.map[HASH]
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `len` tokens from `start` on.
    ///
    /// # Panics
    ///
    /// If the window reaches past the end, as indexing a slice does.
    pub fn window(&self, start: usize, len: usize) -> Vec<u32> {
        self.tokens(start, len).collect()
    }

    /// All tokens in order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.tokens(0, self.len)
    }

    pub(super) fn tokens(&self, start: usize, len: usize) -> impl Iterator<Item = u32> + '_ {
        let width = self.width as usize;
        let bytes = &self.map[HEADER..][start * width..(start + len) * width];
        let little_endian =
            |token: &[u8]| token.iter().rev().fold(0, |t, &b| t << 8 | u32::from(b));
        bytes.chunks_exact(width).map(little_endian)
    }

    /// How often each of `vocab_size` tokens occurs.
    pub(super) fn counts(&self, vocab_size: usize) -> Vec<u64> {
        let mut counts = vec![0; vocab_size];
        for token in self.iter() {
            if let Some(count) = counts.get_mut(token as usize) {
                *count += 1;
            }
        }
        counts
    }
}

/// Writes a shard as its tokens come, then its header.
pub(super) struct ShardWriter {
    path: PathBuf,
    file: BufWriter<File>,
    width: Width,
    count: u64,
    hasher: blake3::Hasher,
}

impl ShardWriter {
    pub(super) fn create(path: &Path, vocab_size: usize) -> Result<Self, DataError> {
        let file = File::create(path).map_err(DataError::io(path))?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        file.write_all(&[0; HEADER]).map_err(DataError::io(path))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            width: Width::of(vocab_size),
            count: 0,
            hasher: blake3::Hasher::new(),
        })
    }

    /// Appends `tokens`, all of them below the vocabulary size.
    pub(super) fn write(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        let bytes: Vec<u8> = match self.width {
            Width::U16 => tokens.iter().flat_map(|&t| (t as u16).to_le_bytes()).collect(),
            Width::U32 => tokens.iter().flat_map(|&t| t.to_le_bytes()).collect(),
        };
        self.hasher.update(&bytes);
        self.count += tokens.len() as u64;
        self.file.write_all(&bytes).map_err(DataError::io(&self.path))
    }

    /// Writes the header and syncs; returns the number of tokens.
    pub(super) fn finish(mut self) -> Result<u64, DataError> {
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.extend_from_slice(&(self.width as u32).to_le_bytes());
        header.extend_from_slice(&self.count.to_le_bytes());
        header.extend_from_slice(self.hasher.finalize().as_bytes());
        header.resize(HEADER, 0);
        let mut write = || {
            self.file.rewind()?;
            self.file.write_all(&header)?;
            self.file.flush()?;
            self.file.get_ref().sync_all()
        };
        write().map_err(DataError::io(&self.path))?;
        Ok(self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn write(path: &Path, tokens: &[u32], vocab_size: usize) {
        let mut writer = ShardWriter::create(path, vocab_size).unwrap();
        for part in tokens.chunks(2) {
            writer.write(part).unwrap();
        }
        assert_eq!(writer.finish().unwrap(), tokens.len() as u64);
    }

    #[test]
    fn both_widths_round_trip() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.bin");
        for (vocab_size, tokens, bytes) in [
            (1 << 16, &[0, 1, 65_535, 7, 258][..], 74),
            ((1 << 16) + 1, &[0, 65_536, 3], 76),
            (10, &[], 64),
        ] {
            write(&path, tokens, vocab_size);
            assert_eq!(fs::metadata(&path).unwrap().len(), bytes);
            let shard = TokenShard::open(&path, vocab_size).unwrap();
            assert_eq!((shard.len(), shard.is_empty()), (tokens.len(), tokens.is_empty()));
            assert_eq!(shard.window(0, tokens.len()), tokens);
            assert_eq!(shard.iter().collect::<Vec<_>>(), tokens);
        }
        write(&path, &[4, 5, 6, 7], 10);
        assert_eq!(TokenShard::open(&path, 10).unwrap().clone().window(1, 2), [5, 6]);
    }

    #[test]
    fn damage_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.bin");
        write(&path, &[1, 2, 3], 10);
        let good = fs::read(&path).unwrap();
        let flipped = |at: usize| {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            bytes
        };
        for (bytes, expected) in [
            (Vec::new(), "the header is cut off"),
            (good[..40].to_vec(), "the header is cut off"),
            (flipped(0), "it is no token shard"),
            (flipped(8), "its version is unknown"),
            (flipped(12), "its token width is unknown"),
            (flipped(16), "6 bytes do not hold 2 tokens"),
            (flipped(30), "its checksum does not match"),
            (flipped(66), "its checksum does not match"),
            (good[..68].to_vec(), "4 bytes do not hold 3 tokens"),
        ] {
            fs::write(&path, bytes).unwrap();
            let error = TokenShard::open(&path, 10).unwrap_err().to_string();
            assert!(error.ends_with(expected) && error.contains("s.bin is damaged"), "{error}");
        }
    }

    #[test]
    fn tokens_outside_the_vocabulary_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.bin");
        write(&path, &[1, 9, 3], 10);
        let error = TokenShard::open(&path, 9).unwrap_err();
        assert!(
            error.to_string().ends_with("token 9 at position 1 is outside the vocabulary of 9")
        );
    }
}
