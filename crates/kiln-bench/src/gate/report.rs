//! What the gate found.

use super::Options;
use crate::special::Why;
use burn::tensor::DType;
use kiln_ops::policy::Implementation;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// One kind of check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Check {
    /// Outputs against the oracle.
    Forward,
    /// Gradients against the oracle.
    Gradients,
    /// Whether errors average out along rows, columns and altogether.
    Bias,
    /// Every element of every kernel output written.
    Written,
    /// Nothing written outside them.
    Guards,
    /// Inputs and cotangents as they were, and what stands around them.
    Inputs,
    /// Kernel and reference in both orders.
    Order,
    /// The same bits twice.
    Repeat,
    /// The oracle's gradients against finite differences.
    FiniteDifferences,
}

impl Check {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Forward,
        Self::Gradients,
        Self::Bias,
        Self::Written,
        Self::Guards,
        Self::Inputs,
        Self::Order,
        Self::Repeat,
        Self::FiniteDifferences,
    ];

    /// Heading of its column.
    pub fn title(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Gradients => "gradients",
            Self::Bias => "bias",
            Self::Written => "all written",
            Self::Guards => "guards",
            Self::Inputs => "inputs kept",
            Self::Order => "both orders",
            Self::Repeat => "same bits",
            Self::FiniteDifferences => "finite diff.",
        }
    }
}

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Green.
    Passed,
    /// Red.
    Failed,
    /// There is nothing to check: no kernel here, or no backward.
    NotApplicable,
}

/// What became of one kind of check.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Checked {
    /// Which.
    pub check: Check,
    /// How it went.
    pub outcome: Outcome,
    /// How often it was made: cases, times the layouts and repetitions.
    pub runs: usize,
    /// How often it failed.
    pub failed: usize,
    /// Largest error over its bound, of checks that measure it; the largest number there is where that is
    /// infinite. An f32, because those come out of JSON as they went in.
    pub worst: Option<f32>,
    /// Where that was.
    pub at: Option<String>,
}

/// What was called again and again.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Stressed {
    /// How often.
    pub calls: usize,
    /// Case.
    pub case: String,
}

/// Special numbers that no case has in an input or a cotangent.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LeftOut {
    /// Which numbers.
    pub numbers: String,
    /// In which input; `the cotangent of` an output, which this names.
    pub input: String,
    /// Why.
    pub why: Why,
}

/// What the gate found for an operator and element type.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// Operator.
    pub op: String,
    /// Element type.
    pub dtype: String,
    /// Device.
    pub device: String,
    /// What was verified.
    pub implementation: Implementation,
    /// On which family of product kernels, if the operator is made of products.
    pub family: Option<String>,
    /// Seed of the data; a stress, which has its own, has none.
    #[serde(default)]
    pub seed: Option<u64>,
    /// Random cases that were asked for; of a stress none.
    #[serde(default)]
    pub fuzz: Option<usize>,
    /// Number of cases.
    pub cases: usize,
    /// Plans of the kernels that were verified: what they are specialised on, and the ways they took.
    pub plans: BTreeSet<String>,
    /// How often a kernel could write a result in the place of an input.
    pub places: usize,
    /// Of a stress, which compares no result with what is right.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stress: Option<Stressed>,
    /// Special numbers that no case has.
    #[serde(default)]
    pub left_out: BTreeSet<LeftOut>,
    /// Element types of the operator that the device lacks: they have no report.
    #[serde(default)]
    pub missing_types: Vec<String>,
    /// Families of the operator's kernels that run on the device in no element type.
    #[serde(default)]
    pub missing_families: Vec<String>,
    /// Every kind of check, in the order of [`Check::ALL`].
    pub checks: Vec<Checked>,
    /// Failures: check, case and what was wrong.
    pub failures: Vec<(Check, String, String)>,
}

/// A plan's kernel, what it is specialised on, and the ways it takes.
fn parts(plan: &str) -> (&str, &str, Vec<&str>) {
    let (specialised, ways) = plan.split_once("; ").unwrap_or((plan, ""));
    let (kernel, of) = specialised.split_once(": ").unwrap_or((specialised, ""));
    (kernel, of, ways.split(", ").filter(|way| !way.is_empty()).collect())
}

/// Failures of one kind that are kept; the others are counted.
const KEPT: usize = 4;
/// The case of a failure that kept others from being run.
const UNFINISHED: &str = "cases that were not finished";

