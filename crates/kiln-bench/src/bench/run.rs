//! What the bench measured, as it is written to a file. The programs that time other libraries write the
//! same.

use super::{Board, Ceilings};
use crate::registry::{Case, Operator};
use burn::tensor::{DType, Device};
use kiln_ops::device;
use kiln_ops::policy::Measured;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Forward, backward, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// Inputs to outputs.
    Forward,
    /// Cotangents to gradients of all inputs.
    Backward,
    /// One after the other, as a training step has them: inputs to outputs and gradients.
    Both,
}

impl std::fmt::Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Both => "forward+backward",
        })
    }
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Operator.
    pub op: String,
    /// Forward, backward or both.
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
    /// Whether the calls were recorded and run again as a whole. Else they were launched one by one, and the
    /// host's time between two launches is in it where the device waits for the host.
    #[serde(default)]
    pub recorded: bool,
    /// Bytes that the pass cannot avoid.
    pub bytes: f64,
    /// Operations that the pass cannot avoid.
    pub flops: f64,
    /// Kernels launched, where they are counted.
    #[serde(default)]
    pub launches: Option<u64>,
    /// Memory that Kiln's kernels allocated in one call, or that the pool reserved on top for it if that is more, in
    /// MiB.
    #[serde(default)]
    pub peak_mib: Option<f64>,
    /// Share of exact zeros in each gradient, and in what the operator names between, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub zeros: BTreeMap<String, f64>,
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

    /// The time over that of another row; none if one of them was recorded and the other was not.
    pub fn over(&self, other: &Self) -> Option<f64> {
        (self.recorded == other.recorded).then(|| self.us / other.us)
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
    /// Libraries that the times depend on.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
    /// Driver, limits, clocks and power, where `nvidia-smi` tells them.
    #[serde(default)]
    pub board: Option<Board>,
    /// Ceilings of the device, where they were measured.
    #[serde(default)]
    pub ceilings: Option<Ceilings>,
    /// Measurements.
    pub rows: Vec<Row>,
}

/// What the workspace pins.
const LIBRARIES: [(&str, &str); 2] = [("burn", "0.22.1"), ("cubecl", "0.11.3")];

impl Run {
    /// An empty run on `device`, now.
    pub fn new(device: &Device, command: String) -> Self {
        let libraries = LIBRARIES.map(|(name, version)| (name.to_string(), version.to_string()));
        let mut versions = BTreeMap::from(libraries);
        versions.insert("kiln".into(), env!("CARGO_PKG_VERSION").into());
        if let Some(version) = device::nvrtc().filter(|_| device::is_cuda(device)) {
            versions.insert("nvrtc".into(), version);
        }
        Self {
            device: device::name(device),
            gpu: device::part(device),
            date: time::OffsetDateTime::now_utc().date().to_string(),
            command,
            versions,
            board: None,
            ceilings: None,
            rows: vec![],
        }
    }

    /// What it ran on and with, when, and by which command, on one line.
    pub fn conditions(&self) -> String {
        let board = self.board.as_ref().map_or_else(String::new, |board| format!(" ({board})"));
        let versions: String =
            self.versions.iter().map(|(name, version)| format!(", {name} {version}")).collect();
        format!("{}{board}, {}{versions}: `{}`", self.gpu, self.date, self.command)
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
        let row = |implementation: &str, pass: Pass| {
            self.rows.iter().find(|row| {
                row.op == op.spec().name
                    && row.shape == shape
                    && row.implementation == implementation
                    && row.pass == pass
            })
        };
        // Of an operator that has no backward the forward is all there is.
        let total = |implementation| {
            row(implementation, Pass::Both).or_else(|| row(implementation, Pass::Forward))
        };
        let (fused, reference) = (total("fused")?, total("reference")?);
        fused.over(reference)?;
        let elements = case.shapes.iter().map(|s| s.iter().product::<usize>()).max().unwrap_or(1);
        Some(Measured {
            op: op.spec().name.into(),
            log2_elements: elements.max(1).ilog2(),
            dtype: format!("{dtype:?}").to_lowercase(),
            device: device::kind(device),
            fused_us: fused.us,
            reference_us: reference.us,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_of_the_workspace() {
        let workspace = include_str!("../../../../Cargo.toml");
        for (name, version) in LIBRARIES {
            let line = format!("{name} = {{ version = \"={version}\"");
            assert!(workspace.contains(&line), "{line}");
        }
    }

    #[test]
    fn runs_of_before_are_read() {
        let text = r#"{"op": "rope", "pass": "backward", "shape": "8", "dtype": "bf16",
            "implementation": "fused", "us": 1.0, "us_low": 1.0, "us_high": 1.0, "bytes": 2.0, "flops": 3.0}"#;
        let row: Row = serde_json::from_str(text).unwrap();
        assert!(!row.recorded && row.zeros.is_empty() && row.launches.is_none());
        let both = Row { pass: Pass::Both, recorded: true, ..row.clone() };
        let text = serde_json::to_string(&both).unwrap();
        assert!(text.contains(r#""pass":"both""#), "{text}");
        assert_eq!(serde_json::from_str::<Row>(&text).unwrap(), both);
        assert_eq!((both.over(&row), both.over(&both)), (None, Some(1.0)));
    }
}
