//! Measured times of both implementations, by operator, size class, element type and kind of device.

use super::{Call, Implementation};
use crate::device;
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
    /// Kind of device, as [`device::kind`] has it: `cuda NVIDIA H200`. `wgpu` is any device of wgpu, and
    /// `cuda:0` the kind of that GPU, as tables of earlier versions have them.
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
    /// The measurement of the nearest size class of this operator, element type and kind of device.
    pub fn find(&self, call: &Call<'_>) -> Option<&Measured> {
        if self.0.is_empty() {
            return None;
        }
        let dtype = format!("{:?}", call.dtype).to_lowercase();
        let (kind, name) = (device::kind(call.device), device::name(call.device));
        let here = |device: &str| device == kind || device == name;
        let class = call.elements.max(1).ilog2();
        self.0
            .iter()
            .filter(|m| m.op == call.op && m.dtype == dtype && here(&m.device))
            .min_by_key(|m| m.log2_elements.abs_diff(class))
    }

    /// Puts the kind in place of the index of a CUDA device, where `kind` knows it.
    pub(super) fn resolve(&mut self, kind: impl Fn(usize) -> Option<String>) {
        for measured in &mut self.0 {
            let index = measured.device.strip_prefix("cuda:").and_then(|index| index.parse().ok());
            if let Some(kind) = index.and_then(&kind) {
                measured.device = kind;
            }
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::{DType, Device};

    fn measured(device: &str, log2_elements: u32) -> Measured {
        Measured {
            op: "swiglu".into(),
            log2_elements,
            dtype: "f32".into(),
            device: device.into(),
            fused_us: 1.0,
            reference_us: 2.0,
        }
    }

    fn call(device: &Device, elements: usize) -> Call<'_> {
        Call { op: "swiglu", elements, dtype: DType::F32, device, has_kernel: true }
    }

    #[test]
    fn an_index_becomes_the_kind_of_that_gpu() {
        let gpus = ["cuda NVIDIA H200", "cuda NVIDIA H200", "cuda NVIDIA A100"];
        let mut table = Table(
            ["cuda:0", "cuda:2", "cuda:3", "wgpu", "cuda NVIDIA L4", "cuda:x"]
                .map(|device| measured(device, 10))
                .to_vec(),
        );
        table.resolve(|index| gpus.get(index).map(ToString::to_string));
        let devices: Vec<&str> = table.0.iter().map(|m| m.device.as_str()).collect();
        let expected = [gpus[0], gpus[2], "cuda:3", "wgpu", "cuda NVIDIA L4", "cuda:x"];
        assert_eq!(devices, expected);
    }

    #[test]
    fn the_nearest_size_on_this_kind_of_device_counts() {
        let device = Device::flex().autodiff();
        let table = Table(vec![
            measured("cpu", 4),
            measured("cpu", 10),
            measured("cuda NVIDIA H200", 8),
            Measured { dtype: "bf16".into(), ..measured("cpu", 8) },
        ]);
        let found = |elements| table.find(&call(&device, elements)).map(|m| m.log2_elements);
        assert_eq!((found(1), found(1 << 6), found(1 << 8)), (Some(4), Some(4), Some(10)));
        assert_eq!(Table::default().find(&call(&device, 1)), None);
        assert_eq!(Table(vec![measured("cuda:0", 4)]).find(&call(&device, 16)), None);
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn a_device_is_found_by_its_kind_and_by_the_name_of_earlier_tables() {
        let opened = match device::open("wgpu") {
            Ok(opened) => opened,
            Err(error) => return kiln_test::skip("wgpu", error),
        };
        let kind = device::kind(&opened.device);
        for (device, expected) in [(kind.as_str(), true), ("wgpu", true), ("wgpu Other", false)] {
            let table = Table(vec![measured(device, 4)]);
            assert_eq!(table.find(&call(&opened.device, 16)).is_some(), expected, "{device}");
        }
    }
}
