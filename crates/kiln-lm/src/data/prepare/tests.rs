//! Tests of [`prepare`](super::prepare) and of the data sets that it writes.

use super::*;
use crate::data::dataset::unigram_loss;
use std::path::PathBuf;

struct Folder {
    dir: tempfile::TempDir,
    config: DataConfig,
}

impl Folder {
    fn new(tokenizer: TokenizerConfig, files: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let config = DataConfig {
            sources: vec!["*.txt".into()],
            tokenizer,
            validation: 0.1,
            cache: "cache".into(),
        };
        Self { dir, config }
    }

    fn prepare(&self) -> Result<Dataset, DataError> {
        prepare(&self.config, self.dir.path(), &mut |_| {})
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

fn texts(dataset: &Dataset) -> (String, String) {
    let text = |shard: &crate::data::TokenShard| {
        let tokens: Vec<u32> = shard.iter().collect();
        dataset.tokenizer.decode(&tokens)
    };
    (text(&dataset.train), text(&dataset.validation))
}

#[test]
fn splits_and_joins() {
    use TokenizerConfig::{Bpe, Byte, Char};
    let files = &[("b.txt", "3456😀é"), ("a.txt", "012"), ("c.txt", "")];
    for (tokenizer, share, train, validation, tokens) in [
        (Byte, 0.2, "012\n3456", "😀é", (8, 6)),
        (Char, 0.2, "012\n3456", "😀é", (8, 2)),
        (Char, 0.9, "0", "12\n3456😀é", (1, 9)),
        (Bpe(257), 0.5, "012<|endoftext|>3", "456😀é<|endoftext|>", (5, 10)),
    ] {
        let mut folder = Folder::new(tokenizer, files);
        folder.config.validation = share;
        let dataset = folder.prepare().unwrap();
        assert_eq!(texts(&dataset), (train.into(), validation.into()));
        assert_eq!((dataset.train.len(), dataset.validation.len()), tokens);
        assert_eq!((dataset.meta.files, dataset.meta.bytes > 12), (3, true));
    }
}

#[test]
fn of_many_files_whole_ones_of_each_kind_are_kept() {
    let names: Vec<(String, String)> = (0..40)
        .map(|i| {
            let kind = if i % 2 == 0 { "rs" } else { "md" };
            (format!("{i:02}.{kind}"), format!("{kind}{i:02}\n"))
        })
        .collect();
    let files: Vec<(&str, &str)> = names.iter().map(|(n, t)| (n.as_str(), t.as_str())).collect();
    let mut folder = Folder::new(TokenizerConfig::Char, &files);
    folder.config.sources = vec!["*.rs".into(), "*.md".into()];
    let first = folder.prepare().unwrap();
    let (train, validation) = texts(&first);
    for kind in ["rs", "md"] {
        assert_eq!((train.matches(kind).count(), validation.matches(kind).count()), (18, 2));
    }
    for name in validation.split_whitespace() {
        assert!(!train.contains(name), "{name} is in both");
    }
    // The same text as one file is cut elsewhere, and so prepared anew.
    let mut one = Folder::new(TokenizerConfig::Char, &[("all.txt", "")]);
    let all: Vec<String> = names.iter().map(|(_, text)| text.clone()).collect();
    fs::write(one.path("all.txt"), all.join("\n")).unwrap();
    one.config.cache = folder.path("cache");
    let second = one.prepare().unwrap();
    assert!(!second.reused && second.dir != first.dir && folder.prepare().unwrap().reused);
}

#[test]
fn a_tokenizer_file_is_used_as_it_is() {
    let bpe = Folder::new(TokenizerConfig::Bpe(300), &[("a.txt", &"hear, hear! ".repeat(9))]);
    let trained = bpe.prepare().unwrap();
    let mut file = Folder::new(TokenizerConfig::Byte, &[("a.txt", &"hear, hear! ".repeat(9))]);
    file.config.tokenizer = TokenizerConfig::File(trained.dir.join(TOKENIZER));
    let loaded = file.prepare().unwrap();
    assert_eq!(texts(&loaded), texts(&trained));
    assert!(loaded.train.len() < 50 && !loaded.reused && file.prepare().unwrap().reused);

    file.config.tokenizer = TokenizerConfig::File("a.txt".into());
    let error = file.prepare().unwrap_err();
    assert!(error.to_string().contains("a.txt"), "{error}");
}

#[test]
fn bpe_learns_from_the_training_split_only() {
    let tail = "zqzq".repeat(50);
    let folder = |text: &str| {
        let mut folder = Folder::new(TokenizerConfig::Bpe(400), &[("a.txt", text)]);
        folder.config.validation = 0.5;
        folder.prepare().unwrap().tokenizer.to_json().unwrap()
    };
    let head = "the cat and the hat. ".repeat(10)[..200].to_owned();
    assert_eq!(folder(&(head.clone() + &tail)), folder(&(head + &tail.replace('z', "é"))));
}

#[test]
fn unchanged_text_is_reused_and_changes_are_noticed() {
    let mut folder = Folder::new(TokenizerConfig::Char, &[("a.txt", "hello\r\nworld")]);
    let mut stages = Vec::new();
    let dir = folder.dir.path().to_owned();
    let first = prepare(&folder.config, &dir, &mut |p| stages.push((p.stage, p.done))).unwrap();
    let expected = [(Stage::Read, 1), (Stage::Encode, 10), (Stage::Encode, 12)];
    assert_eq!((first.reused, &stages[..]), (false, &expected[..]));

    let second = folder.prepare().unwrap();
    assert_eq!((second.reused, &second.dir), (true, &first.dir));
    assert_eq!(texts(&second), texts(&first));

    let mut dirs = vec![first.dir];
    let mut changed = |folder: &Folder| {
        let dataset = folder.prepare().unwrap();
        assert!(!dataset.reused && !dirs.contains(&dataset.dir));
        dirs.push(dataset.dir);
    };
    fs::write(folder.path("a.txt"), "hello\nworld").unwrap();
    changed(&folder);
    folder.config.validation = 0.2;
    changed(&folder);
    folder.config.tokenizer = TokenizerConfig::Byte;
    changed(&folder);
    fs::write(folder.path("b.txt"), "!").unwrap();
    changed(&folder);
    // Nothing temporary is left behind, and the cache itself is no source.
    assert_eq!(fs::read_dir(folder.path("cache")).unwrap().count(), dirs.len());
    folder.config.sources = vec![".".into()];
    assert!(folder.prepare().unwrap().reused);
}

#[test]
fn a_damaged_cache_is_named_and_made_anew() {
    let folder = Folder::new(TokenizerConfig::Byte, &[("a.txt", "hello, world")]);
    let dataset = folder.prepare().unwrap();
    for (name, bytes) in [
        (TRAIN, &b"KILNTOKS"[..]),
        (VALIDATION, b""),
        (TOKENIZER, br#"{"type":"char","characters":"abc"}"#),
        (META, b"{"),
    ] {
        fs::write(dataset.dir.join(name), bytes).unwrap();
        let error = Dataset::open(&dataset.dir).unwrap_err();
        assert!(matches!(&error, DataError::Corrupt { path, .. } if path.ends_with(name)));
        let again = folder.prepare().unwrap();
        assert!(!again.reused);
        assert_eq!(texts(&again), ("hello, wor".into(), "ld".into()));
    }
    fs::copy(dataset.dir.join(TRAIN), dataset.dir.join(VALIDATION)).unwrap();
    let error = Dataset::open(&dataset.dir).unwrap_err();
    assert!(error.to_string().ends_with("it has another number of tokens"));
    fs::remove_file(dataset.dir.join(TRAIN)).unwrap();
    let error = Dataset::open(&dataset.dir).unwrap_err();
    assert!(matches!(&error, DataError::Io { path, .. } if path.ends_with(TRAIN)));
    assert!(!folder.prepare().unwrap().reused);
    assert_eq!(fs::read_dir(folder.path("cache")).unwrap().count(), 1);
}

#[test]
fn bad_configurations_are_errors() {
    type Change = fn(&mut DataConfig);
    let text = &[("a.txt", "text"), ("empty.md", "")];
    let message = |change: Change| {
        let mut folder = Folder::new(TokenizerConfig::Byte, text);
        change(&mut folder.config);
        folder.prepare().unwrap_err().to_string()
    };
    let changes: [(Change, &str); 7] = [
        (|c| c.validation = 0.0, "validation share 0 is outside (0, 1)"),
        (|c| c.validation = 1.0, "validation share 1 is outside (0, 1)"),
        (|c| c.validation = f64::NAN, "validation share NaN is outside (0, 1)"),
        (|c| c.sources.clear(), "the corpus is empty: no text in `sources` (files: 0)"),
        (
            |c| c.sources = vec!["empty.md".into()],
            "the corpus is empty: no text in `sources` (files: 1)",
        ),
        (|c| c.sources.push("b.txt".into()), "source `b.txt` not found"),
        (|c| c.tokenizer = TokenizerConfig::Bpe(256), "a BPE vocabulary of 256 is too small"),
    ];
    for (change, expected) in changes {
        let error = message(change);
        assert!(error.starts_with(expected), "{error}");
    }
    let error = message(|c| c.cache = "a.txt".into());
    assert!(error.contains("a.txt"), "{error}");
}

#[test]
fn windows_are_checked_in_both_splits() {
    let dataset = Folder::new(TokenizerConfig::Byte, &[("a.txt", &"x".repeat(50))]).prepare();
    let dataset = dataset.unwrap();
    assert!(dataset.check_window(4).is_ok());
    for (context, expected) in [
        (5, "the validation split has 5 tokens, but one window needs 6"),
        (45, "the training split has 45 tokens, but one window needs 46"),
        (0, "the context must be at least one token"),
    ] {
        let error = dataset.check_window(context).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn unigram_loss_is_that_of_smoothed_frequencies() {
    let mut folder = Folder::new(TokenizerConfig::Char, &[("a.txt", "aaabbc")]);
    folder.config.validation = 0.5;
    let dataset = folder.prepare().unwrap();
    // Training counts a 3, b 0, c 0, plus one each: 4/6, 1/6, 1/6; validation is "bbc".
    assert!((dataset.unigram_loss() - 6f64.ln()).abs() < 1e-12);
    let same = unigram_loss(&dataset.train, &dataset.train, 3);
    assert!((same - 1.5f64.ln()).abs() < 1e-12);
}
