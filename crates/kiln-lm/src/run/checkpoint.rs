//! A store of checkpoints by step that never loses a good one: saves are complete or invisible,
//! reads are verified, and the last few and the best stay.

use super::disk::{self, DiskError, named};
use super::manifest::{Damage, MANIFEST, Manifest, is_plain_name};
use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::fs;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Prefix of a folder that is being written.
const SAVING: &str = ".saving-";
/// Prefix of a checkpoint that another of the same step takes the place of.
const REPLACED: &str = ".replaced-";
/// Prefix of a checkpoint that is being removed.
const PRUNED: &str = ".pruned-";

/// Why a checkpoint cannot be saved or read.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The filesystem refused.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// A file cannot have this name in a checkpoint.
    #[error("a checkpoint cannot hold a file named {name:?}: {expected}")]
    FileName {
        /// The name.
        name: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// The manifest cannot be written.
    #[error("cannot write the manifest of step {step}: {reason}")]
    Manifest {
        /// Step of the checkpoint.
        step: u64,
        /// What was wrong.
        reason: serde_json::Error,
    },
    /// There are checkpoints, and all are damaged.
    #[error(
        "no checkpoint in {} is whole: {}", dir.display(),
        rejected.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    NoneValid {
        /// Folder of the store.
        dir: PathBuf,
        /// Every checkpoint and what is wrong with it.
        rejected: Vec<Rejected>,
    },
    /// The checkpoint holds no file of this name.
    #[error("{} holds no file {name:?}, only {held}", path.display())]
    NoSuchFile {
        /// Folder of the checkpoint.
        path: PathBuf,
        /// The name.
        name: String,
        /// The names it holds.
        held: String,
    },
    /// A file changed after the checkpoint was found whole.
    #[error("{}: {damage}", path.display())]
    Damaged {
        /// Folder of the checkpoint.
        path: PathBuf,
        /// What is wrong.
        damage: Damage,
    },
}

/// A checkpoint that was passed over.
#[derive(Debug)]
pub struct Rejected {
    /// Name of its folder.
    pub name: String,
    /// What is wrong with it.
    pub damage: Damage,
}

impl Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.damage)
    }
}

/// A whole checkpoint, and those that would have come before it and are not whole.
#[derive(Debug)]
pub struct Found {
    /// `None` if there is none.
    pub checkpoint: Option<Checkpoint>,
    /// Checkpoints that were passed over.
    pub rejected: Vec<Rejected>,
}

/// A saved checkpoint.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
}

impl Checkpoint {
    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Validation loss, where it was measured and finite.
    pub fn validation_loss(&self) -> Option<f64> {
        self.manifest.validation_loss
    }

    /// Folder of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a file, and checks it against the manifest once more.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let Some(entry) = self.manifest.files.get(name) else {
            let held: Vec<&str> = self.manifest.files.keys().map(String::as_str).collect();
            return Err(CheckpointError::NoSuchFile {
                path: self.path.clone(),
                name: name.to_string(),
                held: held.join(", "),
            });
        };
        let path = self.path.join(name);
        let bytes = named(fs::read(&path), "read", &path)?;
        entry
            .check(name, &bytes)
            .map_err(|damage| CheckpointError::Damaged { path: self.path.clone(), damage })?;
        Ok(bytes)
    }
}

/// A folder of checkpoints, `step-00001000` and so on.
///
/// One process at a time may save to it; any number may read it meanwhile, through
/// [`CheckpointStore::view`].
#[derive(Debug, Clone)]
pub struct CheckpointStore {
    dir: PathBuf,
    keep: usize,
}

impl CheckpointStore {
    /// Opens a store to save to, creating its folder if need be, and tidies up after a save that
    /// was interrupted. `keep` is the number of checkpoints that stay beside the best one; the
    /// one saved last always stays.
    pub fn open(dir: impl Into<PathBuf>, keep: usize) -> Result<Self, CheckpointError> {
        let store = Self { dir: dir.into(), keep };
        disk::create_folder(&store.dir)?;
        store.recover()?;
        Ok(store)
    }

