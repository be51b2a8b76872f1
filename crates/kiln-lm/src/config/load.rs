//! Reads a configuration from TOML and `section.key=value` overrides, with errors that name the
//! file and line, or the override, and writes it back.

use super::{Config, TrainConfig, Violation};
use serde::Deserialize;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use thiserror::Error;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Why a configuration cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: io::Error,
    },
    /// An override is not of the form `section.key=value`.
    #[error("--set {given}: expected section.key=value, such as model.width=256")]
    Override {
        /// The override.
        given: String,
    },
    /// Not TOML, a missing key or section, or a value of the wrong type.
    #[error("{place}: {message}")]
    Malformed {
        /// File and line, or override.
        place: String,
        /// What is wrong and what was expected.
        message: String,
    },
    /// A key or section that does not exist.
    #[error("{place}: unknown {what}, expected one of: {expected}")]
    Unknown {
        /// File and line, or override.
        place: String,
        /// `key 'widht' in [model]` or `section [modle]`.
        what: String,
        /// The names that exist.
        expected: String,
    },
    /// Values out of their range.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Invalid(Vec<Violation>),
    /// The configuration holds something that TOML cannot express.
    #[error("the configuration cannot be written as TOML: {0}")]
    Write(String),
}

/// Reads the configuration in `path`, applies the overrides and validates the result.
pub fn load(path: &Path, overrides: &[String]) -> Result<Config, ConfigError> {
    parse(&read(path)?, &path.display().to_string(), overrides)
}

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path)
        .map_err(|reason| ConfigError::Read { path: path.to_path_buf(), reason })
}

/// Reads a configuration from `text`, applies the overrides and validates the result; `origin`
/// names the text in errors.
///
/// An override is `section.key=value`. Its value is read as TOML and, where it is not TOML, taken
/// as a string: `model.width=256`, `data.sources=["a", "b"]` and `data.tokenizer=char` all work.
pub fn parse(text: &str, origin: &str, overrides: &[String]) -> Result<Config, ConfigError> {
    let mut source = Source { text, origin, overrides: Vec::new() };
    let root = source.merged(overrides)?;
    let table = root.get_ref().clone();
    let config = Config::deserialize(toml::Deserializer::from(root))
        .map_err(|error| source.explain(&table, &error))?;
    match config.validate() {
        Ok(()) => Ok(config),
        Err(ConfigError::Invalid(mut violations)) => {
            for violation in &mut violations {
                let keys = std::iter::once(violation.key).chain(violation.also.iter().copied());
                let spans: Vec<_> = keys.filter_map(|key| span_of(&table, key)).collect();
                // Of several keys that do not fit each other the one is wrong that was changed.
                let overridden = |span: &&Range<usize>| source.overriding(span.start).is_some();
                let span = spans.iter().find(overridden).or(spans.first());
                violation.place = Some(source.place(span.cloned()));
            }
            Err(ConfigError::Invalid(violations))
        }
        Err(other) => Err(other),
    }
}

/// The folder of the run that a configuration describes, `train.out`. Its other values may be anything,
/// and where an override names the folder the file is not even read: a run that exists has a
/// configuration of its own.
pub fn run_folder(path: &Path, overrides: &[String]) -> Result<PathBuf, ConfigError> {
    #[derive(Deserialize, Default)]
    #[serde(default)]
    struct OnlyTrain {
        train: OnlyOut,
    }
    #[derive(Deserialize, Default)]
    #[serde(default)]
    struct OnlyOut {
        out: Option<PathBuf>,
    }

    let overrides: Vec<String> =
        overrides.iter().filter(|set| names_folder(set)).cloned().collect();
    let text = if overrides.is_empty() { read(path)? } else { String::new() };
    let origin = path.display().to_string();
    let mut source = Source { text: &text, origin: &origin, overrides: Vec::new() };
    let root = source.merged(&overrides)?;
    let table = root.get_ref().clone();
    let found = OnlyTrain::deserialize(toml::Deserializer::from(root))
        .map_err(|error| source.explain(&table, &error))?;
    Ok(found.train.out.unwrap_or_else(|| TrainConfig::default().out))
}

/// Whether an override names the folder of the run.
pub fn names_folder(set: &str) -> bool {
    let key = set.split('=').next().unwrap_or_default();
    key.split('.').map(str::trim).eq(["train", "out"])
}

