//! The subcommands, one file each.

pub mod bench;
pub mod curves;
pub mod data;
pub mod generate;
pub mod op;
pub mod train;
pub mod verify;

use anyhow::{Context, anyhow, bail};
use kiln_bench::files;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::num::NonZeroUsize;
use std::path::Path;
use std::str::FromStr;

/// The operators with these names, each once; all if there are none.
pub fn operators(
    names: &[String],
) -> anyhow::Result<Vec<&'static dyn kiln_bench::registry::Operator>> {
    use kiln_bench::registry;
    if names.is_empty() {
        return Ok(registry::all().to_vec());
    }
    let first = names.iter().enumerate().filter(|(index, name)| !names[..*index].contains(name));
    first.map(|(_, name)| registry::find(name).map_err(|e| anyhow!(e))).collect()
}

/// A whole number for clap, whose own words for any other are of invalid digits.
pub fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    let wrong = "expected a whole number, 0 or more and below 2^64";
    text.parse::<T>().map_err(|_| wrong.to_string())
}

/// The same from 1 on.
pub fn positive(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| "expected a whole number, 1 or more".to_string())
}

/// Refuses a file that cannot be written before the work of which it is to hold the results.
pub fn expect_writable(path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    if !is_stream(path) {
        files::check(path).map_err(|e| anyhow!(e))?;
    }
    let new = !path.exists();
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map(drop).with_context(|| format!("cannot write {}", path.display()))?;
    // Nothing is left of it if the work fails.
    if new {
        let _ = fs::remove_file(path);
    }
    Ok(())
}

/// The same of `--svg`, which also refuses to draw over what is no SVG, such as what is drawn.
pub fn expect_drawable(path: Option<&Path>) -> anyhow::Result<()> {
    expect_writable(path)?;
    let Some(path) = path.filter(|path| path.exists() && !is_stream(path)) else { return Ok(()) };
    let mut head = vec![];
    let read = fs::File::open(path).and_then(|file| file.take(1024).read_to_end(&mut head));
    read.with_context(|| format!("cannot read {}", path.display()))?;
    if !head.is_empty() && !head.windows(4).any(|part| part == b"<svg") {
        bail!("--svg {} is there and no SVG, expected another file", path.display());
    }
    Ok(())
}

/// Writes a file, whole or not at all; into a stream as it comes.
pub fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    if is_stream(path) {
        return fs::write(path, text).with_context(|| format!("cannot write {}", path.display()));
    }
    files::write(path, text.as_bytes()).map_err(|e| anyhow!(e))
}

/// Whether what is there is written into, not replaced: a device, a FIFO, or the file that standard output or
/// standard error goes to.
pub fn is_stream(path: &Path) -> bool {
    fs::metadata(path)
        .is_ok_and(|found| !found.is_dir() && (!found.is_file() || is_standard(&found)))
}

#[cfg(unix)]
fn is_standard(found: &fs::Metadata) -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;
    let (stdout, stderr) = (std::io::stdout(), std::io::stderr());
    [stdout.as_fd(), stderr.as_fd()].into_iter().any(|stream| {
        let file = stream.try_clone_to_owned().map(fs::File::from);
        let stream = file.and_then(|file| file.metadata());
        stream.is_ok_and(|stream| (stream.dev(), stream.ino()) == (found.dev(), found.ino()))
    })
}

#[cfg(not(unix))]
fn is_standard(_: &fs::Metadata) -> bool {
    false
}

/// Whether both are one file, also by another path or through a link.
pub fn is_same(a: &Path, b: &Path) -> bool {
    let resolved = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    matches!((resolved(a), resolved(b)), (Ok(a), Ok(b)) if a == b)
}

/// The element type of this name.
pub fn dtype(name: &str) -> anyhow::Result<burn::tensor::DType> {
    use burn::tensor::DType;
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        other => bail!("unknown element type `{other}`, expected f32, bf16 or f16"),
    }
}
