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
    } else if is_fifo(path) {
        // Who reads it would take its end for that of what is written.
        return Ok(());
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
    let found = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if !found.is_empty() && !is_svg(&found) {
        bail!("--svg {} is there and no SVG, expected another file", path.display());
    }
    Ok(())
}

/// Whether the first element of a document is `svg`.
fn is_svg(document: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(document) else { return false };
    let mut rest = text.trim_start_matches('\u{feff}').trim_start();
    let before = [("<?", "?>"), ("<!--", "-->"), ("<!", ">")];
    while let Some((_, end)) = before.iter().find(|(begin, _)| rest.starts_with(begin)) {
        rest = rest.split_once(end).map_or("", |(_, behind)| behind.trim_start());
    }
    rest.strip_prefix("<svg").is_some_and(|rest| rest.starts_with([' ', '\n', '\r', '\t', '>']))
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

#[cfg(unix)]
fn is_fifo(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo())
}

#[cfg(not(unix))]
fn is_fifo(_: &Path) -> bool {
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

#[cfg(test)]
mod tests {
    use super::is_svg;

    #[test]
    fn an_svg_begins_with_its_element() {
        let comment = format!(
            "<?xml version=\"1.0\"?>\n<!-- {} -->\n<!DOCTYPE svg>\n<svg>",
            "x".repeat(3000)
        );
        for text in ["<svg xmlns=\"x\"/>", "\u{feff} <svg>", &comment] {
            assert!(is_svg(text.as_bytes()), "{text}");
        }
        for text in ["prompt = \"<svg\"", "<p>an <svg> in a page</p>", "<svgs>", "<!-- <svg>", "\n"]
        {
            assert!(!is_svg(text.as_bytes()), "{text}");
        }
        assert!(!is_svg(b"<svg>\xff"));
    }
}
