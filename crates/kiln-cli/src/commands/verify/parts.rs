//! The rows of the gate in parts, verified in this process or by several.

use super::worker::{self, Event};
use anyhow::Context;
use burn::tensor::DType;
use kiln_bench::gate::{self, Options, Report, Row};
use kiln_bench::registry::Operator;
use kiln_ops::device::{self, Opened};
use std::collections::BTreeMap;
use std::process::Command;

/// Rows of some operators on a device, and the parts that they are verified in. A worker that is given the same
/// operators has the same parts under the same numbers.
pub struct Parts<'a> {
    opened: &'a Opened,
    ops: Vec<&'static str>,
    /// The only element type, if there is one.
    dtype: Option<DType>,
    rows: Vec<Row>,
    parts: Vec<Part>,
    does: Does,
}

/// What is done with a part.
#[derive(Clone, Copy)]
enum Does {
    /// Its cases are verified.
    Verify { seed: u64, fuzz: usize },
    /// A call is made so many times.
    Stress { calls: usize },
}

/// A part of the row of this number.
struct Part {
    row: usize,
    part: usize,
}

impl<'a> Parts<'a> {
    /// In the order in which they are to be taken; of one element type, or of all.
    pub fn new(
        ops: &[&'static dyn Operator],
        opened: &'a Opened,
        dtype: Option<DType>,
        Options { seed, fuzz, .. }: Options,
    ) -> Self {
        Self::of_rows(ops, opened, dtype, Does::Verify { seed, fuzz }, |row| {
            row.parts(fuzz, &opened.device)
        })
    }

    /// For [stress](gate::stress), by so many calls: a row is one part.
    pub fn stressed(
        ops: &[&'static dyn Operator],
        opened: &'a Opened,
        dtype: Option<DType>,
        calls: usize,
    ) -> Self {
        Self::of_rows(ops, opened, dtype, Does::Stress { calls }, |_| 1)
    }

    fn of_rows(
        ops: &[&'static dyn Operator],
        opened: &'a Opened,
        dtype: Option<DType>,
        does: Does,
        count: impl Fn(&Row) -> usize,
    ) -> Self {
        let mut rows = gate::rows(ops, &opened.device);
        rows.retain(|row| dtype.is_none_or(|dtype| row.dtype == dtype));
        let all = |row: usize| (0..count(&rows[row])).map(move |part| Part { row, part });
        let parts = order(&rows).into_iter().flat_map(all).collect();
        let ops = ops.iter().map(|op| op.spec().name).collect();
        Self { opened, ops, dtype, rows, parts, does }
    }

    /// The rows, in the order of the operators.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The row of a part.
    pub fn row(&self, part: usize) -> usize {
        self.parts[part].row
    }

    /// The parts of the rows that are wanted.
    pub fn of(&self, wanted: impl Fn(&Row) -> bool) -> Vec<usize> {
        (0..self.parts.len()).filter(|part| wanted(&self.rows[self.row(*part)])).collect()
    }

    /// The report of a part whose process ended before, and how.
    pub fn unfinished(&self, part: usize, why: String) -> Report {
        let row = &self.rows[self.row(part)];
        let options = match self.does {
            Does::Verify { seed, fuzz } => Some(Options { seed, fuzz, family: row.family }),
            Does::Stress { .. } => None,
        };
        gate::unfinished(row, &self.opened.device, options, why)
    }

    fn verify(&self, part: usize) -> Report {
        let Part { row, part } = self.parts[part];
        let Row { op, dtype, family } = self.rows[row];
        let device = &self.opened.device;
        match self.does {
            Does::Verify { seed, fuzz } => {
                gate::verify_part(op, dtype, device, Options { seed, fuzz, family }, part)
            }
            Does::Stress { calls } => gate::stress(op, dtype, device, family, calls),
        }
    }

    /// Verifies parts as a worker.
    pub fn serve(&self) -> anyhow::Result<()> {
        worker::serve(self.parts.len(), |part| self.verify(part))
    }

    /// Verifies these parts by so many processes, or in this one.
    pub fn each(
        &self,
        parts: &[usize],
        jobs: usize,
        mut show: impl FnMut(Event),
    ) -> anyhow::Result<()> {
        if jobs.min(parts.len()) <= 1 {
            for &part in parts {
                show(Event::Started(part));
                show(Event::Finished(part, Box::new(Ok(self.verify(part)))));
            }
            return Ok(());
        }
        let program = std::env::current_exe().context("cannot find this program")?;
        let command = || {
            let mut command = Command::new(&program);
            command.args(["verify", "--worker", "--device", self.opened.name.as_str()]);
            match self.does {
                Does::Verify { seed, fuzz } => {
                    command.args(["--seed", &seed.to_string(), "--fuzz", &fuzz.to_string()])
                }
                Does::Stress { calls } => command.arg(format!("--stress={calls}")),
            };
            if let Some(dtype) = self.dtype {
                command.args(["--dtype", dtype.name()]);
            }
            command.args(&self.ops);
            command
        };
        worker::share(parts, jobs, &command, show);
        Ok(())
    }

    /// One process for each core, up to 16, if the device has 4 GiB for each: CUDA takes half a gigabyte for a
    /// process before there is a tensor. Eight where it does not tell its memory.
    pub fn jobs(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let memory = device::memory(&self.opened.device);
        cores.min(memory.map_or(8, |bytes| (bytes >> 32) as usize)).clamp(1, 16)
    }
}

/// The reports of parts of one row. They come to the same in whatever order they came.
#[derive(Clone, Default)]
pub struct Found(BTreeMap<usize, Report>);

impl Found {
    /// Takes in that of a part.
    pub fn add(&mut self, part: usize, report: Report) {
        self.0.insert(part, report);
    }

    /// Parts so far.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// What they come to; none of nothing.
    pub fn whole(self) -> Option<Report> {
        self.0.into_values().reduce(|mut whole, part| {
            whole.add(part);
            whole
        })
    }
}

/// The order in which rows are taken: operators made of products first, which have the most kernels, and
/// families last, of which what runs by itself has then compiled some.
fn order(rows: &[Row]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&i| (rows[i].family.is_some(), rows[i].op.families().is_empty()));
    order
}