/// The whole configuration as TOML, defaults included; [`parse`] reads it back to an equal one.
///
/// Fails only for what TOML cannot express: a path that is not UTF-8, which [`parse`] never
/// returns.
pub fn to_toml(config: &Config) -> Result<String, ConfigError> {
    toml::to_string(config).map_err(|error| ConfigError::Write(one_line(&error.to_string())))
}

/// Applies one override to the table; everything it adds carries `span`.
fn set<'a>(root: &mut DeTable<'a>, given: &'a str, span: Range<usize>) -> Result<(), ConfigError> {
    let malformed = || ConfigError::Override { given: given.to_string() };
    let (path, value) = given.split_once('=').ok_or_else(malformed)?;
    let keys: Vec<&str> = path.trim().split('.').map(str::trim).collect();
    let [section, key, inner @ ..] = keys.as_slice() else {
        return Err(malformed());
    };
    if keys.iter().any(|key| key.is_empty()) {
        return Err(malformed());
    }

    let spanned = |key: &'a str| Spanned::new(span.clone(), key.into());
    let value = value.trim();
    let mut value = match DeValue::parse(value) {
        Ok(parsed) => moved(parsed, &span),
        Err(_) => Spanned::new(span.clone(), DeValue::String(value.into())),
    };
    // `data.tokenizer.bpe=4096` replaces the whole of `data.tokenizer`: its forms exclude one
    // another.
    for key in inner.iter().rev() {
        let table = DeTable::from_iter([(spanned(key), value)]);
        value = Spanned::new(span.clone(), DeValue::Table(table));
    }
    let section = root
        .entry(spanned(section))
        .or_insert_with(|| Spanned::new(span.clone(), DeValue::Table(DeTable::new())));
    match section.get_mut() {
        DeValue::Table(table) => {
            // Inserting over a key would keep the old key, and with it the old span.
            table.remove(*key);
            table.insert(spanned(key), value);
            Ok(())
        }
        other => Err(ConfigError::Malformed {
            place: format!("--set {given}"),
            message: format!(
                "'{}' is no section here: its value is of type {}",
                keys[0],
                other.type_str()
            ),
        }),
    }
}

/// A value with `span` in place of its own spans, which count from the start of the override.
fn moved<'a>(value: Spanned<DeValue<'a>>, span: &Range<usize>) -> Spanned<DeValue<'a>> {
    let value = match value.into_inner() {
        DeValue::Array(array) => {
            DeValue::Array(array.into_iter().map(|element| moved(element, span)).collect())
        }
        DeValue::Table(table) => {
            let entries = table.into_iter().map(|(key, value)| {
                (Spanned::new(span.clone(), key.into_inner()), moved(value, span))
            });
            DeValue::Table(entries.collect())
        }
        scalar => scalar,
    };
    Spanned::new(span.clone(), value)
}

/// Where the parts of a merged table were written.
struct Source<'a> {
    text: &'a str,
    origin: &'a str,
    overrides: Vec<(Range<usize>, &'a str)>,
}

