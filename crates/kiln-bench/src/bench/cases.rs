//! What is timed, as data: the programs that time other libraries read it, so that their shapes, their numbers
//! and their rates are those of Kiln.

use super::data::{Part, file_stem, parts};
use super::{Pass, passes};
use crate::registry::{Scale, all};
use burn::tensor::DType;
use serde::Serialize;
use std::collections::BTreeMap;

/// A shape of an operator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TimedCase {
    /// Operator.
    pub op: String,
    /// The size that it belongs to.
    pub scale: Scale,
    /// Shape, as a run has it.
    pub shape: String,
    /// Name of its data, without the element type and the ending.
    pub file: String,
    /// Inputs and cotangents.
    pub tensors: Vec<Part>,
    /// What each pass cannot avoid.
    pub work: Vec<PassWork>,
}

/// What a pass cannot avoid.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PassWork {
    /// Forward, backward or both.
    pub pass: Pass,
    /// Operations.
    pub flops: f64,
    /// Bytes, by element type.
    pub bytes: BTreeMap<String, f64>,
}

/// All that can be timed.
///
/// # Errors
///
/// None, unless a row of the registry names shapes that do not fit it.
pub fn cases() -> Result<Vec<TimedCase>, String> {
    let mut cases = vec![];
    for op in all() {
        for scale in Scale::ALL {
            for case in op.shapes(scale) {
                let types = [("bf16", DType::BF16), ("f16", DType::F16), ("f32", DType::F32)];
                let works = types.map(|(name, dtype)| (name, passes(*op, &case, dtype)));
                let (_, one) = &works[0];
                let work = one.iter().enumerate().map(|(i, (pass, work))| PassWork {
                    pass: *pass,
                    flops: work.flops,
                    bytes: works
                        .iter()
                        .map(|(name, of)| (name.to_string(), of[i].1.bytes))
                        .collect(),
                });
                cases.push(TimedCase {
                    op: op.spec().name.into(),
                    scale,
                    shape: case.to_string(),
                    file: file_stem(*op, &case),
                    tensors: parts(*op, &case)?,
                    work: work.collect(),
                });
            }
        }
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_have_the_cases_of_the_registry() {
        let file = include_str!("../../../../benches/peers/cases.jsonl");
        let cases = cases().unwrap();
        let made: Vec<String> =
            cases.iter().map(|case| serde_json::to_string(case).unwrap()).collect();
        for (line, case) in file.lines().zip(&made) {
            assert_eq!(line, case, "kiln bench --cases > benches/peers/cases.jsonl");
        }
        assert_eq!(file.lines().count(), made.len());
    }

    #[test]
    fn a_case_has_one_file() {
        let cases = cases().unwrap();
        for case in &cases {
            // A size may have the shape of another.
            let mut same = cases.iter().filter(|other| other.file == case.file);
            assert!(same.all(|other| other.tensors == case.tensors), "{}", case.file);
        }
    }
}
