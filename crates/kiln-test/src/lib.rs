//! Tests that leave something out say so, and fail where it must not be left out.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::panic::Location;

pub mod cupti;

/// What must not be left out: names with commas between them, as `cuda,wgpu`.
pub const REQUIRE: &str = "KILN_REQUIRE";

/// The names there are.
const NAMES: [&str; 8] = ["cuda", "wgpu", "kernels", "mma", "wgmma", "large", "offline", "toolkit"];

/// A file in which [`skip`] writes what is left out, a line each.
pub const SKIPPED: &str = "KILN_SKIPPED";

/// The names in a list.
fn names(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|one| !one.is_empty())
}

/// What is required.
///
/// # Panics
///
/// If that is none of [`NAMES`]: nothing would ever fail by it.
#[track_caller]
fn required() -> String {
    let required = std::env::var(REQUIRE).unwrap_or_default();
    if let Err(error) = known(&required) {
        panic!("{error}");
    }
    required
}

fn known(required: &str) -> Result<(), String> {
    match names(required).find(|one| !NAMES.contains(one)) {
        Some(unknown) => {
            Err(format!("{REQUIRE} names {unknown}, expected some of {}", NAMES.join(", ")))
        }
        None => Ok(()),
    }
}

/// What is said of something that is left out, on one line; an error where it is `required`, or where it or something that
/// is required is none of [`NAMES`], which nothing would ever fail by.
fn left_out(name: &str, why: impl Display, required: &str) -> Result<String, String> {
    known(required)?;
    if !NAMES.contains(&name) {
        return Err(format!("{name} cannot be required, expected one of {}", NAMES.join(", ")));
    }
    let why = why.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    match names(required).any(|one| one == name) {
        true => Err(format!("{REQUIRE} names {name}: {why}")),
        false => Ok(format!("SKIPPED on {name}: {why}")),
    }
}

/// Says what a test leaves out: a device, as `wgpu`, or something that devices may have: `kernels`, `wgmma`, `mma`. What a
/// test that passes has said nobody sees, so it is also a line of the file that [`SKIPPED`] names.
///
/// # Panics
///
/// If [`REQUIRE`] names it, or the file cannot be written.
#[track_caller]
pub fn skip(name: &str, why: impl Display) {
    let line = match left_out(name, why, &required()) {
        Ok(line) => line,
        Err(error) => panic!("{error}"),
    };
    eprintln!("{line}");
    if let Ok(path) = std::env::var(SKIPPED) {
        let (file, thread) = (Location::caller().file(), std::thread::current());
        let line = format!("{file}, {}: {line}\n", thread.name().unwrap_or("a thread"));
        let opened = OpenOptions::new().create(true).append(true).open(&path);
        if let Err(error) = opened.and_then(|mut file| file.write_all(line.as_bytes())) {
            panic!("{SKIPPED} {path}: {error}");
        }
    }
}

/// What was found of something; [`skip`]s it where that is nothing.
#[track_caller]
pub fn or_skip<T>(name: &str, found: impl Iterator<Item = T>) -> Vec<T> {
    let found: Vec<T> = found.collect();
    if found.is_empty() {
        skip(name, "no device here has it");
    }
    found
}

/// Says that tests on these devices leave others out, those that [`REQUIRE`] names.
///
/// # Panics
///
/// If there is one.
#[track_caller]
pub fn only(open: &[&str]) {
    for device in left_aside(open, &required()) {
        skip(device, format!("tests run on {} alone", open.join(" and ")));
    }
}

/// The devices that are `required` and not `open`, where one may have a number, as `cuda:1`.
fn left_aside(open: &[&str], required: &str) -> Vec<&'static str> {
    let is_open = |device: &str| open.iter().any(|one| one.split(':').next() == Some(device));
    let devices = ["cuda", "wgpu"].into_iter();
    devices.filter(|name| names(required).any(|one| one == *name) && !is_open(name)).collect()
}

/// The device that `KILN_DEVICE` names, else wgpu, which may be left out.
///
/// # Panics
///
/// If it is named and does not open.
#[track_caller]
pub fn device<T, E: Display>(open: impl FnOnce(&str) -> Result<T, E>) -> Option<T> {
    let named = std::env::var("KILN_DEVICE");
    only(&[named.as_deref().unwrap_or("wgpu")]);
    match (open(named.as_deref().unwrap_or("wgpu")), named) {
        (Ok(opened), _) => return Some(opened),
        (Err(error), Ok(_)) => panic!("KILN_DEVICE: {error}"),
        (Err(error), Err(_)) => skip("wgpu", error),
    }
    None
}

/// The [`device`], if it runs kernels; else there are no kernels to test.
///
/// # Panics
///
/// As there, and if [`REQUIRE`] names kernels and there are none.
#[track_caller]
pub fn kernels<T, E: Display>(
    open: impl FnOnce(&str) -> Result<T, E>,
    runs: impl FnOnce(&T) -> bool,
) -> Option<T> {
    let found = device(open).filter(runs);
    if found.is_none() {
        skip("kernels", "no device that runs them is open");
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_required_is_not_left_aside() {
        for (open, required, left) in [
            (&["cpu"][..], "wgpu, mma", &["wgpu"][..]),
            (&["cpu"], "cuda,wgpu", &["cuda", "wgpu"]),
            (&["cpu"], "", &[]),
            (&["the CPU", "wgpu"], "cuda,wgpu", &["cuda"]),
            (&["cuda:1"], "cuda", &[]),
        ] {
            assert_eq!(left_aside(open, required), left, "{open:?}, {required}");
        }
    }

    #[test]
    fn what_is_required_is_not_left_out() {
        for (required, fails) in
            [("cuda, wgpu", true), ("wgpu", true), ("cuda", false), ("wgpu2", true), ("", false)]
        {
            assert_eq!(left_out("wgpu", "no driver", required).is_err(), fails, "{required}");
        }
        assert_eq!(left_out("wgpu", "no\ndriver", "").unwrap(), "SKIPPED on wgpu: no driver");
        let unknown = left_out("bf16", "none here", "").unwrap_err();
        assert!(
            unknown.starts_with("bf16 cannot be required, expected one of cuda, "),
            "{unknown}"
        );
    }
}