impl<'a> Source<'a> {
    /// The text as a table, with the overrides in it.
    fn merged(&mut self, overrides: &'a [String]) -> Result<Spanned<DeTable<'a>>, ConfigError> {
        let mut root = DeTable::parse(self.text)
            .map_err(|error| self.malformed(error.span(), error.message()))?;
        // Spans of overrides count on from the end of the text, so that one number tells where any
        // part of the merged table was written.
        let mut base = self.text.len() + 1;
        for given in overrides {
            let end = base + given.len() + 1;
            set(root.get_mut(), given, base..end)?;
            self.overrides.push((base..end, given));
            base = end;
        }
        Ok(root)
    }

    /// The override that a span begins in.
    fn overriding(&self, start: usize) -> Option<&str> {
        let (_, given) = self.overrides.iter().find(|(range, _)| range.contains(&start))?;
        Some(given)
    }

    /// `file:line` or `--set …`; the file alone where the span is unknown.
    fn place(&self, span: Option<Range<usize>>) -> String {
        let Some(start) = span.map(|span| span.start) else {
            return self.origin.to_string();
        };
        if let Some(given) = self.overriding(start) {
            return format!("--set {given}");
        }
        let before = self.text.as_bytes().iter().take(start);
        let line = 1 + before.filter(|byte| **byte == b'\n').count();
        format!("{}:{line}", self.origin)
    }

    fn malformed(&self, span: Option<Range<usize>>, message: &str) -> ConfigError {
        ConfigError::Malformed { place: self.place(span), message: one_line(message) }
    }

    /// Turns an error of deserialization into one that names the section and key.
    fn explain(&self, table: &DeTable<'_>, error: &toml::de::Error) -> ConfigError {
        let span = error.span();
        let path = match span.as_ref() {
            Some(span) => match self.overriding(span.start) {
                // All that an override wrote has one span: its own words tell the keys.
                Some(given) => {
                    let keys = given.split('=').next().unwrap_or_default();
                    keys.split('.').map(str::trim).collect()
                }
                None => path_at(table, span.start),
            },
            None => Vec::new(),
        };
        let message = error.message();
        if let Some((name, expected)) = unknown_field(message) {
            let around = match path.as_slice() {
                // An override of an unknown section names keys in it.
                [section, ..] if *section == name => &[],
                [around @ .., last] if *last == name => around,
                around => around,
            };
            let what = match around {
                [] => format!("section [{name}]"),
                around => format!("key '{name}' in [{}]", around.join(".")),
            };
            return ConfigError::Unknown { place: self.place(span), what, expected };
        }
        let missing = message.strip_prefix("missing field `").and_then(|m| m.strip_suffix('`'));
        if let Some(name) = missing {
            // `data` is the only section without a default.
            let (span, message) = match name {
                "data" => (None, "the section [data] is missing: it names the sources".to_string()),
                _ => (span, format!("[{}] lacks the key '{name}'", path.join("."))),
            };
            return self.malformed(span, &message);
        }
        let path = path.join(".");
        self.malformed(span, &format!("{path}: {}", plain(&path, message)))
    }
}

/// Name and alternatives in serde's "unknown field `a`, expected `b` or `c`".
fn unknown_field(message: &str) -> Option<(&str, String)> {
    let (name, expected) = message.strip_prefix("unknown field `")?.split_once("`, expected ")?;
    // The names are the parts between backticks.
    let names: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    Some((name, names.join(", ")))
}

/// Serde's message in words of TOML rather than of Rust.
fn plain(path: &str, message: &str) -> String {
    const WORDS: [(&str, &str); 8] = [
        ("expected usize", "expected a whole number, 0 or more"),
        ("expected u64", "expected a whole number, 0 or more"),
        ("expected f32", "expected a number"),
        ("expected f64", "expected a number"),
        ("wanted string or table", "expected a name in quotes"),
        ("expected a sequence", "expected an array such as [\"a.txt\"]"),
        ("expected path string", "expected a path in quotes"),
        ("wanted exactly 1 element, ", "expected one key, bpe or file, "),
    ];
    if message.ends_with("invalid type: map, expected a sequence") {
        // [optimizer.groups] where there may be several.
        return message.replace("map, expected a sequence", "table, expected [[…]], one for each");
    }
    if path == "optimizer.groups" && message.ends_with("expected a sequence") {
        return message
            .replace("expected a sequence", "expected [[optimizer.groups]], one for each");
    }
    let mut plain = message.to_string();
    for (rust, words) in WORDS {
        plain = plain.replace(rust, words);
    }
    if let Some((before, _)) = plain.split_once("expected struct ") {
        plain = format!("{before}expected a section with keys");
    }
    plain
}

/// An error message on one line.
fn one_line(message: &str) -> String {
    message.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(", ")
}

/// The keys that lead to what was written at `position`.
fn path_at<'t>(table: &'t DeTable<'_>, position: usize) -> Vec<&'t str> {
    for (key, value) in table {
        let mut path = vec![key.get_ref().as_ref()];
        let inner = match value.get_ref() {
            DeValue::Table(table) => path_at(table, position),
            DeValue::Array(array) => {
                let tables = array.iter().filter_map(|element| element.get_ref().as_table());
                tables
                    .map(|table| path_at(table, position))
                    .find(|p| !p.is_empty())
                    .unwrap_or_default()
            }
            _ => Vec::new(),
        };
        if !inner.is_empty() {
            path.extend(inner);
            return path;
        }
        if key.span().contains(&position) || value.span().contains(&position) {
            return path;
        }
    }
    Vec::new()
}

/// Where a `section.key` was set.
fn span_of(table: &DeTable<'_>, path: &str) -> Option<Range<usize>> {
    let (first, rest) = path.split_once('.').unwrap_or((path, ""));
    let (key, value) = table.get_key_value(first)?;
    match value.get_ref() {
        DeValue::Table(table) if !rest.is_empty() => span_of(table, rest),
        _ => Some(key.span()),
    }
}

#[cfg(test)]
mod tests;
