//! The metrics of a run as JSON lines: one record a line, each flushed as it is logged.

use super::disk::{DiskError, named, replace_file};
use serde::de::{self, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Name of the file in its folder.
pub(crate) const METRICS: &str = "metrics.jsonl";

/// Why metrics cannot be read or written.
#[derive(Debug, Error)]
pub enum MetricsError {
    /// The filesystem refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A line other than the last is no record.
    #[error("{}:{line}: expected a record of metrics: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: serde_json::Error,
    },
    /// A record cannot be written as JSON.
    #[error("cannot write the record of step {step}: {reason}")]
    Record {
        /// Its step.
        step: u64,
        /// What was wrong.
        reason: serde_json::Error,
    },
}

/// What a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Training steps.
    Train,
    /// An evaluation on the validation split.
    Validation,
    /// The seeds of a model at the end of an epoch of theirs.
    Seeds,
}

impl Kind {
    /// The kind as it is written: `train`, `validation` or `seeds`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Seeds => "seeds",
        }
    }
}

/// Named values of one step, such as `loss`, `learning_rate` and `tokens_per_second`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(from = "Line")]
pub struct Record {
    /// Optimizer steps done.
    pub step: u64,
    /// What the values are about.
    pub kind: Kind,
    /// The values by name.
    pub values: BTreeMap<String, f64>,
}

impl Record {
    /// A record without values.
    pub fn new(kind: Kind, step: u64) -> Self {
        Self { step, kind, values: BTreeMap::new() }
    }

    /// Adds a value. The names `step` and `kind` are taken.
    pub fn with(mut self, name: &str, value: f64) -> Self {
        self.values.insert(name.to_string(), value);
        self
    }

    /// The name of a value of a seed of a block: `state` (its code), `alpha`, `reconstruction`, the loss of its blueprint in
    /// training, or `gain`, by how much the validation loss is lower with the seed than without.
    pub fn of_seed(block: usize, seed: usize, what: &str) -> String {
        format!("block{block}.seed{seed}.{what}")
    }

    /// The value of this name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied()
    }
}

impl Serialize for Record {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(2 + self.values.len()))?;
        map.serialize_entry("step", &self.step)?;
        map.serialize_entry("kind", &self.kind)?;
        for (name, value) in &self.values {
            map.serialize_entry(name, &Number(*value))?;
        }
        map.end()
    }
}

/// A record as it is read.
#[derive(Deserialize)]
struct Line {
    step: u64,
    kind: Kind,
    #[serde(flatten)]
    values: BTreeMap<String, Number>,
}

impl From<Line> for Record {
    fn from(line: Line) -> Self {
        let values = line.values.into_iter().map(|(name, Number(value))| (name, value)).collect();
        Self { step: line.step, kind: line.kind, values }
    }
}

/// A number, with the ones that JSON does not have as the strings `NaN`, `inf` and `-inf`.
struct Number(f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() {
            serializer.serialize_f64(self.0)
        } else {
            serializer.collect_str(&self.0)
        }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Numbers;

        impl Visitor<'_> for Numbers {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, \"NaN\", \"inf\" or \"-inf\"")
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Number, E> {
                Ok(Number(value))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Number, E> {
                Ok(Number(value as f64))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Number, E> {
                Ok(Number(value as f64))
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Number, E> {
                match value {
                    "NaN" => Ok(Number(f64::NAN)),
                    "inf" => Ok(Number(f64::INFINITY)),
                    "-inf" => Ok(Number(f64::NEG_INFINITY)),
                    other => Err(E::invalid_value(de::Unexpected::Str(other), &self)),
                }
            }
        }

        deserializer.deserialize_any(Numbers)
    }
}

/// The log of a run, open for more.
#[derive(Debug)]
pub struct MetricsLog {
    file: File,
    path: PathBuf,
}

impl MetricsLog {
    /// Opens `metrics.jsonl` in `dir`.
    ///
    /// `None` starts an empty log. `Some(step)` goes on after that step: records of later steps
    /// and a torn last line are dropped, so that the log reads as if the run had never stopped.
    pub fn open(dir: &Path, resume_from_step: Option<u64>) -> Result<Self, MetricsError> {
        let path = dir.join(METRICS);
        let mut kept = Vec::new();
        if let Some(last) = resume_from_step {
            for (text, record) in lines(&path, &read_bytes(&path)?)? {
                if record.step <= last {
                    kept.extend_from_slice(text);
                    kept.push(b'\n');
                }
            }
        }
        replace_file(&path, &kept)?;
        let file = named(OpenOptions::new().append(true).open(&path), "open", &path)?;
        Ok(Self { file, path })
    }

    /// Adds a record.
    pub fn log(&mut self, record: &Record) -> Result<(), MetricsError> {
        let mut line = serde_json::to_vec(record)
            .map_err(|reason| MetricsError::Record { step: record.step, reason })?;
        line.push(b'\n');
        // One unbuffered write for the line, so that whoever follows the file sees it whole.
        Ok(named(self.file.write_all(&line), "write", &self.path)?)
    }
}

/// Reads all records of a file, without the last line if it is torn. A file that does not exist
/// has none.
pub fn read(path: &Path) -> Result<Vec<Record>, MetricsError> {
    let bytes = read_bytes(path)?;
    Ok(lines(path, &bytes)?.into_iter().map(|(_, record)| record).collect())
}

fn read_bytes(path: &Path) -> Result<Vec<u8>, DiskError> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => named(read, "read", path),
    }
}

