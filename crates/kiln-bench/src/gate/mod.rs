//! The correctness gate: what `kiln verify` runs, and what stands before every time.
//!
//! For each element type of the device, each case of the registry, some random ones, and rows both
//! as allocated and cut out of wider ones:
//!
//! * every element of outputs and gradients against the float64 oracle, within its bound;
//! * their rows and columns for errors that do not average out;
//! * the gradients of the backward kernels past autodiff, which is what `kiln bench` times, as all others;
//! * the oracle's own gradients against finite differences;
//! * every element of every kernel output written, and nothing outside it (an audit hands the
//!   kernels poisoned outputs between guard bands);
//! * inputs and cotangents the same afterwards, bit for bit, and the poison around them;
//! * on a device taken for one with two multiprocessors and little memory too, so that small shapes reach
//!   the plans of large ones; which plans were reached is part of the report;
//! * calls whose dimensions are 0 in turn, right or refused for their shape;
//! * right again after freed memory was filled with NaN, and the same bits as before;
//! * kernel first and reference second, and the other way round, each time on fresh data, so that
//!   an answer left in memory by the one is wrong for the other.

mod audits;
mod data;
mod empty;
mod execute;
mod finite;
mod fuzz;
mod plans;
mod report;
mod rows;
mod stress;

pub use data::Data;
pub(crate) use execute::{Audited, audited};
pub use execute::{Run, execute, poison, quiet};
pub(crate) use plans::plans;
pub use report::{Check, Checked, LeftOut, Outcome, Report, Stressed};
pub(crate) use rows::on_family;
use rows::{CASES_OF_A_PART, own_family, parts};
pub use rows::{Row, candidate, cases, dtypes, families, family, rows, runs};
use rows::{missing_dtypes, missing_families};
pub use stress::stress;

use crate::host::Layout;
use crate::registry::{Case, Operator, Spec};
use burn::tensor::{DType, Device};
use kiln_ops::device;
use kiln_ops::oracle::{Bounded, Comparison, Format, Number, Path, Products, Rounding, compare};
use kiln_ops::policy::Implementation;
use plans::{Taken, family_of, heard, on_another_family, thin};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// How much the gate does.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Seed of the data.
    pub seed: u64,
    /// Random cases beside those of the registry.
    pub fuzz: usize,
    /// Which family of product kernels, of [`families`]; none: the one that would run.
    pub family: Option<&'static str>,
}

impl Default for Options {
    fn default() -> Self {
        Self { seed: 1, fuzz: 8, family: None }
    }
}

/// Runs the gate for one operator and element type.
pub fn verify(op: &dyn Operator, dtype: DType, device: &Device, options: Options) -> Report {
    let mut report = verify_part(op, dtype, device, options, 0);
    for part in 1..parts(op, dtype, options.fuzz, device) {
        report.add(verify_part(op, dtype, device, options, part));
    }
    report
}

/// Runs one of the [parts](Row::parts) of that; their reports come to the whole by [`Report::add`]. The first part
/// also makes the checks that one case is enough for.
pub fn verify_part(
    op: &dyn Operator,
    dtype: DType,
    device: &Device,
    options: Options,
    part: usize,
) -> Report {
    let mut gate = Gate::new(op, dtype, device, options);
    let mut cases = op.cases();
    cases.extend((0..options.fuzz).map(|_| fuzz::case(op, &mut gate.rng)));
    let average = cases.len();
    cases.extend(fuzz::special(op, dtype, device));
    if cases.len() == average {
        let error = "no small case holds special numbers".to_string();
        gate.report.fail(Check::Forward, "cases", error);
    }
    // A part's numbers do not depend on what others drew.
    if part > 0 {
        gate.rng.set_stream(part as u64);
        gate.report.leave_out(Check::Order);
        gate.report.leave_out(Check::FiniteDifferences);
    }
    let own = cases.iter().enumerate().skip(part * CASES_OF_A_PART).take(CASES_OF_A_PART);
    for (i, case) in own {
        let small = i % 2 == 0;
        gate.case(case, Layout::Allocated, &Taken { few: !small, ..Taken::default() });
        // Numbers do not ask how rows lie.
        if i < average {
            gate.case(case, Layout::Cut, &Taken { few: small, ..Taken::default() });
        }
        gate.report.cases += 1;
    }
    if part == 0 {
        if let Some(case) = cases[..average].iter().max_by_key(|case| fuzz::moderate(case)) {
            gate.orders(case);
            gate.finite_differences(case);
        }
        // Burn copies what is cut at an odd column: one case shows that the operator takes the copy.
        if let Some(case) = op.cases().iter().max_by_key(|case| fuzz::moderate(case)) {
            gate.case(case, Layout::OddCut, &Taken::default());
        }
        gate.empties();
        gate.report.left_out = fuzz::left_out(op, dtype, device);
    }
    gate.ran_on_its_family(part == 0);
    gate.ran_in_place(part == 0);
    gate.report
}

