//! Several runs side by side.

use super::table::{Kinds, empty, rate};
use super::{Pass, Row, Run};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// What makes rows of different implementations one row of a comparison.
type Key = (String, Pass, String, String);

/// Which rows and columns of some runs stand in a comparison.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// Rows, in this order; all if there is none.
    pub rows: Vec<Filter>,
    /// Implementations, in this order; all if there is none.
    pub columns: Vec<String>,
    /// What all runs were made on and with in one line, instead of a line for each run with its command.
    pub brief: bool,
}

/// Rows of which what is given is this.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Filter {
    /// Operator.
    pub op: Option<String>,
    /// Forward, backward or both.
    pub pass: Option<Pass>,
    /// Shape.
    pub shape: Option<String>,
    /// Element type.
    pub dtype: Option<String>,
    /// Columns that stay empty in them.
    #[serde(default)]
    pub without: Vec<String>,
}

impl std::fmt::Display for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pass = self.pass.map(|pass| format!("{pass:?}").to_lowercase());
        let given =
            [("op", &self.op), ("pass", &pass), ("shape", &self.shape), ("dtype", &self.dtype)];
        let given = given.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        let given: Vec<_> = given.map(|(name, value)| format!("{name} = `{value}`")).collect();
        f.write_str(&given.join(", "))
    }
}

impl Filter {
    fn takes(&self, (op, pass, shape, dtype): &Key) -> bool {
        let is = |wanted: &Option<String>, found: &str| {
            wanted.as_deref().is_none_or(|wanted| wanted == found)
        };
        is(&self.op, op)
            && self.pass.is_none_or(|wanted| wanted == *pass)
            && is(&self.shape, shape)
            && is(&self.dtype, dtype)
    }
}

/// The rows of all runs by what they are of, in the order of the runs.
#[derive(Default)]
struct Cells {
    columns: Vec<String>,
    keys: Vec<Key>,
    rows: BTreeMap<Key, BTreeMap<String, Row>>,
}

impl Cells {
    /// Implementations of one name on unlike devices have columns of their own.
    fn of(runs: &[Run]) -> Result<Self, String> {
        let mut cells = Self::default();
        let one_device = runs.iter().all(|run| run.device == runs[0].device);
        for (run, row) in runs.iter().flat_map(|run| run.rows.iter().map(move |row| (run, row))) {
            let column = match one_device {
                true => row.implementation.clone(),
                false => format!("{} ({})", row.implementation, run.device),
            };
            if !cells.columns.contains(&column) {
                cells.columns.push(column.clone());
            }
            let key = (row.op.clone(), row.pass, row.shape.clone(), row.dtype.clone());
            if !cells.keys.contains(&key) {
                cells.keys.push(key.clone());
            }
            let what = format!("{} {} {} {}", key.0, key.1, key.2, key.3);
            let before = cells.rows.entry(key).or_default().insert(column.clone(), row.clone());
            if before.is_some() {
                return Err(format!("{what}: two runs have a time of `{column}`"));
            }
        }
        Ok(cells)
    }

    /// Takes the columns and rows that are selected, each of which must be there.
    fn select(&mut self, selection: &Selection) -> Result<(), String> {
        let without = selection.rows.iter().flat_map(|filter| &filter.without);
        let mut named = selection.columns.iter().chain(without);
        if let Some(missing) = named.find(|column| !self.columns.contains(column)) {
            let found = self.columns.join(", ");
            return Err(format!("no run has a column `{missing}`, there are {found}"));
        }
        if !selection.columns.is_empty() {
            self.columns = selection.columns.clone();
        }
        if !selection.rows.is_empty() {
            let all = std::mem::take(&mut self.keys);
            for filter in &selection.rows {
                let before = self.keys.len();
                for key in all.iter().filter(|key| filter.takes(key)) {
                    self.keys.push(key.clone());
                    let cells = self.rows.get_mut(key).expect("every key has a row");
                    cells.retain(|column, _| !filter.without.contains(column));
                }
                if self.keys.len() == before {
                    return Err(format!("no run has a row with {filter}"));
                }
            }
        }
        Ok(())
    }

    /// The cells of a row, by column.
    fn row(&self, key: &Key) -> Vec<Option<&Row>> {
        self.columns.iter().map(|column| self.rows[key].get(column)).collect()
    }
}

/// Whether the runs can be compared at all.
pub(super) fn of_one_gpu(runs: &[Run]) -> Result<(), String> {
    let first = runs.first().ok_or("there is no run to compare")?;
    match runs.iter().find(|run| run.gpu != first.gpu) {
        Some(Run { gpu: other, .. }) => {
            let first = &first.gpu;
            Err(format!("runs of different GPUs cannot be compared: {first} and {other}"))
        }
        None => Ok(()),
    }
}

