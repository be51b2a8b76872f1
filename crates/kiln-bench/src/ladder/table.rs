//! The ladder as a table.

use super::{Ladder, Step};
use crate::bench::microseconds;
use comfy_table::{Table, presets};

/// One row a rung.
pub fn table(ladder: &Ladder, markdown: bool) -> String {
    let mut table = Table::new();
    table.load_style(if markdown {
        presets::ASCII_MARKDOWN
    } else {
        presets::UTF8_HORIZONTAL_ONLY
    });
    table.set_header([
        "rung",
        "right after the answer",
        "right first",
        "right after another",
        "never written",
        "error",
        "device time",
        "verdict",
    ]);
    let yes = |right: bool| if right { "yes" } else { "NO" }.to_string();
    for step in &ladder.steps {
        table.add_row([
            step.rung.clone(),
            yes(step.right_on_stale_answers),
            yes(step.right_first),
            yes(step.right_after_reference),
            unwritten(step),
            step.error.map_or_else(|| "not finite".into(), |error| format!("{error:.1e}")),
            match step.passes() {
                true => microseconds(step.us),
                false => format!("{}, worthless", microseconds(step.us)),
            },
            match step.passes() {
                true => "passes".into(),
                false => format!("CONVICTED: {}", step.charges().join("; ")),
            },
        ]);
    }
    format!(
        "{table}\nright after the answer: a reference has just run on the same numbers, and its \
         freed memory holds the answer.\nright first: before any reference. right after another: \
         a reference has just run on other numbers.\n{n}×{n} {}, {}, {}, `{}`",
        ladder.dtype,
        ladder.gpu,
        ladder.date,
        ladder.command,
        n = ladder.size
    )
}

/// How many elements, from where to where.
fn unwritten(step: &Step) -> String {
    match (step.first_unwritten, step.last_unwritten) {
        (Some(first), Some(last)) => format!("{}, {first:?} to {last:?}", step.unwritten),
        _ => "0".into(),
    }
}