impl Report {
    pub(super) fn new(
        op: &str,
        dtype: DType,
        device: String,
        implementation: Implementation,
        family: Option<&'static str>,
        differentiable: bool,
    ) -> Self {
        let checks = Check::ALL.map(|check| {
            let applies = match check {
                Check::Written | Check::Guards | Check::Order => {
                    implementation == Implementation::Fused
                }
                Check::Gradients => differentiable,
                // There is one oracle for all families.
                Check::FiniteDifferences => differentiable && family.is_none(),
                Check::Forward | Check::Bias | Check::Inputs | Check::Repeat => true,
            };
            let outcome = if applies { Outcome::Passed } else { Outcome::NotApplicable };
            Checked { check, outcome, runs: 0, failed: 0, worst: None, at: None }
        });
        Self {
            op: op.into(),
            dtype: format!("{dtype:?}").to_lowercase(),
            device,
            implementation,
            family: family.map(str::to_string),
            seed: None,
            fuzz: None,
            cases: 0,
            plans: BTreeSet::new(),
            places: 0,
            stress: None,
            left_out: BTreeSet::new(),
            missing_types: vec![],
            missing_families: vec![],
            checks: checks.into(),
            failures: vec![],
        }
    }

    pub(super) fn take_options(&mut self, options: Option<Options>) {
        self.seed = options.map(|options| options.seed);
        self.fuzz = options.map(|options| options.fuzz);
    }