/// Verifies a small case that kernels take the way they take `timed`, which is too large for an oracle.
pub(crate) fn verify_as(
    op: &dyn Operator,
    timed: &Case,
    dtype: DType,
    device: &Device,
    options: Options,
) -> Report {
    let mut gate = Gate::new(op, dtype, device, options);
    match fuzz::small(op, timed, dtype) {
        Ok((case, sizes)) => gate.case(&case, Layout::Allocated, &Taken { few: false, sizes }),
        Err(error) => gate.report.fail(Check::Forward, &timed.to_string(), error),
    }
    gate.report
}

/// The report of a row whose gate, with these options if it was no stress, did not come to its end: red, for this reason.
pub fn unfinished(row: &Row, device: &Device, options: Option<Options>, why: String) -> Report {
    let mut report = blank(row.op, row.dtype, device, row.family);
    report.take_options(options);
    report.unfinished(why)
}

/// A report of nothing yet.
fn blank(op: &dyn Operator, dtype: DType, device: &Device, family: Option<&'static str>) -> Report {
    let Spec { name, differentiable, .. } = *op.spec();
    let of = device::name(device);
    let mut report = Report::new(name, dtype, of, candidate(op, device), family, differentiable);
    let missing = missing_dtypes(&[op], device).into_iter();
    report.missing_types = missing.map(|dtype| format!("{dtype:?}").to_lowercase()).collect();
    report.missing_families =
        missing_families(op, device).into_iter().map(str::to_string).collect();
    report
}

/// Where an implementation rounds on a device.
pub(crate) fn rounding(
    op: &dyn Operator,
    dtype: DType,
    device: &Device,
    implementation: Implementation,
    family: Option<&'static str>,
) -> Rounding {
    let format = Format::from(dtype);
    let cuda = device::is_cuda(device);
    let (path, products) = match implementation {
        Implementation::Reference if cuda && format == Format::F32 && op.tf32_reference() => {
            (Path::Reference, Products::Tf32)
        }
        Implementation::Reference if cuda && format != Format::F32 => {
            (Path::Reference, Products::TensorCores)
        }
        Implementation::Reference => (Path::Reference, Products::F32),
        _ if cuda && format != Format::F32 && family != Some("simt") => {
            (Path::Fused, Products::TensorCores)
        }
        _ => (Path::Fused, Products::F32),
    };
    Rounding { format, path, products }
}

/// A result in which what is not finite is what it should be, if that is not finite either: a gradient may be the difference
/// of two infinities by the sum rule, and so may a running mean.
fn not_finite_alike(found: &[f64], expected: &[Bounded]) -> Vec<f64> {
    let pairs = found.iter().zip(expected);
    let alike = |(found, expected): (&f64, &Bounded)| {
        let neither = !found.is_finite() && !expected.value().is_finite();
        if neither { expected.value() } else { *found }
    };
    pairs.map(alike).collect()
}

struct Gate<'a> {
    op: &'a dyn Operator,
    dtype: DType,
    device: &'a Device,
    implementation: Implementation,
    family: Option<&'static str>,
    rng: ChaCha8Rng,
    report: Report,
}

