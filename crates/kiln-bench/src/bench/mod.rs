//! Times behind the gate: `kiln bench`.
//!
//! An operator whose gate is red gets no time, nor does a call whose own results are
//! [wrong](crate::spot). Kernel and reference are timed in alternation on random data that rotates
//! through more memory than a cache holds, by the device's own clock over bursts of calls, warm; the
//! middle of the bursts is reported with its spread. Ceilings (a copy, a matmul, the smallest launch)
//! are measured in the same run.

mod board;
mod cases;
mod ceilings;
mod compare;
mod data;
mod launches;
mod pages;
mod picture;
#[cfg(feature = "cube")]
mod pull;
mod run;
mod table;
#[cfg(test)]
mod tests;
pub(crate) mod timer;
mod workload;
mod zeros;

pub use board::{Board, Samples, Watch};
pub use cases::{PassWork, TimedCase, cases};
pub use ceilings::Ceilings;
pub use compare::{Filter, Selection, compare};
pub(crate) use data::{Maker, parts};
pub use data::{Numbers, Part};
pub use pages::rewrite;
pub use picture::picture;
pub use run::{Pass, Row, Run};
#[cfg(feature = "cube")]
pub(crate) use table::microseconds;
pub use table::table;

use crate::gate::{self, Report};
use crate::registry::{Case, Operator, Scale, Work};
use burn::tensor::{DType, Device};
use data::Data;
use kiln_ops::policy::Implementation;
use std::collections::BTreeSet;
use std::path::PathBuf;
use workload::Workload;

/// Before each burst.
const PAUSE: std::time::Duration = std::time::Duration::from_millis(50);

/// What to time.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Sizes.
    pub scale: Scale,
    /// Element type.
    pub dtype: DType,
    /// Bursts of each implementation.
    pub rounds: usize,
    /// Which family of product kernels; none: the one that would run.
    pub family: Option<&'static str>,
    /// Only these of them, as [`Case`] is written, or else, of each operator, those that begin with this shape; all if
    /// none is named.
    pub only: Vec<String>,
    /// Only this pass.
    pub pass: Option<Pass>,
    /// The folder of the files that the numbers come from; none: they are made on the device.
    pub data: Option<PathBuf>,
}

impl Plan {
    /// What is timed of an operator.
    pub fn cases(&self, op: &dyn Operator) -> Vec<Case> {
        cases_of(op, self.scale, &self.only)
    }

    /// The element type that an operator is timed in: f32 where it computes in no other.
    pub fn dtype_of(&self, op: &dyn Operator) -> DType {
        if op.spec().computes_in(self.dtype) { self.dtype } else { DType::F32 }
    }

    /// What the gate is to verify before.
    pub fn gate(&self) -> gate::Options {
        gate::Options { family: self.family, ..gate::Options::default() }
    }
}

/// The cases of an operator: those that are `only`, or else begin with that shape; all if it is empty.
pub fn cases_of(op: &dyn Operator, scale: Scale, only: &[String]) -> Vec<Case> {
    let mut cases = op.shapes(scale);
    if only.is_empty() {
        return cases;
    }
    let names: Vec<String> = cases.iter().map(Case::to_string).collect();
    let is_meant = |name: &String| {
        let first = name.split([',', ' ']).next();
        only.iter().any(|only| match names.contains(only) {
            true => name == only,
            false => first == Some(only.as_str()),
        })
    };
    let mut meant = names.iter().map(is_meant);
    cases.retain(|_| meant.next() == Some(true));
    cases
}

