//! `kiln curves`: the losses of several runs beside each other.

use super::{expect_writable, is_same};
use crate::stdout::print;
use anyhow::bail;
use comfy_table::{Table, presets};
use kiln_lm::run::curves::{self, Group};
use kiln_lm::run::{Kind, Record, RunDir, metrics};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

/// Arguments of `kiln curves`.
#[derive(clap::Args)]
pub struct Args {
    /// Folders of runs. Runs of one NAME, which differ in their seeds, say, have one colour and a mean; without it a run has
    /// the name of its folder.
    #[arg(required = true, value_name = "[NAME=]FOLDER")]
    runs: Vec<Run>,
    /// Draws the losses into this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Title of the picture.
    #[arg(long, default_value = "Loss", requires = "svg")]
    title: String,
    /// Prints the table as Markdown.
    #[arg(long)]
    markdown: bool,
}

/// A run and the name that it goes under.
#[derive(Clone)]
struct Run {
    name: String,
    folder: PathBuf,
}

impl FromStr for Run {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A folder may have a `=` in its name: one that is there is meant as it is written.
        let named = text.split_once('=').filter(|_| !Path::new(text).exists());
        let (name, folder) = match named {
            Some((name, folder)) => (name.to_string(), PathBuf::from(folder)),
            None => {
                let folder = PathBuf::from(text);
                let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy();
                (name.into_owned(), folder)
            }
        };
        if name.is_empty() || folder.as_os_str().is_empty() {
            return Err("expected a folder, or NAME=FOLDER".into());
        }
        Ok(Self { name, folder })
    }
}

/// Runs of one name: their folders and records.
type Named<'a> = (&'a str, Vec<(&'a Path, Vec<Record>)>);

/// Prints the table, and draws the picture.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    expect_writable(args.svg.as_deref())?;
    let mut named: Vec<Named<'_>> = Vec::new();
    for (index, Run { name, folder }) in args.runs.iter().enumerate() {
        if args.runs[..index].iter().any(|run| is_same(&run.folder, folder)) {
            bail!("{} is named twice", folder.display());
        }
        let records = metrics::read(&RunDir::open(folder)?.metrics())?;
        match named.iter_mut().find(|(other, _)| *other == name) {
            Some((_, runs)) => runs.push((folder, records)),
            None => named.push((name, vec![(folder, records)])),
        }
    }
    let mut table = Table::new();
    table.load_style(if args.markdown {
        presets::ASCII_MARKDOWN
    } else {
        presets::UTF8_HORIZONTAL_ONLY
    });
    table.set_header(["", "run", "steps", "lowest validation loss", "tokens/s"]);
    let mut groups = Vec::new();
    for (name, runs) in named {
        let (folders, records): (Vec<_>, Vec<_>) = runs.into_iter().unzip();
        let group = Group::new(name, &records);
        let rows = folders.iter().zip(&records).zip(group.lowest());
        for ((folder, records), lowest) in rows {
            let steps = records.last().map_or(0, |record| record.step);
            let [lowest, rate] = [(lowest, 4), (tokens_per_second(records), 0)].map(number);
            table.add_row([
                name,
                &folder.display().to_string(),
                &steps.to_string(),
                &lowest,
                &rate,
            ]);
        }
        if folders.len() > 1 {
            table.add_row([name, "mean", "", &number((group.mean(), 4)), ""]);
        }
        groups.push(group);
    }
    print(table.trim_fmt());
    if let Some(svg) = &args.svg {
        curves::draw(&groups, svg, &args.title)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The median over the records: the first ones compile kernels.
fn tokens_per_second(records: &[Record]) -> Option<f64> {
    let training = records.iter().filter(|record| record.kind == Kind::Train);
    let mut rates: Vec<f64> = training.filter_map(|r| r.get("tokens_per_second")).collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied()
}

fn number((value, decimals): (Option<f64>, usize)) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.decimals$}"))
}
