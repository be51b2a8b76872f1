//! Text from a model, token by token: logits, temperature, top-k, top-p, a draw.

use crate::config::SampleConfig;
use crate::model::{MixerCache, Transformer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::ControlFlow;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f64,
    /// Keep only this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of tokens whose probability reaches this share.
    pub top_p: f64,
}

impl From<&SampleConfig> for Sampling {
    fn from(config: &SampleConfig) -> Self {
        let SampleConfig { temperature, top_k, top_p, .. } = *config;
        Self { temperature, top_k, top_p }
    }
}

impl Sampling {
    /// Checks that every number is in its range.
    ///
    /// # Errors
    ///
    /// [`GenerateError::Range`] naming the first that is not.
    pub fn check(&self) -> Result<(), GenerateError> {
        let Sampling { temperature, top_p, .. } = *self;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            let (name, expected) = ("temperature", "be 0 or more and finite");
            return Err(GenerateError::Range { name, value: temperature, expected });
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            let (name, expected) = ("top_p", "be above 0 and at most 1");
            return Err(GenerateError::Range { name, value: top_p, expected });
        }
        Ok(())
    }
}

/// Why no text can be generated.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// There is nothing to continue.
    #[error("the prompt is empty: expected at least one token to continue")]
    EmptyPrompt,
    /// A token of the prompt is unknown to the model.
    #[error("the prompt has token {token}, but the model knows only 0 to {last}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// The last one that it knows.
        last: usize,
    },
    /// A number of [`Sampling`] is out of range.
    #[error("{name} is {value}, must {expected}")]
    Range {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What is allowed.
        expected: &'static str,
    },
    /// The model gives NaN: it was not trained well, or its weights are damaged.
    #[error("the model gives a logit that is no number after {after} tokens")]
    NotANumber {
        /// Tokens generated before.
        after: usize,
    },
    /// The device failed.
    #[error("the device failed while generating: {0}")]
    Device(String),
}

