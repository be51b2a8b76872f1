//! From `sources` to one text: expands files, folders and globs, reads them in sorted order and
//! remembers where each document ends and of what kind it is.

use super::error::DataError;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Extensions taken when a folder is walked.
const TEXT_EXTENSIONS: &[&str] = &[
    "adoc", "bib", "c", "cc", "cfg", "cpp", "css", "csv", "cu", "cuh", "go", "h", "hpp", "htm",
    "html", "ini", "java", "jl", "js", "json", "jsonl", "jsx", "kt", "lean", "lua", "md", "ml",
    "org", "php", "pl", "py", "r", "rb", "rs", "rst", "scala", "sh", "sql", "svg", "swift", "tex",
    "toml", "ts", "tsv", "tsx", "txt", "wgsl", "xml", "yaml", "yml", "zig",
];

/// A file to read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SourceFile {
    pub(super) path: PathBuf,
    /// Named by the user, itself or by a glob: then it must be text.
    pub(super) named: bool,
}

/// All files that `sources` stand for: sorted by path, each one once.
pub(super) fn expand(sources: &[String], base: &Path) -> Result<Vec<SourceFile>, DataError> {
    let mut files = BTreeMap::new();
    for pattern in sources {
        let path = base.join(pattern);
        let (found, named) = if path.is_file() {
            (vec![path], true)
        } else if path.is_dir() {
            (walk(&path)?, false)
        } else if pattern.contains(['*', '?', '[']) {
            (expand_glob(pattern, base)?, true)
        } else if path.exists() {
            return Err(DataError::NotRegular { pattern: pattern.clone() });
        } else {
            let pattern = pattern.clone();
            return Err(DataError::SourceNotFound { pattern, path });
        };
        if found.is_empty() {
            let pattern = pattern.clone();
            return Err(DataError::NoFiles { pattern });
        }
        for path in found {
            *files.entry(path).or_default() |= named;
        }
    }
    let file = |(path, named)| SourceFile { path, named };
    Ok(files.into_iter().map(file).collect())
}

fn expand_glob(pattern: &str, base: &Path) -> Result<Vec<PathBuf>, DataError> {
    // Only the configured part is a pattern, not the folder that it is relative to.
    let base = glob::Pattern::escape(&base.to_string_lossy());
    let full = Path::new(&base).join(pattern);
    let options =
        glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    let matches = glob::glob_with(&full.to_string_lossy(), options).map_err(|source| {
        let pattern = pattern.to_owned();
        DataError::BadPattern { pattern, source }
    })?;
    let mut files = Vec::new();
    for entry in matches {
        let path = entry.map_err(|error| DataError::Io {
            path: error.path().to_owned(),
            source: error.into(),
        })?;
        if path.is_file() {
            files.push(path);
        }
    }
    Ok(files)
}

fn walk(root: &Path) -> Result<Vec<PathBuf>, DataError> {
    let wanted = |entry: &walkdir::DirEntry| {
        let name = entry.file_name().to_string_lossy();
        let folder = entry.file_type().is_dir();
        entry.depth() == 0
            || !(name.starts_with('.')
                || folder && (name == "target" || super::dataset::is_prepared(entry.path())))
    };
    let mut files = Vec::new();
    for entry in walkdir::WalkDir::new(root).into_iter().filter_entry(wanted) {
        let entry = entry.map_err(|error| DataError::Io {
            path: error.path().unwrap_or(root).to_owned(),
            source: error.into(),
        })?;
        let extension = entry.path().extension().and_then(|e| e.to_str());
        let text = extension.is_some_and(|e| {
            TEXT_EXTENSIONS.binary_search(&e.to_ascii_lowercase().as_str()).is_ok()
        });
        if text && entry.file_type().is_file() {
            files.push(entry.into_path());
        }
    }
    Ok(files)
}

/// The text of all files, one after the other.
#[derive(Debug, Default)]
pub(super) struct Corpus {
    pub(super) text: String,
    /// Byte offset in `text` at which each document ends.
    pub(super) ends: Vec<usize>,
    /// Kind of each document: the extension of its file.
    pub(super) kinds: Vec<String>,
}

impl Corpus {
    /// Reads `files`; `separator` goes between two documents. Empty files are left out, and so
    /// are walked files that turn out not to be text.
    pub(super) fn read(
        files: &[SourceFile],
        separator: &str,
        mut progress: impl FnMut(usize),
    ) -> Result<Self, DataError> {
        let mut corpus = Self::default();
        for (index, file) in files.iter().enumerate() {
            let bytes = fs::read(&file.path).map_err(DataError::io(&file.path))?;
            match text_of(&bytes, file) {
                Ok("") => {}
                Ok(text) => {
                    if !corpus.ends.is_empty() {
                        corpus.text.push_str(separator);
                    }
                    corpus.text.push_str(text);
                    corpus.ends.push(corpus.text.len());
                    let kind = file.path.extension().unwrap_or_default();
                    corpus.kinds.push(kind.to_string_lossy().to_ascii_lowercase());
                }
                Err(error) if file.named => return Err(error),
                Err(error) => tracing::warn!("skipped: {error}"),
            }
            progress(index + 1);
        }
        if corpus.text.is_empty() {
            let files = files.len();
            return Err(DataError::EmptyCorpus { files });
        }
        Ok(corpus)
    }

