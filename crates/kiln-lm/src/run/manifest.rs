//! `manifest.json` of a checkpoint: what the folder must hold, and the check that it does.

use super::disk::{DiskError, named};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use thiserror::Error;

/// Name of the manifest in a checkpoint's folder.
pub(crate) const MANIFEST: &str = "manifest.json";
/// Format that this code writes and reads.
const FORMAT: u32 = 1;

/// What a checkpoint holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    format: u32,
    pub(crate) step: u64,
    pub(crate) validation_loss: Option<f64>,
    pub(crate) files: BTreeMap<String, FileEntry>,
}

/// Length and checksum of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileEntry {
    bytes: u64,
    blake3: String,
}

/// Why a checkpoint is not what was saved.
#[derive(Debug, Error)]
pub enum Damage {
    /// There is no manifest.
    #[error("manifest.json is missing")]
    NoManifest,
    /// The manifest cannot be understood.
    #[error("manifest.json is damaged: {0}")]
    BadManifest(String),
    /// The manifest is of another version of the format.
    #[error("manifest.json is of format {found}, this version reads format {expected}")]
    Format {
        /// Format of the manifest.
        found: u32,
        /// Format that can be read.
        expected: u32,
    },
    /// A file is missing.
    #[error("{file} is missing")]
    NoFile {
        /// Its name.
        file: String,
    },
    /// A file is shorter or longer than it was.
    #[error("{file} is {found} bytes, the manifest says {expected}")]
    Length {
        /// Its name.
        file: String,
        /// Its length.
        found: u64,
        /// Its length when it was saved.
        expected: u64,
    },
    /// A file has other content than it had.
    #[error("{file} was altered: checksum {found}, the manifest says {expected}")]
    Altered {
        /// Its name.
        file: String,
        /// The first digits of its BLAKE3 checksum.
        found: String,
        /// The first digits of its checksum when it was saved.
        expected: String,
    },
    /// A file is there but cannot be read.
    #[error(transparent)]
    Unreadable(#[from] DiskError),
}

/// True for the name of a file inside a folder, rather than a path that may lead elsewhere.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !matches!(name, "" | "." | ".." | MANIFEST) && !name.contains(['/', '\\', ':', '\0'])
}

/// The digits of a checksum that are worth showing.
fn short(checksum: &str) -> String {
    checksum.chars().take(16).collect()
}

impl FileEntry {
    fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_hex().to_string() }
    }

    fn check_length(&self, file: &str, found: u64) -> Result<(), Damage> {
        if found == self.bytes {
            return Ok(());
        }
        Err(Damage::Length { file: file.to_string(), found, expected: self.bytes })
    }

    fn check_checksum(&self, file: &str, found: blake3::Hash) -> Result<(), Damage> {
        let found = found.to_hex();
        if found.as_str() == self.blake3 {
            return Ok(());
        }
        let (found, expected) = (short(&found), short(&self.blake3));
        Err(Damage::Altered { file: file.to_string(), found, expected })
    }

    /// Checks bytes that were read.
    pub(crate) fn check(&self, file: &str, bytes: &[u8]) -> Result<(), Damage> {
        self.check_length(file, bytes.len() as u64)?;
        self.check_checksum(file, blake3::hash(bytes))
    }
}

impl Manifest {
    pub(crate) fn new(step: u64, validation_loss: Option<f64>, files: &[(&str, &[u8])]) -> Self {
        let files =
            files.iter().map(|(name, bytes)| (name.to_string(), FileEntry::of(bytes))).collect();
        // JSON has no NaN, and a loss that is none is never the best.
        let validation_loss = validation_loss.filter(|loss| loss.is_finite());
        Self { format: FORMAT, step, validation_loss, files }
    }

    pub(crate) fn to_json(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec_pretty(self)
    }

    /// Reads the manifest in `folder` and checks that every file is there in its full length.
    pub(crate) fn read(folder: &Path, step: u64) -> Result<Self, Damage> {
        /// The one field that every version has.
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }

        let path = folder.join(MANIFEST);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Damage::NoManifest);
            }
            read => named(read, "read", &path)?,
        };
        let bad = |error: serde_json::Error| Damage::BadManifest(error.to_string());
        let Version { format } = serde_json::from_slice(&text).map_err(bad)?;
        if format != FORMAT {
            return Err(Damage::Format { found: format, expected: FORMAT });
        }
        let manifest: Self = serde_json::from_slice(&text).map_err(bad)?;
        if manifest.step != step {
            let message = format!("it is of step {}", manifest.step);
            return Err(Damage::BadManifest(message));
        }
        for (name, entry) in &manifest.files {
            if !is_plain_name(name) {
                return Err(Damage::BadManifest(format!("{name:?} is no file name")));
            }
            let path = folder.join(name);
            let length = match fs::metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(Damage::NoFile { file: name.clone() });
                }
                metadata => named(metadata, "read", &path)?.len(),
            };
            entry.check_length(name, length)?;
        }
        Ok(manifest)
    }

    /// Checks the content of every file.
    pub(crate) fn verify(&self, folder: &Path) -> Result<(), Damage> {
        for (name, entry) in &self.files {
            let path = folder.join(name);
            let hash = || {
                let mut hasher = blake3::Hasher::new();
                hasher.update_reader(File::open(&path)?)?;
                Ok(hasher.finalize())
            };
            entry.check_checksum(name, named(hash(), "read", &path)?)?;
        }
        Ok(())
    }
}
