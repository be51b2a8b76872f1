//! Which part of the text is trained on and which is kept for validation.

use super::sources::Corpus;
use std::collections::BTreeMap;
use std::ops::Range;

/// With fewer documents, whole ones are too coarse.
const MANY: usize = 10;

/// Byte ranges of the text, each split in order. No byte is in both.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Split {
    pub(super) train: Vec<Range<usize>>,
    pub(super) validation: Vec<Range<usize>>,
}

impl Split {
    /// Keeps `share` of the text for validation: whole documents of every kind if there are many,
    /// else the end of the text.
    pub(super) fn of(corpus: &Corpus, share: f64) -> Self {
        Self::documents(corpus, share).unwrap_or_else(|| Self::end(corpus, share))
    }

    /// The last `share` of the characters: as nanoGPT does, the training split has
    /// `floor(n * (1 - share))` of them.
    fn end(corpus: &Corpus, share: f64) -> Self {
        let text = &corpus.text;
        let train = train_characters(text.chars().count(), share);
        let cut = text.char_indices().nth(train).map_or(text.len(), |(offset, _)| offset);
        let mut split = Self::default();
        push(&mut split.train, 0..cut);
        push(&mut split.validation, cut..text.len());
        split
    }

    /// Whole documents, spread evenly over each kind; none if there are few, or if they are so uneven
    /// that the share would be off by more than a third.
    fn documents(corpus: &Corpus, share: f64) -> Option<Self> {
        let ends = &corpus.ends;
        if ends.len() < MANY {
            return None;
        }
        // What has gone by of each kind, and what was kept of it.
        let mut kinds: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
        let (mut split, mut kept_of_all) = (Self::default(), 0);
        let starts = std::iter::once(0).chain(ends.iter().copied());
        for ((start, &end), kind) in starts.zip(ends).zip(&corpus.kinds) {
            let [seen, kept] = kinds.entry(kind).or_default();
            let length = (end - start) as f64;
            *seen += length;
            // Kept if that brings this kind nearer to its share.
            let keep = *kept + length / 2.0 < share * *seen;
            if keep {
                *kept += length;
                kept_of_all += end - start;
            }
            push(if keep { &mut split.validation } else { &mut split.train }, start..end);
        }
        let found = kept_of_all as f64 / corpus.text.len() as f64;
        ((found - share).abs() <= share / 3.0 && found < 1.0).then_some(split)
    }
}

/// Adds a range behind the others, joined to the last if it goes on there.
fn push(ranges: &mut Vec<Range<usize>>, range: Range<usize>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// `floor(n * (1 - share))`, where a product within rounding of a whole number counts as that
/// number: `10 * (1 - 0.9)` is 1, although it is 0.9999999999999998 in f64.
fn train_characters(n: usize, share: f64) -> usize {
    let exact = n as f64 * (1.0 - share);
    let tolerance = n as f64 * 2.0 * f64::EPSILON;
    let whole = exact.round();
    let train = if (exact - whole).abs() <= tolerance { whole } else { exact.floor() };
    (train as usize).min(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Documents of these kinds and lengths.
    fn corpus(documents: &[(&str, usize)]) -> Corpus {
        let mut corpus = Corpus::default();
        for (kind, length) in documents {
            corpus.text.push_str(&"x".repeat(*length));
            corpus.ends.push(corpus.text.len());
            corpus.kinds.push(kind.to_string());
        }
        corpus
    }

    fn length(ranges: &[Range<usize>]) -> usize {
        ranges.iter().map(|range| range.len()).sum()
    }

    #[test]
    fn counts_follow_nanogpt() {
        for (n, share, expected) in [
            (1_115_394, 0.1, 1_003_854), // tiny Shakespeare
            (10, 0.1, 9),
            (10, 0.9, 1),
            (100, 0.99, 1),
            (1000, 0.999, 1),
            (19, 0.1, 17),
            (1, 0.1, 0),
            (1_000_000_007, 0.25, 750_000_005),
        ] {
            assert_eq!(train_characters(n, share), expected, "{n} * (1 - {share})");
        }
        let (text, ends, kinds) = ("ab😀défghij".into(), vec![14], vec!["txt".into()]);
        let split = Split::of(&Corpus { text, ends, kinds }, 0.7);
        assert_eq!((&split.train[0], &split.validation[0]), (&(0..6), &(6..14)));
    }

    #[test]
    fn few_or_uneven_documents_are_cut_at_the_end() {
        let end = |corpus: &Corpus| corpus.text.len() * 9 / 10;
        let few = corpus(&[("rs", 100); MANY - 1]);
        let uneven = [&[("rs", 10); 30][..], &[("rs", 5000), ("rs", 5000)]].concat();
        for corpus in [few, corpus(&uneven), corpus(&[("txt", 1000)])] {
            let cut = end(&corpus);
            let split = Split::of(&corpus, 0.1);
            assert_eq!((&split.train[0], split.train.len()), (&(0..cut), 1));
        }
    }

    #[test]
    fn both_splits_have_whole_documents_of_every_kind() {
        // Sorted by path, as a repository is: code first, documentation last.
        let documents: Vec<(&str, usize)> =
            (0..200).map(|i| (if i < 150 { "rs" } else { "md" }, 500 + i * 7919 % 3000)).collect();
        let corpus = corpus(&documents);
        let split = Split::of(&corpus, 0.1);
        assert_eq!(split, Split::of(&corpus, 0.1));
        let kept = length(&split.validation) as f64 / corpus.text.len() as f64;
        assert!((kept - 0.1).abs() < 0.01, "{kept}");
        assert_eq!(length(&split.train) + length(&split.validation), corpus.text.len());

        let mut all: Vec<_> = split.train.iter().chain(&split.validation).cloned().collect();
        all.sort_by_key(|range| range.start);
        assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start), "{all:?}");
        for range in &all {
            assert!(corpus.ends.contains(&range.end), "{range:?} cuts a document");
        }
        // The code ends where the first document of the other kind begins.
        let code = corpus.ends[149];
        for ranges in [&split.train, &split.validation] {
            assert!(ranges.iter().any(|range| range.end <= code), "{ranges:?}");
            assert!(ranges.iter().any(|range| range.start >= code), "{ranges:?}");
        }
    }
}