/// What a run of the bench says while it goes on.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A line for whoever waits.
    Note(&'a str),
    /// A case is timed: the run with its rows, to be kept if the next is cut off.
    Timed(&'a Run),
}

/// The passes of a case that are timed, and what each cannot avoid. Both passes together are to move and to do
/// what each of them is, however an implementation joins them.
pub fn passes(op: &dyn Operator, case: &Case, dtype: DType) -> Vec<(Pass, Work)> {
    let (forward, backward) = op.work(case, dtype);
    let mut passes = vec![(Pass::Forward, forward)];
    if op.spec().differentiable && op.times_backward(case) {
        if !op.gradients_in_forward() {
            passes.push((Pass::Backward, backward));
        }
        passes.push((Pass::Both, forward + backward));
    }
    passes
}

/// Refuses what the gate found of something else, or of a part of the cases.
fn expect_verified(
    op: &dyn Operator,
    verified: &Report,
    plan: &Plan,
    device: &Device,
) -> Result<(), String> {
    let Report { op: name, dtype, device: place, family, cases, .. } = verified;
    let what = |name: &str, dtype: &str, family: Option<&str>, place: &str, cases: usize| {
        format!("{cases} cases of {name} {dtype} ({}) on {place}", family.unwrap_or("as it runs"))
    };
    let found = what(name, dtype, family.as_deref(), place, *cases);
    let dtype = format!("{:?}", plan.dtype).to_lowercase();
    let cases = gate::cases(op, plan.dtype, plan.gate().fuzz, device);
    let wanted = what(op.spec().name, &dtype, plan.family, &kiln_ops::device::name(device), cases);
    if found == wanted || !verified.green() {
        return Ok(());
    }
    Err(format!("the gate verified {found}, expected {wanted}"))
}

/// Times the cases of `op`, which are those of the [plan](Plan::cases): rows are added to `run`. `verified` is what the
/// [gate](Plan::gate) found before.
///
/// # Errors
///
/// One line if the gate is red or verified something else, if what is timed is wrong, or if the device fails.
pub fn bench(
    op: &dyn Operator,
    verified: &Report,
    plan: &Plan,
    device: &Device,
    run: &mut Run,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<(), String> {
    let name = op.spec().name;
    let cases = plan.cases(op);
    if cases.is_empty() {
        return Ok(());
    }
    let plan = &Plan { dtype: plan.dtype_of(op), ..plan.clone() };
    expect_verified(op, verified, plan, device)?;
    if let Some((check, case, what)) = verified.failures.first() {
        let check = check.title();
        return Err(format!("{name}: the gate is red, so no time ({check}; {case}: {what})"));
    }
    if plan.pass == Some(Pass::Backward) && op.gradients_in_forward() {
        let line = format!("{name} makes its gradients in its forward: there is --pass both");
        progress(Progress::Note(&line));
    }
    let forward_alone = |case: &Case| !op.times_backward(case);
    if plan.pass.is_some_and(|pass| pass != Pass::Forward) && cases.iter().any(forward_alone) {
        let line = format!("{name}: some of these shapes have --pass forward alone");
        progress(Progress::Note(&line));
    }
    for case in cases {
        progress(Progress::Note(&format!("{name} {case}")));
        let timed = implementations(op, &case, device);
        if timed.is_empty() {
            let line = format!("{name} {case}: no kernel here, and the reference is too large");
            progress(Progress::Note(&line));
            continue;
        }
        gate::on_family(plan.family, || rows(op, &case, &timed, verified, plan, device, run))?;
        progress(Progress::Timed(run));
    }
    Ok(())
}

/// What is timed of a case on a device: kernels, if there are any, and the reference, if it is not too large.
pub fn implementations(op: &dyn Operator, case: &Case, device: &Device) -> Vec<Implementation> {
    let candidate = gate::candidate(op, device);
    let there = |of: &Implementation| match of {
        Implementation::Reference => op.times_reference(case, candidate == Implementation::Fused),
        _ => candidate == *of,
    };
    [Implementation::Fused, Implementation::Reference].into_iter().filter(there).collect()
}

/// What the gate has verified, and for a case that is timed in ways that its cases do not take.
struct Verified<'a> {
    gate: &'a Report,
    more: Option<Report>,
}

impl Verified<'_> {
    /// Has these plans of a timed case verified, if they are not.
    fn expect(
        &mut self,
        plans: &BTreeSet<String>,
        op: &dyn Operator,
        case: &Case,
        plan: &Plan,
        device: &Device,
    ) -> Result<(), String> {
        let no_time = format!("{} {case}: no time", op.spec().name);
        if plans.is_empty() {
            return Err(format!("{no_time}, its kernels do not say how they run"));
        }
        if self.gate.unverified(plans).is_none() {
            return Ok(());
        }
        let more = self.more.get_or_insert_with(|| {
            let mut report = gate::verify_as(op, case, plan.dtype, device, plan.gate());
            report.plans.extend(self.gate.plans.iter().cloned());
            report
        });
        if let Some((check, small, what)) = more.failures.first() {
            let check = check.title();
            return Err(format!("{no_time}, its small case is red ({check}; {small}: {what})"));
        }
        match more.unverified(plans) {
            None => Ok(()),
            Some(plan) => Err(format!("{no_time}, no case has verified how it runs ({plan})")),
        }
    }
}

