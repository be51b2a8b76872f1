//! What is seen of a verification: rows as they are done and, where stderr is a terminal, a bar below them.

use super::Part;
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
    parts: &'a [Part],
    device: &'a Device,
    table: Table,
    bar: ProgressBar,
    /// Parts that are being verified, and since when.
    running: Vec<(usize, Instant)>,
    found: Vec<Found>,
}

/// What the parts of a row have come to.
#[derive(Clone, Default)]
struct Found {
    report: Option<Report>,
    parts: usize,
    time: Duration,
}

impl<'a> Board<'a> {
    /// For these rows, which are made of these parts; prints the headings.
    pub fn new(rows: &'a [Row], parts: &'a [Part], device: &'a Device) -> Self {
        let table = Table::new(rows);
        print(table.headings());
        let bar = progress::rows(rows.len());
        let found = vec![Found::default(); rows.len()];
        Self { rows, parts, device, table, bar, running: vec![], found }
    }

    /// Shows what happened.
    pub fn show(&mut self, event: Event) {
        match event {
            Event::Started(part) => self.running.push((part, Instant::now())),
            Event::Finished(part, report) => self.finished(part, report),
            Event::Said(line) => {
                self.bar.suspend(|| say(line));
            }
        }
        let mut running: Vec<usize> =
            self.running.iter().map(|(part, _)| self.parts[*part].row).collect();
        running.dedup();
        let running = running.into_iter().map(|row| self.rows[row].to_string());
        self.bar.set_message(running.collect::<Vec<_>>().join(", "));
    }

    fn finished(&mut self, part: usize, report: Result<Report, String>) {
        let place = self.running.iter().position(|(running, _)| *running == part);
        let time = place.map_or(Duration::ZERO, |place| self.running.remove(place).1.elapsed());
        let row = self.parts[part].row;
        let report =
            report.unwrap_or_else(|why| gate::unfinished(&self.rows[row], self.device, why));
        let found = &mut self.found[row];
        found.parts += 1;
        found.time += time;
        let whole = match found.report.take() {
            Some(mut whole) => {
                whole.add(report);
                whole
            }
            None => report,
        };
        if found.parts == self.parts.iter().filter(|part| part.row == row).count() {
            let line = self.table.row(&whole, found.time);
            self.bar.suspend(|| print(line));
            self.bar.inc(1);
        }
        found.report = Some(whole);
    }

    /// Removes the bar; the reports in the order of the rows.
    pub fn finish(self) -> Vec<Report> {
        self.bar.finish_and_clear();
        self.found.into_iter().filter_map(|found| found.report).collect()
    }
}
