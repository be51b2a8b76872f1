//! The filesystem steps that durable saves are made of, each with an error that names the path.
//!
//! Tests can cut off the disk after any number of steps, as a kill or a power loss would.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// A filesystem operation that failed.
#[derive(Debug, Error)]
#[error("cannot {action} {}: {reason}", path.display())]
pub struct DiskError {
    /// What was tried: `write`, `rename`, …
    pub action: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// What the system says.
    pub reason: io::Error,
}

/// Gives an I/O result the action and the path it is about.
pub(crate) fn named<T>(
    result: io::Result<T>,
    action: &'static str,
    path: &Path,
) -> Result<T, DiskError> {
    result.map_err(|reason| DiskError { action, path: path.to_path_buf(), reason })
}

/// Creates a folder and its parents.
pub(crate) fn create_folder(path: &Path) -> Result<(), DiskError> {
    named(step().and_then(|()| fs::create_dir_all(path)), "create the folder", path)
}

/// Writes a file and waits until it is on the disk.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), DiskError> {
    let write = || {
        step()?;
        let mut file = File::create(path)?;
        // Two halves, so that tests see torn files.
        let (first, second) = bytes.split_at(bytes.len() / 2);
        file.write_all(first)?;
        step()?;
        file.write_all(second)?;
        step()?;
        file.sync_all()
    };
    named(write(), "write", path)
}

/// Waits until the names in a folder are on the disk.
pub(crate) fn sync_folder(path: &Path) -> Result<(), DiskError> {
    // Only Unix opens folders as files; elsewhere the rename itself is all there is.
    let sync = || if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) };
    named(step().and_then(|()| sync()), "sync the folder", path)
}

/// Renames a file or folder.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), DiskError> {
    named(step().and_then(|()| fs::rename(from, to)), "rename", from)
}

/// Removes a folder and all in it; a folder that is not there is no error.
pub(crate) fn remove_folder(path: &Path) -> Result<(), DiskError> {
    let remove = || {
        step()?;
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    };
    named(remove(), "remove the folder", path)
}

/// Replaces a file as a whole: whoever reads it, after whatever crash, sees the old text or the
/// new one.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), DiskError> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".new");
    let temporary = path.with_file_name(name);
    write_file(&temporary, bytes)?;
    rename(&temporary, path)?;
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync_folder(parent),
        _ => sync_folder(Path::new(".")),
    }
}

#[cfg(not(test))]
fn step() -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
use fault::step;

/// Failures that tests bring about: after a given number of steps, every further one fails.
#[cfg(test)]
pub(crate) mod fault {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    }

    /// Runs `action` on a disk that fails after `steps` steps; true if it got that far.
    pub(crate) fn after<T>(steps: usize, action: impl FnOnce() -> T) -> (T, bool) {
        LEFT.set(Some(steps));
        let result = action();
        // The count stays at 0 only once a step was refused.
        let failed = LEFT.take() == Some(REFUSED);
        (result, failed)
    }

    const REFUSED: usize = usize::MAX;

    pub(super) fn step() -> io::Result<()> {
        match LEFT.get() {
            None => Ok(()),
            Some(0 | REFUSED) => {
                LEFT.set(Some(REFUSED));
                Err(io::Error::other("the disk was cut off"))
            }
            Some(left) => {
                LEFT.set(Some(left - 1));
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_file_is_old_or_new_wherever_the_disk_is_cut_off() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("config.toml");
        for steps in 0.. {
            replace_file(&path, b"old text").expect("written");
            let (result, failed) = fault::after(steps, || replace_file(&path, b"new text!"));
            let seen = fs::read(&path).expect("there");
            assert!(seen == b"old text" || seen == b"new text!", "{steps}: {seen:?}");
            if !failed {
                result.expect("no step failed");
                assert_eq!(seen, b"new text!");
                // Write (3), rename, sync.
                assert_eq!(steps, 5);
                break;
            }
            assert!(result.is_err(), "{steps}");
        }
    }

    #[test]
    fn errors_name_the_action_and_the_path() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("missing/file");
        let line = write_file(&path, b"x").expect_err("no folder").to_string();
        assert!(line.starts_with(&format!("cannot write {}: ", path.display())), "{line}");
        remove_folder(&path).expect("nothing to remove");
    }
}
