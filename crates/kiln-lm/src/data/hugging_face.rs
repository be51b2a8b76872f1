//! Byte-level BPE and other tokenizers of Hugging Face's `tokenizers`: training, loading, and
//! encoding long texts in pieces.

use super::error::DataError;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, NormalizerWrapper, TokenizerImpl};

/// Names of the token that ends a document, in the order in which they are looked for.
const EOS: [&str; 4] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"];
/// Bytes that one thread encodes at a time.
const PIECE: usize = 1 << 16;
/// Ids are stored in tables of this size at most; a larger one is taken for damage.
const MAX_VOCABULARY: usize = 1 << 24;

pub(super) struct HuggingFace {
    inner: tokenizers::Tokenizer,
    vocab_size: usize,
    eos: Option<u32>,
    byte_level: bool,
    separable: bool,
}

impl HuggingFace {
    pub(super) fn train<'a>(
        documents: impl Iterator<Item = &'a str> + Send,
        vocab_size: usize,
    ) -> Result<Self, DataError> {
        check_vocab_size(vocab_size)?;
        let mut trainer = BpeTrainer::builder()
            .vocab_size(vocab_size)
            .min_frequency(2)
            .show_progress(false)
            .special_tokens(vec![AddedToken::from(EOS[0], true)])
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        // `tokenizers::Tokenizer` holds any model, but the trainer wants its own type.
        let mut tokenizer: TokenizerImpl<BPE, NormalizerWrapper, ByteLevel, ByteLevel, ByteLevel> =
            TokenizerImpl::new(BPE::default());
        tokenizer
            .with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)))
            .with_decoder(Some(ByteLevel::default()));
        tokenizer
            .train(&mut trainer, documents.flat_map(|d| pieces(d, PIECE, cut_at_space)))
            .map_err(DataError::tokenizer)?;
        let json = tokenizer.to_string(false).map_err(DataError::tokenizer)?;
        Self::from_json(json.as_bytes())
    }

    pub(super) fn from_json(json: &[u8]) -> Result<Self, DataError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(DataError::tokenizer)?;
        // A file may come with these set for training in batches; here they would cut the text.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(DataError::tokenizer)?;
        let largest = inner.get_vocab(true).into_values().max();
        let vocab_size = largest.map_or(0, |id| id as usize + 1);
        if vocab_size == 0 {
            return Err(DataError::tokenizer("the vocabulary is empty"));
        }
        if vocab_size > MAX_VOCABULARY {
            return Err(too_large(vocab_size));
        }
        Ok(Self {
            vocab_size,
            eos: EOS.iter().find_map(|name| inner.token_to_id(name)),
            byte_level: matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))),
            separable: is_separable(&inner),
            inner,
        })
    }

    pub(super) fn to_json(&self) -> Result<String, DataError> {
        self.inner.to_string(true).map_err(DataError::tokenizer)
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub(super) fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether decoding concatenates the bytes of the tokens.
    pub(super) fn is_byte_level(&self) -> bool {
        self.byte_level
    }

    /// Whether text cut by [`cut_at_space`] encodes to the same tokens as the whole.
    pub(super) fn is_separable(&self) -> bool {
        self.separable
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        if !self.separable || text.len() <= PIECE {
            let encoding = self.inner.encode_fast(text, false);
            return Ok(encoding.map_err(DataError::tokenizer)?.get_ids().to_vec());
        }
        let parts: Vec<_> = pieces(text, PIECE, cut_at_space).collect();
        let encodings = self.inner.encode_batch_fast(parts, false);
        let encodings = encodings.map_err(DataError::tokenizer)?;
        Ok(encodings.iter().flat_map(|e| e.get_ids()).copied().collect())
    }

    pub(super) fn decode(&self, tokens: &[u32]) -> String {
        let text = self.inner.decode(tokens, false);
        text.unwrap_or_else(|_| char::REPLACEMENT_CHARACTER.into())
    }

    /// The bytes that a byte-level token stands for, `None` if there is no such token.
    pub(super) fn token_bytes(&self, token: u32) -> Option<Vec<u8>> {
        let name = self.inner.id_to_token(token)?;
        let bytes: Option<Vec<u8>> = name.chars().map(byte_of).collect();
        // Special tokens may have characters that stand for no byte.
        Some(bytes.unwrap_or_else(|| name.into_bytes()))
    }
}

/// Whether [`HuggingFace::train`] can give this many tokens.
pub(super) fn check_vocab_size(asked: usize) -> Result<(), DataError> {
    let least = 256 + 1; // all bytes and the end of a document
    if asked < least {
        return Err(DataError::VocabularyTooSmall { asked, least });
    }
    if asked > MAX_VOCABULARY {
        return Err(too_large(asked));
    }
    Ok(())
}

