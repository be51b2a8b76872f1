//! Calls of nothing: each dimension in turn is 0.

use super::data::inputs;
use super::execute::{caught, upload};
use super::plans::Taken;
use super::{Check, Gate, fuzz};
use crate::host::Layout;
use crate::registry::{Call, Case, Operator};
use kiln_ops::oracle::Format;
use kiln_ops::policy;

/// A call of which this dimension is 0.
pub(super) struct Empty {
    /// The dimension.
    pub(super) dim: &'static str,
    /// The call.
    pub(super) case: Case,
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
        dims.insert(dim, vec![0]);
        if op.empty().contains(&dim) {
            op.fit(&mut dims);
        }
        let mut shapes = spec.shapes(&dims);
        for (shape, was) in shapes.iter_mut().zip(&case.shapes) {
            // An input that may be left out, and is.
            if was.iter().all(|size| *size == 0) {
                shape.clone_from(was);
            }
        }
        Some(Empty { dim, case: Case { shapes, ..case } })
    };
    names.into_iter().filter_map(of).collect()
}

impl Gate<'_> {
    /// What may be nothing is right, and what may not is refused.
    pub(super) fn empties(&mut self) {
        for Empty { dim, case } in cases(self.op) {
            match self.op.empty().contains(&dim) {
                true => self.case(&case, Layout::Allocated, &Taken::default()),
                false => self.refused(dim, &case),
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
                Err(_) => Ok(()),
            }
        };
        let refused = caught(|| policy::force(self.implementation, run));
        self.report.ran(Check::Forward);
        if let Err(error) = refused {
            self.report.fail(Check::Forward, &what, error);
        }
    }
}
