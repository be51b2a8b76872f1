//! A run as a table.

use super::{Row, Run};
use comfy_table::{Table, presets};

/// Microseconds with three digits that matter.
pub(crate) fn microseconds(us: f64) -> String {
    if us < 100.0 {
        format!("{us:.1} µs")
    } else if us < 1e4 {
        format!("{us:.0} µs")
    } else {
        format!("{:.1} ms", us / 1e3)
    }
}

/// The rate that limits the pass: bytes if it does few operations on each, else operations.
pub(super) fn rate(row: &Row) -> String {
    let (rate, unit) = match row.flops / row.bytes < 50.0 {
        true => (row.gigabytes(), "GB/s"),
        false => (row.teraflops(), "TFLOP/s"),
    };
    // On a CPU it may be less than one.
    let decimals = if rate < 1.0 { 2 } else { 0 };
    format!("{rate:.decimals$} {unit}")
}

/// How times are told apart in a table where some are of recorded calls and others are not.
pub(super) struct Kinds {
    both: bool,
}

impl Kinds {
    /// Of the rows of a table.
    pub(super) fn of<'a>(rows: impl Iterator<Item = &'a Row> + Clone) -> Self {
        Self { both: rows.clone().any(|row| row.recorded) && rows.clone().any(|row| !row.recorded) }
    }

    /// The time of a row.
    pub(super) fn time(&self, row: &Row) -> String {
        let mark = if self.both && !row.recorded { "†" } else { "" };
        microseconds(row.us) + mark
    }

    /// What the mark means, where there is one.
    pub(super) fn footnote(&self) -> &'static str {
        match self.both {
            true => {
                "\n† Launched call by call; the other times are of recorded calls. There is no ratio between \
                 the two kinds."
            }
            false => "",
        }
    }
}

/// An empty table in Markdown or for a terminal, and what parts it from the lines below.
pub(super) fn empty(markdown: bool) -> (Table, &'static str) {
    let (style, gap) = match markdown {
        // Else the lines would be rows.
        true => (presets::ASCII_MARKDOWN, "\n"),
        false => (presets::UTF8_HORIZONTAL_ONLY, ""),
    };
    let mut table = Table::new();
    table.load_style(style);
    (table, gap)
}

/// The table of a run, with the ratio of each kernel to its reference.
pub fn table(run: &Run, markdown: bool) -> String {
    let (mut table, gap) = empty(markdown);
    table.set_header([
        "operator",
        "pass",
        "shape",
        "dtype",
        "implementation",
        "time",
        "spread",
        "rate",
        "of the ceiling",
        "× reference",
        "launches",
        "reserved",
    ]);
    let kinds = Kinds::of(run.rows.iter());
    for row in &run.rows {
        let reference = run.rows.iter().find(|other| {
            other.implementation == "reference"
                && (&other.op, other.pass, &other.shape, &other.dtype)
                    == (&row.op, row.pass, &row.shape, &row.dtype)
        });
        let ceiling = run.ceilings.map(|c| {
            if row.flops / row.bytes < 50.0 {
                row.gigabytes() / c.copy_gbps
            } else {
                row.teraflops() / c.matmul_tflops
            }
        });
        let ratio = reference.and_then(|reference| reference.over(row));
        table.add_row([
            row.op.clone(),
            row.pass.to_string(),
            row.shape.clone(),
            row.dtype.clone(),
            row.implementation.clone(),
            kinds.time(row),
            format!("{} to {}", microseconds(row.us_low), microseconds(row.us_high)),
            rate(row),
            ceiling.map_or_else(|| "-".into(), |c| format!("{:.0} %", 100.0 * c)),
            ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
            row.launches.map_or_else(|| "-".into(), |n| n.to_string()),
            row.peak_mib.map_or_else(|| "-".into(), |m| format!("{m:.0} MiB")),
        ]);
    }
    let mut text = table.to_string() + gap;
    text += kinds.footnote();
    if let Some(c) = run.ceilings {
        text += &format!(
            "\nCeilings in this run: a copy {:.0} GB/s, Burn's matmul {:.0} TFLOP/s, the smallest launch {:.1} µs.",
            c.copy_gbps, c.matmul_tflops, c.launch_us
        );
    }
    if run.rows.iter().any(|row| row.recorded && row.bytes < 4e6) {
        text += "\nBelow 4 MB a pass of a GPU is bound by its launch, not by memory.";
    }
    text + &format!("\n{}", run.conditions())
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::Pass;
    use super::*;

    /// A row of 100 µs.
    pub(in crate::bench) fn row(implementation: &str, pass: Pass, recorded: bool) -> Row {
        Row {
            op: "swiglu".into(),
            pass,
            shape: "8×8".into(),
            dtype: "bf16".into(),
            implementation: implementation.into(),
            us: 100.0,
            us_low: 99.0,
            us_high: 101.0,
            recorded,
            bytes: 3e8,
            flops: 5e8,
            launches: None,
            peak_mib: None,
            zeros: Default::default(),
        }
    }

    /// A run of some rows.
    pub(in crate::bench) fn run(gpu: &str, rows: Vec<Row>) -> Run {
        Run {
            device: "cuda:0".into(),
            gpu: gpu.into(),
            date: "2026-11-20".into(),
            command: "kiln bench".into(),
            versions: [("burn".to_string(), "1.2.3".to_string())].into(),
            board: None,
            ceilings: None,
            rows,
        }
    }

    #[test]
    fn a_ratio_is_one_of_like_times() {
        let rows = vec![
            row("fused", Pass::Backward, true),
            Row { us: 400.0, ..row("reference", Pass::Backward, false) },
            row("fused", Pass::Both, true),
            Row { us: 300.0, ..row("reference", Pass::Both, true) },
        ];
        let text = table(&run("NVIDIA H100", rows.clone()), true);
        let line = |part: &str| text.lines().find(|line| line.contains(part)).unwrap().to_string();
        assert!(
            line("backward         | 8×8   | bf16  | fused").contains("| -           |"),
            "{text}"
        );
        assert!(
            line("forward+backward | 8×8   | bf16  | fused").contains("| 3.00        |"),
            "{text}"
        );
        assert!(line("400 µs†").contains("reference"), "{text}");
        assert!(text.contains("|\n\n† Launched call by call"), "{text}");
        assert!(text.ends_with("NVIDIA H100, 2026-11-20, burn 1.2.3: `kiln bench`"), "{text}");

        // Where nothing is recorded, all are alike.
        let rows = rows.into_iter().map(|row| Row { recorded: false, ..row }).collect();
        let text = table(&run("CPU", rows), false);
        assert!(text.contains("4.00") && text.contains("3.00") && !text.contains('†'), "{text}");
    }
}