/// One table of the rows of all runs; ratios are to the first column.
///
/// # Errors
///
/// One line if the runs are of different GPUs, count the work of a pass differently, or have not what is
/// selected.
pub fn compare(runs: &[Run], selection: &Selection, markdown: bool) -> Result<String, String> {
    of_one_gpu(runs)?;
    let mut cells = Cells::of(runs)?;
    cells.select(selection)?;
    let kinds = Kinds::of(cells.keys.iter().flat_map(|key| cells.row(key)).flatten());
    let (mut table, gap) = empty(markdown);
    let header = ["operator", "pass", "shape", "dtype"].map(String::from);
    table.set_header(header.iter().chain(&cells.columns));
    for key in &cells.keys {
        let row = cells.row(key);
        let mut line = vec![key.0.clone(), key.1.to_string(), key.2.clone(), key.3.clone()];
        let mut same = None;
        for (i, cell) in row.iter().enumerate() {
            let Some(cell) = cell else {
                line.push("-".into());
                continue;
            };
            let one = *same.get_or_insert(*cell);
            if (cell.bytes, cell.flops) != (one.bytes, one.flops) {
                let (one, other) = (&one.implementation, &cell.implementation);
                let what = format!("{} {} {} {}", key.0, key.1, key.2, key.3);
                return Err(format!("{what}: {one} and {other} count its work differently"));
            }
            let ratio = row[0].filter(|_| i > 0).and_then(|base| cell.over(base));
            let ratio = ratio.map_or_else(String::new, |ratio| format!(", {ratio:.2}×"));
            line.push(format!("{} ({}){ratio}", kinds.time(cell), rate(cell)));
        }
        table.add_row(line);
    }
    let mut text = table.to_string() + gap;
    text += "\n× is the time over that of the first column.";
    text += kinds.footnote();
    if selection.brief {
        text += &format!("\n{}", brief_conditions(runs));
    } else {
        for run in runs {
            text += &format!("\n{}", run.conditions());
        }
    }
    Ok(text)
}

/// The GPU, the days and the versions of runs of one GPU.
fn brief_conditions(runs: &[Run]) -> String {
    let days: BTreeSet<&str> = runs.iter().map(|run| run.date.as_str()).collect();
    let days: BTreeSet<&str> = [days.first(), days.last()].into_iter().flatten().copied().collect();
    let days: Vec<&str> = days.into_iter().collect();
    let versions = runs.iter().flat_map(|run| &run.versions);
    let versions: BTreeSet<String> =
        versions.map(|(name, version)| format!(", {name} {version}")).collect();
    let versions: String = versions.into_iter().collect();
    format!("{}, {}{versions}", runs[0].gpu, days.join(" to "))
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::{row, run};
    use super::*;

    #[test]
    fn runs_of_different_gpus_are_refused() {
        let runs = [
            run("NVIDIA H100 80GB HBM3", vec![row("fused", Pass::Forward, true)]),
            run("NVIDIA H200", vec![row("torch", Pass::Forward, true)]),
        ];
        assert_eq!(
            compare(&runs, &Selection::default(), false).unwrap_err(),
            "runs of different GPUs cannot be compared: NVIDIA H100 80GB HBM3 and NVIDIA H200"
        );
        assert!(compare(&[], &Selection::default(), false).is_err());
    }

    #[test]
    fn only_like_times_have_a_ratio() {
        let kiln = vec![row("fused", Pass::Forward, true), row("fused", Pass::Both, true)];
        let peers = vec![
            Row { us: 250.0, ..row("torch", Pass::Forward, true) },
            Row { us: 250.0, ..row("torch", Pass::Both, false) },
        ];
        let runs = [run("NVIDIA H200", kiln), run("NVIDIA H200", peers)];
        let text = compare(&runs, &Selection::default(), true).unwrap();
        assert!(text.contains("| 250 µs (1200 GB/s), 2.50× |"), "{text}");
        assert!(text.contains("| 250 µs† (1200 GB/s)       |"), "{text}");
        assert!(text.contains("\n† Launched call by call"), "{text}");

        let forward = Filter { pass: Some(Pass::Forward), ..Filter::default() };
        let columns = vec!["torch".into()];
        let selection = Selection { rows: vec![forward], columns, ..Selection::default() };
        let text = compare(&runs, &selection, true).unwrap();
        assert!(
            !text.contains('†') && !text.contains("fused") && !text.contains("+backward"),
            "{text}"
        );

        let wrong = Selection { columns: vec!["jax".into()], ..Selection::default() };
        let error = compare(&runs, &wrong, true).unwrap_err();
        assert_eq!(error, "no run has a column `jax`, there are fused, torch");
        let without = |column: &str| {
            let rows = vec![Filter { without: vec![column.into()], ..Filter::default() }];
            compare(&runs, &Selection { rows, ..Selection::default() }, true)
        };
        let text = without("torch").unwrap();
        assert!(text.contains("| torch |") && !text.contains("250 µs"), "{text}");
        assert_eq!(without("jax").unwrap_err(), error);
        let none = Filter { op: Some("rope".into()), ..Filter::default() };
        let wrong = Selection { rows: vec![none], ..Selection::default() };
        let error = "no run has a row with op = `rope`";
        assert_eq!(compare(&runs, &wrong, true).unwrap_err(), error);
    }

    #[test]
    fn conditions_of_many_runs_fit_in_a_line() {
        let mut peers = run("NVIDIA H200", vec![row("torch", Pass::Forward, true)]);
        peers.date = "2030-01-02".into();
        peers.versions.insert("torch".into(), "3.0".into());
        let runs = [run("NVIDIA H200", vec![row("fused", Pass::Forward, true)]), peers];
        let brief = Selection { brief: true, ..Selection::default() };
        let text = compare(&runs, &brief, true).unwrap();
        let line = format!("NVIDIA H200, {} to 2030-01-02, burn 1.2.3, torch 3.0", runs[0].date);
        assert_eq!(text.lines().last().unwrap(), line);
        let one = compare(&runs[..1], &brief, true).unwrap();
        assert_eq!(
            one.lines().last().unwrap(),
            format!("NVIDIA H200, {}, burn 1.2.3", runs[0].date)
        );
    }

    #[test]
    fn work_that_is_counted_differently_is_refused() {
        let other = Row { bytes: 1e8, ..row("torch", Pass::Forward, true) };
        let runs = [run("NVIDIA H200", vec![row("fused", Pass::Forward, true), other])];
        assert_eq!(
            compare(&runs, &Selection::default(), false).unwrap_err(),
            "swiglu forward 8×8 bf16: fused and torch count its work differently"
        );
    }
}