/// The records in `bytes`, each with its line; an error names the line of `path`.
fn lines<'b>(path: &Path, bytes: &'b [u8]) -> Result<Vec<(&'b [u8], Record)>, MetricsError> {
    let mut all = bytes
        .split(|byte| *byte == b'\n')
        .enumerate()
        .filter(|(_, line)| !line.trim_ascii().is_empty())
        .peekable();
    let mut records = Vec::new();
    while let Some((index, line)) = all.next() {
        match serde_json::from_slice(line) {
            Ok(record) => records.push((line, record)),
            Err(_) if all.peek().is_none() => {
                tracing::warn!("{}:{}: dropping a torn line", path.display(), index + 1);
            }
            Err(reason) => {
                let path = path.to_path_buf();
                return Err(MetricsError::Line { path, line: index + 1, reason });
            }
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn train(step: u64, loss: f64) -> Record {
        Record::new(Kind::Train, step).with("loss", loss).with("learning_rate", 1e-3)
    }

    fn validation(step: u64, loss: f64) -> Record {
        Record::new(Kind::Validation, step).with("loss", loss)
    }

    fn log_all(dir: &Path, resume: Option<u64>, records: &[Record]) {
        let mut log = MetricsLog::open(dir, resume).expect("opened");
        for record in records {
            log.log(record).expect("logged");
        }
    }

    #[test]
    fn records_are_read_back_and_lines_are_plain_json() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(METRICS);
        assert_eq!(read(&path).expect("none"), []);
        let records = [train(0, 4.25), validation(0, 4.5), train(10, 3.125)];
        let mut log = MetricsLog::open(folder.path(), None).expect("opened");
        for (index, record) in records.iter().enumerate() {
            log.log(record).expect("logged");
            // Flushed: another reader sees it at once.
            assert_eq!(read(&path).expect("read"), records[..=index]);
        }
        let text = fs::read_to_string(&path).expect("text");
        assert_eq!(
            text.lines().next(),
            Some(r#"{"step":0,"kind":"train","learning_rate":0.001,"loss":4.25}"#)
        );
        assert_eq!(records[0].get("loss"), Some(4.25));
        assert_eq!(records[0].get("seconds"), None);
    }

    #[test]
    fn what_json_has_no_number_for_survives() {
        let folder = tempfile::tempdir().expect("a folder");
        let record = Record::new(Kind::Train, 3)
            .with("loss", f64::NAN)
            .with("gradient_norm", f64::INFINITY)
            .with("low", f64::NEG_INFINITY);
        log_all(folder.path(), None, &[record]);
        let path = folder.path().join(METRICS);
        for line in fs::read_to_string(&path).expect("text").lines() {
            serde_json::from_str::<serde_json::Value>(line).expect("valid JSON");
        }
        let read = read(&path).expect("read");
        assert!(read[0].get("loss").is_some_and(f64::is_nan));
        assert_eq!(read[0].get("gradient_norm"), Some(f64::INFINITY));
        assert_eq!(read[0].get("low"), Some(f64::NEG_INFINITY));
    }

    #[test]
    fn a_resumed_log_reads_as_if_it_had_never_stopped() {
        let records: Vec<Record> = (0..=6).map(|i| train(i * 10, 5.0 - i as f64 / 3.0)).collect();
        let whole = tempfile::tempdir().expect("a folder");
        log_all(whole.path(), None, &records);

        let resumed = tempfile::tempdir().expect("a folder");
        log_all(resumed.path(), None, &records[..6]);
        let path = resumed.path().join(METRICS);
        // Killed in the middle of a line.
        let mut file = OpenOptions::new().append(true).open(&path).expect("opened");
        file.write_all(b"{\"step\":60,\"kind\":\"tr").expect("written");
        drop(file);
        assert_eq!(read(&path).expect("read"), records[..6]);
        log_all(resumed.path(), Some(30), &records[4..]);
        let text = |dir: &Path| fs::read(dir.join(METRICS)).expect("text");
        assert_eq!(text(resumed.path()), text(whole.path()));
    }

    #[test]
    fn a_last_line_that_only_lacks_its_end_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(METRICS);
        log_all(folder.path(), None, &[train(1, 1.0), train(2, 2.0)]);
        let text = fs::read(&path).expect("text");
        fs::write(&path, &text[..text.len() - 1]).expect("written");
        log_all(folder.path(), Some(2), &[train(3, 3.0)]);
        assert_eq!(read(&path).expect("read"), [train(1, 1.0), train(2, 2.0), train(3, 3.0)]);
    }

    #[test]
    fn resuming_from_nothing_works_and_a_fresh_log_is_empty() {
        let folder = tempfile::tempdir().expect("a folder");
        log_all(folder.path(), Some(100), &[train(110, 1.0)]);
        log_all(folder.path(), None, &[train(0, 2.0)]);
        assert_eq!(read(&folder.path().join(METRICS)).expect("read"), [train(0, 2.0)]);
    }

    #[test]
    fn a_damaged_line_in_the_middle_is_an_error_with_its_number() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(METRICS);
        let good = r#"{"step":1,"kind":"train","loss":2}"#;
        for bad in [
            "{\"step\":",
            "[]",
            r#"{"step":1,"kind":"test"}"#,
            r#"{"step":1,"kind":"train","loss":"low"}"#,
        ] {
            fs::write(&path, format!("{good}\n{bad}\n{good}\n")).expect("written");
            let line = read(&path).expect_err(bad).to_string();
            assert!(
                line.starts_with(&format!("{}:2: expected a record", path.display())),
                "{line}"
            );
            assert!(MetricsLog::open(folder.path(), Some(5)).is_err(), "{bad}");
        }
        assert!(fs::read_to_string(&path).expect("text").contains("low"), "nothing is lost");
    }
}
