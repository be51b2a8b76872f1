//! Opening a device by name, as every program of Kiln does it: `auto`, `cuda`, `cuda:1`, `wgpu`,
//! `vulkan`, `cpu`, `ndarray`; and what is known of one that is open.
//!
//! What a device needs is looked at before it is opened, so that a missing driver or toolkit is an
//! error that says so.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
mod facts;

pub(crate) use cuda::cuda_kind;
pub use cuda::nvrtc;
#[cfg(feature = "cuda")]
pub(crate) use cuda::{Cluster, clusters};
#[cfg(feature = "cube")]
pub(crate) use facts::client;
#[cfg(feature = "cube")]
pub use facts::{Hardware, hardware};
pub use facts::{is_cube, is_cuda, kind, memory, name, part, pci_address};

use burn::tensor::Device;

/// An open device, and why it is this one.
#[derive(Debug, Clone)]
pub struct Opened {
    /// The device.
    pub device: Device,
    /// Its name as one may give it: `cuda:0`, `wgpu`, `cpu`.
    pub name: String,
    /// One line: what was taken and why.
    pub why: String,
}

/// Why a device cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No such device.
    #[error("unknown device `{0}`, expected auto, cuda, cuda:INDEX, wgpu, vulkan, cpu or ndarray")]
    Unknown(String),
    /// The program was built without it.
    #[error("device `{name}` is not part of this build: build with `--features {feature}`")]
    NotBuilt {
        /// The device.
        name: String,
        /// The Cargo feature that adds it.
        feature: &'static str,
    },
    /// The machine lacks something.
    #[error("device `{name}` cannot be used: {reason}")]
    Unavailable {
        /// The device.
        name: String,
        /// What is missing.
        reason: String,
    },
}

/// Opens the device called `name`.
///
/// `auto` takes CUDA if its driver, NVRTC and headers are there and the CPU otherwise.
///
/// # Errors
///
/// [`DeviceError`] if there is no such device, the build does not have it, or the machine lacks
/// what it needs.
pub fn open(name: &str) -> Result<Opened, DeviceError> {
    let (kind, index) = match name.split_once(':') {
        Some(("cuda", index)) => match index.parse::<usize>() {
            Ok(index) => ("cuda", index),
            Err(_) => return Err(DeviceError::Unknown(name.into())),
        },
        Some(_) => return Err(DeviceError::Unknown(name.into())),
        None => (name, 0),
    };
    match kind {
        "auto" => auto(),
        "cuda" => cuda::open(index),
        "wgpu" => wgpu(),
        "vulkan" => vulkan(),
        "cpu" => cpu(),
        "ndarray" => ndarray(),
        _ => Err(DeviceError::Unknown(name.into())),
    }
}

fn auto() -> Result<Opened, DeviceError> {
    match cuda::open(0) {
        Ok(mut cuda) => {
            cuda.why = format!("{}: CUDA's driver, NVRTC and headers are there", cuda.why);
            Ok(cuda)
        }
        Err(error) => {
            let mut cpu = cpu()?;
            let reason = match error {
                DeviceError::Unavailable { reason, .. } => format!("no CUDA here ({reason})"),
                _ => "this build has no CUDA".into(),
            };
            cpu.why = format!("{}: {reason}", cpu.why);
            Ok(cpu)
        }
    }
}

#[cfg(not(all(
    feature = "flex",
    feature = "ndarray",
    feature = "wgpu",
    feature = "vulkan",
    feature = "cuda"
)))]
fn not_built(name: &str, feature: &'static str) -> Result<Opened, DeviceError> {
    Err(DeviceError::NotBuilt { name: name.into(), feature })
}

fn cpu() -> Result<Opened, DeviceError> {
    #[cfg(feature = "flex")]
    return Ok(Opened {
        device: Device::flex(),
        name: "cpu".into(),
        why: "cpu (burn-flex)".into(),
    });
    #[cfg(not(feature = "flex"))]
    not_built("cpu", "flex")
}

#[allow(deprecated)] // burn-ndarray is deprecated upstream; it stays for those who test with it
fn ndarray() -> Result<Opened, DeviceError> {
    #[cfg(feature = "ndarray")]
    return Ok(Opened { device: Device::ndarray(), name: "ndarray".into(), why: "ndarray".into() });
    #[cfg(not(feature = "ndarray"))]
    not_built("ndarray", "ndarray")
}

fn wgpu() -> Result<Opened, DeviceError> {
    #[cfg(feature = "wgpu")]
    {
        use burn::tensor::{DeviceKind, DeviceType};
        let devices = Device::enumerate(DeviceType::Wgpu).into_vec();
        if devices.is_empty() {
            return Err(DeviceError::Unavailable {
                name: "wgpu".into(),
                reason: "no graphics driver found (on Debian, mesa-vulkan-drivers has one that \
                         runs on the CPU)"
                    .into(),
            });
        }
        let gpu = devices.into_iter().find(|device| !is_software(device));
        let (device, what) = match gpu {
            Some(device) => (device, "a GPU"),
            None => (Device::wgpu(DeviceKind::Cpu), "a software driver on the CPU"),
        };
        let adapter = device.identity().map_or_else(String::new, |i| format!(" {}", i.name));
        let why = format!("wgpu:{adapter}, {what}");
        Ok(Opened { device, name: "wgpu".into(), why })
    }
    #[cfg(not(feature = "wgpu"))]
    not_built("wgpu", "wgpu")
}

#[cfg(feature = "wgpu")]
fn is_software(device: &Device) -> bool {
    use burn::backend::DispatchDevice;
    match device.as_dispatch() {
        DispatchDevice::Cube(cubecl::Device::Wgpu(device)) => {
            matches!(device.kind, cubecl::wgpu::WgpuDeviceKind::Cpu)
        }
        _ => false,
    }
}

fn vulkan() -> Result<Opened, DeviceError> {
    #[cfg(feature = "vulkan")]
    {
        use burn::tensor::DeviceType;
        let mut devices = Device::enumerate(DeviceType::Vulkan).into_vec();
        devices.retain(|device| !is_software(device));
        if devices.is_empty() {
            let reason = "no Vulkan GPU found (the software driver lavapipe cannot run SPIR-V \
                          kernels; use `wgpu` there)";
            return Err(DeviceError::Unavailable { name: "vulkan".into(), reason: reason.into() });
        }
        Ok(Opened { device: devices.remove(0), name: "vulkan".into(), why: "vulkan".into() })
    }
    #[cfg(not(feature = "vulkan"))]
    not_built("vulkan", "vulkan")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_names_are_refused() {
        for name in ["gpu", "cuda:x", "cpu:1", ""] {
            assert_eq!(open(name).unwrap_err(), DeviceError::Unknown(name.into()));
        }
    }

    #[cfg(feature = "flex")]
    #[test]
    fn auto_always_finds_something() {
        let opened = open("auto").unwrap();
        assert!(opened.name == "cpu" || is_cuda(&opened.device), "{opened:?}");
    }
}
