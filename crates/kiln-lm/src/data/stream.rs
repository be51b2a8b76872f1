//! Decoding tokens as they are generated: text comes out only in whole characters.

use super::tokenizer::{Kind, Tokenizer};

/// Decodes one token at a time. What [`StreamDecoder::push`] and [`StreamDecoder::finish`] return,
/// one after the other, is what [`Tokenizer::decode`] makes of all tokens.
#[derive(Debug)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// Start of a character whose other bytes have not come yet.
    bytes: Vec<u8>,
    /// For decoders that look at neighbours: the tokens returned last, then those not yet returned.
    tokens: Vec<u32>,
    returned: usize,
}

impl Tokenizer {
    /// Decodes tokens one at a time, as they are generated.
    pub fn stream_decoder(&self) -> StreamDecoder<'_> {
        StreamDecoder { tokenizer: self, bytes: Vec::new(), tokens: Vec::new(), returned: 0 }
    }
}

impl StreamDecoder<'_> {
    /// Takes the next token; returns the text that it completes, if any.
    pub fn push(&mut self, token: u32) -> Option<String> {
        let text = if self.tokenizer.is_concatenative() {
            self.tokenizer.push_bytes(token, &mut self.bytes);
            self.take_whole_characters()
        } else {
            self.tokens.push(token);
            self.take_new_text(false)
        };
        (!text.is_empty()).then_some(text)
    }

    /// Returns what is left: U+FFFD for a character that never got complete.
    pub fn finish(mut self) -> Option<String> {
        let text = if self.tokenizer.is_concatenative() {
            String::from_utf8_lossy(&self.bytes).into_owned()
        } else {
            self.take_new_text(true)
        };
        (!text.is_empty()).then_some(text)
    }

    fn take_whole_characters(&mut self) -> String {
        let mut text = String::new();
        let mut used = 0;
        for chunk in self.bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            used += chunk.valid().len();
            let invalid = chunk.invalid();
            // No `error_len`: these bytes start a character that the next ones may complete. Only
            // the last chunk can be such a one.
            let wrong = |error: std::str::Utf8Error| error.error_len().is_some();
            let at_end = used + invalid.len() == self.bytes.len();
            if !at_end || str::from_utf8(invalid).is_err_and(wrong) {
                text.push(char::REPLACEMENT_CHARACTER);
                used += invalid.len();
            }
        }
        self.bytes.drain(..used);
        text
    }

    /// Decodes with and without the new tokens, since the first token of a text may be decoded
    /// differently (without its leading space, say).
    fn take_new_text(&mut self, last: bool) -> String {
        let Kind::HuggingFace(inner) = &self.tokenizer.0 else {
            return String::new();
        };
        let before = inner.decode(&self.tokens[..self.returned]);
        let text = inner.decode(&self.tokens);
        let new = match text.strip_prefix(&before) {
            Some(new) => new.to_owned(),
            None => inner.decode(&self.tokens[self.returned..]),
        };
        if !last && new.ends_with(char::REPLACEMENT_CHARACTER) {
            return String::new();
        }
        if !new.is_empty() {
            self.tokens.drain(..self.returned);
            self.returned = self.tokens.len();
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<String> {
        let mut decoder = tokenizer.stream_decoder();
        let mut parts: Vec<_> = tokens.iter().filter_map(|&t| decoder.push(t)).collect();
        parts.extend(decoder.finish());
        parts
    }

    #[test]
    fn only_whole_characters_come_out() {
        for (bytes, expected) in [
            (&b"a\xc3\xa9"[..], &["a", "é"][..]),
            (b"\xf0\x9f\x98\x80!", &["😀", "!"]),
            (b"\xf0\x9fx", &["\u{fffd}x"]),
            (b"\xff\xffy", &["\u{fffd}", "\u{fffd}", "y"]),
            (b"z\xe6\x97", &["z", "\u{fffd}"]),
            (b"\xe6\xe6\x97\xa5", &["\u{fffd}", "日"]),
        ] {
            let tokens: Vec<u32> = bytes.iter().map(|&b| b.into()).collect();
            let parts = stream(&Tokenizer::byte(), &tokens);
            assert_eq!(parts, expected);
            assert_eq!(parts.concat(), Tokenizer::byte().decode(&tokens));
        }
    }

    #[test]
    fn equals_decoding_at_once() {
        let text = "naïve 😀👩‍👩‍👧 café 日本\r\n";
        let bpe = Tokenizer::train_bpe([text].into_iter(), 262).unwrap();
        for tokenizer in [&bpe, &Tokenizer::characters(text)] {
            let tokens = tokenizer.encode(text).unwrap();
            assert_eq!(stream(tokenizer, &tokens).concat(), text);
        }
        let noise: Vec<u32> = (0..600).map(|i| i * 7919 % 262).collect();
        assert_eq!(stream(&bpe, &noise).concat(), bpe.decode(&noise));
    }

    #[test]
    fn a_decoder_that_strips_the_first_space_is_followed() {
        let json = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],
            "normalizer":null,"post_processor":null,
            "pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always"},
            "decoder":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always"},
            "model":{"type":"WordLevel","vocab":{"▁a":0,"▁b":1,"?":2},"unk_token":"?"}}"#;
        let tokenizer = Tokenizer::from_json(json.as_bytes()).unwrap();
        let tokens = tokenizer.encode("a b a").unwrap();
        assert_eq!(tokens, [0, 1, 0]);
        assert_eq!(stream(&tokenizer, &tokens), ["a", " b", " a"]);
    }
}