/// Continues `prompt` by up to `tokens` tokens, hands each to `on_token` as it comes, and stops
/// early if that breaks off. The same seed gives the same text.
///
/// What blocks remember of the tokens they have seen is cached. When the model's context is full, the
/// last half of it is read again from position 0 and generation goes on from there; a prompt longer than the context counts by
/// its end.
///
/// # Errors
///
/// [`GenerateError`] if the prompt is empty or has a token that the model does not know, a number
/// of `sampling` is out of range, the model gives NaN, or the device fails.
pub fn generate(
    model: &Transformer,
    prompt: &[u32],
    tokens: usize,
    sampling: &Sampling,
    seed: u64,
    on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<(), GenerateError> {
    let vocab_size = model.vocab_size();
    sampling.check()?;
    check(prompt, vocab_size)?;
    let model = &model.for_inference();
    let device = model.embedding.weight.device();
    let context = model.context();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut cache = model.empty_cache();
    let mut text = prompt[prompt.len().saturating_sub(context)..].to_vec();
    let mut new = text.clone();
    for after in 0..tokens {
        if cache[0].len() + new.len() > context {
            cache.iter_mut().for_each(MixerCache::clear);
            new = text[text.len() - context.div_ceil(2)..].to_vec();
            text = new.clone();
        }
        let logits = model.forward_cached(tensor(&new, &device), &mut cache);
        let logits = logits.try_into_data();
        let logits = logits.map_err(|error| GenerateError::Device(error.to_string()))?;
        let logits: Vec<f32> = logits.iter::<f32>().collect();
        let token = choose(&logits, sampling, &mut rng);
        let token = token.ok_or(GenerateError::NotANumber { after })?;
        text.push(token);
        new = vec![token];
        if on_token(token).is_break() {
            break;
        }
    }
    Ok(())
}

fn check(prompt: &[u32], vocab_size: usize) -> Result<(), GenerateError> {
    if prompt.is_empty() {
        return Err(GenerateError::EmptyPrompt);
    }
    if let Some(&token) = prompt.iter().find(|token| **token as usize >= vocab_size) {
        return Err(GenerateError::UnknownToken { token, last: vocab_size - 1 });
    }
    Ok(())
}

fn tensor(tokens: &[u32], device: &Device) -> Tensor<2, Int> {
    let tokens: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
    let shape = [1, tokens.len()];
    Tensor::from_data(TensorData::new(tokens, shape), device)
}

/// The next token; `None` if a logit is NaN. Of equal logits the lower token comes first.
fn choose(logits: &[f32], sampling: &Sampling, rng: &mut ChaCha8Rng) -> Option<u32> {
    if logits.iter().any(|logit| logit.is_nan()) {
        return None;
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    if sampling.temperature == 0.0 {
        return order.first().map(|token| *token as u32);
    }
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let highest = *logits.get(*order.first()?)? as f64;
    let weight = |token: &usize| ((logits[*token] as f64 - highest) / sampling.temperature).exp();
    let weights: Vec<f64> = order.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    let mut reached = 0.0;
    let kept = weights.iter().take_while(|weight| {
        let first_or_short = reached < sampling.top_p * total;
        reached += **weight;
        first_or_short
    });
    let kept = kept.count().max(1);
    let mut draw = uniform(rng) * weights[..kept].iter().sum::<f64>();
    for (token, weight) in order.iter().zip(&weights[..kept]) {
        draw -= weight;
        if draw < 0.0 {
            return Some(*token as u32);
        }
    }
    // Rounding left a rest.
    Some(order[kept - 1] as u32)
}

/// In [0, 1). Not `rand`'s own sampling, which may change with its version.
fn uniform(rng: &mut ChaCha8Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::config::{MixerKind, Mixers, ModelConfig};

    const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 };

    fn model() -> Transformer {
        mixing(vec![MixerKind::Attention])
    }

    fn mixing(by_turns: Vec<MixerKind>) -> Transformer {
        let mixer = Mixers::new(by_turns);
        let config =
            ModelConfig { layers: 2, width: 16, heads: 2, context: 8, mixer, ..Default::default() };
        config.init(20, 5, &Device::flex())
    }

    fn text(
        model: &Transformer,
        prompt: &[u32],
        tokens: usize,
        sampling: &Sampling,
        seed: u64,
    ) -> Vec<u32> {
        let mut text = Vec::new();
        let mut take = |token| {
            text.push(token);
            ControlFlow::Continue(())
        };
        generate(model, prompt, tokens, sampling, seed, &mut take).unwrap();
        text
    }

    #[test]
    fn cached_generation_is_what_the_whole_forward_pass_says() {
        let (attention, bk) = (MixerKind::Attention, MixerKind::Bk);
        for by_turns in [vec![attention], vec![bk], vec![bk, attention]] {
            let model = mixing(by_turns);
            let mut tokens = vec![3, 1, 4];
            let generated = text(&model, &tokens, 5, &GREEDY, 0);
            for token in generated {
                let logits = model.forward(tensor(&tokens, &Device::flex())).into_data();
                let logits: Vec<f32> = logits.iter::<f32>().collect();
                let last = &logits[(tokens.len() - 1) * 20..];
                let best = (0..20).rev().max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap();
                assert_eq!(token, best as u32);
                tokens.push(token);
            }
        }
    }

    #[test]
    fn a_full_context_slides_to_its_last_half() {
        for model in [model(), mixing(vec![MixerKind::Bk])] {
            let sampling = Sampling { temperature: 1.0, ..GREEDY };
            let long = text(&model, &[3, 1, 4], 30, &sampling, 1);
            assert_eq!(long.len(), 30);
            // The cache holds the prompt of 3 and 5 new tokens; the sixth was drawn from them, and the
            // seventh from the last 4.
            let all = [&[3, 1, 4], &long[..]].concat();
            let slid = text(&model, &all[5..9], 4, &GREEDY, 1);
            let greedy_long = text(&model, &all[1..9], 5, &GREEDY, 1);
            let after = text(&model, &[&all[6..9], &greedy_long[..1]].concat(), 4, &GREEDY, 1);
            assert_eq!(greedy_long[1..], after[..]);
            assert_eq!(slid.len(), 4);
            // Of a long prompt only the end counts.
            assert_eq!(
                text(&model, &[&[7; 9], &all[..8]].concat(), 3, &GREEDY, 1),
                text(&model, &all[..8], 3, &GREEDY, 1)
            );
        }
    }

    #[test]
    fn the_seed_decides_and_the_callback_stops() {
        let model = model();
        let sampling = Sampling { temperature: 1.0, ..GREEDY };
        let first = text(&model, &[1], 20, &sampling, 1);
        assert_eq!(first, text(&model, &[1], 20, &sampling, 1));
        assert_ne!(first, text(&model, &[1], 20, &sampling, 2));
        let mut count = 0;
        let mut stop = |_| {
            count += 1;
            if count == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        generate(&model, &[1], 20, &sampling, 1, &mut stop).unwrap();
        assert_eq!(count, 3);
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits = [0.125f32, 0.5, 0.125, 0.25].map(f32::ln);
        let drawn = |sampling: &Sampling| {
            let mut rng = ChaCha8Rng::seed_from_u64(1);
            let mut counts = [0; 4];
            for _ in 0..8000 {
                counts[choose(&logits, sampling, &mut rng).unwrap() as usize] += 1;
            }
            counts.map(|count| count as f64 / 8000.0)
        };
        let check = |sampling: Sampling, expected: [f64; 4]| {
            let drawn = drawn(&sampling);
            let close = drawn.iter().zip(expected).all(|(drawn, p)| (drawn - p).abs() < 0.02);
            // What is cut is never drawn.
            let cut = drawn.iter().zip(expected).all(|(drawn, p)| (*drawn == 0.0) == (p == 0.0));
            assert!(close && cut, "{sampling:?}: {drawn:?}");
        };
        let all = Sampling { temperature: 1.0, ..GREEDY };
        check(all, [0.125, 0.5, 0.125, 0.25]);
        check(Sampling { top_k: 2, ..all }, [0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        check(Sampling { top_p: 0.5, ..all }, [0.0, 1.0, 0.0, 0.0]);
        check(Sampling { top_p: 0.51, ..all }, [0.0, 2.0 / 3.0, 0.0, 1.0 / 3.0]);
        check(GREEDY, [0.0, 1.0, 0.0, 0.0]);
        // Squared and normalised again: 16, 4, 1 and 1 of 22.
        check(Sampling { temperature: 0.5, ..all }, [1.0, 16.0, 1.0, 4.0].map(|n| n / 22.0));
    }

    #[test]
    fn what_cannot_be_continued_is_said() {
        let model = model();
        let mut take = |_| ControlFlow::Continue(());
        let mut error = |prompt: &[u32], sampling| {
            generate(&model, prompt, 1, &sampling, 0, &mut take).unwrap_err().to_string()
        };
        assert!(error(&[], GREEDY).contains("empty"));
        assert_eq!(
            error(&[20], GREEDY),
            "the prompt has token 20, but the model knows only 0 to 19"
        );
        let hot = Sampling { temperature: f64::NAN, ..GREEDY };
        assert_eq!(error(&[1], hot), "temperature is NaN, must be 0 or more and finite");
        let none = Sampling { top_p: 0.0, ..GREEDY };
        assert_eq!(error(&[1], none), "top_p is 0, must be above 0 and at most 1");
        assert_eq!(choose(&[0.0, f32::NAN], &GREEDY, &mut ChaCha8Rng::seed_from_u64(0)), None);
    }
}