impl<'a> Gate<'a> {
    fn new(op: &'a dyn Operator, dtype: DType, device: &'a Device, options: Options) -> Self {
        let mut report = blank(op, dtype, device, options.family);
        report.take_options(Some(options));
        Self {
            op,
            dtype,
            device,
            implementation: candidate(op, device),
            family: options.family,
            rng: ChaCha8Rng::seed_from_u64(options.seed),
            report,
        }
    }

    /// Verifies a case; where there are kernels, with device and sizes taken for these.
    fn case(&mut self, case: &Case, layout: Layout, taken: &Taken) {
        let none = Taken::default();
        let taken = if device::is_cube(self.device) { taken } else { &none };
        let what = format!("{case}{layout}{taken}");
        let (_, plans) = heard(taken, || self.case_here(case, layout, &what));
        let thin = thin(&plans);
        self.report.plans.extend(plans);
        // Whose kernels did not run: the family's own.
        if thin && self.family.is_none() {
            self.family = own_family(self.op, self.dtype, self.device);
            let (_, plans) = heard(taken, || self.case_here(case, layout, &what));
            self.report.plans.extend(plans);
            self.family = None;
        }
    }

    fn case_here(&mut self, case: &Case, layout: Layout, what: &str) {
        let mut what = what.to_string();
        if let Some(family) = self.family {
            what = what + ", " + family;
        }
        let rounding = self.rounding(self.implementation);
        let data = match Data::random(self.op, case, self.dtype, rounding, &mut self.rng) {
            Ok(data) => data,
            Err(error) => return self.report.fail(Check::Forward, &what, error),
        };
        let (op, dtype, device, implementation) =
            (self.op, self.dtype, self.device, self.implementation);
        let family = self.family;
        let run = || {
            on_family(family, || -> Result<Run, String> {
                let mut run = execute(op, &data, dtype, layout, device, implementation)?;
                // Nothing is not timed.
                if implementation == Implementation::Fused && !data.empty {
                    let (kernels, changed) = execute::kernels(op, &data, dtype, layout, device)?;
                    run.kernels = kernels;
                    run.changed.extend(changed);
                }
                Ok(run)
            })
        };

        let first = self.audits(&data, &what, &run);
        if implementation == Implementation::Fused && op.untracked() {
            let what = format!("{what}, no gradient wanted");
            let run = || on_family(family, || execute::untracked(op, &data, dtype, layout, device));
            let found = self.audits(&data, &what, &run);
            if let (Ok(found), Ok(again)) = (found, run()) {
                self.repeats(&found, &again, &what);
            }
        }

        poison(&data, self.dtype, self.device);
        let again = run();
        self.compare(&data, again.as_ref(), &format!("{what}, freed memory poisoned"));
        if let (Ok(first), Ok(again)) = (first, again) {
            self.repeats(&first, &again, &what);
        }
    }

    fn repeats(&mut self, first: &Run, again: &Run, what: &str) {
        self.report.ran(Check::Repeat);
        if !first.same_bits(again) {
            self.report.fail(Check::Repeat, what, "two runs on the same data differ".into());
        }
    }

    /// Kernel and reference in turn, each on data of its own.
    fn orders(&mut self, case: &Case) {
        let other = match self.implementation {
            Implementation::Fused => Implementation::Reference,
            _ => return,
        };
        for order in
            [[self.implementation, other, self.implementation], [other, self.implementation, other]]
        {
            for (turn, implementation) in order.into_iter().enumerate() {
                let rounding = self.rounding(implementation);
                let data = Data::random(self.op, case, self.dtype, rounding, &mut self.rng);
                let what = format!("{case}, {implementation} in turn {turn} of {} first", order[0]);
                let data = match data {
                    Ok(data) => data,
                    Err(error) => {
                        self.report.fail(Check::Order, &what, error);
                        continue;
                    }
                };
                let run = on_family(self.family, || {
                    execute(
                        self.op,
                        &data,
                        self.dtype,
                        Layout::Allocated,
                        self.device,
                        implementation,
                    )
                });
                match run {
                    Err(error) => self.report.fail(Check::Order, &what, error),
                    Ok(run) => {
                        self.report.ran(Check::Order);
                        for changed in &run.changed {
                            self.report.fail(Check::Inputs, &what, changed.clone());
                        }
                        self.take(&data, &run, &what, |_| [Check::Order; 2]);
                    }
                }
            }
        }
    }

