//! `kiln curves`: the losses of several runs beside each other.

use super::{expect_drawable, is_same, write};
use crate::stderr::say;
use crate::stdout::print;
use anyhow::bail;
use comfy_table::{Table, presets};
use kiln_lm::config;
use kiln_lm::data::DataId;
use kiln_lm::run::comparison::{self, Group};
use kiln_lm::run::{Kind, Record, RunDir, metrics};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

/// Arguments of `kiln curves`.
#[derive(clap::Args)]
pub struct Args {
    /// Folders of runs. Runs of one NAME, which differ in their seeds, say, have one colour and a mean.
    #[arg(required = true, value_name = "[NAME=]FOLDER")]
    runs: Vec<Run>,
    /// Draws the losses into this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Title of the picture.
    #[arg(long, default_value = "Loss", requires = "svg")]
    title: String,
    /// What the losses are drawn over: steps, or seconds of training at the speed of the run, without evaluations and what
    /// a start compiles.
    #[arg(long, default_value = "step", requires = "svg")]
    over: Over,
    /// Prints the table as Markdown.
    #[arg(long)]
    markdown: bool,
}

/// What losses are drawn over.
#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Over {
    Step,
    Time,
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
        // What stands before a `=` in the path of a folder is no name.
        let named = text.split_once('=').filter(|(name, _)| !name.contains(['/', '\\']));
        let (name, folder) = named.unwrap_or((text, text));
        if name.is_empty() || folder.is_empty() {
            return Err("expected a folder, or NAME=FOLDER".into());
        }
        Ok(Self { name: name.into(), folder: folder.into() })
    }
}

/// Runs of one name.
struct Named<'a> {
    name: &'a str,
    folders: Vec<&'a Path>,
    /// What they were trained on; none of runs that do not say.
    texts: Vec<Option<DataId>>,
    /// With the length of a step in the picture.
    records: Vec<(Vec<Record>, f64)>,
}

/// Prints the table, and draws the picture.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    expect_drawable(args.svg.as_deref())?;
    let mut all: Vec<Named<'_>> = Vec::new();
    for (index, Run { name, folder }) in args.runs.iter().enumerate() {
        if args.runs[..index].iter().any(|run| is_same(&run.folder, folder)) {
            bail!("{} is named twice", folder.display());
        }
        let run = RunDir::open(folder)?;
        let place = all.iter().position(|named| named.name == name).unwrap_or_else(|| {
            all.push(Named { name, folders: vec![], texts: vec![], records: vec![] });
            all.len() - 1
        });
        all[place].folders.push(folder);
        all[place].texts.push(run.load_data().unwrap_or_else(|error| {
            say(format_args!("warning: {error}"));
            None
        }));
        let records = metrics::read(&run.metrics())?;
        if records.is_empty() {
            bail!("{} has no records yet", run.metrics().display());
        }
        let step = match args.over {
            Over::Step => 1.0,
            Over::Time => seconds(&run, &records)?,
        };
        all[place].records.push((records, step));
    }
    let mut table = Table::new();
    let style = match args.markdown {
        true => presets::ASCII_MARKDOWN,
        false => presets::UTF8_HORIZONTAL_ONLY,
    };
    table.load_style(style);
    table.set_header(["name", "run", "text", "steps", "lowest validation loss", "tokens/s"]);
    let mut groups = Vec::new();
    for &Named { name, ref folders, ref texts, ref records } in &all {
        let group = Group::new(name, records.iter().map(|(of, step)| (of.as_slice(), *step)));
        // What parts cells in Markdown is no part of a name.
        let cell = |text: &str| match args.markdown {
            true => text.replace('|', "\\|"),
            false => text.to_string(),
        };
        let shown = cell(name);
        let runs = folders.iter().zip(texts).zip(records).zip(group.lowest());
        for (((folder, text), (records, _)), lowest) in runs {
            let steps = records.last().map_or(0, |record| record.step);
            let rate = number(tokens_per_second(records), 0);
            let folder = cell(&folder.display().to_string());
            let text = text.as_ref().map_or_else(|| "-".into(), DataId::short);
            table.add_row([&shown, &folder, &text, &steps.to_string(), &number(lowest, 4), &rate]);
        }
        if folders.len() > 1 {
            table.add_row([shown.as_str(), "mean", "", "", &number(group.mean(), 4), ""]);
        }
        groups.push(group);
    }
    print(table.trim_fmt());
    warn_of_texts(&all);
    if let Some(svg) = &args.svg {
        let over = match args.over {
            Over::Step => comparison::Over::Steps,
            Over::Time => comparison::Over::Seconds,
        };
        write(svg, &comparison::picture(&groups, &args.title, over)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Says where losses do not compare, or may not.
fn warn_of_texts(all: &[Named<'_>]) {
    let texts = || all.iter().flat_map(|named| &named.texts);
    let known: Vec<&DataId> = texts().flatten().collect();
    let (all, unknown) = (texts().count(), texts().count() - known.len());
    if known.windows(2).any(|two| two[0] != two[1]) {
        say(
            "warning: the runs are of several texts, tokenizers or splits, whose losses do not compare",
        );
    } else if unknown > 0 && !known.is_empty() {
        say(format_args!(
            "warning: {unknown} of {all} runs do not say whether their text is the same"
        ));
    }
}

/// Those of a step at the speed of the run.
fn seconds(run: &RunDir, records: &[Record]) -> anyhow::Result<f64> {
    let Some(rate) = tokens_per_second(records).filter(|rate| *rate > 0.0) else {
        bail!("{} has no record of a speed, expected one for --over time", run.metrics().display());
    };
    let config = config::load(&run.config(), &[])?;
    Ok(config.tokens_per_step() as f64 / rate)
}

/// The median over the records: the first ones compile kernels.
fn tokens_per_second(records: &[Record]) -> Option<f64> {
    let training = records.iter().filter(|record| record.kind == Kind::Train);
    let mut rates: Vec<f64> = training.filter_map(|r| r.get("tokens_per_second")).collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied()
}

fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.decimals$}"))
}
