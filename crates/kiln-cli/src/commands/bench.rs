//! `kiln bench`: times behind the gate, runs side by side, and the tables of documents.

use super::verify::parts::{Found, Parts};
use super::verify::worker::Event;
use super::{expect_drawable, expect_writable, is_same, is_stream, positive, whole, write};
use crate::progress::{self, quoted};
use crate::stderr::say;
use crate::stdout::print;
use anyhow::{Context, anyhow, bail};
use burn::tensor::DType;
use clap::ValueEnum;
use kiln_bench::bench::{self, Ceilings, Pass, Plan, Progress, Run, Selection, Watch};
use kiln_bench::gate::{self, Report, Row};
use kiln_bench::registry::{Operator, Scale};
use kiln_ops::device::{self, Opened};
use kiln_ops::policy::{Policy, Table};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What is read neither for --compare nor for --tables.
const UNREAD: [&str; 12] = [
    "ops", "device", "shapes", "only", "pass", "data", "dtype", "rounds", "tiles", "jobs", "json",
    "policy",
];

/// Arguments of `kiln bench`.
#[derive(clap::Args)]
pub struct Args {
    /// Operators; all if none is named.
    ops: Vec<String>,
    /// auto, cuda, cuda:INDEX, wgpu, vulkan, cpu or ndarray.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Sizes to time.
    #[arg(long, value_enum, default_value_t = Shapes::Train)]
    shapes: Shapes,
    /// Only the case that is this, else, of each operator, those whose first shape it is, such as 4x16x4096x128; may be given
    /// several times.
    #[arg(long = "case", value_name = "SHAPE")]
    only: Vec<String>,
    /// Only this pass; both is the forward and the backward together.
    #[arg(long, value_enum)]
    pass: Option<OnePass>,
    /// Read the numbers from files in this folder, which are written if they are not there: benches/peers
    /// read the same.
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Element type: f32, bf16 or f16; bf16 on CUDA and f32 elsewhere if none is given.
    #[arg(long)]
    dtype: Option<String>,
    /// Bursts of each implementation.
    #[arg(long, default_value_t = 12, allow_negative_numbers = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Processes that verify at a time before anything is timed, 1 for this one alone; as many as cores and memory
    /// allow if it is not given.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = positive)]
    jobs: Option<NonZeroUsize>,
    /// The family of product kernels for operators made of products: wgmma, mma_tma, mma or simt.
    #[arg(long, value_parser = kiln_bench::gate::family)]
    tiles: Option<&'static str>,
    /// Write the run to this file too, case by case.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write what `auto` learns from it, as a policy for `kiln train --policy`.
    #[arg(long, conflicts_with_all = ["tiles", "pass"])]
    policy: Option<PathBuf>,
    /// Print Markdown.
    #[arg(long)]
    markdown: bool,
    /// Climb the ladder of tril_matmul instead: kernels from naive to tensor cores and two that cheat,
    /// each with what convicts it.
    #[arg(long, conflicts_with_all = ["compare", "policy", "tiles", "shapes", "only", "pass", "rounds", "data"])]
    ladder: bool,
    /// Side of the ladder's matrices; 4096 on CUDA and 256 elsewhere if none is given.
    #[arg(long, allow_negative_numbers = true, value_parser = whole::<usize>)]
    size: Option<usize>,
    /// Put runs written by --json, or by benches/peers, side by side instead of timing.
    #[arg(long, num_args = 1.., value_name = "FILE", conflicts_with_all = UNREAD)]
    compare: Vec<PathBuf>,
    /// Draw what is compared instead, as an SVG: times over the last dimension of the first input.
    #[arg(long, value_name = "FILE", conflicts_with = "markdown")]
    svg: Option<PathBuf>,
    /// Make the tables of these Markdown pages, or of those in these folders, from the run files that they
    /// name instead of timing.
    #[arg(long, num_args = 1.., value_name = "PAGE", conflicts_with_all = UNREAD)]
    #[arg(conflicts_with_all = ["compare", "ladder", "markdown"])]
    tables: Vec<PathBuf>,
    /// Change nothing: name the pages whose tables are not those of the run files, with exit status 1.
    #[arg(long)]
    check: bool,
    /// Print the shapes, numbers and work of all operators instead, for benches/peers/cases.jsonl.
    #[arg(long, exclusive = true)]
    cases: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Shapes {
    Small,
    Train,
    Large,
    Thin,
    Lengths,
}

impl Shapes {
    fn scale(self) -> Scale {
        match self {
            Self::Small => Scale::Small,
            Self::Train => Scale::Train,
            Self::Large => Scale::Large,
            Self::Thin => Scale::Thin,
            Self::Lengths => Scale::Lengths,
        }
    }
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum OnePass {
    Forward,
    Backward,
    Both,
}

/// Times, or compares, or makes tables.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    check(&args)?;
    if !args.compare.is_empty() {
        return compare(&args);
    }
    if !args.tables.is_empty() {
        return tables(&args.tables, args.check);
    }
    if args.cases {
        for case in bench::cases().map_err(|e| anyhow!(e))? {
            print(serde_json::to_string(&case)?);
        }
        return Ok(ExitCode::SUCCESS);
    }
    time(args)
}

/// Refuses flags that mean nothing without another, and one file for two of them.
fn check(args: &Args) -> anyhow::Result<()> {
    // Clap's `requires` lets a flag through without the other where something given conflicts with the other.
    for (alone, flag, other) in [
        (args.size.is_some() && !args.ladder, "--size", "--ladder"),
        (args.svg.is_some() && args.compare.is_empty(), "--svg", "--compare"),
        (args.check && args.tables.is_empty(), "--check", "--tables"),
    ] {
        if alone {
            bail!("{flag} is for {other}, which is not given");
        }
    }
    if let (Some(json), Some(policy)) = (&args.json, &args.policy)
        && is_same(json, policy)
        && !is_stream(json)
    {
        let (json, policy) = (json.display(), policy.display());
        bail!("--policy {policy} is the file of --json {json}, expected another");
    }
    Ok(())
}

fn compare(args: &Args) -> anyhow::Result<ExitCode> {
    expect_drawable(args.svg.as_deref())?;
    let runs: anyhow::Result<Vec<Run>> = args.compare.iter().map(|path| read(path)).collect();
    let runs = runs?;
    match &args.svg {
        Some(path) => write(path, &bench::picture(&runs).map_err(|e| anyhow!(e))?)?,
        None => {
            let compared = bench::compare(&runs, &Selection::default(), args.markdown);
            print(compared.map_err(|e| anyhow!(e))?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses operators and shapes without cases, and says which operators have none.
fn expect_cases(
    args: &Args,
    ops: &[&'static dyn Operator],
    scale: Scale,
    only: &[String],
) -> anyhow::Result<()> {
    let shapes = args.shapes.to_possible_value().expect("no variant is skipped");
    let shapes = format!("--shapes {}", shapes.get_name());
    let never = |op: &&dyn Operator| {
        Shapes::value_variants().iter().all(|shapes| op.shapes(shapes.scale()).is_empty())
    };
    if ops.iter().all(|op| op.shapes(scale).is_empty()) {
        let names = ops.iter().map(|op| op.spec().name).collect::<Vec<_>>().join(", ");
        if ops.iter().all(never) {
            bail!("{names}: cannot be timed yet, with any --shapes");
        }
        bail!("{names}: no sizes to time with {shapes}");
    }
    for op in ops.iter().filter(|op| !args.ops.is_empty() && op.shapes(scale).is_empty()) {
        let shapes = if never(op) { "any --shapes" } else { &shapes };
        say(format_args!("{}: nothing to time with {shapes}", op.spec().name));
    }
    for asked in only {
        if ops.iter().all(|op| bench::cases_of(*op, scale, std::slice::from_ref(asked)).is_empty())
        {
            let all = ops.iter().flat_map(|op| op.shapes(scale)).map(|case| case.to_string());
            let all = all.collect::<Vec<_>>().join("; ");
            bail!("--case {asked}: expected one of these shapes: {all}");
        }
    }
    Ok(())
}

fn time(args: Args) -> anyhow::Result<ExitCode> {
    let ops = super::operators(&args.ops)?;
    if args.ladder && args.ops != ["tril_matmul"] {
        bail!("--ladder is that of one operator: kiln bench tril_matmul --ladder");
    }
    let scale = args.shapes.scale();
    if let Some(folder) = args.data.as_ref().filter(|folder| folder.exists() && !folder.is_dir()) {
        bail!("--data: {} is no folder", folder.display());
    }
    let only: Vec<String> = args.only.iter().map(|shape| shape.replace('x', "×")).collect();
    expect_cases(&args, &ops, scale, &only)?;
    let opened = device::open(&args.device)?;
    say(format_args!("device: {}", opened.why));
    let dtype = match args.dtype.as_deref() {
        Some(name) => super::dtype(name)?,
        None if device::is_cuda(&opened.device) => super::dtype("bf16")?,
        None => super::dtype("f32")?,
    };
    if !opened.device.supports_dtype(dtype) {
        bail!("{} does not have {dtype:?}", opened.name);
    }
    let others: Vec<_> = ops.iter().filter(|op| !op.spec().computes_in(dtype)).collect();
    if args.dtype.is_some() && !args.ops.is_empty() && !others.is_empty() {
        let names = others.iter().map(|op| op.spec().name).collect::<Vec<_>>().join(", ");
        if others.len() == ops.len() {
            bail!("{names}: not timed in {}, expected f32", dtype.name());
        }
        say(format_args!("{names}: timed in f32"));
    }
    if let Some(family) = args.tiles.filter(|name| !gate::runs(name, dtype, &opened.device)) {
        bail!("--tiles {family}: {} has no such tiles for {dtype:?}", opened.name);
    }
    let can_be_timed = |op: &dyn Operator| {
        let cases = bench::cases_of(op, scale, &only);
        cases.iter().any(|case| !bench::implementations(op, case, &opened.device).is_empty())
    };
    if !ops.iter().any(|op| can_be_timed(*op)) {
        let name = &opened.name;
        bail!("{name} has no kernels for these shapes, which are too large for the reference");
    }
    expect_writable(args.json.as_deref())?;
    expect_writable(args.policy.as_deref())?;
    if let Some(folder) = &args.data {
        let failed = || format!("--data: cannot make {}", folder.display());
        std::fs::create_dir_all(folder).with_context(failed)?;
    }
    if args.ladder {
        return ladder(&args, &opened, dtype);
    }
    let pass = args.pass.map(|pass| match pass {
        OnePass::Forward => Pass::Forward,
        OnePass::Backward => Pass::Backward,
        OnePass::Both => Pass::Both,
    });
    let (rounds, family, data) = (args.rounds as usize, args.tiles, args.data);
    let plan = Plan { scale, dtype, rounds, family, only, pass, data };
    let ops: Vec<_> = ops.into_iter().filter(|op| !plan.cases(*op).is_empty()).collect();
    if plan.pass == Some(Pass::Backward) && ops.iter().all(|op| op.gradients_in_forward()) {
        let names = ops.iter().map(|op| op.spec().name).collect::<Vec<_>>().join(", ");
        bail!("{names}: gradients are made in the forward, expected --pass forward or both");
    }
    let has = |op: &dyn Operator, pass| {
        let of = |case: &_| bench::passes(op, case, dtype).iter().any(|(of, _)| *of == pass);
        plan.cases(op).iter().any(of)
    };
    if plan.pass.is_some_and(|pass| !ops.iter().any(|op| has(*op, pass))) {
        let names = ops.iter().map(|op| op.spec().name).collect::<Vec<_>>().join(", ");
        bail!("{names}: of these shapes the forward alone is timed, expected --pass forward");
    }
    let not_timed = |op: &&&dyn Operator| {
        !op.gradients_in_forward() && plan.pass.is_some_and(|pass| !has(**op, pass))
    };
    for op in ops.iter().filter(not_timed) {
        say(format_args!("{}: not timed, there is --pass forward alone", op.spec().name));
    }
    let mut run = Run::new(&opened.device, command());
    let watch = Watch::begin(&opened.device);
    run.ceilings = Ceilings::measure(&opened.device, dtype).map_err(|e| anyhow!(e))?;
    let mut red = vec![];
    let mut table = Table::default();
    let mut progress = |progress: Progress<'_>| match (progress, &args.json) {
        (Progress::Note(line), _) => say(line),
        (Progress::Timed(run), Some(path)) => {
            let board = watch.as_ref().and_then(Watch::board);
            // An error would be that of the last one too.
            let _ = write_run(path, &Run { board, ..run.clone() });
        }
        (Progress::Timed(_), None) => {}
    };
    let verified = verified(&ops, &plan, &opened, args.jobs)?;
    for (op, verified) in ops.into_iter().zip(&verified) {
        match bench::bench(op, verified, &plan, &opened.device, &mut run, &mut progress) {
            Ok(()) => {
                let measured = plan
                    .cases(op)
                    .into_iter()
                    .filter_map(|c| run.measured(op, &c, dtype, &opened.device));
                table.0.extend(measured);
            }
            Err(error) => {
                let name = op.spec().name;
                let named = error.starts_with(name);
                red.push(if named { error } else { format!("{name}: {error}") });
            }
        }
    }
    run.board = watch.as_ref().and_then(Watch::board);
    print(bench::table(&run, args.markdown));
    for error in &red {
        print(error);
    }
    if let Some(path) = &args.json {
        write_run(path, &run)?;
    }
    if let Some(path) = args.policy {
        write(&path, &toml::to_string_pretty(&Policy { table, ..Policy::default() })?)?;
    }
    Ok(if red.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// What the gate finds of operators in the order given, by several processes: before the first time much is compiled.
fn verified(
    ops: &[&'static dyn Operator],
    plan: &Plan,
    opened: &Opened,
    jobs: Option<NonZeroUsize>,
) -> anyhow::Result<Vec<Report>> {
    let parts = Parts::new(ops, opened, None, plan.gate());
    let is_of = |row: &Row, op: &dyn Operator| {
        let wanted = (op.spec().name, plan.dtype_of(op), plan.family);
        (row.op.spec().name, row.dtype, row.family) == wanted
    };
    let wanted = parts.of(|row| ops.iter().any(|op| is_of(row, *op)));
    let bar = progress::rows(wanted.len());
    let mut found = vec![Found::default(); parts.rows().len()];
    let jobs = jobs.map_or_else(|| parts.jobs(), usize::from);
    parts.each(&wanted, jobs, |event| match event {
        Event::Started(part) => {
            bar.set_message(format!("verifying {}", parts.rows()[parts.row(part)]))
        }
        Event::Finished(part, report) => {
            let report = report.unwrap_or_else(|why| parts.unfinished(part, why));
            found[parts.row(part)].add(part, report);
            bar.inc(1);
        }
        Event::Said(line) => bar.suspend(|| say(line)),
    })?;
    bar.finish_and_clear();
    Ok(ops
        .iter()
        .map(|op| {
            let row = parts.rows().iter().position(|row| is_of(row, *op));
            // No row: a family that is what runs by itself, or of an operator that has none.
            row.and_then(|row| std::mem::take(&mut found[row]).whole()).unwrap_or_else(|| {
                gate::verify(*op, plan.dtype_of(*op), &opened.device, plan.gate())
            })
        })
        .collect())
}

fn write_run(path: &Path, run: &Run) -> anyhow::Result<()> {
    write(path, &(serde_json::to_string_pretty(run)? + "\n"))
}

/// Makes the tables of pages anew, or says which are not up to date.
fn tables(paths: &[PathBuf], check: bool) -> anyhow::Result<ExitCode> {
    let (mut stale, mut all) = (false, 0);
    for page in pages(paths)? {
        let name = page.display();
        let text = std::fs::read_to_string(&page).with_context(|| format!("cannot read {name}"))?;
        let folder = page.parent().unwrap_or(Path::new(""));
        let open = |file: &str| read(&folder.join(file)).map_err(|e| format!("{e:#}"));
        let (made, tables) = bench::rewrite(&text, &open).map_err(|e| anyhow!("{name}: {e}"))?;
        all += tables;
        if made == text {
            continue;
        }
        stale = true;
        if check {
            print(format_args!(
                "{name}: its tables are not those of the run files: kiln bench --tables {}",
                quoted(&page.to_string_lossy())
            ));
        } else {
            write(&page, &made)?;
            print(format_args!("{name}: tables made anew"));
        }
    }
    if all == 0 {
        let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
        bail!("--tables: no `<!-- table` in the Markdown pages of {}", paths.join(", "));
    }
    Ok(if stale && check { ExitCode::from(1) } else { ExitCode::SUCCESS })
}

/// The Markdown pages among these paths: files, and those in folders.
fn pages(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut pages = vec![];
    for path in paths {
        if !path.is_dir() {
            pages.push(path.clone());
            continue;
        }
        let failed = || format!("cannot read {}", path.display());
        let entries = std::fs::read_dir(path).with_context(failed)?;
        let entries = entries.map(|entry| entry.map(|entry| entry.path()));
        let mut found = entries.collect::<Result<Vec<_>, _>>().with_context(failed)?;
        found.retain(|page| page.extension().is_some_and(|ending| ending == "md"));
        found.sort();
        pages.extend(found);
    }
    Ok(pages)
}

/// The rungs of tril_matmul; the exit status is 1 if an honest one is red or a cheat gets through.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn ladder(args: &Args, opened: &Opened, dtype: DType) -> anyhow::Result<ExitCode> {
    use kiln_bench::ladder;
    let size = args.size.unwrap_or(if device::is_cuda(&opened.device) { 4096 } else { 256 });
    let mut note = |rung: &str| say(rung);
    let climbed = ladder::climb(&opened.device, dtype, size, command(), &mut note);
    let climbed = climbed.map_err(|e| anyhow!(e))?;
    print(ladder::table(&climbed, args.markdown));
    if let Some(path) = &args.json {
        write(path, &(serde_json::to_string_pretty(&climbed)? + "\n"))?;
    }
    Ok(if climbed.as_expected() { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Without CubeCL there are no kernels.
#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
fn ladder(_: &Args, _: &Opened, _: DType) -> anyhow::Result<ExitCode> {
    bail!("the ladder is made of kernels: build with `--features cuda` or `--features wgpu`")
}

/// The command line, as a shell takes it.
fn command() -> String {
    let args = std::env::args().skip(1).map(|word| quoted(&word));
    std::iter::once("kiln".to_string()).chain(args).collect::<Vec<_>>().join(" ")
}

fn read(path: &Path) -> anyhow::Result<Run> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let run: Run = serde_json::from_str(&text)
        .with_context(|| format!("{} is no run of the bench", path.display()))?;
    if run.rows.is_empty() {
        bail!("{}: a run without rows", path.display());
    }
    let mut times = run.rows.iter().flat_map(|row| [row.us, row.us_low, row.us_high]);
    if let Some(us) = times.find(|us| !(us.is_finite() && *us > 0.0)) {
        bail!("{}: a time of {us} µs, expected one above 0", path.display());
    }
    Ok(run)
}
