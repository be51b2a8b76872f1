//! Tables in Markdown pages, made from run files.
//!
//! A comment in the page names the files, relative to the page, and may select rows and columns, in TOML:
//!
//! ```text
//! <!-- table
//! files = ["runs/rms_norm.json", "runs/rms_norm_peers.json"]
//! columns = ["fused", "torch"]
//! rows = [{ op = "rms_norm", pass = "both" }]
//! -->
//! … what `kiln bench --compare` makes of them …
//! <!-- end -->
//! ```

use super::{Filter, Run, Selection, compare};
use crate::host::one_line;
use serde::Deserialize;

/// What stands in a comment.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Comment {
    files: Vec<String>,
    #[serde(default)]
    columns: Vec<String>,
    #[serde(default)]
    rows: Vec<Filter>,
    #[serde(default)]
    brief: bool,
}

/// The page with its tables made anew from the files that they name, which `read` opens, and how many there are. What
/// stands in a code block is no table.
///
/// # Errors
///
/// One line that says where a comment is not what it should be, or why its runs make no table.
pub fn rewrite(
    page: &str,
    read: &dyn Fn(&str) -> Result<Run, String>,
) -> Result<(String, usize), String> {
    let (mut made, mut tables) = (String::with_capacity(page.len()), 0);
    let mut code = false;
    let mut lines = page.split_inclusive('\n').zip(1..);
    while let Some((line, number)) = lines.next() {
        made += line;
        code ^= line.trim_start().starts_with("```");
        if code || line.trim_end() != "<!-- table" {
            continue;
        }
        let wrong = |what: &str| format!("line {number}: {what}");
        let mut comment = String::new();
        loop {
            let (line, _) = lines.next().ok_or_else(|| wrong("the comment has no `-->`"))?;
            made += line;
            if line.trim_end() == "-->" {
                break;
            }
            comment += line;
        }
        // What has stood there.
        let mut rest = lines.by_ref().map(|(line, _)| line);
        // Where another table begins this one has no end, and what is between is no table's.
        let mark = |line: &&str| ["<!-- end -->", "<!-- table"].contains(&line.trim_end());
        let end = rest.find(mark).filter(|line| line.trim_end() == "<!-- end -->");
        let end = end.ok_or_else(|| wrong("the table has no `<!-- end -->`"))?;
        let comment: Comment =
            toml::from_str(&comment).map_err(|e| wrong(&one_line(&e.to_string())))?;
        let runs: Vec<Run> =
            comment.files.iter().map(|file| read(file)).collect::<Result<_, _>>()?;
        let selection =
            Selection { rows: comment.rows, columns: comment.columns, brief: comment.brief };
        let table = compare(&runs, &selection, true).map_err(|e| wrong(&e))?;
        made += &format!("\n{table}\n\n{end}");
        tables += 1;
    }
    Ok((made, tables))
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::{row, run};
    use super::super::{Pass, Row};
    use super::*;

    fn read(file: &str) -> Result<Run, String> {
        let rows = match file {
            "kiln.json" => vec![row("fused", Pass::Both, true)],
            "peers.json" => vec![Row { us: 150.0, ..row("torch", Pass::Both, true) }],
            other => return Err(format!("cannot read {other}")),
        };
        Ok(run("NVIDIA H200", rows))
    }

    const COMMENT: &str = "<!-- table\nfiles = [\"kiln.json\", \"peers.json\"]\n-->\n";

    #[test]
    fn a_table_is_made_anew_and_the_rest_stays() {
        let page = format!("# Title\n\n{COMMENT}| old |\n<!-- end -->\nafter");
        let (made, tables) = rewrite(&page, &read).unwrap();
        assert_eq!(tables, 1);
        assert!(made.starts_with(&format!("# Title\n\n{COMMENT}\n| operator |")), "{made}");
        assert!(made.contains("| 150 µs (2000 GB/s), 1.50× |\n\n× is the time"), "{made}");
        assert!(made.ends_with("`kiln bench`\n\n<!-- end -->\nafter"), "{made}");
        assert_eq!(rewrite(&made, &read).unwrap(), (made, 1));
        for untouched in ["", "no table\n", &format!("```text\n{COMMENT}old\n<!-- end -->\n```\n")]
        {
            assert_eq!(rewrite(untouched, &read).unwrap(), (untouched.to_string(), 0));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (page, error) in [
            ("\n<!-- table\nfiles = []\n", "line 2: the comment has no `-->`"),
            ("<!-- table\nfiles = []\n-->\n", "line 1: the table has no `<!-- end -->`"),
            (
                "<!-- table\nfiles = []\n-->\ntext\n<!-- table\nfiles = []\n-->\n<!-- end -->\n",
                "line 1: the table has no `<!-- end -->`",
            ),
            ("<!-- table\nfiles = []\n-->\n<!-- end -->\n", "line 1: there is no run to compare"),
            ("<!-- table\nfiles = [\"x.json\"]\n-->\n<!-- end -->\n", "cannot read x.json"),
        ] {
            assert_eq!(rewrite(page, &read).unwrap_err(), error);
        }
        let page = "<!-- table\nfile = \"kiln.json\"\n-->\n<!-- end -->\n";
        assert!(rewrite(page, &read).unwrap_err().contains("unknown field `file`"));
    }
}