fn too_large(vocab_size: usize) -> DataError {
    DataError::tokenizer(format!(
        "a vocabulary of {vocab_size} is above the limit of {MAX_VOCABULARY}"
    ))
}

/// Holds for GPT-2's pre-tokenizer, whose expression never matches across the end of a word and
/// never looks behind, and for special tokens that take no white space with them.
fn is_separable(tokenizer: &tokenizers::Tokenizer) -> bool {
    let plain = |token: &AddedToken| {
        !(token.lstrip || token.rstrip || token.content.contains(char::is_whitespace))
    };
    tokenizer.get_normalizer().is_none()
        && matches!(
            tokenizer.get_pre_tokenizer(),
            Some(PreTokenizerWrapper::ByteLevel(level))
                if level.use_regex && !level.add_prefix_space
        )
        && matches!(tokenizer.get_model(), ModelWrapper::BPE(_))
        && tokenizer.get_added_tokens_decoder().values().all(plain)
}

/// The byte of a character of GPT-2's byte alphabet: printable bytes stand for themselves, the
/// others are numbered from U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(character).checked_sub(0x100) {
        None => u8::try_from(character).ok().filter(printable),
        Some(n) => (0..=255).filter(|b| !printable(b)).nth(n as usize),
    }
}

/// First index at or after `size` between the end of a word and white space.
pub(super) fn cut_at_space(text: &str, size: usize) -> usize {
    let start = text.ceil_char_boundary(size);
    let mut after_word = false;
    for (index, character) in text[start..].char_indices() {
        if after_word && character.is_whitespace() {
            return start + index;
        }
        after_word = !character.is_whitespace();
    }
    text.len()
}

/// `text` in consecutive pieces, each as long as `cut` says.
pub(super) fn pieces(
    text: &str,
    size: usize,
    cut: fn(&str, usize) -> usize,
) -> impl Iterator<Item = &str> + Send {
    let mut rest = text;
    std::iter::from_fn(move || {
        let at = if rest.len() <= size { rest.len() } else { cut(rest, size) };
        let (piece, after) = rest.split_at(at);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "the cat sat on the mat, the cat sat; that's that.\r\n";

    #[test]
    fn training_is_deterministic_and_keeps_to_its_size() {
        let train = || HuggingFace::train([TEXT, TEXT].into_iter(), 270).unwrap();
        let first = train();
        assert_eq!(first.vocab_size(), 270);
        assert_eq!(first.to_json().unwrap(), train().to_json().unwrap());
        assert!(first.encode(TEXT).unwrap().len() < TEXT.len());
        // Nothing is repeated, so nothing is merged.
        let short = HuggingFace::train(["abc"].into_iter(), 1000).unwrap();
        assert_eq!(short.vocab_size(), 257);
    }

    #[test]
    fn the_end_of_a_document_is_one_token() {
        let bpe = HuggingFace::train([TEXT].into_iter(), 257).unwrap();
        let eos = bpe.eos().unwrap();
        let a = bpe.encode("a").unwrap()[0];
        assert_eq!(bpe.encode("a<|endoftext|>a").unwrap(), [a, eos, a]);
        assert_eq!(bpe.token_bytes(eos).unwrap(), b"<|endoftext|>");
    }

    #[test]
    fn every_byte_has_its_token() {
        let bpe = HuggingFace::train([TEXT].into_iter(), 257).unwrap();
        let mut bytes: Vec<u8> = (1..257).flat_map(|t| bpe.token_bytes(t).unwrap()).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn vocabulary_sizes_are_checked() {
        for (size, expected) in [
            (256, "a BPE vocabulary of 256 is too small"),
            (1 << 30, "tokenizer: a vocabulary of 1073741824 is above"),
        ] {
            let error = HuggingFace::train([TEXT].into_iter(), size).err().unwrap();
            assert!(error.to_string().starts_with(expected), "{error}");
        }
    }

    #[test]
    fn truncation_of_a_file_is_not_applied() {
        let mut bpe = HuggingFace::train([TEXT].into_iter(), 260).unwrap().inner;
        bpe.with_truncation(Some(tokenizers::TruncationParams {
            max_length: 2,
            ..Default::default()
        }))
        .unwrap();
        let loaded = HuggingFace::from_json(bpe.to_string(false).unwrap().as_bytes()).unwrap();
        assert!(loaded.encode(TEXT).unwrap().len() > 2);
    }
}
