//! `kiln verify`: the correctness gate, row by row.

mod board;
mod table;
mod worker;

use super::{positive, whole};
use crate::stderr::say;
use crate::stdout::print;
use anyhow::Context;
use board::Board;
use burn::tensor::Device;
use kiln_bench::gate::{self, Options, Row};
use kiln_ops::device;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use worker::Event;

/// Arguments of `kiln verify`.
#[derive(clap::Args)]
pub struct Args {
    /// Operators; all if none is named.
    ops: Vec<String>,
    /// auto, cuda, cuda:INDEX, wgpu, vulkan, cpu or ndarray.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Write the reports to this file too.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Seed of the data.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true, value_parser = whole::<u64>)]
    seed: u64,
    /// Random cases for each operator and element type, at most 100000.
    #[arg(long, default_value_t = 8, allow_negative_numbers = true, value_parser = cases)]
    fuzz: usize,
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
    let ops = super::operators(&args.ops)?;
    let opened = device::open(&args.device)?;
    super::expect_writable(args.json.as_deref())?;
    if !args.worker {
        say(format_args!("device: {}", opened.why));
    }
    let rows = gate::rows(&ops, &opened.device);
    let parts: Vec<Part> = order(&rows)
        .into_iter()
        .flat_map(|row| (0..rows[row].parts(args.fuzz)).map(move |part| Part { row, part }))
        .collect();
    let verify = |&Part { row, part }: &Part| {
        let Row { op, dtype, family } = rows[row];
        let options = Options { seed: args.seed, fuzz: args.fuzz, family };
        gate::verify_part(op, dtype, &opened.device, options, part)
    };
    if args.worker {
        worker::serve(&parts, verify)?;
        return Ok(ExitCode::SUCCESS);
    }
    let jobs = args.jobs.map_or_else(|| default_jobs(&opened.device), usize::from);
    let mut board = Board::new(&rows, &parts, &opened.device);
    if jobs.min(parts.len()) <= 1 {
        for (i, part) in parts.iter().enumerate() {
            board.show(Event::Started(i));
            board.show(Event::Finished(i, Ok(verify(part))));
        }
    } else {
        let program = std::env::current_exe().context("cannot find this program")?;
        let command = || {
            let mut command = Command::new(&program);
            command.args(["verify", "--worker", "--device", opened.name.as_str()]);
            command.args(["--seed", &args.seed.to_string(), "--fuzz", &args.fuzz.to_string()]);
            command.args(&args.ops);
            command
        };
        worker::share(parts.len(), jobs, &command, |event| board.show(event));
    }
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
    print(format_args!("{} green, {red} red, on {}", reports.len() - red, opened.name));
    if let Some(path) = args.json {
        let text = serde_json::to_string_pretty(&reports)?;
        super::write(&path, &text)?;
    }
    Ok(if red == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// A number of random cases for clap: all of a row are drawn before the first one runs.
fn cases(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| *number <= 100_000);
    number.ok_or_else(|| "expected a whole number, 0 or more and at most 100000".into())
}

/// One for each core, up to 16, if the device has 4 GiB for each: CUDA takes half a gigabyte for a process
/// before there is a tensor. Eight where it does not tell its memory.
fn default_jobs(device: &Device) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let room = device::memory(device).map_or(8, |bytes| (bytes >> 32) as usize);
    cores.min(room).clamp(1, 16)
}

/// A part of the row of this number.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Part {
    row: usize,
    part: usize,
}

/// The order in which rows are taken: operators made of products first, which have the most kernels, and
/// families last, of which what runs by itself has then compiled some.
fn order(rows: &[Row]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&i| (rows[i].family.is_some(), !rows[i].op.tiled()));
    order
}