    /// Opens a store to read from. It changes nothing, so that it is safe beside a process that
    /// saves; a folder that does not exist reads as empty.
    pub fn view(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), keep: usize::MAX }
    }

    /// Saves the checkpoint of a step, replacing the one that is there; returns its folder.
    ///
    /// All is written to a temporary folder and synced before it takes its name. Afterwards old
    /// checkpoints are pruned; that this fails is logged and no error, for the checkpoint is safe.
    pub fn save(
        &self,
        step: u64,
        files: &[(&str, &[u8])],
        validation_loss: Option<f64>,
    ) -> Result<PathBuf, CheckpointError> {
        check_names(files)?;
        let manifest = Manifest::new(step, validation_loss, files)
            .to_json()
            .map_err(|reason| CheckpointError::Manifest { step, reason })?;
        let saving = self.temporary(SAVING, step);
        let written = write_all(&saving, files, &manifest).and_then(|()| self.put(&saving, step));
        if let Err(error) = written {
            // A full disk is a likely reason: leave no part of a checkpoint on it.
            let _ = disk::remove_folder(&saving);
            return Err(error.into());
        }
        if let Err(error) = self.prune(step) {
            tracing::warn!("old checkpoints stay: {error}");
        }
        Ok(self.path(step))
    }

    /// The newest checkpoint whose every file is as it was saved, and the newer ones that had to
    /// be passed over; an error if there are checkpoints and none is whole.
    pub fn latest(&self) -> Result<Found, CheckpointError> {
        let mut rejected = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            match self.verified(step) {
                Ok(checkpoint) => return Ok(Found { checkpoint: Some(checkpoint), rejected }),
                Err(damage) => rejected.push(Rejected { name: folder_name(step), damage }),
            }
        }
        if rejected.is_empty() {
            return Ok(Found { checkpoint: None, rejected });
        }
        Err(CheckpointError::NoneValid { dir: self.dir.clone(), rejected })
    }

    /// The whole checkpoint with the lowest validation loss, if one has a validation loss; and, of those that are not whole,
    /// the ones with a lower loss and the ones whose loss cannot be read.
    pub fn best(&self) -> Result<Found, CheckpointError> {
        let (readable, mut rejected) = self.readable()?;
        for candidate in by_loss(&readable) {
            match candidate.manifest.verify(&candidate.path) {
                Ok(()) => return Ok(Found { checkpoint: Some(candidate.clone()), rejected }),
                Err(damage) => {
                    rejected.push(Rejected { name: folder_name(candidate.step()), damage });
                }
            }
        }
        Ok(Found { checkpoint: None, rejected })
    }

    fn path(&self, step: u64) -> PathBuf {
        self.dir.join(folder_name(step))
    }

    fn temporary(&self, prefix: &str, step: u64) -> PathBuf {
        self.dir.join(format!("{prefix}{}", folder_name(step)))
    }

    /// Names in the folder of the store.
    fn names(&self) -> Result<Vec<String>, DiskError> {
        let list = || -> std::io::Result<Vec<String>> {
            if !self.dir.try_exists()? {
                return Ok(Vec::new());
            }
            let names = fs::read_dir(&self.dir)?.map(|entry| Ok(entry?.file_name()));
            // Names of checkpoints are ASCII; others do not matter.
            names.filter_map(|name| name.map(|name| name.into_string().ok()).transpose()).collect()
        };
        named(list(), "list the folder", &self.dir)
    }

    /// Steps of all checkpoints, whole or not, in order.
    fn steps(&self) -> Result<BTreeSet<u64>, DiskError> {
        Ok(self.names()?.iter().filter_map(|name| step_of(name)).collect())
    }

    /// Checkpoints with a manifest and files of the right lengths, and the others, oldest first.
    fn readable(&self) -> Result<(Vec<Checkpoint>, Vec<Rejected>), DiskError> {
        let (mut readable, mut rejected) = (Vec::new(), Vec::new());
        for step in self.steps()? {
            match self.checkpoint(step) {
                Ok(checkpoint) => readable.push(checkpoint),
                Err(damage) => rejected.push(Rejected { name: folder_name(step), damage }),
            }
        }
        Ok((readable, rejected))
    }

    fn checkpoint(&self, step: u64) -> Result<Checkpoint, Damage> {
        let path = self.path(step);
        let manifest = Manifest::read(&path, step)?;
        Ok(Checkpoint { path, manifest })
    }

    fn verified(&self, step: u64) -> Result<Checkpoint, Damage> {
        let checkpoint = self.checkpoint(step)?;
        checkpoint.manifest.verify(&checkpoint.path)?;
        Ok(checkpoint)
    }

    /// Gives a complete folder the name of its step.
    fn put(&self, saving: &Path, step: u64) -> Result<(), DiskError> {
        let (path, replaced) = (self.path(step), self.temporary(REPLACED, step));
        let replaces = path.exists();
        if replaces {
            // A folder cannot be renamed over another. Between the two renames the old one is
            // under its temporary name, from which `recover` brings it back.
            disk::remove_folder(&replaced)?;
            disk::rename(&path, &replaced)?;
        }
        if let Err(error) = disk::rename(saving, &path) {
            if replaces {
                let _ = disk::rename(&replaced, &path);
            }
            return Err(error);
        }
        disk::sync_folder(&self.dir)?;
        disk::remove_folder(&replaced)
    }

    /// Removes what interrupted saves left, and brings back a checkpoint that was about to be
    /// replaced.
    fn recover(&self) -> Result<(), DiskError> {
        for name in self.names()? {
            let path = self.dir.join(&name);
            let replaced = name.strip_prefix(REPLACED).and_then(step_of);
            if let Some(step) = replaced.filter(|step| !self.path(*step).exists()) {
                disk::rename(&path, &self.path(step))?;
                disk::sync_folder(&self.dir)?;
            } else if [SAVING, REPLACED, PRUNED].iter().any(|prefix| name.starts_with(prefix)) {
                tracing::info!("removing {}, left by an interrupted save", path.display());
                disk::remove_folder(&path)?;
            }
        }
        Ok(())
    }

    /// Removes all but the last `keep`, the best and the one of step `saved`.
    ///
    /// Damaged checkpoints do not count and are not touched: what cannot be read now may be
    /// readable later, and one that replaces them removes them.
    fn prune(&self, saved: u64) -> Result<(), DiskError> {
        let (readable, _) = self.readable()?;
        let best = by_loss(&readable).first().map(|checkpoint| checkpoint.step());
        let old = readable.len().saturating_sub(self.keep);
        for checkpoint in &readable[..old] {
            let step = checkpoint.step();
            if step != saved && Some(step) != best {
                // Renamed first, so that a checkpoint never stands there half removed.
                let pruned = self.temporary(PRUNED, step);
                disk::remove_folder(&pruned)?;
                disk::rename(&checkpoint.path, &pruned)?;
                disk::remove_folder(&pruned)?;
            }
        }
        Ok(())
    }
}

