//! Calls of nothing: each dimension in turn is 0.

use super::data::inputs;
use super::execute::{caught, upload};
use super::plans::Taken;
use super::{Check, Gate, fuzz};
use crate::host::Layout;
use crate::registry::{Call, Case, Operator};
use kiln_ops::oracle::Format;
use kiln_ops::{OpError, policy};

/// A call of which this dimension is 0.
pub(super) struct Empty {
    /// The dimension.
    pub(super) dim: &'static str,
    /// The call, of a case of the registry; none if no small one has the dimension.
    pub(super) case: Option<Case>,
}

/// One for each dimension that the spec names, of the largest of the registry's small cases that has it.
pub(super) fn cases(op: &dyn Operator) -> Vec<Empty> {
    let spec = op.spec();
    // What may be left out has its own way to be without elements.
    let inputs = spec.inputs.iter().filter(|input| !input.holds.optional());
    let mut names: Vec<&str> = inputs.flat_map(|input| input.shape).copied().collect();
    names.retain(|name| name.parse::<usize>().is_err() && !name.ends_with("-1"));
    names.sort_unstable();
    names.dedup();
    let of = |dim: &'static str| {
        let small = op.cases().into_iter().filter(|case| !fuzz::large(case));
        let known = small.filter_map(|case| {
            let dims = spec.dims(&case.shapes).ok()?;
            dims.contains_key(dim).then_some((case, dims))
        });
        let (case, mut dims) = known.max_by_key(|(case, _)| fuzz::moderate(case))?;
        op.zero(&mut dims, dim);
        Some(Case { shapes: spec.shapes_like(&dims, &case.shapes), ..case })
    };
    names.into_iter().map(|dim| Empty { dim, case: of(dim) }).collect()
}

impl Gate<'_> {
    /// What may be nothing is right, and what may not is refused.
    pub(super) fn empties(&mut self) {
        for Empty { dim, case } in cases(self.op) {
            match case {
                None => {
                    let error = format!("no small case has the dimension {dim}");
                    self.report.fail(Check::Forward, "cases", error);
                }
                Some(case) if self.op.may_be_zero().contains(&dim) => {
                    self.case(&case, Layout::Allocated, &Taken::default());
                }
                Some(case) => self.refused(dim, &case),
            }
            self.report.cases += 1;
        }
    }

    fn refused(&mut self, dim: &str, case: &Case) {
        let (op, dtype, device) = (self.op, self.dtype, self.device);
        let what = format!("{case}, where {dim} is 0");
        let run = || -> Result<(), String> {
            let attributes = case.attributes(op.spec())?;
            let inputs = inputs(op, case, dtype, Format::from(dtype), &mut self.rng)?;
            let inputs = upload(op, &inputs, dtype, Layout::Allocated, false, device);
            let call = Call { inputs: &inputs, attributes: &attributes };
            match op.run(&call) {
                Ok(_) => Err("was taken, but should have been refused".into()),
                Err(OpError::Shape { .. } | OpError::Attribute { .. }) => Ok(()),
                Err(other) => Err(format!("is refused, but not for its shape: {other}")),
            }
        };
        let refused = caught(|| policy::force(self.implementation, run));
        self.report.ran(Check::Forward);
        if let Err(error) = refused {
            self.report.fail(Check::Forward, &what, error);
        }
    }
}
