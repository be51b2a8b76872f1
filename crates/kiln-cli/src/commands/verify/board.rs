//! What is seen of a verification: rows as they are done and, where stderr is a terminal, a bar below them.

use super::table::Table;
use super::worker::Event;
use crate::progress;
use crate::stderr::say;
use crate::stdout::print;
use burn::tensor::Device;
use indicatif::ProgressBar;
use kiln_bench::gate::{self, Report, Row};
use std::time::{Duration, Instant};

/// Shows rows and keeps their reports.
pub struct Board<'a> {
    rows: &'a [Row],
    device: &'a Device,
    table: Table,
    bar: ProgressBar,
    /// Rows that are being verified, and since when.
    running: Vec<(usize, Instant)>,
    reports: Vec<Option<Report>>,
}

impl<'a> Board<'a> {
    /// For these rows; prints the headings.
    pub fn new(rows: &'a [Row], device: &'a Device) -> Self {
        let table = Table::new(rows);
        print(table.headings());
        let bar = progress::rows(rows.len());
        Self { rows, device, table, bar, running: vec![], reports: vec![None; rows.len()] }
    }

    /// Shows what happened.
    pub fn show(&mut self, event: Event) {
        match event {
            Event::Started(row) => self.running.push((row, Instant::now())),
            Event::Finished(row, report) => self.finished(row, report),
            Event::Said(line) => {
                self.bar.suspend(|| say(line));
            }
        }
        let running = self.running.iter().map(|(row, _)| self.rows[*row].to_string());
        self.bar.set_message(running.collect::<Vec<_>>().join(", "));
    }

    fn finished(&mut self, row: usize, report: Result<Report, String>) {
        let place = self.running.iter().position(|(running, _)| *running == row);
        let time = place.map_or(Duration::ZERO, |place| self.running.remove(place).1.elapsed());
        let report =
            report.unwrap_or_else(|why| gate::unfinished(&self.rows[row], self.device, why));
        let line = self.table.row(&report, time);
        self.bar.suspend(|| print(line));
        self.bar.inc(1);
        self.reports[row] = Some(report);
    }

    /// Removes the bar; the reports in the order of the rows.
    pub fn finish(self) -> Vec<Report> {
        self.bar.finish_and_clear();
        self.reports.into_iter().flatten().collect()
    }
}