    /// Documents between two byte offsets, each with whether it ends there.
    pub(super) fn documents(
        &self,
        start: usize,
        end: usize,
    ) -> impl Iterator<Item = (&str, bool)> + '_ {
        let mut from = start;
        let first = self.ends.partition_point(|&e| e <= start);
        self.ends[first..].iter().map_while(move |&document_end| {
            let to = document_end.min(end);
            let document = self.text.get(from..to).filter(|d| !d.is_empty())?;
            from = to;
            Some((document, document_end <= end))
        })
    }
}

/// Walked files with a NUL byte are taken for binary.
fn text_of<'a>(bytes: &'a [u8], file: &SourceFile) -> Result<&'a str, DataError> {
    let invalid = |offset| DataError::NotUtf8 { path: file.path.clone(), offset };
    let text = str::from_utf8(bytes).map_err(|error| invalid(error.valid_up_to()))?;
    match text.find('\0') {
        Some(offset) if !file.named => Err(invalid(offset)),
        _ => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        dir
    }

    fn names(sources: &[&str], dir: &Path) -> Result<Vec<String>, DataError> {
        let sources: Vec<_> = sources.iter().map(|s| s.to_string()).collect();
        let name = |f: &SourceFile| {
            let relative = f.path.strip_prefix(dir).unwrap();
            relative.to_string_lossy().replace('\\', "/")
        };
        Ok(expand(&sources, dir)?.iter().map(name).collect())
    }

    #[test]
    fn extensions_are_sorted() {
        assert!(TEXT_EXTENSIONS.is_sorted());
    }

    #[test]
    fn sources_expand_sorted_and_once() {
        let dir = tree(&[
            ("b.txt", b"b"),
            ("src/z.rs", b"z"),
            ("src/a/m.MD", b"m"),
            ("src/image.png", b"p"),
            ("src/.git/c.txt", b"c"),
            ("src/.hidden.rs", b"h"),
            ("src/target/t.rs", b"t"),
            ("src/old/meta.json", b"{}"),
            ("src/old/train.bin", b""),
            ("src/old/tokenizer.json", b"{}"),
        ]);
        for (sources, expected) in [
            (&["src", "b.txt"][..], &["b.txt", "src/a/m.MD", "src/z.rs"][..]),
            (&["src/*.png", "b.txt", "*.txt"], &["b.txt", "src/image.png"]),
            (&["**/*.rs"], &["src/target/t.rs", "src/z.rs"]),
        ] {
            assert_eq!(names(sources, dir.path()).unwrap(), expected);
        }
    }

    #[test]
    fn missing_sources_are_named() {
        let dir = tree(&[("empty/x.bin", b"")]);
        for (source, expected) in [
            ("no.txt", "source `no.txt` not found"),
            ("*.md", "source `*.md` matches no text file"),
            ("empty", "source `empty` matches no text file"),
            ("a[", "source `a[` is not a valid glob pattern"),
        ] {
            let error = names(&[source], dir.path()).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn what_is_there_but_no_file_is_not_called_missing() {
        let error = names(&["/dev/null"], Path::new("")).unwrap_err().to_string();
        assert!(error.starts_with("source `/dev/null` is no regular file, expected"), "{error}");
    }

    #[test]
    fn bad_utf8_is_an_error_only_in_named_files() {
        let dir = tree(&[
            ("a.txt", b"good"),
            ("b.txt", b"caf\xe9"),
            ("c.txt", b"n\0l"),
            ("d.txt", b""),
            ("e.txt", b"end"),
        ]);
        let files = expand(&[".".into()], dir.path()).unwrap();
        let corpus = Corpus::read(&files, "\n", |_| {}).unwrap();
        assert_eq!((corpus.text.as_str(), corpus.ends), ("good\nend", vec![4, 8]));

        let files = expand(&["b.*".into()], dir.path()).unwrap();
        let error = Corpus::read(&files, "\n", |_| {}).unwrap_err();
        assert!(
            matches!(&error, DataError::NotUtf8 { path, offset: 3 } if path.ends_with("b.txt"))
        );

        let files = expand(&["d.txt".into()], dir.path()).unwrap();
        let error = Corpus::read(&files, "\n", |_| {}).unwrap_err();
        assert!(matches!(error, DataError::EmptyCorpus { files: 1 }));
    }

    #[test]
    fn documents_know_where_they_end() {
        let (text, ends) = ("onetwothree".into(), vec![3, 6, 11]);
        let corpus = Corpus { text, ends, ..Corpus::default() };
        let documents = |a, b| corpus.documents(a, b).collect::<Vec<_>>();
        assert_eq!(documents(0, 4), [("one", true), ("t", false)]);
        assert_eq!(documents(4, 11), [("wo", true), ("three", true)]);
        assert_eq!(documents(0, 3), [("one", true)]);
        assert_eq!(documents(3, 11), [("two", true), ("three", true)]);
        assert_eq!(documents(0, 0), []);
    }
}
