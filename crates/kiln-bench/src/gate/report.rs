//! What the gate found.

use burn::tensor::DType;
use kiln_ops::policy::Implementation;
use serde::Serialize;
use std::collections::BTreeMap;

/// One kind of check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Check {
    /// Outputs against the oracle.
    Forward,
    /// Gradients against the oracle.
    Gradients,
    /// Every element of every kernel output written.
    Written,
    /// Nothing written outside them.
    Guards,
    /// Kernel and reference in both orders.
    Order,
    /// The same bits twice.
    Repeat,
    /// The oracle's gradients against finite differences.
    FiniteDifferences,
}

impl Check {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Forward,
        Self::Gradients,
        Self::Written,
        Self::Guards,
        Self::Order,
        Self::Repeat,
        Self::FiniteDifferences,
    ];

    /// Heading of its column.
    pub fn title(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Gradients => "gradients",
            Self::Written => "all written",
            Self::Guards => "guards",
            Self::Order => "both orders",
            Self::Repeat => "same bits",
            Self::FiniteDifferences => "finite diff.",
        }
    }
}

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Green.
    Passed,
    /// Red.
    Failed,
    /// There is nothing to check: no kernel here, or no backward.
    NotApplicable,
}

/// What the gate found for an operator and element type.
#[derive(Debug, Clone, Serialize)]
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
    pub family: Option<&'static str>,
    /// Number of cases.
    pub cases: usize,
    /// Largest ‖out − ref‖/‖ref‖ of an output.
    pub forward: f64,
    /// Largest ‖out − ref‖/‖ref‖ of a gradient.
    pub backward: f64,
    /// Failures: check, case and what was wrong.
    pub failures: Vec<(Check, String, String)>,
    #[serde(skip)]
    count: BTreeMap<Check, usize>,
}

/// Failures of one kind that are kept; the others are counted.
const KEPT: usize = 4;

impl Report {
    pub(super) fn new(
        op: &str,
        dtype: DType,
        device: String,
        implementation: Implementation,
        family: Option<&'static str>,
    ) -> Self {
        Self {
            op: op.into(),
            dtype: format!("{dtype:?}").to_lowercase(),
            device,
            implementation,
            family,
            cases: 0,
            forward: 0.0,
            backward: 0.0,
            failures: vec![],
            count: BTreeMap::new(),
        }
    }

    pub(super) fn fail(&mut self, check: Check, case: &str, what: String) {
        let count = self.count.entry(check).or_default();
        *count += 1;
        if *count <= KEPT {
            self.failures.push((check, case.into(), what));
        }
    }

    /// Whether nothing failed.
    pub fn green(&self) -> bool {
        self.failures.is_empty()
    }

    /// How one kind of check went; `differentiable` says whether the operator has a backward.
    pub fn outcome(&self, check: Check, differentiable: bool) -> Outcome {
        let kernel = self.implementation == Implementation::Fused;
        let applies = match check {
            Check::Written | Check::Guards | Check::Order => kernel,
            Check::Gradients | Check::FiniteDifferences => differentiable,
            Check::Forward | Check::Repeat => true,
        };
        match (self.count.contains_key(&check), applies) {
            (true, _) => Outcome::Failed,
            (false, true) => Outcome::Passed,
            (false, false) => Outcome::NotApplicable,
        }
    }

    /// How often a check failed.
    pub fn failed(&self, check: Check) -> usize {
        self.count.get(&check).copied().unwrap_or_default()
    }
}