    /// That products ran on the family that was asked for, or on the fastest where none was.
    fn ran_on_its_family(&mut self, some: bool) {
        let Some(own) = own_family(self.op, self.dtype, self.device) else { return };
        let plans = self.report.plans.iter();
        let ran: Vec<(&str, &str)> = plans.filter_map(|plan| family_of(plan)).collect();
        if let Some(error) = on_another_family(self.family.unwrap_or(own), &ran, some) {
            self.report.fail(Check::Forward, "kernels that ran", error);
        }
    }

    fn compare(&mut self, data: &Data, run: Result<&Run, &String>, what: &str) {
        let run = match run {
            Ok(run) => run,
            Err(error) => return self.report.fail(Check::Forward, what, error.clone()),
        };
        let outputs = run.outputs.len();
        self.report.ran(Check::Forward);
        self.report.ran(Check::Bias);
        self.report.ran(Check::Inputs);
        for changed in &run.changed {
            self.report.fail(Check::Inputs, what, changed.clone());
        }
        if !run.gradients.is_empty() {
            self.report.ran(Check::Gradients);
        }
        self.take(data, run, what, |i| {
            [if i < outputs { Check::Forward } else { Check::Gradients }, Check::Bias]
        });
    }

    fn rounding(&self, implementation: Implementation) -> Rounding {
        rounding(self.op, self.dtype, self.device, implementation, self.family)
    }

    /// Compares a run with the oracle; `checks` says what elements and lines of a result count for.
    fn take(&mut self, data: &Data, run: &Run, what: &str, checks: impl Fn(usize) -> [Check; 2]) {
        let spec = self.op.spec();
        let gradients = || spec.float_inputs().map(|i| format!("grad.{}", spec.inputs[i].name));
        let by_kernels = gradients().map(|name| format!("{name} of the backward kernels"));
        let outputs = spec.outputs.iter().map(|output| output.name.to_string());
        let names = outputs.chain(gradients()).chain(by_kernels);
        let expected = data.all().chain(&data.gradients);
        for (i, ((found, expected), name)) in run.all().zip(expected).zip(names).enumerate() {
            let [of_elements, of_lines] = checks(i);
            if found.shape != expected.shape {
                let (found, expected) = (&found.shape, &expected.shape);
                let error = format!("`{name}` has shape {found:?}, not {expected:?}");
                self.report.fail(of_elements, what, error);
                continue;
            }
            let columns = expected.shape.last().copied().unwrap_or(1);
            let of_rest = spec.outputs.get(i).is_none_or(|output| output.constant);
            let found = match data.special.is_some() && of_rest {
                true => &not_finite_alike(&found.values, &expected.values),
                false => &found.values,
            };
            let compared = compare(found, &expected.values, columns);
            let Comparison { elements, mut lines, wrong, not_finite } = compared;
            // Of results that are alike roundings are, too.
            if data.special.is_some() {
                lines = None;
            }
            for (check, worst) in [(of_elements, elements), (of_lines, lines)] {
                let Some(worst) = worst else { continue };
                let place = || format!("`{name}`, {} of {what}", worst.place);
                self.report.measured(check, worst.ratio, place);
                if worst.exceeds() {
                    let of = match check == of_elements {
                        true => format!("; {wrong} elements wrong, {not_finite} not finite"),
                        false => String::new(),
                    };
                    self.report.fail(check, what, format!("`{name}` is {worst}{of}"));
                    // Where elements are wrong, lines need not be named too.
                    break;
                }
            }
        }
    }
}
