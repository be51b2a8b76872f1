//! The table of `kiln verify`, a line at a time: its columns are as wide before the first row is known as
//! after the last.

use kiln_bench::gate::{Check, Outcome, Report, Row};
use std::time::Duration;

/// Headings and widths of the columns.
pub struct Table(Vec<(&'static str, usize)>);

impl Table {
    /// With room for these rows.
    pub fn new(rows: &[Row]) -> Self {
        let names = rows.iter().map(|row| row.op.spec().name);
        let mut samples = vec![
            ("operator", names.max_by_key(|name| name.len()).unwrap_or_default()),
            ("dtype", "bf16"),
            ("ran", "fused (mma_tma)"),
            ("cases", "100"),
            ("plans", "100"),
            ("error / bound", "0.12"),
            ("its gradients", "0.12"),
        ];
        samples.extend(Check::ALL.map(|check| (check.title(), "100 RED")));
        samples.extend([("verdict", "green"), ("time", "100.0 s")]);
        let width = |(title, sample): (&'static str, &str)| (title, title.len().max(sample.len()));
        Self(samples.into_iter().map(width).collect())
    }

    /// The headings.
    pub fn headings(&self) -> String {
        self.line(self.0.iter().map(|(title, _)| title.to_string()))
    }

    /// The row of a report that was made in this time.
    pub fn row(&self, report: &Report, time: Duration) -> String {
        let worst = |check| report.checked(check).worst.map_or_else(|| "-".into(), ratio);
        let mut cells = vec![
            report.op.clone(),
            report.dtype.clone(),
            match &report.family {
                Some(family) => format!("{} ({family})", report.implementation),
                None => report.implementation.to_string(),
            },
            report.cases.to_string(),
            report.plans.len().to_string(),
            worst(Check::Forward),
            worst(Check::Gradients),
        ];
        cells.extend(report.checks.iter().map(|checked| match checked.outcome {
            Outcome::Passed => "ok".to_string(),
            Outcome::Failed => format!("{} RED", checked.failed),
            Outcome::NotApplicable => "-".to_string(),
        }));
        cells.push(if report.green() { "green".into() } else { "RED".into() });
        cells.push(format!("{:.1} s", time.as_secs_f64()));
        self.line(cells)
    }

    fn line(&self, cells: impl IntoIterator<Item = String>) -> String {
        let cells = self.0.iter().zip(cells).map(|(&(_, width), cell)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    }
}

/// An error over its bound, short however large it is.
fn ratio(worst: f32) -> String {
    if worst < 1e6 { format!("{worst:.2}") } else { format!("{worst:.0e}") }
}
