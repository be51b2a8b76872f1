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
    if row.flops / row.bytes < 50.0 {
        format!("{:.0} GB/s", row.gigabytes())
    } else {
        format!("{:.0} TFLOP/s", row.teraflops())
    }
}

/// The table of a run, with the ratio of each kernel to its reference.
pub fn table(run: &Run, markdown: bool) -> String {
    let mut table = Table::new();
    table.load_style(if markdown {
        presets::ASCII_MARKDOWN
    } else {
        presets::UTF8_HORIZONTAL_ONLY
    });
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
        table.add_row([
            row.op.clone(),
            row.pass.to_string(),
            row.shape.clone(),
            row.dtype.clone(),
            row.implementation.clone(),
            microseconds(row.us),
            format!("{} to {}", microseconds(row.us_low), microseconds(row.us_high)),
            rate(row),
            ceiling.map_or_else(|| "-".into(), |c| format!("{:.0} %", 100.0 * c)),
            reference.map_or_else(|| "-".into(), |r| format!("{:.2}", r.us / row.us)),
            row.launches.map_or_else(|| "-".into(), |n| n.to_string()),
            row.peak_mib.map_or_else(|| "-".into(), |m| format!("{m:.0} MiB")),
        ]);
    }
    let mut text = table.to_string();
    if let Some(c) = run.ceilings {
        text += &format!(
            "\nCeilings in this run: a copy {:.0} GB/s, Burn's matmul {:.0} TFLOP/s, the smallest launch {:.1} µs.",
            c.copy_gbps, c.matmul_tflops, c.launch_us
        );
    }
    if run.rows.iter().any(|row| row.bytes < 4e6) {
        text += "\nBelow 4 MB a pass is bound by its launch, not by memory.";
    }
    text + &format!("\n{}, {}, `{}`", run.gpu, run.date, run.command)
}
