//! Measured times of both implementations, by operator, size class, element type and device.

use super::{Call, Implementation, device_name};
use serde::{Deserialize, Serialize};

/// One measurement of both implementations, made after both passed the correctness gate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Operator.
    pub op: String,
    /// Size class: the largest power of two that is not above the number of elements, as exponent.
    pub log2_elements: u32,
    /// Element type: `f32`, `bf16`, `f16`.
    pub dtype: String,
    /// Device: `cuda:0`, `wgpu`.
    pub device: String,
    /// Median time of the kernel, forward and backward, in microseconds.
    pub fused_us: f64,
    /// Median time of the reference, forward and backward, in microseconds.
    pub reference_us: f64,
}

impl Measured {
    /// The faster of the two.
    pub fn faster(&self) -> Implementation {
        if self.fused_us <= self.reference_us {
            Implementation::Fused
        } else {
            Implementation::Reference
        }
    }
}

/// Measurements.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Table(pub Vec<Measured>);

impl Table {
    /// The measurement of the nearest size class of this operator, element type and device.
    pub fn find(&self, call: &Call<'_>) -> Option<&Measured> {
        let dtype = format!("{:?}", call.dtype).to_lowercase();
        let device = device_name(call.device);
        let class = call.elements.max(1).ilog2();
        self.0
            .iter()
            .filter(|m| m.op == call.op && m.dtype == dtype && m.device == device)
            .min_by_key(|m| m.log2_elements.abs_diff(class))
    }
}
