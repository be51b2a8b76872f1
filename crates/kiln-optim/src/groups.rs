//! Which parameters move by which rule.

use crate::rule::{Pace, Rule};
use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::tensor::Tensor;

/// How the parameters of a group move.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The formula and its numbers.
    pub rule: Rule,
    /// Their learning rate as a multiple of the one that a step is given.
    pub learning_rate_scale: f64,
}

impl<R: Into<Rule>> From<R> for Settings {
    fn from(rule: R) -> Self {
        Self { rule: rule.into(), learning_rate_scale: 1.0 }
    }
}

impl Settings {
    /// When and how far parameters of the group move, of how far those move that are in none.
    pub(crate) fn pace(&self, of: &Pace) -> Pace {
        Pace { learning_rate: of.learning_rate * self.learning_rate_scale, ..of.clone() }
    }

    /// The same with another multiple of the learning rate.
    pub fn with_learning_rate_scale(self, learning_rate_scale: f64) -> Self {
        Self { learning_rate_scale, ..self }
    }
}

/// Settings for all parameters, and those of groups that differ.
#[derive(Debug, Clone)]
pub(crate) struct Groups {
    default: Settings,
    exceptions: Vec<(ParamGroup, Settings)>,
}

/// Which settings of [`Groups`]: equal for parameters of one group.
pub(crate) type GroupIndex = usize;

impl Groups {
    pub(crate) fn new(default: Settings) -> Self {
        Self { default, exceptions: Vec::new() }
    }

    /// Of several groups that hold a parameter the last counts.
    pub(crate) fn push(&mut self, group: ParamGroup, settings: Settings) {
        self.exceptions.push((group, settings));
    }

    /// The group of a parameter.
    pub(crate) fn of(&self, id: &ParamId, name: &str) -> GroupIndex {
        let holds = |(group, _): &(ParamGroup, Settings)| group.matches(id, Some(name));
        self.exceptions.iter().rposition(holds).map_or(0, |index| index + 1)
    }

    /// The settings of a group.
    pub(crate) fn settings(&self, index: GroupIndex) -> &Settings {
        match index.checked_sub(1) {
            Some(exception) => &self.exceptions[exception].1,
            None => &self.default,
        }
    }
}

/// Norm scales and biases: the parameters that weight decay spares by custom. Add the embeddings
/// with [`ParamGroup::fuse`].
pub fn below_rank_two<M: Module>(module: &M) -> ParamGroup {
    struct Vectors(Vec<ParamId>);
    impl ModuleVisitor for Vectors {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if D < 2 {
                self.0.push(param.id);
            }
        }
    }
    let mut vectors = Vectors(Vec::new());
    module.visit(&mut vectors);
    ParamGroup::from_ids(vectors.0)
}
