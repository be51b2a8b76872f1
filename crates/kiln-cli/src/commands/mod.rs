//! The subcommands, one file each.

pub mod bench;
pub mod data;
pub mod generate;
pub mod op;
pub mod train;
pub mod verify;

use anyhow::Context;
use std::fs::OpenOptions;
use std::num::NonZeroUsize;
use std::path::Path;
use std::str::FromStr;

/// The operators with these names; all if there are none.
pub fn operators(
    names: &[String],
) -> anyhow::Result<Vec<&'static dyn kiln_bench::registry::Operator>> {
    use kiln_bench::registry;
    if names.is_empty() {
        return Ok(registry::all().to_vec());
    }
    names.iter().map(|name| registry::find(name).map_err(|e| anyhow::anyhow!(e))).collect()
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
    let new = !path.exists();
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map(drop).with_context(|| format!("cannot write {}", path.display()))?;
    // Nothing is left of it if the work fails.
    if new {
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Writes a file.
pub fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The element type of this name.
pub fn dtype(name: &str) -> anyhow::Result<burn::tensor::DType> {
    use burn::tensor::DType;
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        other => anyhow::bail!("unknown element type `{other}`, expected f32, bf16 or f16"),
    }
}