    /// The first of these plans that no case has verified: none was of a kernel that is specialised alike, or one of
    /// its ways was taken in none of its kind.
    pub fn unverified<'a>(&self, plans: &'a BTreeSet<String>) -> Option<&'a String> {
        let verified: Vec<_> = self.plans.iter().map(|plan| parts(plan)).collect();
        plans.iter().find(|plan| {
            let (kernel, of, ways) = parts(plan);
            let alike = verified.iter().any(|(k, o, _)| (*k, *o) == (kernel, of));
            let taken =
                |way: &str| verified.iter().any(|(k, _, w)| *k == kernel && w.contains(&way));
            !(alike && ways.into_iter().all(taken))
        })
    }

    /// Takes in what was found for other cases of the same row.
    pub fn add(&mut self, other: Self) {
        self.cases += other.cases;
        self.plans.extend(other.plans);
        self.places += other.places;
        self.left_out.extend(other.left_out);
        for (checked, more) in self.checks.iter_mut().zip(other.checks) {
            checked.outcome = match (checked.outcome, more.outcome) {
                (Outcome::Failed, _) | (_, Outcome::Failed) => Outcome::Failed,
                (Outcome::Passed, _) | (_, Outcome::Passed) => Outcome::Passed,
                _ => Outcome::NotApplicable,
            };
            checked.runs += more.runs;
            checked.failed += more.failed;
            if more.worst > checked.worst {
                (checked.worst, checked.at) = (more.worst, more.at);
            }
        }
        for (check, case, what) in other.failures {
            let kept = self.failures.iter().filter(|failure| failure.0 == check).count();
            if kept < KEPT || case == UNFINISHED {
                self.failures.push((check, case, what));
            }
        }
    }

    /// Says that a check is made with other cases.
    pub(super) fn leave_out(&mut self, check: Check) {
        self.checks[check as usize].outcome = Outcome::NotApplicable;
    }

    /// Counts a check.
    pub(super) fn ran(&mut self, check: Check) {
        let checked = &mut self.checks[check as usize];
        if checked.outcome != Outcome::NotApplicable {
            checked.runs += 1;
        }
    }

    /// Takes in the largest error over its bound that a check measured, and where.
    pub(super) fn measured(&mut self, check: Check, ratio: f64, at: impl FnOnce() -> String) {
        let checked = &mut self.checks[check as usize];
        let ratio = ratio.min(f32::MAX.into()) as f32;
        let nearer = checked.worst.is_none_or(|worst| ratio > worst);
        if nearer && checked.outcome != Outcome::NotApplicable {
            (checked.worst, checked.at) = (Some(ratio), Some(at()));
        }
    }

    pub(super) fn fail(&mut self, check: Check, case: &str, what: String) {
        let checked = &mut self.checks[check as usize];
        checked.outcome = Outcome::Failed;
        checked.failed += 1;
        if checked.failed <= KEPT {
            self.failures.push((check, case.into(), what));
        }
    }

    /// Makes it red for this reason, with no check made.
    pub(super) fn unfinished(mut self, why: String) -> Self {
        for checked in &mut self.checks {
            checked.outcome = Outcome::NotApplicable;
        }
        self.fail(Check::Forward, UNFINISHED, why);
        self
    }

    /// Whether nothing failed.
    pub fn green(&self) -> bool {
        self.failures.is_empty()
    }

    /// What became of one kind of check.
    pub fn checked(&self, check: Check) -> &Checked {
        &self.checks[check as usize]
    }

    /// How often a check failed.
    pub fn failed(&self, check: Check) -> usize {
        self.checked(check).failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_is_listed_in_its_place() {
        let mut report =
            Report::new("op", DType::F32, "cpu".into(), Implementation::Reference, None, true);
        for (ratio, at) in [(0.1, "first"), (0.7, "second"), (0.2, "third")] {
            report.ran(Check::Forward);
            report.measured(Check::Forward, ratio, || at.into());
        }
        report.ran(Check::Guards);
        report.measured(Check::Guards, 0.5, || "nowhere".into());
        for _ in 0..6 {
            report.fail(Check::Repeat, "[1]", "differs".into());
        }
        let listed: Vec<Check> = report.checks.iter().map(|checked| checked.check).collect();
        assert_eq!(listed, Check::ALL);
        let forward = report.checked(Check::Forward);
        assert_eq!((forward.outcome, forward.runs), (Outcome::Passed, 3));
        assert_eq!((forward.worst, forward.at.as_deref()), (Some(0.7), Some("second")));
        let guards = report.checked(Check::Guards);
        assert_eq!((guards.outcome, guards.runs), (Outcome::NotApplicable, 0));
        assert_eq!((guards.worst, &guards.at), (None, &None));
        assert_eq!((report.failed(Check::Repeat), report.failures.len()), (6, KEPT));
        assert!(!report.green());
    }

    #[test]
    fn plans_that_no_case_took_are_found() {
        let mut report =
            Report::new("op", DType::F32, "cpu".into(), Implementation::Fused, None, true);
        let plans = |plans: &[&str]| -> BTreeSet<String> {
            plans.iter().map(|plan| plan.to_string()).collect()
        };
        report.plans =
            plans(&["sum: (4, 2); in parts", "sum: (8, 2); in turns, a batch", "add: (4, 2)"]);
        for same in [
            "sum: (4, 2); in parts",
            "sum: (4, 2)",
            "sum: (4, 2); in parts, in turns",
            "add: (4, 2)",
        ] {
            assert_eq!(report.unverified(&plans(&[same])), None, "{same}");
        }
        // Specialised otherwise, a way that only another kernel takes, one that none takes, no kernel of these.
        for other in ["sum: (4, 4)", "add: (4, 2); in parts", "sum: (4, 2); ragged", "mean: (4, 2)"]
        {
            assert_eq!(
                report.unverified(&plans(&["add: (4, 2)", other])),
                Some(&other.to_string())
            );
        }
    }

    #[test]
    fn parts_come_to_the_whole() {
        let part = |ratio: f64, plan: &str, failures: usize| {
            let mut report =
                Report::new("op", DType::F32, "cpu".into(), Implementation::Fused, None, true);
            report.cases = 2;
            report.plans.insert(plan.into());
            report.ran(Check::Forward);
            report.measured(Check::Forward, ratio, || plan.into());
            for _ in 0..failures {
                report.fail(Check::Repeat, plan, "differs".into());
            }
            report
        };
        let mut report = part(0.3, "first", 0);
        report.leave_out(Check::Order);
        report.add(part(0.7, "second", 3));
        report.add(part(0.2, "first", 3));
        let died = part(0.0, "none", 0).unfinished("it died".into());
        report.add(died);
        assert_eq!((report.cases, report.plans.len()), (8, 3));
        let forward = report.checked(Check::Forward);
        assert_eq!((forward.outcome, forward.runs, forward.failed), (Outcome::Failed, 4, 1));
        assert_eq!((forward.worst, forward.at.as_deref()), (Some(0.7), Some("second")));
        assert_eq!(report.failed(Check::Repeat), 6);
        assert_eq!(report.failures.len(), KEPT + 1);
        assert!(!report.green());

        // Nor is its seed lost, if it is the first.
        let mut died = part(0.0, "none", 0);
        died.take_options(Some(Options { seed: 7, fuzz: 3, family: None }));
        let mut died = died.unfinished("it died".into());
        died.add(part(0.2, "first", 0));
        assert_eq!((died.seed, died.fuzz), (Some(7), Some(3)));

        // What only the part that died would have checked is not claimed, and why it died is kept.
        let mut report = part(0.1, "first", 0);
        report.leave_out(Check::Order);
        for _ in 0..KEPT {
            report.fail(Check::Forward, "first", "wrong".into());
        }
        report.add(part(0.1, "second", 0).unfinished("it died".into()));
        assert_eq!(report.checked(Check::Order).outcome, Outcome::NotApplicable);
        assert_eq!(report.checked(Check::Repeat).outcome, Outcome::Passed);
        assert_eq!(report.failures[KEPT].2, "it died");
    }

    #[test]
    fn an_infinite_error_is_a_number_in_json() {
        let mut report =
            Report::new("op", DType::F32, "cpu".into(), Implementation::Reference, None, true);
        report.measured(Check::Forward, f64::INFINITY, || "here".into());
        assert_eq!(report.checked(Check::Forward).worst, Some(f32::MAX));
    }

    #[test]
    fn an_unfinished_report_is_red_and_claims_no_check() {
        let report = Report::new("op", DType::F32, "cpu".into(), Implementation::Fused, None, true)
            .unfinished("it died".into());
        assert!(!report.green());
        let failure = (Check::Forward, UNFINISHED.to_string(), "it died".to_string());
        assert_eq!(report.failures, [failure]);
        let claimed = report.checks.iter().filter(|c| c.outcome != Outcome::NotApplicable);
        assert_eq!(claimed.map(|checked| checked.check).collect::<Vec<_>>(), [Check::Forward]);
    }
}
