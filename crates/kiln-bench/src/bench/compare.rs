//! Several runs side by side.

use super::table::{microseconds, rate};
use super::{Pass, Row, Run};
use comfy_table::{Table, presets};
use std::collections::BTreeMap;

/// One table of the rows of all runs; ratios are to the first column. Implementations of one name
/// on unlike devices have columns of their own.
pub fn compare(runs: &[Run], markdown: bool) -> String {
    type Key = (String, Pass, String, String);
    let mut columns: Vec<String> = vec![];
    let mut order: Vec<Key> = vec![];
    let mut cells: BTreeMap<Key, BTreeMap<String, Row>> = BTreeMap::new();
    let one_device = runs.iter().all(|run| run.device == runs[0].device);
    for (run, row) in runs.iter().flat_map(|run| run.rows.iter().map(move |row| (run, row))) {
        let column = if one_device {
            row.implementation.clone()
        } else {
            format!("{} ({})", row.implementation, run.device)
        };
        if !columns.contains(&column) {
            columns.push(column.clone());
        }
        let key = (row.op.clone(), row.pass, row.shape.clone(), row.dtype.clone());
        if !order.contains(&key) {
            order.push(key.clone());
        }
        cells.entry(key).or_default().insert(column, row.clone());
    }
    let mut table = Table::new();
    table.load_style(if markdown {
        presets::ASCII_MARKDOWN
    } else {
        presets::UTF8_HORIZONTAL_ONLY
    });
    let mut header = vec!["operator".to_string(), "pass".into(), "shape".into(), "dtype".into()];
    header.extend(columns.iter().cloned());
    table.set_header(header);
    for key in order {
        let found = &cells[&key];
        let first = columns.iter().find_map(|c| found.get(c)).map(|row| row.us);
        let mut line = vec![key.0.clone(), key.1.to_string(), key.2.clone(), key.3.clone()];
        for (i, column) in columns.iter().enumerate() {
            line.push(match (found.get(column), first) {
                (Some(row), Some(first)) if i > 0 => {
                    format!("{} ({}), {:.2}×", microseconds(row.us), rate(row), row.us / first)
                }
                (Some(row), _) => format!("{} ({})", microseconds(row.us), rate(row)),
                (None, _) => "-".into(),
            });
        }
        table.add_row(line);
    }
    let mut text = table.to_string();
    text += "\n× is the time over that of the first column.";
    for run in runs {
        text += &format!("\n{}, {}, `{}`", run.gpu, run.date, run.command);
    }
    text
}
