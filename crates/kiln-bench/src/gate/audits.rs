//! Runs under an audit, and once more with results in the places of inputs.

use super::data::Data;
use super::execute::{self, Audited, Run, audited};
use super::{Check, Gate};
use crate::host::HostTensor;
use kiln_ops::device;
use kiln_ops::policy::Implementation;

/// Says so if results of so many elements are not all seen in buffers of so many: each in one of its size, or else beside
/// others in the smallest that has room.
fn unseen(results: Vec<usize>, buffers: Vec<usize>) -> Option<String> {
    let mut room = buffers.clone();
    let mut others = vec![];
    for result in &results {
        match room.iter().position(|left| left == result) {
            Some(own) => _ = room.swap_remove(own),
            None => others.push(*result),
        }
    }
    // Stacks of several: the largest first.
    others.sort_unstable();
    let missing = others.into_iter().rev().any(|result| {
        let enough = room.iter_mut().filter(|left| **left >= result).min();
        enough.map(|left| *left -= result).is_none()
    });
    missing.then(|| {
        let count = results.len();
        format!("{count} results of {results:?} elements, but the audit saw {buffers:?} written")
    })
}

impl Gate<'_> {
    /// What `run` returns, which is compared, and once more with results in the places of inputs where kernels can do so.
    pub(super) fn audits(
        &mut self,
        data: &Data,
        what: &str,
        run: &impl Fn() -> Result<Run, String>,
    ) -> Result<Run, String> {
        let (first, places) = self.audit(data, what, false, run);
        self.compare(data, first.as_ref(), what);
        self.report.places += places;
        if places > 0 {
            let what = format!("{what}, in place");
            let (found, places) = self.audit(data, &what, true, run);
            if places == 0 {
                let error = "no kernel wrote in the place of an input".to_string();
                self.report.fail(Check::Written, &what, error);
            }
            self.compare(data, found.as_ref(), &what);
            if let (Ok(first), Ok(found)) = (&first, found) {
                self.repeats(first, &found, &what);
            }
        }
        first
    }

    /// What `run` returns, with what its kernels wrote, and how often they could have done so in the place of an input;
    /// `in_place`: they do.
    fn audit(
        &mut self,
        data: &Data,
        what: &str,
        in_place: bool,
        run: &impl Fn() -> Result<Run, String>,
    ) -> (Result<Run, String>, usize) {
        let (result, Audited { buffers, places, errors }) = audited(self.device, in_place, run);
        self.report.ran(Check::Written);
        self.report.ran(Check::Guards);
        for (check, error) in errors {
            self.report.fail(check, what, error);
        }
        // A result that no kernel was handed is one that the audit did not see. Of no rows no kernel makes any.
        if let (Ok(run), Implementation::Fused) = (&result, self.implementation) {
            let (op, spec) = (self.op, self.op.spec());
            // An output that is another one may be its memory.
            let mut outputs: Vec<&HostTensor> = vec![];
            for (of, output) in spec.outputs.iter().zip(&run.outputs) {
                let written = !op.by_burn().contains(&of.name);
                if written && !outputs.iter().any(|other| execute::same_bits(other, output)) {
                    outputs.push(output);
                }
            }
            let by_kernels = |gradients| {
                let inputs = spec.float_inputs().map(|i| spec.inputs[i].name);
                let pairs = inputs.zip::<&Vec<HostTensor>>(gradients);
                pairs.filter(|(name, _)| !op.by_burn().contains(name)).map(|(_, of)| of)
            };
            let gradients = by_kernels(&run.gradients).chain(by_kernels(&run.kernels));
            let results = outputs.into_iter().chain(gradients);
            let results = results.map(|of| of.values.len()).filter(|elements| *elements > 0);
            if let Some(error) = unseen(results.collect(), buffers).filter(|_| !data.empty) {
                self.report.fail(Check::Written, what, error);
            }
        }
        (result, places)
    }

    /// That kernels of CUDA could write in the places of inputs, at least once if `some`, or never could, as the operator
    /// says.
    pub(super) fn ran_in_place(&mut self, some: bool) {
        if self.implementation != Implementation::Fused || !device::is_cuda(self.device) {
            return;
        }
        let error = match (self.op.in_place(), self.report.places) {
            (true, 0) if some => "no kernel could write in the place of an input".to_string(),
            (false, places @ 1..) => {
                format!(
                    "kernels could write in the place of an input, {places} times, and the operator does not say so"
                )
            }
            _ => return,
        };
        self.report.fail(Check::Written, "results in place", error);
    }
}
