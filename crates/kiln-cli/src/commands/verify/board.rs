//! What is seen of a verification: rows as they are done and, where stderr is a terminal, a bar below them.

use super::parts::{Found, Parts};
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
    rows: Vec<Row>,
}

/// A row that is being verified.
#[derive(Clone, Default)]
struct Row {
    found: Found,
    parts: usize,
    time: Duration,
}

impl<'a> Board<'a> {
    /// For all of these; prints the headings.
    pub fn new(parts: &'a Parts<'a>) -> Self {
        let table = Table::new(parts.rows());
        print(table.headings());
        let bar = progress::rows(parts.rows().len());
        let mut rows = vec![Row::default(); parts.rows().len()];
        for part in parts.of(|_| true) {
            rows[parts.row(part)].parts += 1;
        }
        Self { parts, table, bar, running: vec![], rows }
    }

    /// Shows what happened; whether a row is done with it.
    pub fn show(&mut self, event: Event) -> bool {
        let mut done = false;
        match event {
            Event::Started(part) => self.running.push((part, Instant::now())),
            Event::Finished(part, report) => done = self.finished(part, *report),
            Event::Said(line) => {
                self.bar.suspend(|| say(line));
            }
        }
        let mut running: Vec<usize> =
            self.running.iter().map(|(part, _)| self.parts.row(*part)).collect();
        running.dedup();
        let running = running.into_iter().map(|row| self.parts.rows()[row].to_string());
        self.bar.set_message(running.collect::<Vec<_>>().join(", "));
        done
    }

    fn finished(&mut self, part: usize, report: Result<Report, String>) -> bool {
        let place = self.running.iter().position(|(running, _)| *running == part);
        let time = place.map_or(Duration::ZERO, |place| self.running.remove(place).1.elapsed());
        let report = report.unwrap_or_else(|why| self.parts.unfinished(part, why));
        let row = &mut self.rows[self.parts.row(part)];
        row.time += time;
        row.found.add(part, report);
        let done = row.found.count() == row.parts;
        if done {
            let whole = row.found.clone().whole().expect("it has parts");
            let line = self.table.row(&whole, row.time);
            self.bar.suspend(|| print(line));
            self.bar.inc(1);
        }
        done
    }

    /// The reports of the rows that are done, in their order.
    pub fn done(&self) -> Vec<Report> {
        let done = self.rows.iter().filter(|row| row.found.count() == row.parts);
        done.filter_map(|row| row.found.clone().whole()).collect()
    }

    /// Removes the bar; the reports in the order of the rows.
    pub fn finish(self) -> Vec<Report> {
        self.bar.finish_and_clear();
        self.rows.into_iter().filter_map(|row| row.found.whole()).collect()
    }
}
