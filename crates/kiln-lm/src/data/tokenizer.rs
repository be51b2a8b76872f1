//! Text to tokens and back: bytes, characters, or what Hugging Face's `tokenizers` does.

use super::error::DataError;
use super::hugging_face::HuggingFace;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Turns text into token ids and back. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer(pub(super) Kind);

#[derive(Clone)]
pub(super) enum Kind {
    Byte,
    Char(Arc<Characters>),
    HuggingFace(Arc<HuggingFace>),
}

pub(super) struct Characters {
    sorted: Vec<char>,
    ids: HashMap<char, u32>,
}

/// The file format of the two tokenizers that have no `tokenizer.json` of Hugging Face.
#[derive(Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Saved {
    Byte,
    Char { characters: String },
}

impl Tokenizer {
    /// 256 tokens, one for each byte.
    pub fn byte() -> Self {
        Self(Kind::Byte)
    }

    /// One token for each character of `text`, in the order of their code points.
    pub fn characters(text: &str) -> Self {
        let sorted: Vec<char> = text.chars().collect::<BTreeSet<_>>().into_iter().collect();
        let ids = (0..).zip(&sorted).map(|(id, &c)| (c, id)).collect();
        Self(Kind::Char(Arc::new(Characters { sorted, ids })))
    }

    /// Byte-level BPE with GPT-2's pre-tokenizer and the special token `<|endoftext|>`, trained on
    /// `documents`. A text with few repeated pairs gives fewer than `vocab_size` tokens.
    ///
    /// # Errors
    ///
    /// [`DataError::VocabularyTooSmall`] below 257 tokens.
    pub fn train_bpe<'a>(
        documents: impl Iterator<Item = &'a str> + Send,
        vocab_size: usize,
    ) -> Result<Self, DataError> {
        HuggingFace::train(documents, vocab_size).map(Self::hugging_face)
    }

    fn hugging_face(inner: HuggingFace) -> Self {
        Self(Kind::HuggingFace(Arc::new(inner)))
    }

    /// Number of token ids, unused ones included: every id is below it.
    pub fn vocab_size(&self) -> usize {
        match &self.0 {
            Kind::Byte => 256,
            Kind::Char(characters) => characters.sorted.len(),
            Kind::HuggingFace(inner) => inner.vocab_size(),
        }
    }

    /// The token that ends a document, where there is one.
    pub fn eos(&self) -> Option<u32> {
        match &self.0 {
            Kind::HuggingFace(inner) => inner.eos(),
            _ => None,
        }
    }

    /// The tokens of `text`. Special tokens are recognised in it, but none are added.
    ///
    /// # Errors
    ///
    /// [`DataError::UnknownCharacter`] for a character outside a character vocabulary.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match &self.0 {
            Kind::Byte => Ok(text.bytes().map(u32::from).collect()),
            Kind::Char(characters) => text
                .chars()
                .map(|character| {
                    let id = characters.ids.get(&character).copied();
                    id.ok_or(DataError::UnknownCharacter { character })
                })
                .collect(),
            Kind::HuggingFace(inner) => inner.encode(text),
        }
    }

    /// The text of `tokens`; what is no UTF-8 or no token becomes U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match &self.0 {
            Kind::HuggingFace(inner) if !inner.is_byte_level() => inner.decode(tokens),
            _ => {
                let mut bytes = Vec::new();
                for &token in tokens {
                    self.push_bytes(token, &mut bytes);
                }
                String::from_utf8_lossy(&bytes).into_owned()
            }
        }
    }

    /// Whether the bytes of a text are those of its tokens, one after the other.
    pub(super) fn is_concatenative(&self) -> bool {
        match &self.0 {
            Kind::HuggingFace(inner) => inner.is_byte_level(),
            _ => true,
        }
    }

    /// Appends the bytes of `token`, for a tokenizer that is concatenative.
    pub(super) fn push_bytes(&self, token: u32, bytes: &mut Vec<u8>) {
        let replacement = char::REPLACEMENT_CHARACTER;
        let character = match &self.0 {
            Kind::Byte => match u8::try_from(token) {
                Ok(byte) => return bytes.push(byte),
                Err(_) => replacement,
            },
            Kind::Char(characters) => {
                let character = characters.sorted.get(token as usize).copied();
                character.unwrap_or(replacement)
            }
            Kind::HuggingFace(inner) => match inner.token_bytes(token) {
                Some(token) => return bytes.extend(token),
                None => replacement,
            },
        };
        bytes.extend(character.encode_utf8(&mut [0; 4]).bytes());
    }

    /// Cuts `text` into pieces of about `size` bytes that encode to the same tokens as the whole.
    pub(super) fn pieces<'a>(
        &self,
        text: &'a str,
        size: usize,
    ) -> impl Iterator<Item = &'a str> + Send + use<'a> {
        let cut: fn(&str, usize) -> usize = match &self.0 {
            Kind::HuggingFace(inner) if inner.is_separable() => super::hugging_face::cut_at_space,
            Kind::HuggingFace(_) => |text, _| text.len(),
            _ => |text, size| text.ceil_char_boundary(size),
        };
        super::hugging_face::pieces(text, size, cut)
    }

    /// One JSON document: `{"type":"byte"}`, `{"type":"char","characters":"…"}` or a
    /// `tokenizer.json` as Hugging Face's libraries read it.
    ///
    /// # Errors
    ///
    /// [`DataError::Tokenizer`] if `tokenizers` fails to write it.
    pub fn to_json(&self) -> Result<String, DataError> {
        let file = match &self.0 {
            Kind::Byte => Saved::Byte,
            Kind::Char(characters) => {
                Saved::Char { characters: characters.sorted.iter().collect() }
            }
            Kind::HuggingFace(inner) => return inner.to_json(),
        };
        serde_json::to_string(&file).map_err(DataError::tokenizer)
    }

    /// Reads what [`Tokenizer::to_json`] writes, or any `tokenizer.json` of Hugging Face.
    ///
    /// # Errors
    ///
    /// [`DataError::Tokenizer`] if it is neither.
    pub fn from_json(json: &[u8]) -> Result<Self, DataError> {
        #[derive(Deserialize)]
        struct Probe {
            r#type: Option<String>,
        }
        let probe: Probe = serde_json::from_slice(json).map_err(DataError::tokenizer)?;
        if probe.r#type.is_none() {
            return HuggingFace::from_json(json).map(Self::hugging_face);
        }
        match serde_json::from_slice(json).map_err(DataError::tokenizer)? {
            Saved::Byte => Ok(Self::byte()),
            Saved::Char { characters } => {
                let ascending = characters.chars().is_sorted_by(|a, b| a < b);
                if characters.is_empty() || !ascending {
                    let message = "the character vocabulary is empty or not in ascending order";
                    return Err(DataError::tokenizer(message));
                }
                Ok(Self::characters(&characters))
            }
        }
    }

    /// Writes [`Tokenizer::to_json`] to a file.
    ///
    /// # Errors
    ///
    /// [`DataError::Io`] with the path.
    pub fn save(&self, path: &Path) -> Result<(), DataError> {
        std::fs::write(path, self.to_json()?).map_err(DataError::io(path))
    }

    /// Reads a file with [`Tokenizer::from_json`].
    ///
    /// # Errors
    ///
    /// [`DataError::TokenizerFile`].
    pub fn load(path: &Path) -> Result<Self, DataError> {
        let failed = |reason: String| DataError::TokenizerFile { path: path.to_owned(), reason };
        // What is no file may have no end, as /dev/zero.
        if path.exists() && !path.is_file() {
            return Err(failed("it is no regular file".into()));
        }
        let json = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
        Self::from_json(&json).map_err(|error| match error {
            DataError::Tokenizer { message } => failed(message),
            other => other,
        })
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.0 {
            Kind::Byte => "byte",
            Kind::Char(_) => "char",
            Kind::HuggingFace(_) => "hugging-face",
        };
        write!(f, "Tokenizer({kind}, {} tokens)", self.vocab_size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "Tabs\tand\r\nCRLF, naïve 😀👩‍👩‍👧 don't  stop\n\n <|endoftext|>日本";

    fn all() -> Vec<Tokenizer> {
        let bpe = Tokenizer::train_bpe([TEXT, TEXT, "the cat the hat"].into_iter(), 300).unwrap();
        vec![Tokenizer::byte(), Tokenizer::characters(TEXT), bpe]
    }

    #[test]
    fn round_trips_also_through_a_file() {
        let dir = tempfile::tempdir().unwrap();
        for tokenizer in all() {
            let tokens = tokenizer.encode(TEXT).unwrap();
            assert_eq!(tokenizer.decode(&tokens), TEXT, "{tokenizer:?}");
            assert!(tokens.iter().all(|&t| (t as usize) < tokenizer.vocab_size()));

            let path = dir.path().join("tokenizer.json");
            tokenizer.save(&path).unwrap();
            let loaded = Tokenizer::load(&path).unwrap();
            assert_eq!(loaded.encode(TEXT).unwrap(), tokens);
            assert_eq!(loaded.decode(&tokens), TEXT);
            assert_eq!(format!("{loaded:?}"), format!("{tokenizer:?}"));
            assert_eq!(loaded.to_json().unwrap(), tokenizer.to_json().unwrap());
        }
    }

    #[test]
    fn pieces_encode_as_the_whole() {
        let text = TEXT.repeat(7) + &" \n x".repeat(9);
        for tokenizer in all() {
            for size in [1, 5, 64] {
                let mut tokens = Vec::new();
                for piece in tokenizer.pieces(&text, size) {
                    tokens.extend(tokenizer.encode(piece).unwrap());
                }
                assert_eq!(tokens, tokenizer.encode(&text).unwrap(), "{tokenizer:?} {size}");
            }
        }
    }

    #[test]
    fn what_is_not_text_becomes_a_replacement_character() {
        for (tokens, expected) in [
            (&[0xff, 104, 105][..], "\u{fffd}hi"),
            (&[0xf0, 0x9f, 104], "\u{fffd}h"),
            (&[256, 104], "\u{fffd}h"),
        ] {
            assert_eq!(Tokenizer::byte().decode(tokens), expected);
        }
        assert_eq!(Tokenizer::characters("abc").decode(&[2, 3]), "c\u{fffd}");
        assert_eq!(all()[2].decode(&[9999]), "\u{fffd}");
    }

    #[test]
    fn unknown_characters_are_named() {
        let error = Tokenizer::characters("abc").encode("ab😀").unwrap_err();
        assert_eq!(error.to_string(), "character '😀' (U+1F600) is not in the vocabulary");
    }

    #[test]
    fn damaged_files_are_errors() {
        for json in [
            "",
            "{}",
            "[]",
            r#"{"type":"word"}"#,
            r#"{"type":"char","characters":""}"#,
            r#"{"type":"char","characters":"ba"}"#,
            r#"{"type":"char","characters":"aa"}"#,
            r#"{"version":"1.0","model":{"type":"BPE"}}"#,
        ] {
            let result = Tokenizer::from_json(json.as_bytes());
            assert!(matches!(result, Err(DataError::Tokenizer { .. })), "{json}");
        }
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_named_with_what_was_expected() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        for (path, reason) in [
            (dir.path().join("nowhere.json"), ""),
            (dir.path().to_owned(), "it is no regular file; "),
            (file("text.txt", "the kiln\n"), "expected "),
            (file("other.json", "{}"), ""),
            (file("empty.json", ""), "EOF"),
        ] {
            let error = Tokenizer::load(&path).unwrap_err().to_string();
            let start = format!("tokenizer {}: {reason}", path.display());
            assert!(error.starts_with(&start), "{error}");
            assert!(error.contains("; expected a tokenizer.json of Hugging Face's"), "{error}");
        }
    }
}
