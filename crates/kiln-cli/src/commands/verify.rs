//! `kiln verify`: the correctness gate, row by row.

mod board;
pub mod parts;
mod table;
pub mod worker;

use super::{positive, whole};
use crate::stderr::say;
use crate::stdout::print;
use anyhow::bail;
use board::Board;
use kiln_bench::gate::{self, Options, Report};
use kiln_bench::special::Why;
use kiln_ops::device::{self, Opened};
use parts::Parts;
use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `kiln verify`.
#[derive(clap::Args)]
pub struct Args {
    /// Operators; all if none is named.
    ops: Vec<String>,
    /// auto, cuda, cuda:INDEX, wgpu, vulkan, cpu or ndarray.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Only this element type: f32, bf16 or f16; all that the device has if none is given.
    #[arg(long)]
    dtype: Option<String>,
    /// Write the reports to this file too, row by row.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Seed of the data.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true, value_parser = whole::<u64>)]
    seed: u64,
    /// Random cases for each operator and element type, at most 100000.
    #[arg(long, default_value_t = 8, allow_negative_numbers = true, value_parser = cases)]
    fuzz: usize,
    /// Stress instead: a call, forward and backward, so many times, 1000 if no number is given, beside other work of a
    /// device with kernels, the same bits each time; on CUDA at the size of a layer of a 124M model or larger.
    #[arg(
        long,
        value_name = "CALLS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1000",
        allow_negative_numbers = true,
        value_parser = positive,
        conflicts_with_all = ["seed", "fuzz"]
    )]
    stress: Option<NonZeroUsize>,
    /// Processes that verify at a time, 1 for this one alone; as many as cores and memory allow if it is
    /// not given.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    jobs: Option<NonZeroUsize>,
    /// Verify the rows that are asked for on stdin.
    #[arg(long, hide = true)]
    worker: bool,
}

/// Verifies; the exit status is 1 if anything is red.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let (Some(_), Some(number)) =
        (args.stress, args.ops.iter().find_map(|op| op.parse::<u32>().ok()))
    {
        bail!("{number} is no operator; for so many calls: --stress={number}");
    }
    let ops = super::operators(&args.ops)?;
    let dtype = args.dtype.as_deref().map(super::dtype).transpose()?;
    let opened = device::open(&args.device)?;
    if let Some(dtype) = dtype.filter(|dtype| !opened.device.supports_dtype(*dtype)) {
        bail!("{} does not have {}", opened.name, dtype.name());
    }
    super::expect_writable(args.json.as_deref())?;
    if !args.worker {
        say(format_args!("device: {}", opened.why));
    }
    let options = Options { seed: args.seed, fuzz: args.fuzz, family: None };
    let parts = match args.stress {
        Some(calls) => Parts::stressed(&ops, &opened, dtype, calls.into()),
        None => Parts::new(&ops, &opened, dtype, options),
    };
    if let Some(dtype) = dtype {
        let has = |name: &str| parts.rows().iter().any(|row| row.op.spec().name == name);
        let names = ops.iter().map(|op| op.spec().name);
        let without: Vec<&str> = names.filter(|name| !has(name)).collect();
        if parts.rows().is_empty() {
            let rows = gate::rows(&ops, &opened.device);
            let types: BTreeSet<&str> = rows.iter().map(|row| row.dtype.name()).collect();
            let (names, types) = (without.join(", "), Vec::from_iter(types).join(", "));
            bail!("{names}: not verified in {}, expected {types}", dtype.name());
        }
        if !without.is_empty() && !args.worker {
            say(format_args!("{}: not verified in {}", without.join(", "), dtype.name()));
        }
    }
    if args.worker {
        parts.serve()?;
        return Ok(ExitCode::SUCCESS);
    }
    // Stress is of sizes that fill a device, one after another.
    let own = || if args.stress.is_some() { 1 } else { parts.jobs() };
    let jobs = args.jobs.map_or_else(own, usize::from);
    let mut board = Board::new(&parts);
    let json = args.json.as_ref().filter(|path| !super::is_stream(path));
    if let Some(path) = json {
        // What another run left there is none of this one's.
        write_reports(path, &[])?;
    }
    parts.each(&parts.of(|_| true), jobs, |event| {
        let done = board.show(event);
        if let (true, Some(path)) = (done, json) {
            // An error would be that of the whole below.
            let _ = write_reports(path, &board.done());
        }
    })?;
    let reports = board.finish();
    for report in &reports {
        for (check, case, what) in &report.failures {
            let title = check.title();
            let family = report.family.as_ref().map_or_else(String::new, |f| format!(" {f}"));
            let (op, dtype) = (&report.op, &report.dtype);
            print(format_args!("RED {op} {dtype}{family} ({title}) {case}: {what}"));
        }
    }
    let red = reports.iter().filter(|report| !report.green()).count();
    say_left_out(&reports, &opened, dtype.is_none(), args.json.as_deref());
    let what = args.stress.map_or_else(String::new, |calls| {
        format!(": {calls} calls each, whether they are the same and not whether they are right")
    });
    print(format_args!("{} green, {red} red, on {}{what}", reports.len() - red, opened.name));
    if let Some(path) = args.json {
        write_reports(&path, &reports)?;
    }
    Ok(if red == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// What was left out, below the table; element types that the device lacks if all were asked for.
fn say_left_out(reports: &[Report], opened: &Opened, every_type: bool, json: Option<&Path>) {
    let lacks = |what: &str, missing: BTreeSet<&str>| {
        if !missing.is_empty() {
            let missing = Vec::from_iter(missing).join(", ");
            print(format_args!("left out: {what}{missing}, which {} does not have", opened.name));
        }
    };
    if !device::is_cube(&opened.device) {
        print(format_args!(
            "left out: kernels, which do not run on {}: these are the references",
            opened.name
        ));
    }
    let types = reports.iter().flat_map(|report| &report.missing_types);
    if every_type {
        lacks("", types.map(String::as_str).collect());
    }
    let families = reports.iter().flat_map(|report| &report.missing_families);
    let families: BTreeSet<&str> = families.map(String::as_str).collect();
    let of = if families.len() == 1 { "family" } else { "families" };
    lacks(&format!("kernels of the {of} "), families);
    let of = |why: Why| {
        let some = move |report: &&Report| report.left_out.iter().any(|one| one.why == why);
        let name = |Report { op, dtype, .. }: &Report| match why {
            Why::Type | Why::Bound => format!("{op} in {dtype}"),
            _ => op.clone(),
        };
        reports.iter().filter(some).map(name).collect::<BTreeSet<String>>()
    };
    if !of(Why::Device).is_empty() {
        print(format_args!(
            "left out: numbers that are not finite, which {} does not define",
            opened.name
        ));
    }
    for (why, what) in [
        (Why::Operator, "that are not defined"),
        (Why::Type, "whose results the element type does not hold"),
        (Why::Bound, "for which there is no bound"),
    ] {
        let ops = of(why).into_iter().collect::<Vec<_>>().join(", ");
        if !ops.is_empty() {
            let list = match json {
                Some(path) => format!("`left_out` in {}", path.display()),
                None => "--json FILE lists them".into(),
            };
            print(format_args!("left out: numbers {what}, of {ops}; {list}"));
        }
    }
}

fn write_reports(path: &Path, reports: &[Report]) -> anyhow::Result<()> {
    super::write(path, &(serde_json::to_string_pretty(reports)? + "\n"))
}

/// A number of random cases for clap: all of a row are drawn before the first one runs.
fn cases(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| *number <= 100_000);
    number.ok_or_else(|| "expected a whole number, 0 or more and at most 100000".into())
}
