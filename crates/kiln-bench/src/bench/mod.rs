//! Times behind the gate: `kiln bench`.
//!
//! An operator whose gate is red gets no time, nor does a call whose own results are
//! [wrong](crate::spot). Kernel and reference are timed in alternation on random data that rotates
//! through more memory than a cache holds, by the device's own clock over bursts of calls, warm; the
//! middle of the bursts is reported with its spread. Ceilings (a copy, a matmul, the smallest launch)
//! are measured in the same run.

mod ceilings;
mod compare;
mod launches;
#[cfg(feature = "cube")]
mod pull;
mod table;
#[cfg(test)]
mod tests;
pub(crate) mod timer;
mod workload;

pub use ceilings::Ceilings;
pub use compare::compare;
#[cfg(feature = "cube")]
pub(crate) use table::microseconds;
pub use table::table;

use crate::gate;
use crate::registry::{Case, Operator, Scale, Work};
use burn::tensor::{DType, Device};
use kiln_ops::device;
use kiln_ops::policy::{Implementation, Measured};
use serde::{Deserialize, Serialize};
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
    /// Only this pass.
    pub pass: Option<Pass>,
}

/// Forward or backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// Inputs to outputs.
    Forward,
    /// Cotangents to gradients of all inputs.
    Backward,
}

impl std::fmt::Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

/// One measurement. The programs that time other libraries write the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Operator.
    pub op: String,
    /// Forward or backward.
    pub pass: Pass,
    /// Shape, as the registry writes it.
    pub shape: String,
    /// Element type.
    pub dtype: String,
    /// `fused`, `reference`, or the name of a library.
    pub implementation: String,
    /// Median time of a call in microseconds.
    pub us: f64,
    /// A fifth of the bursts was faster.
    pub us_low: f64,
    /// A fifth of the bursts was slower.
    pub us_high: f64,
    /// Bytes that the pass cannot avoid.
    pub bytes: f64,
    /// Operations that the pass cannot avoid.
    pub flops: f64,
    /// Kernels launched, where they are counted.
    #[serde(default)]
    pub launches: Option<u64>,
    /// Memory that the pool reserved on top for one call, in MiB.
    #[serde(default)]
    pub peak_mib: Option<f64>,
}

impl Row {
    /// Bytes that must move over the time, in GB/s.
    pub fn gigabytes(&self) -> f64 {
        self.bytes / self.us / 1e3
    }

    /// Operations over the time, in TFLOP/s.
    pub fn teraflops(&self) -> f64 {
        self.flops / self.us / 1e6
    }
}

/// A run of the bench.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Device: `cuda:0`, `wgpu`, `cpu`.
    pub device: String,
    /// The part's name.
    pub gpu: String,
    /// Day, UTC.
    pub date: String,
    /// The command that made it.
    pub command: String,
    /// Ceilings of the device, where they were measured.
    #[serde(default)]
    pub ceilings: Option<Ceilings>,
    /// Measurements.
    pub rows: Vec<Row>,
}

impl Run {
    /// An empty run on `device`, now.
    pub fn new(device: &Device, command: String) -> Self {
        Self {
            device: device::name(device),
            gpu: device.identity().map_or_else(|| "CPU".into(), |identity| identity.name),
            date: time::OffsetDateTime::now_utc().date().to_string(),
            command,
            ceilings: None,
            rows: vec![],
        }
    }

    /// What `auto` can learn from it: both implementations of the same operator and shape.
    pub fn measured(
        &self,
        op: &dyn Operator,
        case: &Case,
        dtype: DType,
        device: &Device,
    ) -> Option<Measured> {
        let shape = case.to_string();
        let total = |implementation: &str| -> Option<f64> {
            let rows = self.rows.iter().filter(|row| {
                row.op == op.spec().name
                    && row.shape == shape
                    && row.implementation == implementation
            });
            let times: Vec<f64> = rows.map(|row| row.us).collect();
            (!times.is_empty()).then(|| times.iter().sum())
        };
        let elements = case.shapes.iter().map(|s| s.iter().product::<usize>()).max().unwrap_or(1);
        Some(Measured {
            op: op.spec().name.into(),
            log2_elements: elements.max(1).ilog2(),
            dtype: format!("{dtype:?}").to_lowercase(),
            device: device::kind(device),
            fused_us: total("fused")?,
            reference_us: total("reference")?,
        })
    }
}

/// Verifies `op` and, if it is green, times its cases: rows are added to `run`.
///
/// # Errors
///
/// One line if the gate is red, if what is timed is wrong, or if the device fails.
pub fn bench(
    op: &dyn Operator,
    plan: &Plan,
    device: &Device,
    run: &mut Run,
    note: &mut dyn FnMut(&str),
) -> Result<(), String> {
    let name = op.spec().name;
    if op.shapes(plan.scale).is_empty() {
        return Ok(());
    }
    let options = gate::Options { family: plan.family, ..gate::Options::default() };
    let report = gate::verify(op, plan.dtype, device, options);
    if let Some((check, case, what)) = report.failures.first() {
        let check = check.title();
        return Err(format!("{name}: the gate is red, so no time ({check}; {case}: {what})"));
    }
    let mut implementations = vec![];
    if gate::candidate(op, device) == Implementation::Fused {
        implementations.push(Implementation::Fused);
    }
    implementations.push(Implementation::Reference);
    for case in op.shapes(plan.scale) {
        note(&format!("{name} {case}"));
        gate::on_family(plan.family, || rows(op, &case, &implementations, plan, device, run))?;
    }
    Ok(())
}

fn rows(
    op: &dyn Operator,
    case: &Case,
    implementations: &[Implementation],
    plan: &Plan,
    device: &Device,
    run: &mut Run,
) -> Result<(), String> {
    let (forward, backward) = op.work(case, plan.dtype);
    let forced = op.tiled() && plan.family.is_some_and(|name| gate::runs(name, plan.dtype, device));
    let passes: &[(Pass, Work)] = &[(Pass::Forward, forward), (Pass::Backward, backward)];
    for (pass, work) in passes {
        let unwanted = plan.pass.is_some_and(|wanted| wanted != *pass);
        if unwanted || (*pass == Pass::Backward && !op.spec().differentiable) {
            continue;
        }
        let workload = Workload::new(op, case, plan.dtype, device, *pass, work.bytes)?;
        let mut times = vec![vec![]; implementations.len()];
        let mut extra = vec![];
        for implementation in implementations {
            extra.push(workload.warm_up(*implementation)?);
        }
        for implementation in implementations {
            let rounding = gate::rounding(op, plan.dtype, device, *implementation, plan.family);
            let results = workload.results(*implementation)?;
            workload.check(*implementation, rounding, &results).map_err(|what| {
                let what = format!("{case}, {pass}, {implementation}: {what}");
                format!("{}: what is timed is wrong, so no time ({what})", op.spec().name)
            })?;
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
                pass: *pass,
                shape: case.to_string(),
                dtype: format!("{:?}", plan.dtype).to_lowercase(),
                implementation: match plan.family {
                    Some(family) if forced && *implementation == Implementation::Fused => {
                        format!("fused ({family})")
                    }
                    _ => implementation.to_string(),
                },
                us: at(0.5),
                us_low: at(0.2),
                us_high: at(0.8),
                bytes: work.bytes,
                flops: work.flops,
                launches: extra.launches,
                peak_mib: extra.peak_mib,
            });
        }
    }
    Ok(())
}