/// Checkpoints with a validation loss, the lowest first and, of equals, the newest.
fn by_loss(checkpoints: &[Checkpoint]) -> Vec<&Checkpoint> {
    let mut measured: Vec<(f64, &Checkpoint)> = checkpoints
        .iter()
        .filter_map(|checkpoint| checkpoint.validation_loss().map(|loss| (loss, checkpoint)))
        .collect();
    measured.sort_by(|(a, first), (b, second)| {
        a.total_cmp(b).then_with(|| second.step().cmp(&first.step()))
    });
    measured.into_iter().map(|(_, checkpoint)| checkpoint).collect()
}

fn folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a checkpoint's folder; `None` for any other name.
fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (folder_name(step) == name).then_some(step)
}

fn check_names(files: &[(&str, &[u8])]) -> Result<(), CheckpointError> {
    let mut seen = BTreeSet::new();
    for (name, _) in files {
        let refuse = |expected| CheckpointError::FileName { name: name.to_string(), expected };
        if !is_plain_name(name) {
            return Err(refuse("expected a plain file name other than manifest.json"));
        }
        if !seen.insert(*name) {
            return Err(refuse("it is given twice"));
        }
    }
    Ok(())
}

/// Writes a complete checkpoint into a new folder and waits until it is on the disk.
fn write_all(folder: &Path, files: &[(&str, &[u8])], manifest: &[u8]) -> Result<(), DiskError> {
    disk::remove_folder(folder)?;
    disk::create_folder(folder)?;
    for (name, bytes) in files {
        disk::write_file(&folder.join(name), bytes)?;
    }
    disk::write_file(&folder.join(MANIFEST), manifest)?;
    disk::sync_folder(folder)
}

#[cfg(test)]
mod tests;
