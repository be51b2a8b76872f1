//! `kiln verify`: the correctness gate, as a table.

use anyhow::Context;
use comfy_table::{Table, presets};
use kiln_bench::gate::{self, Check, Options, Outcome, Report};
use kiln_ops::device;
use std::path::PathBuf;
use std::process::ExitCode;

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
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Random cases for each operator and element type.
    #[arg(long, default_value_t = 8)]
    fuzz: usize,
}

/// Verifies; the exit status is 1 if anything is red.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let ops = super::operators(&args.ops)?;
    let opened = device::open(&args.device)?;
    eprintln!("device: {}", opened.why);
    let options = Options { seed: args.seed, fuzz: args.fuzz, family: None };
    let mut reports = vec![];
    for op in ops {
        for dtype in gate::dtypes(&opened.device) {
            for family in gate::families(op, dtype, &opened.device) {
                let options = Options { family, ..options };
                reports.push(gate::verify(op, dtype, &opened.device, options));
            }
        }
    }
    println!("{}", table(&reports));
    for report in &reports {
        for (check, case, what) in &report.failures {
            let title = check.title();
            println!("RED {} {} ({title}) {case}: {what}", report.op, report.dtype);
        }
    }
    let red = reports.iter().filter(|report| !report.green()).count();
    println!("{} green, {red} red, on {}", reports.len() - red, opened.name);
    if let Some(path) = args.json {
        let text = serde_json::to_string_pretty(&reports)?;
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(if red == 0 { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn table(reports: &[Report]) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    let mut header =
        vec!["operator", "dtype", "ran", "cases", "plans", "error / bound", "its gradients"];
    header.extend(Check::ALL.map(Check::title));
    header.push("verdict");
    table.set_header(header);
    for report in reports {
        let error = |check| {
            report.checked(check).worst.map_or_else(|| "-".into(), |worst| format!("{worst:.2}"))
        };
        let mut row = vec![
            report.op.clone(),
            report.dtype.clone(),
            match report.family {
                Some(family) => format!("{} ({family})", report.implementation),
                None => report.implementation.to_string(),
            },
            report.cases.to_string(),
            report.plans.len().to_string(),
            error(Check::Forward),
            error(Check::Gradients),
        ];
        row.extend(report.checks.iter().map(|checked| match checked.outcome {
            Outcome::Passed => "ok".to_string(),
            Outcome::Failed => format!("{} RED", checked.failed),
            Outcome::NotApplicable => "-".to_string(),
        }));
        row.push(if report.green() { "green".into() } else { "RED".into() });
        table.add_row(row);
    }
    table.to_string()
}
