//! Files that appear whole or not at all.

use std::fmt::Display;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Writes a file, to a temporary one beside it first; of a link, the file that it leads to.
///
/// # Errors
///
/// One line if something else than a file has this name, or the system refuses.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let failed = |e: &dyn Display| format!("cannot write {}: {e}", path.display());
    let (target, permissions) = target(path)?;
    let mut file = beside(&target).map_err(|e| failed(&e))?;
    // Not `file` itself, whose errors name it.
    let written = file.as_file_mut().write_all(bytes);
    let written = written.and_then(|()| match permissions {
        Some(permissions) => file.as_file().set_permissions(permissions),
        None => Ok(()),
    });
    written.and_then(|()| file.as_file().sync_all()).map_err(|e| failed(&e))?;
    file.persist(&target).map_err(|e| failed(&e.error))?;
    Ok(())
}

/// Refuses what [`write()`] could not begin with.
///
/// # Errors
///
/// As those of [`write()`].
pub fn check(path: &Path) -> Result<(), String> {
    let (target, _) = target(path)?;
    beside(&target).map(drop).map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// The file to replace, with its permissions, or the one to make.
fn target(path: &Path) -> Result<(PathBuf, Option<Permissions>), String> {
    let failed = |e: &dyn Display| format!("cannot write {}: {e}", path.display());
    match fs::metadata(path) {
        Ok(found) if found.is_file() => {
            let target = path.canonicalize().map_err(|e| failed(&e))?;
            Ok((target, Some(found.permissions())))
        }
        Ok(_) => Err(failed(&"it is no regular file, expected a file")),
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(&error)),
        Err(_) if path.is_symlink() => {
            Err(failed(&"it is a link to what is not there, expected a file"))
        }
        Err(_) => Ok((path.to_path_buf(), None)),
    }
}

/// An empty file in the folder of this one, which is removed unless it is renamed.
fn beside(path: &Path) -> Result<NamedTempFile, String> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        return Err(format!("there is no folder {}", folder.display()));
    }
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        // As any other file: the umask decides.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(Permissions::from_mode(0o666));
    }
    // Its kind alone: the error itself names the temporary file.
    let refused =
        |e: io::Error| format!("no file can be made in {}: {}", folder.display(), e.kind());
    builder.tempfile_in(folder).map_err(refused)
}
