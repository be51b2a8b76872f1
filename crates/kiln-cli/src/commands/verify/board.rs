//! What is seen of a verification: rows as they are done and, where stderr is a terminal, a bar below them.

use super::parts::{Parts, add};
use super::table::Table;
use super::worker::Event;
use crate::progress;
use crate::stderr::say;
use crate::stdout::print;
use indicatif::ProgressBar;
use kiln_bench::gate::Report;
use std::time::{Duration, Instant};

/// Shows rows and keeps their reports.
pub struct Board<'a> {
    parts: &'a Parts<'a>,
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
    left: usize,
    time: Duration,
}

impl<'a> Board<'a> {
    /// For all of these; prints the headings.
    pub fn new(parts: &'a Parts<'a>) -> Self {
        let table = Table::new(parts.rows());
        print(table.headings());
        let bar = progress::rows(parts.rows().len());
        let mut found = vec![Found::default(); parts.rows().len()];
        for part in parts.of(|_| true) {
            found[parts.row(part)].left += 1;
        }
        Self { parts, table, bar, running: vec![], found }
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
            self.running.iter().map(|(part, _)| self.parts.row(*part)).collect();
        running.dedup();
        let running = running.into_iter().map(|row| self.parts.rows()[row].to_string());
        self.bar.set_message(running.collect::<Vec<_>>().join(", "));
    }

    fn finished(&mut self, part: usize, report: Result<Report, String>) {
        let place = self.running.iter().position(|(running, _)| *running == part);
        let time = place.map_or(Duration::ZERO, |place| self.running.remove(place).1.elapsed());
        let report = report.unwrap_or_else(|why| self.parts.unfinished(part, why));
        let found = &mut self.found[self.parts.row(part)];
        found.left -= 1;
        found.time += time;
        add(&mut found.report, report);
        if let Some(whole) = found.report.as_ref().filter(|_| found.left == 0) {
            let line = self.table.row(whole, found.time);
            self.bar.suspend(|| print(line));
            self.bar.inc(1);
        }
    }

    /// Removes the bar; the reports in the order of the rows.
    pub fn finish(self) -> Vec<Report> {
        self.bar.finish_and_clear();
        self.found.into_iter().filter_map(|found| found.report).collect()
    }
}
