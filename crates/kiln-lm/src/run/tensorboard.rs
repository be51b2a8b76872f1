//! Scalars as TensorBoard event files: protobuf events in TFRecord frames.

use super::disk::{DiskError, create_folder, named};
use super::metrics::Record;
use prost::Message;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// `tensorflow.Event`, the fields that are used.
#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

/// `tensorflow.Event.what`.
#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// `tensorflow.Summary`.
#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

/// `tensorflow.Summary.Value`, the scalar form.
#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    // Optional, as a member of a oneof is: a plain field would not write a value of 0.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// `tensorflow.SessionLog`.
#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// `tensorflow.SessionLog.SessionStatus.START`.
const START: i32 = 1;

/// Writes records as scalars `train/loss`, `validation/loss` and so on.
#[derive(Debug)]
pub struct EventWriter {
    file: File,
    path: PathBuf,
}

impl EventWriter {
    /// Starts a new event file in `dir`, which is created if need be.
    ///
    /// `Some(step)` tells TensorBoard that the run went on after that step, so that it drops what
    /// earlier files of the folder hold of later ones.
    pub fn create(dir: &Path, resume_from_step: Option<u64>) -> Result<Self, DiskError> {
        create_folder(dir)?;
        let (file, path) = new_file(dir)?;
        let mut writer = Self { file, path };
        writer.write(0, What::FileVersion("brain.Event:2".into()))?;
        if let Some(step) = resume_from_step {
            writer.write(step.saturating_add(1), What::SessionLog(SessionLog { status: START }))?;
        }
        Ok(writer)
    }

    /// Adds the values of a record, under the names `<kind>/<name>`.
    pub fn log(&mut self, record: &Record) -> Result<(), DiskError> {
        let scalar = |(name, value): (&String, &f64)| Scalar {
            tag: format!("{}/{name}", record.kind.as_str()),
            simple_value: Some(*value as f32),
        };
        let value = record.values.iter().map(scalar).collect();
        self.write(record.step, What::Summary(Summary { value }))
    }

    /// The event file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn write(&mut self, step: u64, what: What) -> Result<(), DiskError> {
        let wall_time = since_epoch().as_secs_f64();
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let event = Event { wall_time, step, what: Some(what) };
        // One unbuffered write for the frame, so that TensorBoard sees it at once.
        named(self.file.write_all(&frame(&event.encode_to_vec())), "write", &self.path)
    }
}

/// Time since 1970; 0 for a clock set before it.
fn since_epoch() -> std::time::Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Creates `events.out.tfevents.<seconds>.<host>.kiln` under a name that is not taken yet.
fn new_file(dir: &Path) -> Result<(File, PathBuf), DiskError> {
    let host = host();
    let mut seconds = since_epoch().as_secs();
    loop {
        let path = dir.join(format!("events.out.tfevents.{seconds:010}.{host}.kiln"));
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            // TensorBoard reads the files in the order of their names: one of a run that is
            // resumed within the second comes after.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => seconds += 1,
            opened => return Ok((named(opened, "create", &path)?, path)),
        }
    }
}

/// Name of this machine, reduced to what is harmless in a file name.
fn host() -> String {
    let name = std::env::var("HOSTNAME")
        .or_else(|_| fs::read_to_string("/etc/hostname"))
        .unwrap_or_default();
    let plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let name: String = name.trim().chars().filter(plain).take(64).collect();
    if name.is_empty() { "localhost".into() } else { name }
}

/// A TFRecord frame: length, its checksum, the data, its checksum.
fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut frame = Vec::with_capacity(data.len() + 16);
    frame.extend_from_slice(&length);
    frame.extend_from_slice(&masked_crc(&length).to_le_bytes());
    frame.extend_from_slice(data);
    frame.extend_from_slice(&masked_crc(data).to_le_bytes());
    frame
}

/// CRC-32C, rotated and offset as TFRecord wants it.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::super::metrics::Kind;
    use super::*;

    /// Takes a file apart, checking every checksum.
    fn events(path: &Path) -> Vec<Event> {
        let bytes = fs::read(path).expect("read");
        let mut rest = bytes.as_slice();
        let mut take = |count: usize| {
            let (taken, left) = rest.split_at_checked(count).expect("a whole frame");
            rest = left;
            (taken, left.is_empty())
        };
        let unmask = |crc: &[u8]| {
            let crc = u32::from_le_bytes(crc.try_into().expect("four bytes"));
            crc.wrapping_sub(0xa282_ead8).rotate_left(15)
        };
        let mut events = Vec::new();
        loop {
            let length = take(8).0;
            assert_eq!(unmask(take(4).0), crc32c::crc32c(length));
            let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
            let data = take(length as usize).0;
            let (crc, end) = take(4);
            assert_eq!(unmask(crc), crc32c::crc32c(data));
            events.push(Event::decode(data).expect("an event"));
            if end {
                return events;
            }
        }
    }

    #[test]
    fn the_first_frame_is_the_one_tensorflow_writes() {
        // The 24 bytes of the version record are the same in every file but for the time.
        let event = Event {
            wall_time: 1.5,
            step: 0,
            what: Some(What::FileVersion("brain.Event:2".into())),
        };
        let bytes = frame(&event.encode_to_vec());
        assert_eq!(&bytes[..8], 24u64.to_le_bytes());
        // Checksum of the length 24, as at the start of any event file.
        assert_eq!(&bytes[8..12], [0xa3, 0x7f, 0x4b, 0x22]);
        assert_eq!(&bytes[12..21], [9, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f]);
        assert_eq!(&bytes[21..36], b"\x1a\x0dbrain.Event:2");
        assert_eq!(bytes.len(), 40);
    }

    #[test]
    fn records_become_scalars() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("tensorboard");
        let mut writer = EventWriter::create(&dir, None).expect("created");
        let train = Record::new(Kind::Train, 10).with("loss", 2.5).with("learning_rate", 0.0);
        let validation = Record::new(Kind::Validation, 20).with("loss", f64::NAN);
        writer.log(&train).expect("logged");
        writer.log(&validation).expect("logged");

        let name = writer.path().file_name().and_then(|name| name.to_str()).expect("a name");
        assert!(name.starts_with("events.out.tfevents.") && name.ends_with(".kiln"), "{name}");
        let events = events(writer.path());
        assert_eq!(events.len(), 3);
        assert_eq!(events[0].what, Some(What::FileVersion("brain.Event:2".into())));
        assert!(events.iter().all(|event| event.wall_time > 1.7e9));
        assert_eq!((events[1].step, events[2].step), (10, 20));
        let Some(What::Summary(summary)) = &events[1].what else { panic!("{events:?}") };
        let scalar = |tag: &str, value| Scalar { tag: tag.into(), simple_value: Some(value) };
        assert_eq!(summary.value, [scalar("train/learning_rate", 0.0), scalar("train/loss", 2.5)]);
        let Some(What::Summary(summary)) = &events[2].what else { panic!("{events:?}") };
        assert!(summary.value[0].simple_value.is_some_and(f32::is_nan));
    }

    #[test]
    fn a_resumed_run_has_a_later_file_that_drops_what_was_undone() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = EventWriter::create(folder.path(), None).expect("created");
        let second = EventWriter::create(folder.path(), Some(100)).expect("created");
        assert!(second.path() > first.path());
        let events = events(second.path());
        assert_eq!(events[1].step, 101);
        assert_eq!(events[1].what, Some(What::SessionLog(SessionLog { status: START })));
    }
}
