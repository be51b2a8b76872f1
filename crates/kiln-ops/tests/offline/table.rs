//! What is recorded of every kernel.

use crate::toolkit::Usage;
use std::collections::{BTreeMap, HashMap};
use std::fmt::{Display, Formatter, Result};

const HEAD: &str = "registers  spilled  stack  shared  source        kernel";

/// Rows by the names of their kernels, and the toolkit that compiled them.
#[derive(Default)]
pub struct Table {
    pub toolkit: String,
    pub rows: BTreeMap<String, Row>,
}

/// What was found of a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub usage: Usage,
    /// Bytes of shared memory.
    pub shared: usize,
    /// The [`hash`] of its CUDA C++.
    pub source: String,
}

/// The hash of a kernel's CUDA C++. CubeCL numbers variables otherwise in every run: they count as if they were
/// numbered in the order in which they appear. Nor does the end of a kernel's name count, a hash that is another in every
/// build.
pub fn hash(code: &str) -> String {
    let mut numbers = HashMap::new();
    let mut text = String::with_capacity(code.len());
    // A name is `v12`, or has that between underlines.
    for part in code.split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
        let word = part.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        match word.strip_prefix('v').and_then(|number| number.parse::<u32>().ok()) {
            Some(number) => {
                let next = numbers.len();
                let number = numbers.entry(number).or_insert(next);
                text.push_str(&format!("v{number}{}", &part[word.len()..]));
            }
            None if part.ends_with('(') && of_build(word) => text.push('('),
            None => text.push_str(part),
        }
    }
    blake3::hash(text.as_bytes()).to_hex()[..12].into()
}

fn of_build(word: &str) -> bool {
    word.len() == 8 && word.chars().all(|c| c.is_ascii_digit() || ('a'..='f').contains(&c))
}

#[test]
fn numbers_of_variables_are_not_in_the_hash() {
    let code = |a, b| format!("float v{a} = 2; float v{b} = v{a} * vec1(v{b}3)");
    assert_eq!(hash(&code(1, 2)), hash(&code(31, 7)));
    assert_ne!(hash(&code(1, 2)), hash(&code(1, 1)));
    assert_ne!(hash("v1 + v2 * v1"), hash("v1 + v2 * v2"));
    assert_eq!(hash("info_v5.x = v7;"), hash("info_v7.x = v1;"));
    assert_ne!(hash("x1"), hash("x2"));
    assert_eq!(hash("step_n_4_5cd79359(float v1)"), hash("step_n_4_638390c4(float v1)"));
    assert_ne!(hash("step_n_4_5cd79359(float v1)"), hash("step_n_2_638390c4(float v1)"));
}

impl Table {
    /// What [`Display`] writes; without rows that it would not write.
    pub fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        let toolkit = lines.next().unwrap_or_default().into();
        Self { toolkit, rows: lines.filter_map(Row::parse).collect() }
    }

    /// That of a kernel, if it was compiled from this source by this toolkit.
    pub fn known(&self, toolkit: &str, name: &str, source: &str) -> Option<Usage> {
        let row = self.rows.get(name).filter(|row| row.source == source)?;
        (self.toolkit == toolkit).then_some(row.usage)
    }
}

impl Row {
    fn parse(line: &str) -> Option<(String, Self)> {
        let mut words = line.split_whitespace();
        let [registers, spilled, stack, shared] =
            std::array::from_fn(|_| words.next().and_then(|word| word.parse::<u32>().ok()));
        let usage = Usage { registers: registers?, spilled: spilled?, stack: stack? };
        let source = words.next()?.into();
        Some((
            words.collect::<Vec<_>>().join(" "),
            Self { usage, shared: shared? as usize, source },
        ))
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        writeln!(f, "{}\n{HEAD}", self.toolkit)?;
        for (name, Row { usage, shared, source }) in &self.rows {
            let (registers, spilled, stack) = (usage.registers, usage.spilled, usage.stack);
            let numbers = format!("{registers:>9} {spilled:>8} {stack:>6} {shared:>7}");
            writeln!(f, "{numbers}  {source}  {name}")?;
        }
        Ok(())
    }
}