fn rows(
    op: &dyn Operator,
    case: &Case,
    implementations: &[Implementation],
    verified: &Report,
    plan: &Plan,
    device: &Device,
    run: &mut Run,
) -> Result<(), String> {
    let mut verified = Verified { gate: verified, more: None };
    let forced = plan
        .family
        .is_some_and(|name| op.families().contains(&name) && gate::runs(name, plan.dtype, device));
    let open = |folder: &PathBuf| Data::open(folder, op, case, plan.dtype);
    let data = plan.data.as_ref().map(open).transpose()?;
    for (pass, work) in passes(op, case, plan.dtype) {
        if plan.pass.is_some_and(|wanted| wanted != pass) {
            continue;
        }
        let data = data.as_ref();
        let workload = Workload::new(op, case, plan.dtype, device, pass, work.bytes, data)?;
        let mut times = vec![vec![]; implementations.len()];
        let mut extra = vec![];
        for implementation in implementations {
            extra.push(workload.warm_up(*implementation)?);
        }
        for implementation in implementations {
            let rounding = gate::rounding(op, plan.dtype, device, *implementation, plan.family);
            let wrong = |what: String| {
                let what = format!("{case}, {pass}, {implementation}: {what}");
                format!("{}: what is timed is wrong, so no time ({what})", op.spec().name)
            };
            let (audited, mut plans) = gate::plans(|| workload.audit(*implementation));
            audited.map_err(wrong)?;
            // What may take the place of an input does so in no audit.
            let (results, of_burst) = gate::plans(|| workload.results(*implementation));
            let results = results?;
            plans.extend(of_burst);
            if *implementation == Implementation::Fused {
                verified.expect(&plans, op, case, plan, device)?;
            }
            workload.check(*implementation, rounding, &results).map_err(wrong)?;
            // What it took to know is no memory of what is timed.
            device.memory_cleanup();
        }
        for _ in 0..plan.rounds {
            for (times, implementation) in times.iter_mut().zip(implementations) {
                // Bursts without pauses heat the board up to its limit and time that.
                std::thread::sleep(PAUSE);
                times.push(workload.burst(*implementation)?);
            }
        }
        for ((mut times, implementation), extra) in
            times.into_iter().zip(implementations).zip(extra)
        {
            times.sort_by(f64::total_cmp);
            let at = |share: f64| 1e6 * times[((times.len() - 1) as f64 * share).round() as usize];
            run.rows.push(Row {
                op: op.spec().name.into(),
                pass,
                shape: case.to_string(),
                dtype: format!("{:?}", plan.dtype).to_lowercase(),
                implementation: match plan.family {
                    Some(family) if forced && *implementation == Implementation::Fused => {
                        format!("fused ({family})")
                    }
                    _ => implementation.to_string(),
                },
                us: 1e6 * (times[(times.len() - 1) / 2] + times[times.len() / 2]) / 2.0,
                us_low: at(0.2),
                us_high: at(0.8),
                recorded: workload.recorded(*implementation),
                bytes: work.bytes,
                flops: work.flops,
                launches: extra.launches,
                peak_mib: extra.peak_mib,
                zeros: match pass {
                    Pass::Forward => Default::default(),
                    _ => zeros::zeros(op, &workload, *implementation)?,
                },
            });
        }
    }
    Ok(())
}
